//! A forward and a backward that run together, packed into seven bytes so that an [`crate::Action`] stays as
//! small as one that names a single stage.
//!
//! An overlap names two stages and two microbatches. As four numbers of full size they would double the size
//! of every action, also of the many that are not overlaps. So a stage has 12 bits and a microbatch 16, which
//! is more than any pipeline with overlaps needs.

use std::fmt;

use crate::ids::{Microbatch, StageIndex};

/// The largest stage of an overlap.
pub const MAX_OVERLAPPED_STAGE: u32 = (1 << STAGE_BITS) - 1;

/// The largest microbatch of an overlap.
pub const MAX_OVERLAPPED_MICROBATCH: u32 = (1 << MICROBATCH_BITS) - 1;

const STAGE_BITS: u32 = 12;
const MICROBATCH_BITS: u32 = 16;
const PART_BITS: u32 = STAGE_BITS + MICROBATCH_BITS;

/// The stage and microbatch that run forward, and the ones that run backward: `(0F7;7B3)OVERLAP_F_B`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Overlap([u8; 7]);

impl Overlap {
    /// Joins a forward and a backward; `None` if a stage is above [`MAX_OVERLAPPED_STAGE`] or a microbatch
    /// above
    /// [`MAX_OVERLAPPED_MICROBATCH`].
    pub fn new(forward: (StageIndex, Microbatch), backward: (StageIndex, Microbatch)) -> Option<Self> {
        let mut bits = 0;
        for (stage, microbatch) in [forward, backward] {
            if stage.get() > MAX_OVERLAPPED_STAGE || microbatch.get() > MAX_OVERLAPPED_MICROBATCH {
                return None;
            }
            bits =
                bits << PART_BITS | u64::from(stage.get()) << MICROBATCH_BITS | u64::from(microbatch.get());
        }
        Some(Self::from_bits(bits))
    }

    /// The stage and microbatch that run forward.
    pub fn forward(self) -> (StageIndex, Microbatch) {
        part(self.to_bits() >> PART_BITS)
    }

    /// The stage and microbatch that run backward.
    pub fn backward(self) -> (StageIndex, Microbatch) {
        part(self.to_bits())
    }

    /// The numbers of both parts, in the lowest 56 bits.
    pub(crate) fn to_bits(self) -> u64 {
        self.0.iter().fold(0, |bits, &byte| bits << 8 | u64::from(byte))
    }

    /// The overlap that [`Overlap::to_bits`] made this number from.
    pub(crate) fn from_bits(bits: u64) -> Self {
        let [_, bytes @ ..] = bits.to_be_bytes();
        Self(bytes)
    }
}

/// Unpacks the stage and the microbatch in the lowest bits.
fn part(bits: u64) -> (StageIndex, Microbatch) {
    let bits = bits as u32;
    let stage = StageIndex::new(bits >> MICROBATCH_BITS & MAX_OVERLAPPED_STAGE);
    (stage, Microbatch::new(bits & MAX_OVERLAPPED_MICROBATCH))
}

impl fmt::Debug for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (forward, backward) = (self.forward(), self.backward());
        f.debug_struct("Overlap").field("forward", &forward).field("backward", &backward).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LARGEST: [u32; 4] =
        [MAX_OVERLAPPED_STAGE, MAX_OVERLAPPED_MICROBATCH, MAX_OVERLAPPED_STAGE, MAX_OVERLAPPED_MICROBATCH];

    fn joined([a, b, c, d]: [u32; 4]) -> Option<Overlap> {
        Overlap::new((StageIndex::new(a), b.into()), (StageIndex::new(c), d.into()))
    }

    proptest! {
        #[test]
        fn numbers_come_back(any: [u32; 4]) {
            let numbers = [0, 1, 2, 3].map(|index| any[index] & LARGEST[index]);
            let overlap = joined(numbers).expect("in range");
            let ((a, b), (c, d)) = (overlap.forward(), overlap.backward());
            prop_assert_eq!([a.get(), b.get(), c.get(), d.get()], numbers);
        }

        #[test]
        fn order_is_that_of_the_numbers(a in prop::array::uniform4(0..3u32), b in prop::array::uniform4(0..3u32)) {
            prop_assert_eq!(joined(a).cmp(&joined(b)), a.cmp(&b));
        }
    }

    #[test]
    fn numbers_have_a_limit() {
        assert!(joined(LARGEST).is_some());
        for index in 0..4 {
            let mut numbers = [0; 4];
            numbers[index] = LARGEST[index] + 1;
            assert_eq!(joined(numbers), None);
        }
    }
}
