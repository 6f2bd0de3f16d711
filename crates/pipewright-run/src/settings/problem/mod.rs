//! The problems of a configuration, each with its place.
//!
//! Reading continues after a problem, so that all problems are reported together ([`ConfigError`]).

mod advice;
mod kind;
mod profile_mismatch;

use std::fmt;
use std::path::PathBuf;

use miette::{LabeledSpan, SourceCode};
use thiserror::Error;

use crate::settings::place::Place;
use crate::text::escape;

pub(crate) use kind::ProblemKind;
pub(super) use profile_mismatch::ProfileMismatch;

/// The longest line of a file that is shown, in bytes. The message has the place of a mistake in any case.
const LONGEST_LINE: usize = 4096;

/// The reason why there are no settings.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: cannot read the {what}", path.display())]
    Read {
        /// The kind of file: a configuration or a profile.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The file or the arguments contain mistakes.
    #[error("{} problems in the configuration", .0.len())]
    Problems(Vec<Problem>),
}

/// One mistake in a configuration.
#[derive(Debug, Error)]
#[error("{place}: {kind}")]
pub struct Problem {
    /// The place where it was written.
    pub place: Place,
    /// The kind of mistake.
    pub kind: ProblemKind,
}

impl Problem {
    /// Returns whether the schedule does not fit into memory.
    pub fn is_memory(&self) -> bool {
        matches!(self.kind, ProblemKind::Memory(_))
    }
}

impl miette::Diagnostic for Problem {
    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        let advice = self.kind.advice()?;
        Some(Box::new(advice))
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        match &self.place {
            // The line is shown as it is, so it must not have control characters.
            Place::File { source, .. }
                if self.place.line_length() <= LONGEST_LINE && escape(&source.text) == source.text =>
            {
                Some(&source.text)
            }
            _ => None,
        }
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        match &self.place {
            Place::File { span, .. } => {
                let label = LabeledSpan::new_primary_with_span(None, (span.start, span.len()));
                Some(Box::new(std::iter::once(label)))
            }
            Place::Set { .. } | Place::Default => None,
        }
    }
}
