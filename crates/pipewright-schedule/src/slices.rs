//! Slices of microbatches: a microbatch is cut along its sequence, and its slices pass the pipeline one after
//! the other.
//!
//! If microbatches are cut into `k` slices, actions number slices: slice `s` of microbatch `m` has the number
//! `m k + s`. With `k = 4`, `0F5` is the forward of slice 1 of microbatch 1. With one slice, the numbers of
//! slices and of microbatches are equal. Tables and traces have the numbers, and pictures the names
//! ([`Slices::name`]).
//!
//! A token of a causal model attends to itself and to the tokens before it. So on each stage the forward of a
//! slice needs the keys and values of the slices before it, and its backward needs the gradients of its keys
//! and values, which the slices after it compute. Forwards therefore run in ascending order of the slices,
//! and backwards in descending order.
//!
//! ```
//! use pipewright_schedule::ids::Slice;
//! use pipewright_schedule::{Microbatch, Slices};
//! let slices = Slices::new(4).expect("4 is not 0");
//! assert_eq!(slices.place(Microbatch::new(5)), (Microbatch::new(1), Slice::new(1)));
//! assert_eq!(slices.before(Microbatch::new(4)), None);
//! ```

use std::fmt;
use std::num::NonZeroU32;

use crate::ids::{Microbatch, Slice};

/// The number of slices into which each microbatch is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slices(NonZeroU32);

impl Slices {
    /// Whole microbatches.
    pub const ONE: Self = Self(NonZeroU32::MIN);

    /// Wraps a number of slices; `None` for 0.
    pub const fn new(count: u32) -> Option<Self> {
        match NonZeroU32::new(count) {
            Some(count) => Some(Self(count)),
            None => None,
        }
    }

    /// Returns the number.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0.get()
    }

    /// Returns whether microbatches are not cut.
    #[inline]
    pub const fn is_one(self) -> bool {
        self.get() == 1
    }

    /// Returns the microbatch and the slice with this number.
    pub const fn place(self, number: Microbatch) -> (Microbatch, Slice) {
        (Microbatch::new(number.get() / self.get()), Slice::new(number.get() % self.get()))
    }

    /// Returns the number of the slice before this one in the same microbatch; `None` for the first slice.
    pub fn before(self, number: Microbatch) -> Option<Microbatch> {
        let (_, slice) = self.place(number);
        (slice.get() > 0).then(|| Microbatch::new(number.get() - 1))
    }

    /// Returns the number of the slice after this one in the same microbatch; `None` for the last slice.
    pub fn after(self, number: Microbatch) -> Option<Microbatch> {
        let (_, slice) = self.place(number);
        number.get().checked_add(1).filter(|_| slice.get() + 1 < self.get()).map(Microbatch::new)
    }

    /// Returns the share of `amount` that a slice has, rounded up.
    pub(crate) const fn share(self, amount: u64) -> u64 {
        amount.div_ceil(self.get() as u64)
    }

    /// Returns the name of the slice with this number: `3.1` for slice 1 of microbatch 3, or `3` for a
    /// microbatch that is not cut.
    pub fn name(self, number: Microbatch) -> String {
        match self.place(number) {
            (microbatch, _) if self.is_one() => microbatch.to_string(),
            (microbatch, slice) => format!("{microbatch}.{slice}"),
        }
    }
}

impl Default for Slices {
    /// Whole microbatches.
    fn default() -> Self {
        Self::ONE
    }
}

impl fmt::Display for Slices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(slices: u32, number: u32, before: Option<u32>, after: Option<u32>, name: &str) {
        let (slices, number) = (Slices::new(slices).expect("not 0"), Microbatch::new(number));
        assert_eq!(slices.before(number), before.map(Microbatch::new));
        assert_eq!(slices.after(number), after.map(Microbatch::new));
        assert_eq!(slices.name(number), name);
    }

    #[test]
    fn slices_of_a_microbatch_are_neighbours() {
        check(1, 7, None, None, "7");
        check(2, 6, None, Some(7), "3.0");
        check(2, 7, Some(6), None, "3.1");
        check(3, 7, Some(6), Some(8), "2.1");
        check(3, u32::MAX, None, None, "1431655765.0");
    }

    #[test]
    fn no_slices_are_refused() {
        assert_eq!(Slices::new(0), None);
        assert_eq!(Slices::new(1), Some(Slices::default()));
    }
}
