//! The errors of files of token ids that `pipewright tokenize` makes.

use std::path::PathBuf;

use pipewright_system::bounded_file::Size;
use thiserror::Error;

use super::token_place::TokenPlace;

/// Why a file of token ids cannot be written or read.
#[derive(Error)]
pub enum TokenizedError {
    /// A file cannot be written.
    #[error("{}: cannot be written", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The caller stopped the work before the file was complete.
    #[error("{}: not written, because the work was stopped", path.display())]
    Stopped {
        /// The file.
        path: PathBuf,
    },
    /// An example has more bytes than the format of the file allows.
    #[error("{}: a record has more than {} of token ids; divide it", path.display(), Size(u32::MAX.into()))]
    LongExample {
        /// The file that is written.
        path: PathBuf,
    },
    /// A file was made by another version.
    #[error("{}: its version is {found}, and this program reads version {known}; tokenize the data again", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// The version of the file.
        found: u32,
        /// The known version.
        known: u32,
    },
    /// The header is damaged.
    #[error("{}: the header is damaged: {reason}; copy the file or tokenize the data again", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The length of the file is not the one in its header.
    #[error(
        "{}: the file has {found} bytes, and its header says {expected}; copy the file or tokenize the data again",
        path.display()
    )]
    Length {
        /// The file.
        path: PathBuf,
        /// The number of bytes that the header says.
        expected: u64,
        /// The number of bytes of the file.
        found: u64,
    },
    /// The lists behind the content, of the lengths of records and of hashes, are not the ones that were
    /// written.
    #[error(
        "{}: the lists behind its token ids contradict its header; copy the file or tokenize the data again", path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
    },
    /// The content of the file is not what was written.
    #[error(
        "{}: the file is damaged: its token ids do not have the hash that was written with them; copy the file or tokenize the data again",
        path.display()
    )]
    Content {
        /// The file.
        path: PathBuf,
    },
    /// A token id that was read is larger than all that were written.
    #[error(
        "{}: the file is damaged:{place} has the id {id}, and the largest in its header is {largest}; copy the file or \
         tokenize the data again", path.display()
    )]
    Id {
        /// The file.
        path: PathBuf,
        /// The place of the token.
        place: TokenPlace,
        /// Its id.
        id: u32,
        /// The largest id that the header states.
        largest: u32,
    },
    /// A file was made with another setting.
    #[error(
        "{}: the file was made with another `{setting}` ({own}) than [data] has ({given}); write the same one, or tokenize the \
         data again", path.display()
    )]
    OtherSetting {
        /// The file.
        path: PathBuf,
        /// The key of the setting.
        setting: &'static str,
        /// Its value in the file, or its fingerprint.
        own: String,
        /// Its value in the configuration, or its fingerprint.
        given: String,
    },
    /// A file is not the only one.
    #[error("{}: a file of `pipewright tokenize` is the only file of its data; tokenize all files into one", path.display())]
    NotAlone {
        /// The file.
        path: PathBuf,
    },
    /// A record does not fit into a row.
    #[error(
        "{}: record {example} has {found} tokens, and a row of seq_len {seq_len} takes {}; raise seq_len, or write \
         `long_records = \"cut\"` or \"skip\" in [data]", path.display(), seq_len + 1
    )]
    Long {
        /// The file.
        path: PathBuf,
        /// The record, counted from 1.
        example: u64,
        /// Tokens of the record.
        found: usize,
        /// Tokens per row that the model receives.
        seq_len: usize,
    },
    /// The prompt of a record fills a row, and its end is left out.
    #[error(
        "{}: after the cut to the {} tokens of a row of seq_len {seq_len}, nothing of record {example} counts in the loss; raise \
         seq_len, or write `long_records = \"skip\"` in [data]", path.display(), seq_len + 1
    )]
    NothingLeft {
        /// The file.
        path: PathBuf,
        /// The record, counted from 1.
        example: u64,
        /// Tokens per row that the model receives.
        seq_len: usize,
    },
}

pipewright_schedule::message_as_debug!(TokenizedError);
