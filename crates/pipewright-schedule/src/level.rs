//! The three levels to which a program can be lowered, as the command line and the validator name them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::action::{Action, ActionKind};
use crate::ids::StageIndex;
use crate::schedule::Program;
use crate::trained::StageBackward;

/// The level to which a program is lowered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Only computation; the transfers between ranks are implied.
    Compute,
    /// Computation, and every send and receive between ranks.
    Comms,
    /// Computation and messages as in [`Level::Comms`], and the gathering of parameters and the reduction of
    /// gradients for sharded data parallelism.
    Full,
}

/// A text that is not the name of a [`Level`].
#[derive(Clone, PartialEq, Eq, Error)]
#[error("unknown level `{name}`; use `compute`, `comms` or `full`")]
pub struct UnknownLevel {
    /// The text.
    pub name: String,
}

crate::error_text::message_as_debug!(UnknownLevel);

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Compute => "compute",
            Self::Comms => "comms",
            Self::Full => "full",
        })
    }
}

impl Program {
    /// Returns the level of the program by the actions that it has: [`Level::Comms`] if any action sends,
    /// receives or waits for a send, otherwise [`Level::Compute`]; [`Level::Full`] if also every stage
    /// gathers its parameters and reduces its gradients. A program of one rank needs no messages for it. The
    /// program may be unsound at this level.
    pub fn level(&self) -> Level {
        let communicates = self.communicates();
        if (communicates || self.ranks() == 1) && self.is_sharded() {
            Level::Full
        } else if communicates {
            Level::Comms
        } else {
            Level::Compute
        }
    }

    /// Returns whether any action sends, receives or waits for a send.
    pub fn communicates(&self) -> bool {
        self.rows().iter().flatten().any(|action| action.is_communication())
    }

    /// Returns whether any action gathers or drops parameters.
    pub fn gathers(&self) -> bool {
        self.has(&[ActionKind::Unshard, ActionKind::Reshard])
    }

    /// Returns whether any action reduces gradients or waits for a reduction.
    pub fn reduces(&self) -> bool {
        self.has(&[ActionKind::ReduceGrad, ActionKind::WaitReduceGrad])
    }

    /// Returns whether any action moves kept tensors out of memory or back into it.
    pub fn offloads(&self) -> bool {
        self.has(&[ActionKind::Offload, ActionKind::Reload])
    }

    fn has(&self, kinds: &[ActionKind]) -> bool {
        self.rows().iter().flatten().any(|action| kinds.contains(&action.kind()))
    }

    /// Returns whether every stage gathers its parameters and, if it is trained, reduces its gradients.
    fn is_sharded(&self) -> bool {
        let stages = self.placement().stages() as usize;
        let (mut gathered, mut reduced, mut awaited) =
            (vec![false; stages], vec![false; stages], vec![false; stages]);
        let mut has_backward = false;
        for part in self.rows().iter().flatten().flat_map(|action| action.parts()) {
            has_backward |= part.is_compute() && part.kind() != ActionKind::Forward;
            let list = match part {
                Action::Unshard { .. } => &mut gathered,
                Action::ReduceGrad { .. } => &mut reduced,
                Action::WaitReduceGrad { .. } => &mut awaited,
                _ => continue,
            };
            if let Some(entry) = list.get_mut(part.stage().index()) {
                *entry = true;
            }
        }
        let is_reduced = |stage: StageIndex| {
            let is_trained = self.trained().backward_of(stage) == StageBackward::Whole;
            !is_trained || reduced[stage.index()] && awaited[stage.index()]
        };
        let all_reduced = || self.placement().all_stages().all(is_reduced);
        gathered.into_iter().all(|entry| entry) && (!has_backward || all_reduced())
    }
}

impl FromStr for Level {
    type Err = UnknownLevel;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Compute, Self::Comms, Self::Full]
            .into_iter()
            .find(|level| level.to_string() == text)
            .ok_or_else(|| UnknownLevel { name: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::parse_program;

    fn check(rows: &str, level: Level) {
        assert_eq!(parse_program(rows).expect("rows").level(), level, "{rows}");
    }

    #[test]
    fn a_program_has_the_level_of_its_actions() {
        check("0F0,0B0\n1F0,1B0\n", Level::Compute);
        check("0UNSHARD,0F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n1F0,1B0\n", Level::Compute);
        check("0F0,0SEND_F0\n1RECV_F0,1F0\n", Level::Comms);
        check("0UNSHARD,0F0,0SEND_F0\n1RECV_F0,1F0\n", Level::Comms);
        check("0UNSHARD,0F0,0SEND_F0\n1UNSHARD,1RECV_F0,1F0\n", Level::Full);
        check("0UNSHARD,0F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n", Level::Full);
        check("0UNSHARD,0F0,0B0,0REDUCE_GRAD\n", Level::Compute);
    }

    #[test]
    fn names_round_trip() {
        for level in [Level::Compute, Level::Comms, Level::Full] {
            assert_eq!(level.to_string().parse(), Ok(level));
        }
        let message = "unknown level `half`; use `compute`, `comms` or `full`";
        assert_eq!("half".parse::<Level>().map_err(|error| error.to_string()), Err(message.to_owned()));
    }
}
