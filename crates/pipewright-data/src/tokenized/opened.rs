//! Opens a file of token ids, and checks that it fits the settings and the model.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use pipewright_system::bounded_file::open_regular;

use super::header::{Header, LENGTH, MAGIC};
use crate::chat::error::TemplateError;
use crate::chat::template::ChatRenderer;
use crate::collected::{Collected, CollectedContent, Known, Totals};
use crate::config::DataConfig;
use crate::encoding::tokenizer::fingerprint;
use crate::error::{DataError, FileError, FormatError, TokenPlace, TokenizedError};
use crate::formats::format::{DataSource, Format};
use crate::packing::Packing;
use crate::settings::train_on::{LongRecordCount, LongRecords, TrainOn};
use crate::storage::bytes::{Bytes, Expected, FileBytes};
use crate::storage::examples::{Examples, ids_in};
use crate::storage::ids::Ids;
use crate::stride::Stride;

/// The ending of the name of such a file.
const ENDING: &str = "pwtok";

/// Returns whether the name says that a file has token ids of `pipewright tokenize`.
pub(crate) fn is_tokenized(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case(ENDING))
}

/// Opens the file `path` for a model with `vocab_size` ids.
pub(crate) fn open(path: &Path, config: &DataConfig, vocab_size: usize) -> Result<Collected, DataError> {
    let unreadable = |source| FileError::Read { path: path.to_owned(), source };
    let mut file = open_regular(path).map_err(unreadable)?;
    let found = file.metadata().map_err(unreadable)?.len();
    let mut head = Vec::new();
    file.by_ref().take(LENGTH as u64).read_to_end(&mut head).map_err(unreadable)?;
    if !head.starts_with(&MAGIC) {
        let (path, format) = (path.to_owned(), "a file of `pipewright tokenize`");
        return Err(FormatError::NotOfItsName { path, ending: ENDING, format }.into());
    }
    let header = Header::parse(&head, path)?;
    let expected = header.file_length();
    if expected != Some(found) {
        let expected = expected.unwrap_or(u64::MAX);
        return Err(TokenizedError::Length { path: path.to_owned(), expected, found }.into());
    }
    check_settings(&header, config, path)?;
    let sizes = read_sizes(&mut file, &header).map_err(unreadable)?.ok_or_else(|| damaged(path))?;
    let hash = blake3::Hash::from_hex(&header.hash).map_err(|error| TokenizedError::Header {
        path: path.to_owned(),
        reason: format!("the hash of its token ids is malformed: {error}"),
    })?;
    let expected = Expected { hash, largest_id: header.largest_id };
    let content_bytes = header.bytes as usize;
    let bytes = Bytes::File(FileBytes::new(path.to_owned(), file, LENGTH as u64, content_bytes, expected));
    let known = Known {
        hash: Some(hash),
        totals: Some(Totals {
            targets: header.targets as usize,
            frequency_entropy: f64::from_bits(header.frequency_entropy),
        }),
    };
    let sources = vec![DataSource { format: Format::Tokenized, packing: Packing::Plain, files: 1 }];
    let mut collected = Collected {
        content: content(bytes, &header, &sizes, path)?,
        sources,
        long_records: LongRecordCount {
            treatment: config.long_records,
            long: 0,
            records: sizes.len() as u64,
            seq_len: config.seq_len,
        },
        known,
    };
    check_ids(&collected.content, &header, vocab_size, path)?;
    treat_long(&mut collected, config, path)?;
    Ok(collected)
}

/// Returns the error of a file whose records have other lengths than its header says.
fn damaged(path: &Path) -> TokenizedError {
    TokenizedError::Damaged { path: path.to_owned() }
}

/// Reads the numbers of bytes of the examples. Returns `None` if they have another hash than the header says.
fn read_sizes(file: &mut File, header: &Header) -> std::io::Result<Option<Vec<u64>>> {
    file.seek(SeekFrom::Start(LENGTH as u64 + header.bytes))?;
    let mut bytes = vec![0; header.examples.unwrap_or(0) as usize * size_of::<u32>()];
    file.read_exact(&mut bytes)?;
    if blake3::hash(&bytes).to_hex().as_str() != header.sizes_hash {
        return Ok(None);
    }
    let sizes = bytes.as_chunks().0.iter().map(|size| u32::from_le_bytes(*size).into()).collect();
    Ok(Some(sizes))
}

