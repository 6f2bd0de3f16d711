//! Where the neighbours of each stage are, found once a stage and not once an action.
//!
//! For the checks and simulations that ask for every action of a large program. What the messages between
//! neighbours are called is in [`crate::transfer`].

use crate::action::Action;
use crate::ids::{Rank, StageIndex};
use crate::placement::Placement;

/// The stage before or after another in the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Neighbour {
    /// There is none: the model begins or ends here.
    None,
    /// It is on the same rank.
    SameRank,
    /// It is on this other rank.
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

    /// The rank at the other end of the message that `action` sends, receives or waits for; `None` where it
    /// does not communicate, or nobody is there.
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

    /// The stage before `stage`; nobody for stages that do not exist.
    #[inline]
    pub(crate) fn before(&self, stage: StageIndex) -> Neighbour {
        self.sides.get(stage.index()).map_or(Neighbour::None, |sides| sides[0])
    }

    /// The stage after `stage`; nobody for stages that do not exist.
    #[inline]
    pub(crate) fn after(&self, stage: StageIndex) -> Neighbour {
        self.sides.get(stage.index()).map_or(Neighbour::None, |sides| sides[1])
    }
}
