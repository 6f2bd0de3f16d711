//! The pass `unshard`: gathers a stage's sharded parameters before it computes, and drops them when the rank
//! needs other stages first.
//!
//! The pass looks at a rank's next compute actions, and at the distinct stages in them, in the order of their
//! next use. Two numbers bound the gathering: the `window` says how many of these stages may be gathered, and
//! the `lookahead` how many of them are fetched before they are needed. Rules before each compute action: (1)
//! a gathered stage that is not one of the next `window` stages is dropped (`RESHARD`), the one that was
//! gathered first comes first; (2) after that, each of the next `lookahead` stages that is not gathered is
//! gathered (`UNSHARD`), in the order of its next use. (3) At the end of the row every gathered stage is
//! dropped. (4) Both stages of an overlap count, even if only the first fits the number. (5) If what is gathered is frozen,
//! weight gradients do not need it, so `W` does not count as a use.
//!
//! A stage that was fetched stays gathered as long as it is in the window, so a small lookahead delays
//! messages and does not repeat them. These are the rules of PyTorch 2.15 (`max_active_stages`,
//! `unshard_lookahead`), which refuses a window of 1 for a program with overlaps of two stages.
//!
//! The pass keeps each stage of the rank with its next use, in order. An action moves its own stages. Time:
//! the length of the row times the window.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::Arc;

use crate::action::{Action, ActionKind};
use crate::ids::{Rank, StageIndex};
use crate::lower::error::LowerError;
use crate::schedule::Program;
use crate::words::counted;

/// The settings of gathering parameters ahead of their use.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct UnshardConfig {
    /// The number of stages of a rank that are gathered at once (one more around an overlap).
    pub window: NonZeroU32,
    /// The number of a rank's next stages that are fetched ahead of their use.
    pub lookahead: UnshardLookahead,
    /// Whether the parameters that are gathered are frozen, so that weight gradients do not need them: matrices that stay in
    /// a file.
    pub frozen: bool,
}

impl Default for UnshardConfig {
    /// The setting of PyTorch's reference: a window of 3 stages, which is also the lookahead.
    fn default() -> Self {
        const WINDOW: NonZeroU32 = NonZeroU32::new(3).expect("3 is not 0");
        Self { window: WINDOW, lookahead: UnshardLookahead::Full, frozen: false }
    }
}

/// How many of a rank's next stages are fetched, the stage that computes next included. No number may be
/// larger than the window. The documentation of each variant begins with its text form.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub enum UnshardLookahead {
    /// `full`: as many as the window has.
    #[default]
    Full,
    /// `auto`: 2 on rank 0, and one more on each further rank, up to the window. A later rank has more time
    /// before its first tensors arrive.
    Auto,
    /// `2`: this number on every rank.
    Stages(NonZeroU32),
    /// `1/2/2`: a number for each rank. Commas may separate the numbers too.
    PerRank(Arc<[NonZeroU32]>),
}

/// A text that is not an [`UnshardLookahead`].
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is not a lookahead; use full, auto, a number of stages from 1, or a number for each rank such as 1/2/2"
)]
pub struct ParseLookaheadError {
    /// The text, shortened if it is very long.
    pub text: String,
}
crate::error_text::message_as_debug!(ParseLookaheadError);

impl fmt::Display for UnshardLookahead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("full"),
            Self::Auto => f.write_str("auto"),
            Self::Stages(stages) => write!(f, "{stages}"),
            Self::PerRank(stages) => {
                let numbers: Vec<String> = stages.iter().map(ToString::to_string).collect();
                f.write_str(&numbers.join("/"))
            }
        }
    }
}

impl FromStr for UnshardLookahead {
    type Err = ParseLookaheadError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseLookaheadError { text: text.chars().take(64).collect() };
        match text {
            "full" => Ok(Self::Full),
            "auto" => Ok(Self::Auto),
            _ => {
                let numbers = text.split(['/', ',']).map(|number| number.trim().parse());
                let numbers: Vec<NonZeroU32> = numbers.collect::<Result<_, _>>().map_err(|_| error())?;
                Ok(match numbers.as_slice() {
                    &[stages] => Self::Stages(stages),
                    _ => Self::PerRank(numbers.into()),
                })
            }
        }
    }
}

impl UnshardConfig {
    /// Returns how many of the next stages `rank` fetches.
    ///
    /// # Errors
    /// When the number is larger than the window.
    fn lookahead_of(&self, rank: Rank) -> Result<NonZeroU32, LowerError> {
        let window = self.window;
        let lookahead = match &self.lookahead {
            UnshardLookahead::Full => window,
            UnshardLookahead::Auto => {
                window.min(NonZeroU32::MIN.saturating_add(rank.get().saturating_add(1)))
            }
            UnshardLookahead::Stages(stages) => *stages,
            UnshardLookahead::PerRank(stages) => stages.get(rank.index()).copied().unwrap_or(window),
        };
        if lookahead <= window {
            Ok(lookahead)
        } else {
            let problem =
                format!("rank {rank} has a lookahead of {lookahead} stages, and the window has {window}");
            Err(LowerError::Refused(format!("{problem}; use a lookahead from 1 to {window}")))
        }
    }

