//! The branches, loops, groups and functions around a command, and whether the command runs.

use crate::emit::shell::condition::{and, not, or};
use crate::emit::shell::variables::OldValue;

/// Whether a command runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Runs {
    Yes,
    No,
    /// It depends on a condition or a loop of this line.
    Maybe(usize),
}

impl Runs {
    /// Returns whether a command in a part of this one runs, by a condition of a line.
    pub(super) fn only_if(self, condition: Option<bool>, line: usize) -> Self {
        match (self, condition) {
            (Self::No, _) | (_, Some(false)) => Self::No,
            (Self::Yes, None) => Self::Maybe(line),
            (runs, _) => runs,
        }
    }
}

/// A list of commands that `&&` and `||` connect.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct List {
    /// The result of the commands before, unless it is not decided.
    pub(super) status: Option<bool>,
    /// The line of the command that decides.
    pub(super) line: usize,
    /// The connection to the next command.
    pub(super) link: Link,
    /// Whether `!` negates the command.
    pub(super) is_negated: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Link {
    #[default]
    None,
    And,
    Or,
}

impl List {
    /// Returns whether the next command runs.
    pub(super) fn condition(&self) -> Option<bool> {
        match self.link {
            Link::None => Some(true),
            Link::And => self.status,
            Link::Or => not(self.status),
        }
    }

    /// Adds the result of a command.
    pub(super) fn add(&mut self, result: Option<bool>, line: usize) {
        let result = if self.is_negated { not(result) } else { result };
        let status = match self.link {
            Link::None => result,
            Link::And => and(self.status, result),
            Link::Or => or(self.status, result),
        };
        *self = Self { status, line, ..Self::default() };
    }
}

/// A function of the script.
#[derive(Debug, Clone, Copy)]
pub(super) struct Function {
    /// The index of the first letter of the body.
    pub(super) start: usize,
    pub(super) in_parentheses: bool,
    /// Whether the function is certainly defined so.
    pub(super) is_certain: bool,
}

/// The kind of a compound command.
#[derive(Debug)]
pub(super) enum CompoundKind {
    If,
    Loop,
    /// `case`, with its word if it is certain.
    Case(Option<String>),
    Group,
    Subshell,
    /// The body of a function where it is defined. `true` if it is in parentheses.
    Definition(bool),
    /// The body of a function where it is called.
    Call {
        /// The index of the letter behind the call.
        back: usize,
        /// The index of the first letter of the body.
        start: usize,
        in_parentheses: bool,
        /// The values that the subshell around it keeps for its end.
        kept: usize,
    },
}

/// A compound command that is open.
#[derive(Debug)]
pub(super) struct OpenCompound {
    pub(super) kind: CompoundKind,
    pub(super) line: usize,
    /// Whether the compound command runs.
    pub(super) outer: Runs,
    /// Whether an earlier branch of it is taken.
    before: Option<bool>,
    /// Whether this branch is taken.
    taken: Option<bool>,
    /// The list that it is a command of.
    pub(super) list: List,
    /// The values that variables get back when it ends.
    pub(super) saved: Vec<(String, OldValue)>,
    /// The functions that names get back when it ends.
    pub(super) functions: Vec<(String, Option<Function>)>,
}

impl OpenCompound {
    pub(super) fn new(kind: CompoundKind, line: usize, outer: Runs, list: List) -> Self {
        let taken = match kind {
            CompoundKind::Loop => None,
            CompoundKind::Definition(_) | CompoundKind::Case(_) => Some(false),
            _ => Some(true),
        };
        Self { kind, line, outer, before: Some(false), taken, list, saved: Vec::new(), functions: Vec::new() }
    }

    /// Returns whether the commands of the current branch run.
    pub(super) fn runs(&self) -> Runs {
        self.outer.only_if(self.taken, self.line)
    }

    /// Begins a branch that is taken if no earlier one is and the condition holds.
    pub(super) fn begin(&mut self, condition: Option<bool>) {
        self.taken = and(not(self.before), condition);
    }

    /// Marks the current branch as one that may be taken.
    pub(super) fn doubt(&mut self) {
        self.taken = None;
    }

    /// Ends the current branch.
    pub(super) fn end(&mut self) {
        self.before = or(self.before, self.taken);
    }

    /// Marks the commands up to the end as not run.
    pub(super) fn leave(&mut self) {
        self.outer = Runs::No;
    }
}
