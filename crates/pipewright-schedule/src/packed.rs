//! An action as one number, for messages between processes. Its text form is in [`crate::notation`].
//!
//! ```text
//! bits 0 to 7            bits 8 to 31    bits 32 to 63
//! kind                   stage           microbatch            an action of one stage
//! kind of an overlap     stages and microbatches of its parts  see `overlap.rs`
//! ```

use crate::action::{Action, ActionKind};
use crate::ids::{Microbatch, StageIndex};
use crate::overlap::Overlap;

const KIND_BITS: u32 = 8;
const STAGE_BITS: u32 = 24;

impl Action {
    /// The action as a number that [`Action::from_bits`] reads.
    ///
    /// ```
    /// use pipewright_schedule::Action;
    ///
    /// let action: Action = "2RECV_B7".parse().expect("an action");
    /// assert_eq!(Action::from_bits(action.to_bits()), Some(action));
    /// ```
    pub fn to_bits(self) -> u64 {
        let rest = match self {
            Self::Overlap(overlap) => overlap.to_bits(),
            single => {
                let microbatch = single.microbatch().map_or(0, Microbatch::get);
                u64::from(microbatch) << STAGE_BITS | u64::from(single.stage().get())
            }
        };
        rest << KIND_BITS | self.kind() as u64
    }

    /// The action that [`Action::to_bits`] made this number from; `None` if it is not the number of an
    /// action.
    pub fn from_bits(bits: u64) -> Option<Self> {
        let kind = bits & ((1 << KIND_BITS) - 1);
        let kind = ActionKind::ALL.into_iter().find(|&known| known as u64 == kind)?;
        let rest = bits >> KIND_BITS;
        if kind == ActionKind::Overlap {
            return Some(Self::Overlap(Overlap::from_bits(rest)));
        }
        let stage = StageIndex::new((rest & u64::from(StageIndex::LARGEST)) as u32);
        let microbatch = Microbatch::new((rest >> STAGE_BITS) as u32);
        Self::of_microbatch(kind, stage, microbatch)
            .or_else(|| Self::of_stage(kind, stage).filter(|_| microbatch.get() == 0))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_action_comes_back(kind in 0..ActionKind::ALL.len(), stage in 0..=StageIndex::LARGEST, on: u32) {
            let (kind, stage, microbatch) = (ActionKind::ALL[kind], StageIndex::new(stage), Microbatch::new(on));
            let small = (StageIndex::new(stage.get() & 0xfff), Microbatch::new(on & 0xffff));
            let overlap = Overlap::new(small, (StageIndex::new(3), Microbatch::new(5))).map(Action::Overlap);
            let action = Action::of_microbatch(kind, stage, microbatch).or(Action::of_stage(kind, stage)).or(overlap);
            let action = action.expect("every kind has an action");
            prop_assert_eq!(action.kind(), kind);
            prop_assert_eq!(Action::from_bits(action.to_bits()), Some(action));
        }

        #[test]
        fn a_number_is_at_most_one_action(bits: u64) {
            if let Some(action) = Action::from_bits(bits) {
                prop_assert_eq!(action.to_bits(), bits);
            }
        }
    }

    #[test]
    fn other_numbers_are_refused() {
        assert_eq!(Action::from_bits(ActionKind::ALL.len() as u64), None);
        let unshard = "3UNSHARD".parse::<Action>().expect("an action").to_bits();
        assert_eq!(Action::from_bits(unshard | 1 << (KIND_BITS + STAGE_BITS)), None, "it has no microbatch");
    }
}