    /// Checks that the settings fit a program of this many ranks.
    ///
    /// # Errors
    /// When a lookahead is larger than the window, or there is another number of them than of ranks.
    pub fn check(&self, ranks: u32) -> Result<(), LowerError> {
        match &self.lookahead {
            UnshardLookahead::PerRank(stages) if stages.len() != ranks as usize => {
                let (found, ranks) = (counted(stages.len(), "lookahead"), counted(ranks, "rank"));
                let advice = "give one for each rank, or one number for all";
                Err(LowerError::Refused(format!("{found} for {ranks}; {advice}")))
            }
            UnshardLookahead::PerRank(_) => {
                (0..ranks).try_for_each(|rank| self.lookahead_of(Rank::new(rank)).map(drop))
            }
            _ => self.lookahead_of(Rank::new(0)).map(drop),
        }
    }
}

/// Adds `UNSHARD` and `RESHARD`.
///
/// # Errors
/// As [`UnshardConfig::check`].
pub fn unshard(program: Program, config: &UnshardConfig) -> Result<Program, LowerError> {
    config.check(program.ranks())?;
    let window = config.window.get() as usize;
    Ok(program.map_rows(|rank, row| {
        let lookahead = config.lookahead_of(rank).map_or(window, |lookahead| lookahead.get() as usize);
        unshard_row(&row, window, lookahead, config.frozen)
    }))
}

fn unshard_row(row: &[Action], window: usize, lookahead: usize, is_frozen: bool) -> Vec<Action> {
    let mut gathering =
        Gathering { window, lookahead, gathered: Vec::new(), lowered: Vec::with_capacity(row.len() + 2) };
    let is_use =
        |action: Action| action.is_compute() && !(is_frozen && action.kind() == ActionKind::WeightBackward);
    let mut upcoming = Upcoming::of(row, is_use);
    gathering.change(&upcoming);
    for &action in row {
        gathering.lowered.push(action);
        if is_use(action) {
            upcoming.pass(action);
            // The last compute action before the change is here, so the change directly follows it.
            gathering.change(&upcoming);
        }
    }
    gathering.lowered
}

/// The gathered stages of a rank, and the new row so far.
struct Gathering {
    window: usize,
    lookahead: usize,
    /// In the order in which they were gathered.
    gathered: Vec<StageIndex>,
    lowered: Vec<Action>,
}

impl Gathering {
    /// Appends the drops and gathers before the next compute action; after the last one, the drops of all
    /// stages.
    fn change(&mut self, upcoming: &Upcoming) {
        let is_near = |stage: &StageIndex| upcoming.first(self.window).any(|near| near == *stage);
        let lowered = &mut self.lowered;
        self.gathered.retain(|&stage| {
            let stays = is_near(&stage);
            if !stays {
                lowered.push(Action::Reshard { stage });
            }
            stays
        });
        for stage in upcoming.first(self.lookahead) {
            if !self.gathered.contains(&stage) {
                self.gathered.push(stage);
                self.lowered.push(Action::Unshard { stage });
            }
        }
    }
}

/// A place at which a stage computes: twice the number of the action, plus 1 for the second part of an
/// overlap.
type Position = usize;

/// The stages that compute in the rest of a row.
struct Upcoming {
    /// Each stage with its next place, in the order of the places.
    nearest: VecDeque<(Position, StageIndex)>,
    /// For each part of the remaining compute actions, the next place of its stage after it.
    following: VecDeque<Option<Position>>,
}

impl Upcoming {
    /// Returns the stages of a row before its first action. `is_use` says whether an action needs its stages.
    fn of(row: &[Action], is_use: impl Fn(Action) -> bool) -> Self {
        let mut following = VecDeque::with_capacity(row.len());
        let mut next: BTreeMap<StageIndex, Position> = BTreeMap::new();
        for (number, action) in row.iter().enumerate().rev().filter(|(_, action)| is_use(**action)) {
            let parts: Vec<StageIndex> = action.parts().map(Action::stage).collect();
            for (part, stage) in parts.into_iter().enumerate().rev() {
                following.push_front(next.insert(stage, 2 * number + part));
            }
        }
        let mut nearest: Vec<(Position, StageIndex)> =
            next.into_iter().map(|(stage, at)| (at, stage)).collect();
        nearest.sort_unstable();
        Self { nearest: nearest.into(), following }
    }

    /// Moves past the next compute action.
    fn pass(&mut self, action: Action) {
        for stage in action.parts().map(Action::stage) {
            self.nearest.pop_front();
            if let Some(next) = self.following.pop_front().flatten() {
                let at = self.nearest.partition_point(|&(place, _)| place < next);
                self.nearest.insert(at, (next, stage));
            }
        }
    }

