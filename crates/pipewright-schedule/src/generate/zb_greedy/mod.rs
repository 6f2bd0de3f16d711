//! The greedy zero-bubble scheduler: it optimises the order for measured times, under a memory limit on each
//! stage.
//!
//! After the heuristic of Qi et al., "Zero Bubble Pipeline Parallelism", 2023. There is one stage per rank.
//! The paper's B and W are `I` and `W` here.
//!
//! In a simulated run (`run.rs`), a free stage chooses its next action by rules with a few flags
//! (`rules.rs`). The scheduler runs all combinations of flags, and the fixed orders of ZB-H1 and ZB-H2 if the
//! limits allow them, and keeps the shortest. So with the memory of ZB-H1 it is never slower than ZB-H1, and
//! it never exceeds its limits.
//!
//! The limit of a stage counts the microbatches whose activations it holds, from `F` to `W`. A limit of one
//! is slow but has no deadlock: each stage takes the microbatches in order, so the next stage of the oldest
//! microbatch in flight holds no microbatch that blocks it.
//!
//! Time: about a dozen runs, each linear in the actions with a factor logarithmic in the ranks. A run stops
//! once it is longer than the best one so far. Sizes at which the search would take minutes are refused.

mod generator;
mod rules;
mod run;

pub(super) use generator::GENERATOR;
