//! The errors of reading the files of other systems.

use thiserror::Error;

use crate::csv::CsvError;
use crate::generate::GenerateError;
use crate::placement::PlacementError;
use crate::plan::System;
use crate::words::counted;

/// A mistake in a file of another system.
#[derive(Clone, PartialEq, Error)]
#[error("{}{kind}", line.map(|line| format!("line {line}: ")).unwrap_or_default())]
pub struct ReadError {
    /// The line, counted from 1; `None` if the mistake is in no line alone.
    pub line: Option<usize>,
    /// The mistake.
    #[source]
    pub kind: ReadErrorKind,
}

/// A kind of mistake in a file of another system.
#[derive(Clone, PartialEq, Error)]
pub enum ReadErrorKind {
    /// The text has no option of any system.
    #[error(
        "read {found}, and expected options of torchtitan (`--parallelism.pipeline_parallel_degree 4`), options of Megatron \
         (`--pipeline-model-parallel-size 4`), or DeepSpeed's JSON (`{{\"pipeline\": ..}}`)"
    )]
    NoSystem {
        /// The start of the text, or its keys.
        found: String,
    },
    /// The text is a table of actions alone.
    #[error(
        "read a table of actions, which does not say the layers of its stages; check the options that name it in \
         `--parallelism.pipeline_parallel_schedule_csv`, or predict the best cut with `pipewright simulate --csv`"
    )]
    TableAlone,
    /// The text has options of two systems.
    #[error(
        "`{key}` is an option of {system}, and the options before it are of {expected}; use one system's"
    )]
    OtherSystem {
        /// The option.
        key: String,
        /// Its system.
        system: System,
        /// The system of the others.
        expected: System,
    },
    /// The system has no such key.
    #[error("{system} has no key `{key}`{}", nearest.as_ref().map(|key| format!("; did you mean `{key}`?")).unwrap_or_default())]
    UnknownKey {
        /// The system.
        system: System,
        /// The key.
        key: String,
        /// A known key that is similar.
        nearest: Option<String>,
    },
    /// A key that is needed is missing.
    #[error("`{key}` is missing; {system} needs it for a prediction")]
    MissingKey {
        /// The system.
        system: System,
        /// The key.
        key: &'static str,
    },
    /// A key has another value than it may have.
    #[error("`{key}` is `{value}`, and expected {expected}")]
    Value {
        /// The key.
        key: String,
        /// The value.
        value: String,
        /// The values that it may have, in words.
        expected: String,
    },
    /// Two keys contradict each other.
    #[error("{what}")]
    Contradiction {
        /// The contradiction, and what to do.
        what: String,
    },
    /// A layout has a character without a meaning.
    #[error(
        "the layout has `{letter}` at character {column}; Megatron knows `E`, `t`, `m`, `L`, `|`, `*3` and parentheses, and \
         a profile has no layer for `m`"
    )]
    Letter {
        /// The character.
        letter: char,
        /// Its place, counted from 1.
        column: usize,
    },
    /// A layout repeats too much, or its parentheses do not match.
    #[error("the layout at character {column}: {what}")]
    Repeat {
        /// The place, counted from 1.
        column: usize,
        /// The mistake.
        what: &'static str,
    },
    /// A part of the model is missing, is twice, or is out of order.
    #[error("stage {stage}: {what}")]
    Order {
        /// The stage.
        stage: usize,
        /// The mistake, and what to do.
        what: String,
    },
    /// The stages have more or fewer blocks than the profile.
    #[error(
        "the stages have {}, and the profile has {profile}; put each block into a stage, or use the profile of this model",
        counted(*found, "block")
    )]
    BlockCount {
        /// The blocks of the stages.
        found: usize,
        /// The blocks of the profile.
        profile: usize,
    },
    /// The number of stages does not divide by the ranks.
    #[error(
        "there are {} for {}; each rank needs the same number of stages",
        counted(*stages, "stage"), counted(*ranks, "rank")
    )]
    StageCount {
        /// The stages.
        stages: usize,
        /// The ranks.
        ranks: u32,
    },
    /// A stage has no layer of the profile.
    #[error("stage {stage} has no layer that the profile has costs for; give it a block")]
    EmptyStage {
        /// The stage.
        stage: usize,
    },
    /// The text is not JSON, or not of this form.
    #[error("the JSON cannot be read: {0}")]
    Json(String),
    /// The table of actions cannot be read.
    #[error("the table of actions cannot be read: {0}")]
    Table(#[source] CsvError),
    /// The schedule does not exist at this size.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// The stages cannot be placed.
    #[error(transparent)]
    Placement(#[from] PlacementError),
}

crate::error_text::message_as_debug!(ReadError, ReadErrorKind);

impl ReadErrorKind {
    /// Returns the error at a line.
    pub(super) fn at(self, line: usize) -> ReadError {
        ReadError { line: Some(line), kind: self }
    }
}

impl From<ReadErrorKind> for ReadError {
    fn from(kind: ReadErrorKind) -> Self {
        Self { line: None, kind }
    }
}
