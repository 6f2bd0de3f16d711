//! Opens a file of token ids, and checks that it fits the settings and the model.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use pipewright_system::bounded_file::open_regular;

use super::header::{Header, LENGTH, MAGIC, damaged_header};
use crate::bad_records::LeftOut;
use crate::chat::template::ChatRenderer;
use crate::collected::{Collected, CollectedContent, Known, Stride, Totals};
use crate::config::DataConfig;
use crate::container::data_file::Packing;
use crate::encoding::tokenizer::fingerprint;
use crate::error::{DataError, DataErrorKind, DataPlace};
use crate::formats::format::{DataSource, Format, not_of_its_name};
use crate::gathered::{long_record, nothing_left, packed_without_beginning};
use crate::settings::train_on::{LongRecordCount, LongRecords, TrainOn};
use crate::storage::bytes::{Bytes, FileBytes, other_content};
use crate::storage::examples::{Examples, ids_in};
use crate::storage::ids::{Ids, Width};
use crate::vocabulary;

/// The ending of the name of such a file.
const ENDING: &str = "pwtok";

/// Returns whether the name says that a file has token ids of `pipewright tokenize`.
pub(crate) fn is_tokenized(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case(ENDING))
}

/// Opens the file `path` for a model with `vocab_size` ids.
pub(crate) fn open(path: &Path, config: &DataConfig, vocab_size: usize) -> Result<Collected, DataError> {
    let unreadable = |source| DataError::unreadable(path, source);
    let mut file = open_regular(path).map_err(unreadable)?;
    let found = file.metadata().map_err(unreadable)?.len();
    let mut head = Vec::new();
    file.by_ref().take(LENGTH as u64).read_to_end(&mut head).map_err(unreadable)?;
    if !head.starts_with(&MAGIC) {
        return Err(not_of_its_name(path, ENDING, "a file of `pipewright tokenize`"));
    }
    let header = Header::parse(&head, path)?;
    check_length(&header, found, path)?;
    check_settings(&header, config, path)?;
    let (sizes, hashes) = read_lists(&mut file, &header).map_err(unreadable)?.ok_or_else(|| damaged(path))?;
    let hash = blake3::Hash::from_hex(&header.hash)
        .map_err(|error| damaged_header(path, &format!("the hash of its token ids is malformed: {error}")))?;
    let part = (LENGTH as u64, header.bytes as usize);
    let bytes = Bytes::File(FileBytes::new(path.to_owned(), file, part, hashes, header.largest_id));
    let hashed_as = Width::of(vocab_size);
    let known = Known::default();
    if hashed_as == header.width() {
        known.hash.get_or_init(|| hash);
    }
    known.totals.get_or_init(|| Totals {
        targets: header.targets as usize,
        frequency_entropy: f64::from_bits(header.frequency_entropy),
    });
    let mut collected = Collected {
        content: content(bytes, &header, &sizes, hashed_as, path)?,
        sources: vec![DataSource { format: Format::Tokenized, packing: Packing::Plain, files: 1 }],
        long_records: LongRecordCount {
            treatment: config.long_records,
            long: 0,
            records: sizes.len() as u64,
            seq_len: config.seq_len,
            is_half: false,
        },
        bad_records: None,
        missing_end: None,
        known,
    };
    check_ids(&collected.content, &header, vocab_size, path)?;
    treat_long(&mut collected, config, path)?;
    Ok(collected)
}

/// Returns the error of a file whose lists are not the ones that its header says.
fn damaged(path: &Path) -> DataError {
    let problem =
        "the lists behind its token ids contradict its header; copy the file or tokenize the data again";
    DataError::of(path, problem)
}

/// Checks that the file has the `found` bytes that its header says.
fn check_length(header: &Header, found: u64, path: &Path) -> Result<(), DataError> {
    match header.file_length() {
        None => Err(damaged_header(path, "it says more bytes than a file can have")),
        Some(expected) if expected != found => Err(DataError::of(
            path,
            format!(
                "the file has {found} bytes, and its header says {expected}; copy the file or tokenize the data again"
            ),
        )),
        Some(_) => Ok(()),
    }
}

/// The numbers of bytes of the examples, and the hashes of the blocks.
type Lists = (Vec<u64>, Vec<blake3::Hash>);

/// Reads the lists behind the content. Returns `None` if they have another hash than the header says.
fn read_lists(file: &mut File, header: &Header) -> std::io::Result<Option<Lists>> {
    file.seek(SeekFrom::Start(LENGTH as u64 + header.bytes))?;
    // The file has these bytes: its length was compared with the header.
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    if blake3::hash(&bytes).to_hex().as_str() != header.lists_hash {
        return Ok(None);
    }
    let hashes = header.blocks() as usize * blake3::OUT_LEN;
    let Some((sizes, hashes)) = bytes.len().checked_sub(hashes).map(|end| bytes.split_at(end)) else {
        return Ok(None);
    };
    let sizes = sizes.as_chunks().0.iter().map(|size| u32::from_le_bytes(*size).into()).collect();
    let hashes = hashes.as_chunks().0.iter().map(|hash| blake3::Hash::from_bytes(*hash)).collect();
    Ok(Some((sizes, hashes)))
}

