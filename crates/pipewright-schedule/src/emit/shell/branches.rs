//! The branches, loops, groups and functions around a command, and whether the command runs.

use std::collections::HashSet;

use crate::emit::shell::condition::{and, not, or};
use crate::emit::shell::letters::HereDocument;

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
    /// Whether the command is behind a pipe, and so in a subshell.
    pub(super) is_piped: bool,
    /// The number of changes before the list, which is a subshell if `&` ends it.
    pub(super) start: usize,
    /// The number of changes before the command, which is a subshell if a pipe follows.
    pub(super) command_start: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Link {
    #[default]
    None,
    And,
    Or,
}

impl List {
    /// Returns an empty list after some changes.
    pub(super) fn after(changes: usize) -> Self {
        Self { start: changes, command_start: changes, ..Self::default() }
    }

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
        *self = Self { status, line, link: Link::None, is_negated: false, ..*self };
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
    /// The number of changes before it.
    pub(super) start: usize,
}

/// The first reading of a loop that is in no other loop. No condition in it is decided.
#[derive(Debug)]
pub(super) struct FirstReading {
    /// The line of the loop.
    pub(super) line: usize,
    /// The variables that subshells in the loop change.
    pub(super) names: HashSet<String>,
    /// The starts of the functions that the loop calls. Each is read once.
    pub(super) called: HashSet<usize>,
    /// The index of the first letter of the loop.
    pub(super) at: usize,
    /// The numbers of branches, calls, changes and commands up to the loop.
    pub(super) branches: usize,
    pub(super) calls: usize,
    pub(super) changes: usize,
    pub(super) commands: usize,
    pub(super) documents: Vec<HereDocument>,
}

impl OpenCompound {
    pub(super) fn new(kind: CompoundKind, line: usize, outer: Runs, list: List, start: usize) -> Self {
        let taken = match kind {
            CompoundKind::Loop => None,
            CompoundKind::Definition(_) | CompoundKind::Case(_) => Some(false),
            _ => Some(true),
        };
        Self { kind, line, outer, before: Some(false), taken, list, start }
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
}
