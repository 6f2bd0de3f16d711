//! A computation of a repeating row, and why a schedule has no such rows.

use std::fmt;

use thiserror::Error;

use crate::action::Action;

/// A computation of a repeating row. Its text form is the action's, with `'` behind it for the next batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DelayedAction {
    /// The computation, with the microbatch's number in its own batch.
    pub action: Action,
    /// Whether it belongs to the next batch instead of the older one.
    pub is_next: bool,
}

impl fmt::Display for DelayedAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { action, is_next } = self;
        write!(f, "{action}{}", if *is_next { "'" } else { "" })
    }
}

/// Why a schedule cannot be delayed.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct DelayError(pub(super) String);

crate::error_text::message_as_debug!(DelayError);
