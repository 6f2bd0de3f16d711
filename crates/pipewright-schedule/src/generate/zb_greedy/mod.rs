//! The greedy zero-bubble scheduler: an order made to measured times, under a limit of memory on each stage.
//!
//! After the heuristic of Qi et al., "Zero Bubble Pipeline Parallelism", 2023. One stage a rank. What the paper
//! calls B and W are `I` and `W` here.
//!
//! A run in time (`run.rs`) lets every stage, whenever it is free, choose what to do next by rules that hang on
//! a few flags (`rules.rs`). All combinations of flags are run, besides the fixed orders of ZB-H1 and ZB-H2
//! where the limits allow them, and the order with the shortest step is kept. So it is never worse than
//! ZB-H1 at the memory of ZB-H1, and never above its limit.
//!
//! The limit of a stage counts microbatches whose activations it holds, from `F` to `W`. With a limit of one the
//! stages take turns, which is slow and sound: the oldest microbatch in flight can always go on, since its next
//! stage holds nothing older, and what that stage holds of younger ones it could only have taken after it.
//!
//! Cost: about a dozen runs, each linear in the actions but for a factor logarithmic in the ranks, and given up once
//! it takes longer than the best before it. Sizes at which that would take minutes are refused.

mod generator;
mod rules;
mod run;

pub(super) use generator::GENERATOR;
