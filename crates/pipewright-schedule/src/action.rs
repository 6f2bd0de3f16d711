//! The actions of schedules and programs: one cell of a rank's row.
//!
//! Actions are small `Copy` values, because a large program holds a hundred million of them. Their text form
//! is in
//! [`crate::notation`]. The runtime decides what an action does to tensors.

use crate::ids::{Microbatch, StageIndex};
use crate::overlap::Overlap;

/// An action of a rank. The documentation of each variant begins with its text form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// `2F0`: run the stage on the microbatch.
    Forward {
        /// The stage that runs.
        stage: StageIndex,
        /// The microbatch it runs on.
        microbatch: Microbatch,
    },
    /// `2I0`: compute the gradient of the stage's inputs, and defer the gradient of its weights.
    InputBackward {
        /// The stage that runs.
        stage: StageIndex,
        /// The microbatch it runs on.
        microbatch: Microbatch,
    },
    /// `2W0`: compute the gradient of the stage's weights that `2I0` deferred.
    WeightBackward {
        /// The stage that runs.
        stage: StageIndex,
        /// The microbatch it runs on.
        microbatch: Microbatch,
    },
    /// `2B0`: compute the gradients of inputs and weights together.
    Backward {
        /// The stage that runs.
        stage: StageIndex,
        /// The microbatch it runs on.
        microbatch: Microbatch,
    },
    /// `2UNSHARD`: gather the stage's sharded parameters.
    Unshard {
        /// The stage whose parameters are gathered.
        stage: StageIndex,
    },
    /// `2RESHARD`: drop the gathered parameters again.
    Reshard {
        /// The stage whose parameters are dropped.
        stage: StageIndex,
    },
    /// `2REDUCE_GRAD`: start to reduce the stage's gradients over its data-parallel replicas.
    ReduceGrad {
        /// The stage whose gradients are reduced.
        stage: StageIndex,
    },
    /// `2WAIT_REDUCE_GRAD`: wait until that reduction is complete.
    WaitReduceGrad {
        /// The stage whose gradients are waited for.
        stage: StageIndex,
    },
    /// `2SEND_F0`: send the output of `2F0` to stage 3.
    SendForward {
        /// The stage whose output is sent.
        stage: StageIndex,
        /// The microbatch it belongs to.
        microbatch: Microbatch,
    },
    /// `2RECV_F0`: receive the input of `2F0` from stage 1.
    RecvForward {
        /// The stage whose input is received.
        stage: StageIndex,
        /// The microbatch it belongs to.
        microbatch: Microbatch,
    },
    /// `2SEND_B0`: send the gradient of the inputs of `2F0` to stage 1.
    SendBackward {
        /// The stage whose input gradient is sent.
        stage: StageIndex,
        /// The microbatch it belongs to.
        microbatch: Microbatch,
    },
    /// `2RECV_B0`: receive the gradient of the output of `2F0` from stage 3.
    RecvBackward {
        /// The stage whose output gradient is received.
        stage: StageIndex,
        /// The microbatch it belongs to.
        microbatch: Microbatch,
    },
    /// `2WAIT_SEND_F0`: wait until `2SEND_F0` is complete.
    WaitSendForward {
        /// The stage whose output was sent.
        stage: StageIndex,
        /// The microbatch it belongs to.
        microbatch: Microbatch,
    },
    /// `2WAIT_SEND_B0`: wait until `2SEND_B0` is complete.
    WaitSendBackward {
        /// The stage whose input gradient was sent.
        stage: StageIndex,
        /// The microbatch it belongs to.
        microbatch: Microbatch,
    },
    /// `(0F7;7B3)OVERLAP_F_B`: run one stage's forward and another's backward together.
    Overlap(Overlap),
    /// `2OFFLOAD0`: start to move the tensors that `2F0` keeps for its backward out of memory.
    Offload {
        /// The stage whose tensors are moved.
        stage: StageIndex,
        /// The microbatch they belong to.
        microbatch: Microbatch,
    },
    /// `2RELOAD0`: start to bring the tensors back that `2OFFLOAD0` has moved away.
    Reload {
        /// The stage whose tensors come back.
        stage: StageIndex,
        /// The microbatch they belong to.
        microbatch: Microbatch,
    },
}