/// Returns the content, whose parts are as long as the header says.
fn content(
    bytes: Bytes,
    header: &Header,
    sizes: &[u64],
    path: &Path,
) -> Result<CollectedContent, TokenizedError> {
    let width = header.width();
    if header.examples.is_none() {
        let is_whole = header.tokens.checked_mul(width.bytes() as u64) == Some(header.bytes);
        let ids = CollectedContent::Ids(Ids::new(width, bytes), Stride::Overlapping);
        return if is_whole { Ok(ids) } else { Err(damaged(path)) };
    }
    let has_target = |size: &u64| ids_in(*size as usize, width) > 1;
    let sum = sizes.iter().try_fold(0u64, |sum, size| sum.checked_add(*size));
    let count = u32::try_from(sizes.len()).map_err(|_| damaged(path))?;
    if sum != Some(header.bytes) || !sizes.iter().all(has_target) {
        return Err(damaged(path));
    }
    let examples = Examples::new(width, bytes, sizes.iter().copied());
    Ok(CollectedContent::Examples(examples, (0..count).collect()))
}

/// Checks that the file was made with the settings that the run has.
fn check_settings(header: &Header, config: &DataConfig, path: &Path) -> Result<(), DataError> {
    let differs = |setting: &'static str, own: String, given: String| {
        DataError::from(TokenizedError::OtherSetting { path: path.to_owned(), setting, own, given })
    };
    let tokenizer = fingerprint(&config.tokenizer)?;
    if header.tokenizer != tokenizer {
        return Err(differs("tokenizer", header.tokenizer.clone(), tokenizer));
    }
    if let Some(own) = &header.template {
        match ChatRenderer::fingerprint_of(config) {
            Ok(given) if given != *own => return Err(differs("chat_template", own.clone(), given)),
            // The text is rendered already.
            Ok(_) | Err(TemplateError::Missing) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let words = |train_on: Option<TrainOn>| train_on.map_or("the default", TrainOn::key).to_owned();
    if config.train_on.is_some() && config.train_on != header.train_on {
        return Err(differs("train_on", words(header.train_on), words(config.train_on)));
    }
    let bos_id = config.documents.map(|documents| documents.bos_id);
    if bos_id != header.bos_id {
        let words = |id: Option<u32>| id.map_or("none".to_owned(), |id| id.to_string());
        return Err(differs("bos_id", words(header.bos_id), words(bos_id)));
    }
    let packs_stream = config.packs_examples && header.examples.is_none();
    if packs_stream && bos_id.is_none() {
        return Err(DataError::PackedWithoutBeginning { path: path.to_owned() });
    }
    Ok(())
}

/// Checks that all ids are below the size of the model's vocabulary.
fn check_ids(
    content: &CollectedContent,
    header: &Header,
    vocab_size: usize,
    path: &Path,
) -> Result<(), DataError> {
    if (header.largest_id as usize) < vocab_size {
        return Ok(());
    }
    let (mut token, mut beyond) = (0, None);
    let mut look = |id: u32| {
        if beyond.is_none() && id as usize >= vocab_size {
            beyond = Some((token, id));
        }
        token += 1;
    };
    match content {
        CollectedContent::Ids(ids, _) => ids.each(&(0..ids.len()), look)?,
        CollectedContent::Examples(examples, chosen) => {
            for example in chosen {
                examples.read(*example)?.ids.into_iter().for_each(&mut look);
            }
        }
    }
    let Some((token, id)) = beyond else {
        return Err(TokenizedError::Content { path: path.to_owned() }.into());
    };
    let (path, place) = (path.to_owned(), TokenPlace::Token(token));
    Err(DataError::BeyondVocabulary { path, place, id: id.into(), vocab_size })
}

/// Treats the examples that do not fit into a row as the settings say.
fn treat_long(collected: &mut Collected, config: &DataConfig, path: &Path) -> Result<(), DataError> {
    let CollectedContent::Examples(examples, chosen) = &mut collected.content else { return Ok(()) };
    let seq_len = config.seq_len;
    let is_long = |example: &u32| examples.ids(*example) > seq_len + 1;
    let long: Vec<u32> = chosen.iter().copied().filter(is_long).collect();
    let Some(&first) = long.first() else { return Ok(()) };
    collected.long_records.long = long.len() as u64;
    collected.known.totals = None;
    let example = |example: u32| u64::from(example) + 1;
    match config.long_records {
        LongRecords::Refuse => {
            let (path, found) = (path.to_owned(), examples.ids(first));
            Err(TokenizedError::Long { path, example: example(first), found, seq_len }.into())
        }
        LongRecords::Skip => {
            chosen.retain(|example| !is_long(example));
            Ok(())
        }
        LongRecords::Cut => {
            for number in long {
                let mut part = examples.read(number)?;
                part.truncate(seq_len + 1);
                if part.targets().next().is_none() {
                    let path = path.to_owned();
                    return Err(
                        TokenizedError::NothingLeft { path, example: example(number), seq_len }.into()
                    );
                }
            }
            Ok(())
        }
    }
}
