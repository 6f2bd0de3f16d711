//! Recomputation: a forward keeps its inputs only, and the rank computes it again before its backward.
//!
//! The second forward fills the bubble before the backward: it runs while the gradients are on their way,
//! when the rank has nothing else to do. Block by block, it runs with the backward.
//!
//! This saves the activations between the forward and the backward of a microbatch, for the time of another
//! forward. A forward that its own backward follows at once, with no other computation of the rank in
//! between, is not recomputed: it would cost time and save nothing. So the last stage of 1F1B is never
//! recomputed.
//!
//! ```
//! use pipewright_schedule::{Recompute, StageIndex};
//! let recompute: Recompute = "0,2".parse()?;
//! assert!(recompute.applies_to(StageIndex::new(2)) && !recompute.applies_to(StageIndex::new(1)));
//! # Ok::<(), pipewright_schedule::recompute::RecomputeError>(())
//! ```

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};
use thiserror::Error;

use crate::action::Action;
use crate::ids::StageIndex;

/// The stages that compute their forward again.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Recompute {
    /// No stage.
    #[default]
    None,
    /// Every stage, each as a whole.
    Stage,
    /// Every stage, block by block: a stage keeps the inputs of each of its blocks, and its backward holds
    /// the activations of one block at a time.
    Block,
    /// These stages, each as a whole.
    Stages(BTreeSet<StageIndex>),
}

/// A text that does not say what is recomputed.
#[derive(Clone, PartialEq, Eq, Error)]
#[error(
    "`{text}` is not a choice of what is recomputed; write `none`, `stage`, `block`, or stages such as `0,2`"
)]
pub struct RecomputeError {
    /// The text.
    pub text: String,
}

crate::error_text::message_as_debug!(RecomputeError);

impl Recompute {
    /// Whether `stage` computes its forward again.
    pub fn applies_to(&self, stage: StageIndex) -> bool {
        match self {
            Self::None => false,
            Self::Stage | Self::Block => true,
            Self::Stages(stages) => stages.contains(&stage),
        }
    }

    /// Whether stages are recomputed block by block.
    pub fn is_by_block(&self) -> bool {
        *self == Self::Block
    }

    /// Returns the largest stage of a list, which must exist.
    pub fn largest_stage(&self) -> Option<StageIndex> {
        match self {
            Self::Stages(stages) => stages.last().copied(),
            Self::None | Self::Stage | Self::Block => None,
        }
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Stage => f.write_str("stage"),
            Self::Block => f.write_str("block"),
            Self::Stages(stages) => {
                let stages: Vec<String> = stages.iter().map(ToString::to_string).collect();
                f.write_str(&stages.join(","))
            }
        }
    }
}

impl Serialize for Recompute {
    /// A word, or a list of numbers.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Stages(stages) => serializer.collect_seq(stages),
            word => serializer.collect_str(word),
        }
    }
}

impl FromStr for Recompute {
    type Err = RecomputeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || RecomputeError { text: text.chars().take(40).collect() };
        match text.to_ascii_lowercase().as_str() {
            "none" => Ok(Self::None),
            "stage" => Ok(Self::Stage),
            "block" => Ok(Self::Block),
            list => {
                let stage = |part: &str| StageIndex::try_from(part.trim().parse::<u32>().ok()?).ok();
                list.split(',').map(stage).collect::<Option<_>>().map(Self::Stages).ok_or_else(wrong)
            }
        }
    }
}

/// Returns whether the next computation of the rank after the forward at `position` of its row is the
/// backward of the same stage and microbatch.
pub fn backward_follows(row: &[Action], position: usize) -> bool {
    let Some(&Action::Forward { stage, microbatch }) = row.get(position) else { return false };
    let next = row[position + 1..].iter().find(|action| action.is_compute());
    next.is_some_and(|&next| {
        [Action::Backward { stage, microbatch }, Action::InputBackward { stage, microbatch }].contains(&next)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::parse_program;

    #[test]
    fn a_choice_is_read_and_written() {
        for text in ["none", "stage", "block", "0,2,17"] {
            assert_eq!(text.parse::<Recompute>().map(|recompute| recompute.to_string()).as_deref(), Ok(text));
        }
        for text in ["", "all", "1,", "-1", "99999999"] {
            assert!(text.parse::<Recompute>().is_err(), "{text}");
        }
    }

    #[test]
    fn only_messages_may_stand_between() {
        let program = parse_program("1RECV_F0,1F0,1RECV_F1,1I0,1SEND_B0,1W0,1F1,1F2,1B1,1B2\n0F0\n");
        let program = program.expect("a program");
        let row = program.row(crate::ids::Rank::new(0));
        let follows: Vec<usize> =
            (0..row.len()).filter(|&position| backward_follows(row, position)).collect();
        assert_eq!(follows, [1]);
    }
}