/// The kind of an [`Action`], without its stage and microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "each kind is documented at the variant of `Action` with its name")]
pub enum ActionKind {
    Forward,
    InputBackward,
    WeightBackward,
    Backward,
    Unshard,
    Reshard,
    ReduceGrad,
    WaitReduceGrad,
    SendForward,
    RecvForward,
    SendBackward,
    RecvBackward,
    WaitSendForward,
    WaitSendBackward,
    Overlap,
    Offload,
    Reload,
}

impl Action {
    /// Returns the kind of the action.
    pub fn kind(self) -> ActionKind {
        match self {
            Self::Forward { .. } => ActionKind::Forward,
            Self::InputBackward { .. } => ActionKind::InputBackward,
            Self::WeightBackward { .. } => ActionKind::WeightBackward,
            Self::Backward { .. } => ActionKind::Backward,
            Self::Unshard { .. } => ActionKind::Unshard,
            Self::Reshard { .. } => ActionKind::Reshard,
            Self::ReduceGrad { .. } => ActionKind::ReduceGrad,
            Self::WaitReduceGrad { .. } => ActionKind::WaitReduceGrad,
            Self::SendForward { .. } => ActionKind::SendForward,
            Self::RecvForward { .. } => ActionKind::RecvForward,
            Self::SendBackward { .. } => ActionKind::SendBackward,
            Self::RecvBackward { .. } => ActionKind::RecvBackward,
            Self::WaitSendForward { .. } => ActionKind::WaitSendForward,
            Self::WaitSendBackward { .. } => ActionKind::WaitSendBackward,
            Self::Overlap(_) => ActionKind::Overlap,
            Self::Offload { .. } => ActionKind::Offload,
            Self::Reload { .. } => ActionKind::Reload,
        }
    }

    /// Returns the stage of the action; for an overlap, the stage of its forward.
    pub fn stage(self) -> StageIndex {
        match self {
            Self::Unshard { stage }
            | Self::Reshard { stage }
            | Self::ReduceGrad { stage }
            | Self::WaitReduceGrad { stage }
            | Self::Forward { stage, .. }
            | Self::InputBackward { stage, .. }
            | Self::WeightBackward { stage, .. }
            | Self::Backward { stage, .. }
            | Self::SendForward { stage, .. }
            | Self::RecvForward { stage, .. }
            | Self::SendBackward { stage, .. }
            | Self::RecvBackward { stage, .. }
            | Self::WaitSendForward { stage, .. }
            | Self::WaitSendBackward { stage, .. }
            | Self::Offload { stage, .. }
            | Self::Reload { stage, .. } => stage,
            Self::Overlap(overlap) => overlap.forward().0,
        }
    }

    /// Returns the microbatch of the action; for an overlap, the microbatch of its forward; `None` for
    /// actions that concern a whole stage.
    pub fn microbatch(self) -> Option<Microbatch> {
        match self {
            Self::Unshard { .. }
            | Self::Reshard { .. }
            | Self::ReduceGrad { .. }
            | Self::WaitReduceGrad { .. } => None,
            Self::Forward { microbatch, .. }
            | Self::InputBackward { microbatch, .. }
            | Self::WeightBackward { microbatch, .. }
            | Self::Backward { microbatch, .. }
            | Self::SendForward { microbatch, .. }
            | Self::RecvForward { microbatch, .. }
            | Self::SendBackward { microbatch, .. }
            | Self::RecvBackward { microbatch, .. }
            | Self::WaitSendForward { microbatch, .. }
            | Self::WaitSendBackward { microbatch, .. }
            | Self::Offload { microbatch, .. }
            | Self::Reload { microbatch, .. } => Some(microbatch),
            Self::Overlap(overlap) => Some(overlap.forward().1),
        }
    }