/// Returns the content, whose parts are as long as the header says.
fn content(
    bytes: Bytes,
    header: &Header,
    sizes: &[u64],
    hashed_as: Width,
    path: &Path,
) -> Result<CollectedContent, DataError> {
    let width = header.width();
    if header.examples.is_none() {
        let is_whole = header.tokens.checked_mul(width.bytes() as u64) == Some(header.bytes);
        let ids = CollectedContent::Ids(Ids::new(width, bytes, hashed_as), Stride::Overlapping);
        return if is_whole { Ok(ids) } else { Err(damaged(path)) };
    }
    let has_target = |size: &u64| ids_in(*size as usize, width) > 1;
    let sum = sizes.iter().try_fold(0u64, |sum, size| sum.checked_add(*size));
    if sum != Some(header.bytes) || !sizes.iter().all(has_target) || u32::try_from(sizes.len()).is_err() {
        return Err(damaged(path));
    }
    Ok(CollectedContent::Examples(Examples::new(width, bytes, sizes.iter().copied(), hashed_as)))
}

/// Checks that the file was made with the settings that the run has.
fn check_settings(header: &Header, config: &DataConfig, path: &Path) -> Result<(), DataError> {
    let differs = |setting: &'static str, [own, given]: [String; 2]| {
        let problem = format!(
            "the file was made with another `{setting}` ({own}) than [data] has ({given}); write the same one, or tokenize the \
             data again"
        );
        Err(DataError::of(path, problem))
    };
    let tokenizer = fingerprint(&config.tokenizer)?;
    if header.tokenizer != tokenizer {
        return differs("tokenizer", [header.tokenizer.clone(), tokenizer]);
    }
    if let Some(own) = &header.template {
        match ChatRenderer::identity_of(config) {
            Ok(given) => {
                if let Some((setting, values)) = own.difference(&given) {
                    return differs(setting, values);
                }
            }
            // The text is rendered already.
            Err(error) if error.kind == DataErrorKind::NoTemplate => {}
            Err(error) => return Err(error),
        }
    }
    let is_other = |given: &TrainOn| header.examples.is_some() && header.train_on != Some(*given);
    if let Some(given) = config.train_on.filter(is_other) {
        let own = header.train_on.map_or("the default", TrainOn::key);
        return differs("train_on", [own, given.key()].map(str::to_owned));
    }
    let bos_id = config.documents.map(|documents| documents.bos_id);
    if bos_id != header.bos_id {
        let words = |id: Option<u32>| id.map_or("none".to_owned(), |id| id.to_string());
        return differs("bos_id", [words(header.bos_id), words(bos_id)]);
    }
    let packs_stream = config.packs_examples && header.examples.is_none();
    if packs_stream && bos_id.is_none() {
        return Err(packed_without_beginning(path));
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
    match content {
        CollectedContent::Ids(ids, _) => {
            let (mut token, mut beyond) = (0, None);
            ids.each(&(0..ids.len()), |id| {
                if beyond.is_none() && id as usize >= vocab_size {
                    beyond = Some((id, token));
                }
                token += 1;
            })?;
            if let Some((id, token)) = beyond {
                let place = DataPlace::Token(token);
                return Err(vocabulary::beyond_vocabulary(id.into(), vocab_size).at(path, place));
            }
        }
        CollectedContent::Examples(examples) => {
            for example in 0..examples.len() as u32 {
                let ids = examples.read(example)?.ids.into_iter().map(u64::from);
                let record = |_| DataPlace::Record(u64::from(example) + 1);
                vocabulary::check(ids, vocab_size, path, record)?;
            }
        }
    }
    Err(other_content(path))
}

/// Treats the examples that do not fit into a row as the settings say.
fn treat_long(collected: &mut Collected, config: &DataConfig, path: &Path) -> Result<(), DataError> {
    let CollectedContent::Examples(examples) = &mut collected.content else { return Ok(()) };
    let (seq_len, row) = (config.seq_len, collected.long_records.row());
    let is_long = |example: &u32| examples.ids(*example) > seq_len + 1;
    let (long, short): (Vec<u32>, Vec<u32>) = (0..examples.len() as u32).partition(is_long);
    let Some(&first) = long.first() else { return Ok(()) };
    collected.long_records.long = long.len() as u64;
    // The figures in the header are of the whole records.
    collected.known = Known::default();
    let place = |example: u32| DataPlace::Record(u64::from(example) + 1);
    match config.long_records {
        LongRecords::Refuse => Err(long_record(examples.ids(first), seq_len, &row).at(path, place(first))),
        LongRecords::Skip => {
            examples.choose(short);
            Ok(())
        }
        LongRecords::Cut => {
            let (mut left_out, mut chosen) = (LeftOut::at_most(config.bad_records), short);
            for number in long {
                let mut part = examples.read(number)?;
                part.truncate(seq_len + 1);
                if part.targets().next().is_some() {
                    chosen.push(number);
                } else {
                    left_out.leave_out(nothing_left(seq_len, &row).of_record(path, place(number)))?;
                }
            }
            collected.bad_records = left_out.finish(!chosen.is_empty())?;
            if collected.bad_records.is_some() {
                chosen.sort_unstable();
                examples.choose(chosen);
            }
            Ok(())
        }
    }
}
