//! The pass `unshard`: gathers a stage's sharded parameters before it computes, and drops them when the rank needs
//! other stages first.
//!
//! Before each compute action, the next `window` distinct stages of the rank, the action's own included, are gathered.
//! Rules: (1) a gathered stage that is not one of them is dropped (`RESHARD`), in ascending order; (2) after that, each
//! of them that is not gathered is gathered (`UNSHARD`), in the order of its next use; (3) at the end of the row every
//! gathered stage is dropped; (4) both stages of an overlap count, even if only the first fits the window; (5) if
//! `lookahead` is set, a stage that is used only after the next `lookahead` compute actions does not count, so that
//! parameters are not held for long without use.
//!
//! The pass finds the next stages from the end of the row to its start. Each action moves its stage to the front of a
//! list of next stages. A stage that has left the window does not return before it is used, so a list of `window + 1`
//! stages is enough. Time: the length of the row times the window.

use std::num::NonZeroU32;

use crate::action::Action;
use crate::ids::StageIndex;
use crate::schedule::Program;

/// The settings of gathering parameters ahead of their use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct UnshardConfig {
    /// The number of stages of a rank that are gathered at once (one more around an overlap).
    pub window: NonZeroU32,
    /// The number of a rank's next compute actions within which a gathered stage must be used; `None` for any number.
    pub lookahead: Option<NonZeroU32>,
}

impl Default for UnshardConfig {
    /// The setting of PyTorch's reference: a window of 3 stages, any number of actions ahead.
    fn default() -> Self {
        const WINDOW: NonZeroU32 = NonZeroU32::new(3).expect("3 is not 0");
        Self { window: WINDOW, lookahead: None }
    }
}

/// Adds `UNSHARD` and `RESHARD`.
pub fn unshard(program: Program, config: UnshardConfig) -> Program {
    program.map_rows(|_, row| unshard_row(&row, config))
}

fn unshard_row(row: &[Action], config: UnshardConfig) -> Vec<Action> {
    let mut changes = changes_in_reverse(row, config);
    let mut lowered = Vec::with_capacity(row.len() + changes.len());
    for position in 0..=row.len() {
        while let Some((_, change)) = changes.pop_if(|(at, _)| *at == position) {
            lowered.push(change);
        }
        lowered.extend(row.get(position));
    }
    lowered
}

/// Returns the gathers and drops with the position before which each comes, in reverse order.
fn changes_in_reverse(row: &[Action], config: UnshardConfig) -> Vec<(usize, Action)> {
    let mut changes = Vec::new();
    let mut upcoming = Upcoming {
        window: config.window.get() as usize,
        lookahead: config.lookahead.map_or(usize::MAX, |lookahead| lookahead.get() as usize),
        seen: 0,
        nearest: Vec::new(),
    };
    let mut after: Vec<StageIndex> = Vec::new();
    for (position, action) in row.iter().enumerate().rev().filter(|(_, action)| action.is_compute()) {
        upcoming.prepend(*action);
        let before: Vec<StageIndex> = upcoming.in_window().collect();
        // The last compute action before the change is here, so the change directly follows it.
        push_changes(&mut changes, position + 1, &before, &after);
        after = before;
    }
    push_changes(&mut changes, 0, &[], &after);
    changes
}

/// Appends the changes of the gathered stages from `before` to `after`, in reverse order.
fn push_changes(changes: &mut Vec<(usize, Action)>, at: usize, before: &[StageIndex], after: &[StageIndex]) {
    let fetched = after.iter().rev().filter(|stage| !before.contains(stage));
    changes.extend(fetched.map(|&stage| (at, Action::Unshard { stage })));
    let mut dropped: Vec<StageIndex> =
        before.iter().copied().filter(|stage| !after.contains(stage)).collect();
    dropped.sort_unstable_by(|a, b| b.cmp(a));
    changes.extend(dropped.into_iter().map(|stage| (at, Action::Reshard { stage })));
}

/// The next stages, in the order of their next use.
struct Upcoming {
    window: usize,
    lookahead: usize,
    /// The number of compute actions that have been added.
    seen: usize,
    /// The next stages, each with the value of `seen` at its next use.
    nearest: Vec<(StageIndex, usize)>,
}

impl Upcoming {
    fn prepend(&mut self, action: Action) {
        self.seen += 1;
        let mut stages = action.parts().map(Action::stage);
        let (first, second) = (stages.next(), stages.next());
        for stage in [second, first].into_iter().flatten() {
            self.nearest.retain(|&(other, _)| other != stage);
            self.nearest.insert(0, (stage, self.seen));
        }
        self.nearest.truncate(self.window.saturating_add(1));
    }

    fn in_window(&self) -> impl Iterator<Item = StageIndex> {
        let splits_overlap = match (self.nearest.get(self.window - 1), self.nearest.get(self.window)) {
            (Some(last), Some(beyond)) => last.1 == beyond.1,
            _ => false,
        };
        let counted = self.window.saturating_add(usize::from(splits_overlap));
        let near = |&&(_, used): &&(StageIndex, usize)| self.seen - used < self.lookahead;
        self.nearest.iter().take(counted).take_while(near).map(|&(stage, _)| stage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(window: u32, row: &str, expected: &str) {
        check_ahead(window, 0, row, expected);
    }

    /// Does the same as [`check`] with a lookahead, or without one if it is 0.
    fn check_ahead(window: u32, lookahead: u32, row: &str, expected: &str) {
        let lookahead = NonZeroU32::new(lookahead);
        let config = UnshardConfig { window: NonZeroU32::new(window).expect("a window"), lookahead };
        let row: Vec<Action> = row.split_whitespace().map(|cell| cell.parse().expect("an action")).collect();
        let lowered: Vec<String> = unshard_row(&row, config).iter().map(ToString::to_string).collect();
        assert_eq!(lowered.join(" "), expected);
    }

    #[test]
    fn one_stage_is_gathered_once() {
        check(3, "0F0 0F1 0B0 0B1", "0UNSHARD 0F0 0F1 0B0 0B1 0RESHARD");
        check(1, "", "");
    }

    #[test]
    fn a_stage_that_is_done_is_dropped() {
        check(
            3,
            "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1",
            "0UNSHARD 1UNSHARD 0F0 0F1 1F0 1F1 1B0 1B1 1RESHARD 0B0 0B1 0RESHARD",
        );
    }

    #[test]
    fn a_narrow_window_gathers_again() {
        check(1, "0F0 1F0 1B0 0B0", "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD");
        check(
            2,
            "0F0 1F0 2F0 0B0",
            "0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 1RESHARD 0UNSHARD 2F0 2RESHARD 0B0 0RESHARD",
        );
    }

    #[test]
    fn an_overlap_is_gathered_whole() {
        check(1, "(0F1;1B0)OVERLAP_F_B 1B1", "0UNSHARD 1UNSHARD (0F1;1B0)OVERLAP_F_B 0RESHARD 1B1 1RESHARD");
    }

    #[test]
    fn what_is_far_away_is_not_gathered() {
        check_ahead(2, 2, "0F0 0F1 0F2 1F0", "0UNSHARD 0F0 0F1 1UNSHARD 0F2 0RESHARD 1F0 1RESHARD");
        check_ahead(2, 1, "0F0 1F0", "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1RESHARD");
        check_ahead(u32::MAX, u32::MAX, "0F0 1F0", "0UNSHARD 1UNSHARD 0F0 0RESHARD 1F0 1RESHARD");
    }
}
