//! The description of a schedule for readers who choose one: its source, its order, its bubble and its
//! memory.
//!
//! `tools/book` prints the descriptions as a chapter of the book, and its tests compare every formula with
//! the simulation.

/// The description of a schedule.
///
/// The formulas hold if `F`, `I` and `W` take equally long on every stage, `B` takes as long as `I` and `W`
/// together, and messages take no time and are sent after whole actions
/// ([`Level::Comms`](crate::Level::Comms)).
#[derive(Debug, Clone, Copy)]
pub struct Guide {
    /// The paper that describes the schedule.
    pub source: &'static str,
    /// The placement of the stages, and the order of a rank's actions.
    pub order: &'static str,
    /// When to choose the schedule, and what it costs.
    pub choice: &'static str,
    /// The share of a step in which a rank idles, from barrier to barrier.
    pub bubble: &'static [Formula],
    /// The largest number of activations that any rank holds. An activation belongs to one stage and one
    /// microbatch, and a slice has its share of it.
    pub peak: &'static [Formula],
}

/// A formula, as text that people and the tests read.
///
/// `p` is the number of ranks, `m` of microbatches, `v` of stages on a rank, `g` the group size, and `k` the
/// number of slices. Factors stand side by side: `(p - 1) / (v m + p - 1)`. There are `+`, `-`, `/`,
/// parentheses and `min(a, b)`.
#[derive(Debug, Clone, Copy)]
pub struct Formula {
    /// The value.
    pub value: &'static str,
    /// The sizes for which the formula holds: conditions such as `m >= 2 p`, `p is even` or
    /// `m is a multiple of p`, with `and` between them. If it is empty, the formula is valid for all sizes
    /// that the generator accepts.
    pub sizes: &'static str,
    /// Whether the value is an upper bound. Otherwise it is exact.
    pub is_bound: bool,
}

impl Formula {
    /// Makes a formula for all sizes.
    pub(super) const fn always(value: &'static str) -> Self {
        Self { value, sizes: "", is_bound: false }
    }

    /// Makes a formula for some sizes.
    pub(super) const fn with(sizes: &'static str, value: &'static str) -> Self {
        Self { value, sizes, is_bound: false }
    }

    /// Makes an upper bound for some sizes.
    pub(super) const fn at_most(sizes: &'static str, value: &'static str) -> Self {
        Self { value, sizes, is_bound: true }
    }
}
