//! Gated DeltaNet (Yang et al., 2024) between its projections: a short causal convolution of queries, keys and values,
//! and the gated delta rule. The formulas of the rule are in `pipewright_kernel::delta`.
//!
//! Convolution and rule are one operation: on the CPU back end it keeps its inputs, and computes everything else again
//! in its backward.

#![expect(non_snake_case, reason = "checkpoints name a parameter with a capital")]

mod rule;
mod composed;
mod operation;

#[cfg(test)]
mod tests;

pub use operation::DeltaCache;
pub use rule::{DeltaRule, DeltaSizes};
