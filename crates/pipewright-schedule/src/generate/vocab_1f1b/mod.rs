//! 1F1B with a head that is cut along the vocabulary, so that every rank computes a part of it.
//!
//! After Yeung, Qi, Lin and Wan, "Balancing Pipeline Parallelism with Vocabulary Parallelism", 2024. In the
//! paper, the ranks compute their parts of the head at the same time, between collectives. Here the parts are
//! stages like others: a part sends the hidden states and the statistics of the softmax on to the next one,
//! so there are only messages between neighbours.
//!
//! There are two stages on each rank, placed in a loop: the first round is meant for the layers, the second
//! one for the parts of the head. A stage holds the activations of at most `p + 2` microbatches, or of as
//! many as the memory limit says.
//!
//! In a simulated run (`run.rs`), a free rank runs the first action of a list that can run. The lists are
//! orders of the four kinds: a forward and a backward of each of its two stages. The generator tries several
//! lists and keeps the shortest run.
//!
//! A limit of one is slow but has no deadlock: each stage takes the microbatches in order, so the stages that
//! the oldest microbatch in flight needs hold no microbatch that blocks it.
//!
//! Time: some runs, each linear in the actions with a factor logarithmic in the ranks.

mod generator;
mod run;

pub(super) use generator::GENERATOR;
