//! The error of reading a file of another system.

use thiserror::Error;

use crate::error_text::with_causes;
use crate::generate::GenerateError;
use crate::plan::System;

/// A mistake in a file of another system.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("{}{reason}", line.map(|line| format!("line {line}: ")).unwrap_or_default())]
pub struct ReadError {
    /// The line, counted from 1; `None` if the mistake is in no line alone.
    pub line: Option<usize>,
    /// The mistake, with what was read, and what was expected or what to do.
    pub reason: String,
}

crate::error_text::message_as_debug!(ReadError);

impl ReadError {
    /// Returns a mistake that is in no line alone.
    pub(super) fn new(reason: impl Into<String>) -> Self {
        Self { line: None, reason: reason.into() }
    }

    /// Returns the mistake of a part of the model that is missing, is twice, or is out of order.
    pub(super) fn in_stage(stage: usize, reason: &str) -> Self {
        Self::new(format!("stage {stage}: {reason}"))
    }

    /// Returns the mistake of a key that is needed and missing.
    pub(super) fn missing_key(system: System, key: &str) -> Self {
        Self::new(format!("`{key}` is missing; {system} needs it for a prediction"))
    }

    /// Returns the mistake of a key that the system does not have. `nearest` is a known key that is similar.
    pub(super) fn unknown_key(system: System, key: &str, nearest: Option<&str>) -> Self {
        let advice = nearest.map_or_else(String::new, |key| format!("; did you mean `{key}`?"));
        Self::new(format!("{system} has no key `{key}`{advice}"))
    }

    /// Returns the mistake of a key that has another value than it may have.
    pub(super) fn value(key: &str, value: &str, expected: &str) -> Self {
        Self::new(format!("`{key}` is `{value}`, and expected {expected}"))
    }

    /// Returns the mistake at a line.
    pub(super) fn at(self, line: usize) -> Self {
        Self { line: Some(line), ..self }
    }
}

impl From<GenerateError> for ReadError {
    fn from(error: GenerateError) -> Self {
        Self::new(with_causes(&error))
    }
}
