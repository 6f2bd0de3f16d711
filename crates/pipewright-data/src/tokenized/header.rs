//! The header of a file of token ids.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::chat::identity::TemplateIdentity;
use crate::error::DataError;
use crate::settings::train_on::TrainOn;
use crate::storage::bytes::BLOCK;
use crate::storage::ids::Width;

/// The first bytes of a file. Text contains neither the first of them nor both ends of lines.
pub(crate) const MAGIC: [u8; 8] = *b"\x89PWTOK\r\n";
/// The number of bytes of the header.
pub(crate) const LENGTH: usize = 4096;
const VERSION: u32 = 3;
/// The place of the JSON, behind the magic bytes, the version and its length.
const JSON: usize = MAGIC.len() + 8;
/// The place of the checksum.
const CHECKSUM: usize = LENGTH - blake3::OUT_LEN;

/// The properties of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Header {
    /// One more than the largest id that the tokenizer or the beginning of a document has.
    pub(crate) vocab_size: u64,
    /// The fingerprint of the tokenizer.
    pub(crate) tokenizer: String,
    /// The chat template, if there are chats.
    pub(crate) template: Option<TemplateIdentity>,
    /// The tokens that count in the loss, if they are the same for all examples.
    pub(crate) train_on: Option<TrainOn>,
    /// The id that begins each document.
    pub(crate) bos_id: Option<u32>,
    /// The number of examples; `None` for a stream of ids.
    pub(crate) examples: Option<u64>,
    /// The number of bytes of the content.
    pub(crate) bytes: u64,
    pub(crate) tokens: u64,
    /// The number of targets that count.
    pub(crate) targets: u64,
    /// The bits of the entropy of their frequencies, in nats.
    pub(crate) frequency_entropy: u64,
    pub(crate) largest_id: u32,
    /// The BLAKE3 hash of the content, in hexadecimal.
    pub(crate) hash: String,
    /// The BLAKE3 hash of everything behind the content, in hexadecimal.
    pub(crate) lists_hash: String,
}

impl Header {
    /// Returns the width of the ids.
    pub(crate) fn width(&self) -> Width {
        Width::of(usize::try_from(self.vocab_size).unwrap_or(usize::MAX))
    }

    /// Returns the number of blocks of the content.
    pub(crate) fn blocks(&self) -> u64 {
        self.bytes.div_ceil(BLOCK as u64)
    }

    /// Returns the number of bytes of the file; `None` if no file is so long.
    pub(crate) fn file_length(&self) -> Option<u64> {
        let sizes = self.examples.unwrap_or(0).checked_mul(size_of::<u32>() as u64)?;
        let hashes = self.blocks() * blake3::OUT_LEN as u64;
        self.bytes.checked_add(sizes)?.checked_add(hashes)?.checked_add(LENGTH as u64)
    }

    /// Returns the bytes of the header.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let json = serde_json::to_vec(self).expect("numbers and short texts are JSON");
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((json.len() as u32).to_le_bytes());
        bytes.extend(json);
        bytes.resize(CHECKSUM, 0);
        bytes.extend(blake3::hash(&bytes).as_bytes());
        bytes
    }

    /// Reads the header of the file `path`.
    ///
    /// # Errors
    /// When the file has another version, or the header is damaged.
    pub(crate) fn parse(bytes: &[u8], path: &Path) -> Result<Self, DataError> {
        let damaged = |reason: &str| damaged_header(path, reason);
        let number = |at: usize| {
            let bytes = bytes.get(at..at + 4)?;
            Some(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        };
        if bytes.len() < LENGTH || !bytes.starts_with(&MAGIC) {
            return Err(damaged("it ends early"));
        }
        match number(MAGIC.len()) {
            Some(VERSION) => {}
            version => {
                let found = version.unwrap_or(0);
                let problem = format!(
                    "its version is {found}, and this program reads version {VERSION}; tokenize the data again"
                );
                return Err(DataError::of(path, problem));
            }
        }
        if blake3::hash(&bytes[..CHECKSUM]).as_bytes() != &bytes[CHECKSUM..LENGTH] {
            return Err(damaged("its checksum differs"));
        }
        let end = number(MAGIC.len() + 4).and_then(|length| JSON.checked_add(length as usize));
        let json = end.and_then(|end| bytes[..CHECKSUM].get(JSON..end));
        let json = json.ok_or_else(|| damaged("its length is too large"))?;
        serde_json::from_slice(json).map_err(|error| damaged(&error.to_string()))
    }
}

/// Returns the error of a header that is damaged.
pub(crate) fn damaged_header(path: &Path, reason: &str) -> DataError {
    let problem = format!("the header is damaged: {reason}; copy the file or tokenize the data again");
    DataError::of(path, problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            vocab_size: 300,
            tokenizer: "bytes".to_owned(),
            template: None,
            train_on: Some(TrainOn::All),
            bos_id: None,
            examples: Some(3),
            bytes: 100,
            tokens: 40,
            targets: 30,
            frequency_entropy: 1.5f64.to_bits(),
            largest_id: 299,
            hash: "0".repeat(64),
            lists_hash: "1".repeat(64),
        }
    }

    #[test]
    fn every_damaged_byte_is_noticed() {
        for place in (0..LENGTH).step_by(7) {
            let mut bytes = header().to_bytes();
            bytes[place] ^= 1;
            assert!(Header::parse(&bytes, Path::new("a")).is_err(), "byte {place}");
        }
        assert!(Header::parse(&header().to_bytes()[..LENGTH - 1], Path::new("a")).is_err());
        assert_eq!(Header::parse(&header().to_bytes(), Path::new("a")).ok(), Some(header()));
    }
}
