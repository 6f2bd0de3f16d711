//! Loops, which are read twice: the first time only for the variables that a round changes, because a later round sees
//! their values, and the second time for the commands of any round.

use std::collections::HashSet;
use std::rc::Rc;

use crate::emit::shell::branches::{FirstReading, List};
use crate::emit::shell::changes::Change;
use crate::emit::shell::script::Reader;

impl Reader {
    /// Begins the first reading of a loop that was opened.
    pub(super) fn begin_first_reading(&mut self, line: usize) {
        self.first_reading = Some(FirstReading {
            line,
            names: HashSet::new(),
            called: HashSet::new(),
            at: self.letters.at,
            branches: self.branches.len(),
            calls: self.calls.len(),
            changes: self.changes.len(),
            commands: self.commands.len(),
            documents: self.documents.clone(),
        });
    }

    /// Returns whether the innermost compound command is a loop that is read for the first time.
    pub(super) fn ends_first_reading(&self) -> bool {
        self.first_reading.as_ref().is_some_and(|first| first.branches == self.branches.len())
    }

    /// Ends the first reading of a loop, and begins the second one.
    pub(super) fn read_again(&mut self) {
        let Some(first) = self.first_reading.take() else { return };
        let mut names: Vec<String> = first.names.into_iter().collect();
        let changes = self.changes.get(first.changes..).unwrap_or_default();
        names.extend(changes.iter().filter_map(Change::variable).map(str::to_owned));
        names.sort_unstable();
        names.dedup();
        self.undo(first.changes, first.line);
        self.branches.truncate(first.branches);
        self.calls.truncate(first.calls);
        self.commands.truncate(first.commands);
        (self.letters.at, self.documents, self.loops) = (first.at, first.documents, 1);
        let reason = reason_of_loop(first.line);
        names.iter().for_each(|name| self.doubt(name, &reason));
        self.list = List::after(self.changes.len());
    }
}

pub(super) fn reason_of_loop(line: usize) -> Rc<str> {
    format!("its value changes in the loop of line {line}, which is not run").into()
}
