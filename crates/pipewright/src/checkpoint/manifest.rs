//! The manifest: the files of a checkpoint and their contents. It is written last and contains its own hash.
//!
//! The file is a JSON object whose last member is the hash of all text before it.

use std::io;
use std::path::Path;

use pipewright_data::Cursor;
use pipewright_system::bounded_file::{SMALL_TEXT, read_regular};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

use super::error::CheckpointError;
use crate::tensor::shard::RowShard;

/// The manifest's name in a checkpoint's folder.
pub const MANIFEST: &str = "manifest.json";

/// The format of checkpoints whose tensors are whole.
const WHOLE: u32 = 1;

/// The format of checkpoints whose tensors are stored in parts.
const IN_PARTS: u32 = 2;

/// The format of checkpoints whose tensors are stored in shards.
const IN_SHARDS: u32 = 3;

/// The format of checkpoints with several shards of a tensor in one file.
const SEVERAL_SHARDS: u32 = 4;

/// The newest format that this crate reads, of checkpoints whose files name the rows of some parameters.
const OTHER_ROWS: u32 = 5;

/// The text between the manifest's content and its hash, and the text after the hash.
const BEFORE_HASH: &str = ",\n  \"hash\": \"";
const BEHIND_HASH: &str = "\"\n}\n";

/// The content of a manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    format: u32,
    /// Optimizer steps taken.
    pub step: u64,
    /// The next row of the data.
    pub cursor: Cursor,
    /// The run's own entries, which this crate does not read.
    pub description: Map<String, Json>,
    /// The files with the tensors.
    #[serde(rename = "shards")]
    pub files: Vec<StateFile>,
}

/// A file of tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateFile {
    /// Its name in the checkpoint's folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// The BLAKE3 hash of its content, in hexadecimal.
    pub hash: String,
    /// The rows of its tensors that the file has; all rows if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) part: Option<RowShard>,
    /// Whether the file has shards of some tensors. Its header says which.
    #[serde(default, skip_serializing_if = "is_false", rename = "has_slices")]
    pub(crate) has_shards: bool,
    /// Whether the file has several shards of one tensor. Their names have the indices of the shards.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) has_several: bool,
    /// Whether the file has other rows of some parameters than `part` says. Its header says which.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) has_rows: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

impl Manifest {
    /// Makes a manifest in the oldest format that can hold these files.
    pub fn new(step: u64, cursor: Cursor, description: Map<String, Json>, files: Vec<StateFile>) -> Self {
        let format = if files.iter().any(|file| file.has_rows) {
            OTHER_ROWS
        } else if files.iter().any(|file| file.has_several) {
            SEVERAL_SHARDS
        } else if files.iter().any(|file| file.has_shards) {
            IN_SHARDS
        } else if files.iter().any(|file| file.part.is_some()) {
            IN_PARTS
        } else {
            WHOLE
        };
        Self { format, step, cursor, description, files }
    }

    /// Reads the manifest in a checkpoint's folder, but not the files that it names.
    ///
    /// # Errors
    /// When it is missing, damaged, or of a later format.
    pub fn read(checkpoint: &Path) -> Result<Self, CheckpointError> {
        Self::read_file(&checkpoint.join(MANIFEST))
    }

