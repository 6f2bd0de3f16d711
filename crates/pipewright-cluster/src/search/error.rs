//! The errors of the search.

use pipewright_schedule::GenerateError;
use thiserror::Error;

use crate::layout::{Layout, LayoutError};
use pipewright_schedule::held_bytes::HeldBytes;

/// The reason why a search has no plan, and the advice.
#[derive(Clone, PartialEq, Error)]
#[error("{reason}{}{advice}", if .advice.is_empty() { "" } else { "; " })]
pub struct SearchError {
    /// The kind of error.
    pub kind: SearchErrorKind,
    /// The reason.
    pub reason: String,
    /// The advice; empty if the reason says it.
    pub advice: String,
}

/// The kinds of errors of the search.
#[derive(Debug, Clone, PartialEq)]
pub enum SearchErrorKind {
    /// The request has no layout, or none that can be predicted.
    Request,
    /// The system of the request runs none of its layouts.
    System,
    /// No layout fits into memory. This one needs least.
    Memory(Box<LeastMemory>),
}

pipewright_schedule::message_as_debug!(SearchError);

/// The layout whose largest rank needs the fewest bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct LeastMemory {
    /// The layout.
    pub layout: Layout,
    /// The rank of a pipeline that needs most.
    pub rank: usize,
    /// The bytes of this rank.
    pub memory: HeldBytes<f64>,
    /// The bytes that a rank may need.
    pub limit: f64,
}

/// The rank of a pipeline that lacks most bytes, or has the fewest left.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TightestRank {
    pub(crate) rank: usize,
    pub(crate) memory: HeldBytes<f64>,
    /// The bytes that it may need.
    pub(crate) limit: f64,
}

impl TightestRank {
    /// Returns the bytes that the rank lacks, below 0 if it has some left.
    pub(crate) fn missing(&self) -> f64 {
        self.memory.total() - self.limit
    }

    /// Returns the rank with its layout.
    pub(crate) fn of_layout(self, layout: &Layout) -> LeastMemory {
        let Self { rank, memory, limit } = self;
        LeastMemory { layout: layout.clone(), rank, memory, limit }
    }
}

impl SearchError {
    /// Returns an error of the request.
    pub(crate) fn new(reason: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { kind: SearchErrorKind::Request, reason: reason.into(), advice: advice.into() }
    }
}

impl From<LayoutError> for SearchError {
    fn from(LayoutError { reason, advice }: LayoutError) -> Self {
        Self::new(reason, advice)
    }
}

impl From<GenerateError> for SearchError {
    fn from(error: GenerateError) -> Self {
        Self::new(error.to_string(), "")
    }
}

impl LeastMemory {
    /// Returns all bytes of the rank.
    pub fn needed(&self) -> f64 {
        self.memory.total()
    }

    /// Returns the bytes that the rank lacks, below 0 if it has some left.
    pub(crate) fn missing(&self) -> f64 {
        self.needed() - self.limit
    }
}
