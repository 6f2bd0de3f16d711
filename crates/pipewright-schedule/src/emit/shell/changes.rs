//! The changes of variables and functions that the end of a subshell or a function undoes.

use crate::emit::shell::branches::Function;
use crate::emit::shell::variables::OldValue;

/// A change that the end of a subshell or a function undoes.
#[derive(Debug)]
pub(super) enum Change {
    /// A variable had another value.
    Variable(String, OldValue),
    /// A name became a variable of the function that is called, and had another value.
    Local(String, OldValue),
    /// A variable had another type, or none.
    Type(String, Option<DeclaredType>),
    /// A name had another function, or none.
    Function(String, Option<Function>),
    /// The commands that follow do not run, because of `exit` or `return`.
    Left,
}

/// The type that `declare` gives a variable, which changes each value.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeclaredType {
    /// Whether values are sums, and not another type.
    pub(super) is_number: bool,
    /// The line of the declaration.
    pub(super) line: usize,
}

impl Change {
    /// Returns the variable whose value changes.
    pub(super) fn variable(&self) -> Option<&str> {
        match self {
            Self::Variable(name, _) | Self::Local(name, _) => Some(name),
            Self::Type(..) | Self::Function(..) | Self::Left => None,
        }
    }
}
