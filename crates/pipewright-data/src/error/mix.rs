//! The errors of mixtures.

use std::path::PathBuf;

use thiserror::Error;

/// Why the sources of a mixture cannot be used together.
#[derive(Error)]
pub enum MixError {
    /// The data is named twice.
    #[error("the data has both `path` and `mix`: remove `path`, or make it a source of `mix` with a weight")]
    PathAndMix,
    /// A file is in two sources.
    #[error(
        "{}: the file is in two sources of `mix`, {first} and {second}, so its records would be repeated too early; leave it out \
         of one of them, with a pattern that begins with `!`", path.display()
    )]
    FileTwice {
        /// The file.
        path: PathBuf,
        /// The patterns of the first source.
        first: String,
        /// The patterns of the second source.
        second: String,
    },
    /// A source has no row.
    #[error(
        "{source_name}: this source of `mix` has {tokens} tokens and no row of seq_len {seq_len} to train on; give it more data or a \
         shorter seq_len, or leave it out"
    )]
    NoRow {
        /// The patterns of the source.
        source_name: String,
        /// The number of its tokens.
        tokens: usize,
        /// Tokens per row that the model receives.
        seq_len: usize,
    },
}

pipewright_schedule::message_as_debug!(MixError);
