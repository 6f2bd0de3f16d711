//! [`Difference`]: the first result of a step that was computed with different bits.

use std::fmt;

use pipewright_schedule::{Action, Microbatch, StageIndex};
use serde::{Deserialize, Serialize};

use crate::ids::WorldRank;

/// The kind of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Content {
    /// The parameters of a stage, which its replicas hold.
    Parameters,
    /// The outputs or the loss of a forward.
    Forward,
    /// The gradients of the inputs, computed by a `B`.
    Backward,
    /// The gradients of the inputs, computed by an `I`.
    InputBackward,
    /// The sum of the weight gradients of a stage over the microbatches of a replica.
    Weights,
}

/// The first result, in the order of the computation, that was computed with different bits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// The kind of the result.
    pub content: Content,
    /// The stage.
    pub stage: StageIndex,
    /// The microbatch, numbered within its replica as in the program; 0 if the content has no microbatch.
    pub microbatch: Microbatch,
    /// The ranks that have computed wrong bits.
    pub wrong: Vec<WorldRank>,
    /// If no rank is known to be wrong: the ranks that have computed the result. At least one of them is wrong.
    pub undecided: Vec<WorldRank>,
}

impl Difference {
    /// Returns the text of the action: `3F2`, or `3W` for the sum of weight gradients; `None` for parameters.
    pub fn action(&self) -> Option<String> {
        let Self { content, stage, microbatch, .. } = *self;
        let action = match content {
            Content::Parameters => return None,
            Content::Weights => return Some(format!("{stage}W")),
            Content::Forward => Action::Forward { stage, microbatch },
            Content::Backward => Action::Backward { stage, microbatch },
            Content::InputBackward => Action::InputBackward { stage, microbatch },
        };
        Some(action.to_string())
    }

    /// Returns what to do if the step cannot continue.
    pub(crate) fn advice(&self) -> &'static str {
        match (self.content, self.wrong.is_empty()) {
            (Content::Parameters, false) => {
                "start again from a checkpoint, without the host of the wrong rank"
            }
            (Content::Parameters, true) => {
                "start again from a checkpoint, without the hosts of these ranks, or test their memory before"
            }
            (_, false) => {
                "leave out the host of the wrong rank, and resume from the newest checkpoint; if a layer, the loss or \
                 a hook computes other bits each time, do not verify steps"
            }
            (_, true) => {
                "leave out or test the hosts of these ranks, and resume from the newest checkpoint; if a layer, the \
                 loss or a hook computes other bits each time, do not verify steps"
            }
        }
    }
}

impl fmt::Display for Difference {
    /// Writes a sentence about the ranks.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { content, stage, wrong, undecided, .. } = self;
        let what = match (content, self.action()) {
            (Content::Weights, _) => format!("the weight gradients of stage {stage}"),
            (_, None) => format!("the parameters of stage {stage}"),
            (_, Some(action)) => format!("action {action}"),
        };
        let verb = if *content == Content::Parameters { "has" } else { "has computed" };
        match (&wrong[..], &undecided[..]) {
            ([], [rank]) => write!(f, "rank {rank} {verb} {what} with unexpected bits"),
            ([], ranks) => {
                write!(
                    f,
                    "the {} have different bits in {what}, and which one is wrong is not known",
                    named(ranks)
                )
            }
            ([rank], _) => write!(f, "rank {rank} {verb} wrong bits in {what}"),
            (ranks, _) => {
                let verb = verb.replace("has", "have");
                write!(f, "the {} {verb} wrong bits in {what}", named(ranks))
            }
        }
    }
}

/// Returns the text of several ranks, such as `ranks 1 and 3`.
fn named(ranks: &[WorldRank]) -> String {
    let numbers: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    match numbers.split_last() {
        Some((last, first)) if !first.is_empty() => format!("ranks {} and {last}", first.join(", ")),
        _ => format!("rank {}", numbers.concat()),
    }
}