    /// Returns whether the action runs a stage forward or backward.
    pub fn is_compute(self) -> bool {
        self.kind().is_compute()
    }

    /// Returns whether the action moves a tensor between two stages, or waits for such a move.
    pub fn is_communication(self) -> bool {
        self.kind().is_communication()
    }

    /// Returns the wait for a send; `None` for other actions.
    #[inline]
    pub(crate) fn wait_of_send(self) -> Option<Self> {
        self.with_kind(self.kind().wait_of_send()?)
    }

    /// Returns the forward and the backward of an overlap, or the action itself if it is not an overlap.
    #[inline]
    pub fn parts(self) -> ActionParts {
        match self {
            Self::Overlap(overlap) => {
                let ((stage, microbatch), (of, on)) = (overlap.forward(), overlap.backward());
                let backward = Self::Backward { stage: of, microbatch: on };
                ActionParts { next: Some(Self::Forward { stage, microbatch }), last: Some(backward) }
            }
            single => ActionParts { next: Some(single), last: None },
        }
    }

    /// Returns the action of another kind for the same stage and microbatch; `None` if actions of this kind have no
    /// microbatch.
    #[inline]
    pub(crate) fn with_kind(self, kind: ActionKind) -> Option<Self> {
        Self::of_microbatch(kind, self.stage(), self.microbatch()?)
    }

    /// Makes an action of a kind that has a stage and a microbatch; `None` for other kinds.
    #[inline]
    pub(crate) fn of_microbatch(kind: ActionKind, stage: StageIndex, microbatch: Microbatch) -> Option<Self> {
        Some(match kind {
            ActionKind::Forward => Self::Forward { stage, microbatch },
            ActionKind::InputBackward => Self::InputBackward { stage, microbatch },
            ActionKind::WeightBackward => Self::WeightBackward { stage, microbatch },
            ActionKind::Backward => Self::Backward { stage, microbatch },
            ActionKind::SendForward => Self::SendForward { stage, microbatch },
            ActionKind::RecvForward => Self::RecvForward { stage, microbatch },
            ActionKind::SendBackward => Self::SendBackward { stage, microbatch },
            ActionKind::RecvBackward => Self::RecvBackward { stage, microbatch },
            ActionKind::WaitSendForward => Self::WaitSendForward { stage, microbatch },
            ActionKind::WaitSendBackward => Self::WaitSendBackward { stage, microbatch },
            ActionKind::Offload => Self::Offload { stage, microbatch },
            ActionKind::Reload => Self::Reload { stage, microbatch },
            _ => return None,
        })
    }

    /// Makes an action of a kind that concerns a whole stage; `None` for other kinds.
    pub(crate) fn of_stage(kind: ActionKind, stage: StageIndex) -> Option<Self> {
        Some(match kind {
            ActionKind::Unshard => Self::Unshard { stage },
            ActionKind::Reshard => Self::Reshard { stage },
            ActionKind::ReduceGrad => Self::ReduceGrad { stage },
            ActionKind::WaitReduceGrad => Self::WaitReduceGrad { stage },
            _ => return None,
        })
    }
}

/// An iterator over the one or two parts of an action; see [`Action::parts`].
#[derive(Debug, Clone)]
pub struct ActionParts {
    next: Option<Action>,
    last: Option<Action>,
}

impl Iterator for ActionParts {
    type Item = Action;

    #[inline]
    fn next(&mut self) -> Option<Action> {
        std::mem::replace(&mut self.next, self.last.take())
    }
}

impl ActionKind {
    /// All kinds, in the order of the enum.
    pub const ALL: [Self; 17] = [
        Self::Forward,
        Self::InputBackward,
        Self::WeightBackward,
        Self::Backward,
        Self::Unshard,
        Self::Reshard,
        Self::ReduceGrad,
        Self::WaitReduceGrad,
        Self::SendForward,
        Self::RecvForward,
        Self::SendBackward,
        Self::RecvBackward,
        Self::WaitSendForward,
        Self::WaitSendBackward,
        Self::Overlap,
        Self::Offload,
        Self::Reload,
    ];

