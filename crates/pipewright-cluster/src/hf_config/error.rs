//! The errors of a `config.json`.

use thiserror::Error;

/// The largest file that is read, in bytes.
pub const MAX_FILE: usize = 1 << 20;
/// The most blocks of a model.
pub(super) const MAX_BLOCKS: u64 = 10_000;
/// The largest size of a part. Published models have at most some ten thousand.
pub(super) const MAX_SIZE: u64 = 1 << 20;
/// The largest vocabulary.
pub(super) const MAX_VOCABULARY: u64 = 1 << 28;

/// The errors of a configuration.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// The file is not a JSON object.
    #[error("the file is not a JSON object{at}")]
    NotAnObject {
        /// Where it ends to be one, if it is not JSON.
        at: String,
    },
    /// The file is too large.
    #[error("the file has more than {MAX_FILE} bytes; a configuration is smaller")]
    TooLarge,
    /// A size is missing.
    #[error("the configuration needs one of the keys {names}; add it")]
    Missing {
        /// The names of the key.
        names: String,
    },
    /// A size is not a number in its range.
    #[error("`{key}` is {value}; use a whole number from {least} to {most}")]
    Size {
        /// The key.
        key: String,
        /// Its value, shortened.
        value: String,
        /// The smallest value.
        least: u64,
        /// The largest value.
        most: u64,
    },
    /// A value contradicts another one, or is of another kind.
    #[error("`{key}` is {value}; use {expected}")]
    Value {
        /// The key.
        key: String,
        /// Its value, shortened.
        value: String,
        /// The expected value.
        expected: String,
    },
    /// A kind of block has no cost.
    #[error("`{key}` names the kind of block `{kind}`, whose costs are not known; known are {known}")]
    Block {
        /// The key.
        key: String,
        /// The kind.
        kind: String,
        /// The known kinds.
        known: &'static str,
    },
    /// The whole model has a form without costs.
    #[error("`model_type` is {family}: {why}; plan it from a profile (`pipewright plan --profile`)")]
    Family {
        /// The family.
        family: String,
        /// The part without costs.
        why: &'static str,
    },
    /// A list of blocks is empty or too long.
    #[error("`{key}` has {blocks} blocks; use from 1 to {MAX_BLOCKS}")]
    Blocks {
        /// The key.
        key: String,
        /// The blocks.
        blocks: usize,
    },
    /// The width of a head would be 0.
    #[error("{heads} heads are more than the hidden size of {hidden}; use fewer heads, or give `head_dim`")]
    Heads {
        /// The heads.
        heads: u64,
        /// The width of the hidden states.
        hidden: u64,
    },
}

pipewright_schedule::message_as_debug!(ConfigError);
