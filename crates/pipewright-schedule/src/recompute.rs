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
//! A stage may recompute less than everything ([`StageRecompute`]): its first layers only, so that the others
//! keep their activations, or only the microbatches above a number in flight. Less is computed again, and
//! more is kept.
//!
//! Some results inside a layer take much memory and little time. A stage may compute these parts of its layers
//! again ([`LayerParts`]), and keep the rest. This is not a second forward: the backward of a layer computes a
//! part of it when it needs the result.
//!
//! ```
//! use pipewright_schedule::{Recompute, StageIndex};
//! let recompute: Recompute = "0,2:layers=3:keep=1".parse()?;
//! assert!(recompute.applies_to(StageIndex::new(2)) && !recompute.applies_to(StageIndex::new(1)));
//! assert_eq!(recompute.of(StageIndex::new(2)).map(|stage| stage.keep), Some(1));
//! let parts: Recompute = "0:parts=norms+feed-forward".parse()?;
//! assert!(!parts.applies_to(StageIndex::new(0)) && !parts.parts_of(StageIndex::new(0)).is_empty());
//! # Ok::<(), pipewright_schedule::recompute::RecomputeError>(())
//! ```

mod parts;
mod choice;
mod notation;
mod in_flight;

use crate::action::Action;

pub use choice::{Recompute, StageRecompute};
pub use in_flight::KeptForwards;
pub use notation::{GivenChoice, RecomputeError};
pub use parts::{LayerPart, LayerParts};

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
    fn only_messages_may_stand_between() {
        let program = parse_program("1RECV_F0,1F0,1RECV_F1,1I0,1SEND_B0,1W0,1F1,1F2,1B1,1B2\n0F0\n");
        let program = program.expect("a program");
        let row = program.row(crate::ids::Rank::new(0));
        let follows: Vec<usize> =
            (0..row.len()).filter(|&position| backward_follows(row, position)).collect();
        assert_eq!(follows, [1]);
    }
}