    /// Returns the next `count` stages, and one more if only the first stage of an overlap would be among
    /// them.
    fn first(&self, count: usize) -> impl Iterator<Item = StageIndex> {
        let action = |index: usize| self.nearest.get(index).map(|(place, _)| place / 2);
        let splits_overlap = action(count).is_some() && action(count - 1) == action(count);
        let count = count.saturating_add(usize::from(splits_overlap));
        self.nearest.iter().take(count).map(|&(_, stage)| stage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::{parse_program, print_program};

    fn check(window: u32, row: &str, expected: &str) {
        check_ahead(window, "full", row, expected);
    }

    fn check_ahead(window: u32, lookahead: &str, row: &str, expected: &str) {
        let config = config(window, lookahead);
        let row: Vec<Action> = row.split_whitespace().map(|cell| cell.parse().expect("an action")).collect();
        let lookahead = config.lookahead_of(Rank::new(0)).expect("a lookahead").get() as usize;
        let lowered = unshard_row(&row, window as usize, lookahead, false);
        assert_eq!(lowered.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "), expected);
    }

    fn config(window: u32, lookahead: &str) -> UnshardConfig {
        let window = NonZeroU32::new(window).expect("a window");
        UnshardConfig { window, lookahead: lookahead.parse().expect("a lookahead"), frozen: false }
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
        check_ahead(
            2,
            "1",
            "0F0 (0F1;1B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B",
            "0UNSHARD 0F0 1UNSHARD (0F1;1B0)OVERLAP_F_B 1RESHARD (0F2;0B1)OVERLAP_F_B 0RESHARD",
        );
    }

    #[test]
    fn the_stages_of_the_lookahead_are_fetched_and_those_of_the_window_stay() {
        check_ahead(2, "1", "0F0 0F1 1F0 0B0 1B0", "0UNSHARD 0F0 0F1 1UNSHARD 1F0 0B0 0RESHARD 1B0 1RESHARD");
        check_ahead(u32::MAX, "1", "0F0 1F0 0B0", "0UNSHARD 0F0 1UNSHARD 1F0 1RESHARD 0B0 0RESHARD");
        check_ahead(u32::MAX, "full", "0F0 1F0", "0UNSHARD 1UNSHARD 0F0 0RESHARD 1F0 1RESHARD");
    }

    #[test]
    fn the_stage_that_was_gathered_first_is_dropped_first() {
        check(
            2,
            "1F0 0F0 3F0 2F0",
            "1UNSHARD 0UNSHARD 1F0 1RESHARD 3UNSHARD 0F0 0RESHARD 2UNSHARD 3F0 3RESHARD 2F0 2RESHARD",
        );
        check(
            1,
            "(1F1;0B0)OVERLAP_F_B 2F0",
            "1UNSHARD 0UNSHARD (1F1;0B0)OVERLAP_F_B 1RESHARD 0RESHARD 2UNSHARD 2F0 2RESHARD",
        );
    }

    #[test]
    fn weight_gradients_do_not_need_what_is_frozen() {
        let row = "0F0 1F0 1I0 0I0 1W0 0W0";
        let whole = "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1I0 1RESHARD 0UNSHARD 0I0 0RESHARD 1UNSHARD 1W0 1RESHARD \
                     0UNSHARD 0W0 0RESHARD";
        check(1, row, whole);
        let actions: Vec<Action> = row.split(' ').map(|cell| cell.parse().expect("an action")).collect();
        let frozen = unshard_row(&actions, 1, 1, true).iter().map(ToString::to_string).collect::<Vec<_>>();
        let expected = "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1I0 1RESHARD 0UNSHARD 0I0 0RESHARD 1W0 0W0";
        assert_eq!(frozen.join(" "), expected);
    }

    #[test]
    fn later_ranks_may_look_further_ahead() {
        let rows = "0F0,2F0,4F0\n1F0,3F0,5F0\n";
        let of = |lookahead: &str| {
            let program = parse_program(rows).expect("a program");
            unshard(program, &config(3, lookahead)).map(|program| print_program(&program))
        };
        let first = |lookahead: &str| {
            let lowered = of(lookahead).unwrap_or_else(|error| panic!("{error}"));
            let begins = lowered.lines().map(|row| {
                row.matches("UNSHARD,").count()
                    - row.find('F').map_or(0, |at| row[at..].matches("UNSHARD,").count())
            });
            begins.collect::<Vec<_>>()
        };
        for (lookahead, expected) in [("full", [3, 3]), ("auto", [2, 3]), ("2", [2, 2]), ("1/3", [1, 3])] {
            assert_eq!(first(lookahead), expected, "{lookahead}");
        }
        let refused = |lookahead: &str| of(lookahead).expect_err(lookahead).to_string();
        assert_eq!(
            refused("1/4"),
            "rank 1 has a lookahead of 4 stages, and the window has 3; use a lookahead from 1 to 3"
        );
        assert_eq!(
            refused("1/1/1"),
            "3 lookaheads for 2 ranks; give one for each rank, or one number for all"
        );
    }

    #[test]
    fn texts_that_are_not_a_lookahead() {
        for text in ["", "0", "all", "1/", "-1", "1/x"] {
            let error = text.parse::<UnshardLookahead>().expect_err(text);
            assert!(error.to_string().starts_with(&format!("`{text}` is not a lookahead; use full, auto,")));
        }
        assert_eq!("1,2".parse(), "1/2".parse::<UnshardLookahead>());
    }
}
