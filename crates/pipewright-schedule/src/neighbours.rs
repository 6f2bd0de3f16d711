//! The ranks of each stage's neighbours, looked up once for each stage instead of once for each action.
//!
//! Checks and simulations use this table for every action of a large program. [`crate::transfer`] names the
//! messages between neighbours.

use crate::action::{Action, ActionKind};
use crate::ids::{Rank, StageIndex};
use crate::placement::Placement;

/// The location of the stage before or after another in the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Neighbour {
    /// There is no such stage: the model begins or ends here.
    None,
    /// The stage is on the same rank.
    SameRank,
    /// The stage is on this other rank.
    OtherRank(Rank),
}

/// The neighbours of every stage.
pub(crate) struct Neighbours {
    sides: Vec<[Neighbour; 2]>,
}

impl Neighbours {
    pub(crate) fn of(placement: &Placement) -> Self {
        let neighbour = |stage: StageIndex, other: Option<StageIndex>| match other {
            None => Neighbour::None,
            Some(other) if placement.rank_of(other) == placement.rank_of(stage) => Neighbour::SameRank,
            Some(other) => Neighbour::OtherRank(placement.rank_of(other)),
        };
        let sides =
            |stage| [placement.previous(stage), placement.next(stage)].map(|other| neighbour(stage, other));
        Self { sides: placement.all_stages().map(sides).collect() }
    }

    /// Returns the other rank of the message that `action` sends, receives or waits for; `None` if it does
    /// not communicate, or if there is no neighbour on another rank.
    #[inline]
    pub(crate) fn peer(&self, action: Action) -> Option<Rank> {
        let neighbour = match action {
            Action::SendForward { stage, .. }
            | Action::WaitSendForward { stage, .. }
            | Action::RecvBackward { stage, .. } => self.after(stage),
            Action::SendBackward { stage, .. }
            | Action::WaitSendBackward { stage, .. }
            | Action::RecvForward { stage, .. } => self.before(stage),
            _ => return None,
        };
        if let Neighbour::OtherRank(rank) = neighbour { Some(rank) } else { None }
    }

    /// Returns the receive that brings a tensor to `part`, a part of a computation; `None` if it needs none
    /// from another rank.
    #[inline]
    pub(crate) fn receive_for(&self, part: Action) -> Option<Action> {
        let (kind, stage) = (part.kind(), part.stage());
        let is_gradient = kind.carries_gradient().filter(|_| kind.is_compute())?;
        match if is_gradient { self.after(stage) } else { self.before(stage) } {
            Neighbour::OtherRank(_) => part.with_kind(ActionKind::receive_of(is_gradient)),
            Neighbour::None | Neighbour::SameRank => None,
        }
    }

    /// Returns the location of the stage before `stage`.
    #[inline]
    pub(crate) fn before(&self, stage: StageIndex) -> Neighbour {
        self.sides.get(stage.index()).map_or(Neighbour::None, |sides| sides[0])
    }

    /// Returns the location of the stage after `stage`.
    #[inline]
    pub(crate) fn after(&self, stage: StageIndex) -> Neighbour {
        self.sides.get(stage.index()).map_or(Neighbour::None, |sides| sides[1])
    }
}