    /// Reads a manifest, or a part of one.
    pub(super) fn read_file(path: &Path) -> Result<Self, CheckpointError> {
        let bytes = match read_regular(path, SMALL_TEXT) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let reason = "the manifest is missing: this is not a complete checkpoint; use another";
                return Err(CheckpointError::unusable(path, reason));
            }
            Err(source) => return Err(CheckpointError::io("read", path)(source)),
        };
        Self::parse(&bytes).map_err(|flaw| match flaw {
            Flaw::TooNew(found) => CheckpointError::unusable(
                path,
                format!(
                    "the checkpoint has format {found}, and this program reads up to {OTHER_ROWS}; use a later version"
                ),
            ),
            Flaw::Damaged(reason) => {
                CheckpointError::damaged(path, format!("the manifest is damaged: {reason}"))
            }
        })
    }

    /// Returns the file's text.
    pub(super) fn to_text(&self) -> String {
        let json = serde_json::to_string_pretty(self).expect("a manifest is plain data");
        let body = json.strip_suffix("\n}").expect("pretty JSON closes an object on a line of its own");
        format!("{body}{BEFORE_HASH}{}{BEHIND_HASH}", blake3::hash(body.as_bytes()).to_hex())
    }

    fn parse(bytes: &[u8]) -> Result<Self, Flaw> {
        let damaged = |reason: &str| Flaw::Damaged(reason.to_owned());
        let text = std::str::from_utf8(bytes).map_err(|_| damaged("it is not UTF-8"))?;
        let sealed = text.strip_suffix(BEHIND_HASH).and_then(|text| text.rsplit_once(BEFORE_HASH));
        let (body, hash) = sealed.ok_or_else(|| damaged("its end is missing"))?;
        if blake3::hash(body.as_bytes()).to_hex().as_str() != hash {
            return Err(damaged("its content has another hash than was written"));
        }
        let json: Json =
            serde_json::from_str(&format!("{body}\n}}")).map_err(|error| damaged(&error.to_string()))?;
        // A later format may have other members, so the number is checked first.
        match json.get("format").and_then(Json::as_u64).and_then(|format| u32::try_from(format).ok()) {
            Some(found) if found > OTHER_ROWS => return Err(Flaw::TooNew(found)),
            _ => {}
        }
        let manifest: Self = serde_json::from_value(json).map_err(|error| damaged(&error.to_string()))?;
        let is_plain = |name: &str| Path::new(name).file_name() == Some(name.as_ref());
        match manifest.files.iter().find(|file| !is_plain(&file.name)) {
            Some(file) => Err(Flaw::Damaged(format!("`{}` is not a file name", file.name))),
            None => Ok(manifest),
        }
    }
}

/// The error of a manifest's text.
#[derive(Debug, PartialEq)]
enum Flaw {
    TooNew(u32),
    Damaged(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let file = StateFile {
            name: "rank-0000.safetensors".into(),
            bytes: 12,
            hash: "ab".into(),
            part: None,
            has_shards: false,
            has_several: false,
            has_rows: false,
        };
        let description = Map::from_iter([("epsilon".to_owned(), Json::from(1e-5))]);
        Manifest::new(40, Cursor { epoch: 1, index: 7 }, description, vec![file])
    }

    #[test]
    fn text_comes_back() {
        let text = manifest().to_text();
        assert_eq!(Manifest::parse(text.as_bytes()), Ok(manifest()));
        let json: Json = serde_json::from_str(&text).expect("the file is plain JSON");
        assert_eq!(json["step"], 40);
    }

    #[test]
    fn parts_have_a_format_of_their_own() {
        let mut files = manifest().files;
        assert_eq!(manifest().format, WHOLE);
        files[0].part = Some(RowShard::one(1, 2));
        let manifest = Manifest::new(40, Cursor { epoch: 1, index: 7 }, Map::new(), files.clone());
        assert_eq!(manifest.format, IN_PARTS);
        assert_eq!(Manifest::parse(manifest.to_text().as_bytes()), Ok(manifest));
        files[0].has_rows = true;
        let manifest = Manifest::new(40, Cursor { epoch: 1, index: 7 }, Map::new(), files);
        assert_eq!(manifest.format, OTHER_ROWS);
        assert_eq!(Manifest::parse(manifest.to_text().as_bytes()), Ok(manifest));
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_found() {
        let text = manifest().to_text().into_bytes();
        for index in 0..text.len() {
            for bit in 0..8 {
                let mut flipped = text.clone();
                flipped[index] ^= 1 << bit;
                assert!(
                    matches!(Manifest::parse(&flipped), Err(Flaw::Damaged(_))),
                    "bit {bit} of byte {index}"
                );
            }
            assert!(matches!(Manifest::parse(&text[..index]), Err(Flaw::Damaged(_))), "cut at {index}");
        }
    }

    #[test]
    fn a_later_format_is_not_damage() {
        let later = Manifest { format: OTHER_ROWS + 1, ..manifest() };
        assert_eq!(Manifest::parse(later.to_text().as_bytes()), Err(Flaw::TooNew(OTHER_ROWS + 1)));
    }

    #[test]
    fn a_file_outside_the_folder_is_refused() {
        let mut manifest = manifest();
        manifest.files[0].name = "../rank-0000.safetensors".into();
        assert!(matches!(Manifest::parse(manifest.to_text().as_bytes()), Err(Flaw::Damaged(_))));
    }
}