    /// Returns whether actions of this kind run a stage forward or backward.
    pub fn is_compute(self) -> bool {
        matches!(
            self,
            Self::Forward | Self::InputBackward | Self::WeightBackward | Self::Backward | Self::Overlap
        )
    }

    /// Returns whether actions of this kind move a tensor between two stages, or wait for such a move.
    pub fn is_communication(self) -> bool {
        matches!(
            self,
            Self::SendForward
                | Self::RecvForward
                | Self::SendBackward
                | Self::RecvBackward
                | Self::WaitSendForward
                | Self::WaitSendBackward
        )
    }

    /// Returns whether it adds to the gradients of a stage's weights.
    #[inline]
    pub(crate) fn adds_weight_gradients(self) -> bool {
        matches!(self, Self::Backward | Self::WeightBackward)
    }

    /// Returns whether the tensor that a computation makes, or that a message carries, is a gradient; `None` if there
    /// is no such tensor.
    #[inline]
    pub(crate) fn carries_gradient(self) -> Option<bool> {
        match self {
            Self::Forward | Self::SendForward | Self::RecvForward | Self::WaitSendForward => Some(false),
            Self::Backward | Self::InputBackward => Some(true),
            Self::SendBackward | Self::RecvBackward | Self::WaitSendBackward => Some(true),
            _ => None,
        }
    }

    /// Returns the kind of a send, of a gradient or of an output.
    #[inline]
    pub(crate) fn send_of(is_gradient: bool) -> Self {
        if is_gradient { Self::SendBackward } else { Self::SendForward }
    }

    /// Returns the kind of a receive, of a gradient or of an input.
    #[inline]
    pub(crate) fn receive_of(is_gradient: bool) -> Self {
        if is_gradient { Self::RecvBackward } else { Self::RecvForward }
    }

    /// Returns whether it sends a tensor to another stage.
    #[inline]
    pub fn is_send(self) -> bool {
        matches!(self, Self::SendForward | Self::SendBackward)
    }

    /// Returns the kind of the wait for a send; `None` for other kinds.
    #[inline]
    pub(crate) fn wait_of_send(self) -> Option<Self> {
        match self {
            Self::SendForward => Some(Self::WaitSendForward),
            Self::SendBackward => Some(Self::WaitSendBackward),
            _ => None,
        }
    }

    /// Returns whether it receives a tensor from another stage.
    #[inline]
    pub fn is_receive(self) -> bool {
        matches!(self, Self::RecvForward | Self::RecvBackward)
    }

    /// Returns whether it waits until a tensor has been sent.
    #[inline]
    pub(crate) fn is_wait_for_send(self) -> bool {
        matches!(self, Self::WaitSendForward | Self::WaitSendBackward)
    }

    /// Returns whether actions of this kind move kept tensors out of memory or back into it.
    pub fn is_offload(self) -> bool {
        matches!(self, Self::Offload | Self::Reload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_action_stays_small() {
        assert_eq!(size_of::<Action>(), 8, "a hundred million of them must fit a laptop");
        assert_eq!(size_of::<Option<Action>>(), size_of::<Action>());
    }

    #[test]
    fn an_overlap_has_two_parts() {
        let action: Action = "(0F7;7B3)OVERLAP_F_B".parse().expect("an overlap");
        let parts: Vec<String> = action.parts().map(|part| part.to_string()).collect();
        assert_eq!(parts, ["0F7", "7B3"]);
        assert!(action.is_compute() && !action.is_communication());
    }

    #[test]
    fn kinds_fall_into_four_families() {
        let count =
            |family: fn(ActionKind) -> bool| ActionKind::ALL.into_iter().filter(|&kind| family(kind)).count();
        assert_eq!(count(ActionKind::is_compute), 5);
        assert_eq!(count(ActionKind::is_communication), 6);
        assert_eq!(count(ActionKind::is_offload), 2);
    }
}
