//! Verification of suspicious steps: a step is computed again, and the rank that computed other bits is
//! named.
//!
//! A processor that computes wrong numbers without an error ruins a training silently. The results of a step
//! have the same bits for every cut, schedule and mesh, so a second computation of a step must give the same
//! bits, also on other ranks. With [`Verify::OnSuspicion`] each rank notes checksums of what it computes. If
//! a step is suspicious ([`Suspicion`]), no rank updates; all ranks compute the step again and compare the
//! checksums.
//!
//! A step is suspicious if a loss, a gradient or a parameter is not finite, if a forward has other results
//! when its backward computes it again, or if the gradient norm is more than [`JUMP`] times the median of the
//! last [`NORMS`] norms, unless the median is 0. A pipeline first observes [`FIRST_NORMS`] norms. With a loss
//! scale (f16), a gradient that is not finite skips the update and halves the scale only if the repetition has
//! the same bits.
//!
//! If gradients are accumulated over several batches, a suspicious batch repeats all batches of the step so
//! far. The next batch is then computed for the first time, and is verified like any other.
//!
//! # What must hold
//!
//! Layers, losses and hooks must compute the same bits each time, from their parameters, their inputs and the
//! random numbers of their context. Otherwise a rank is named that is not broken. A hook that adds gradients
//! over replicas itself knows the numbers of the replicas, not their shares, and may add them in another
//! order in a repetition. The description of messages that a rank has got from another replica's share stays
//! known after a repetition: if the shapes differ between replicas, compare them in the first step only
//! ([`CheckMetadata`](crate::tensor::CheckMetadata)).
//!
//! # On other ranks
//!
//! If the pipeline has replicas, repetition `k` gives each replica the microbatches of the `k`-th next one. A
//! processor that always computes the same wrong bits is then found too. If parameters are sharded, the
//! microbatches move within the group of replicas that hold the parameters together. If replicas hold experts
//! together, the microbatches of an expert group move to the `k`-th next expert group, which is in the same
//! group if parameters are sharded over several expert groups. A repetition runs on the same ranks if there
//! is only one replica or one expert group.
//!
//! # What is compared
//!
//! The outputs and the loss of each forward, the gradients of its inputs that each backward computes, the
//! tokens and gradients that a rank sends to the replicas with which it holds experts together, the sum of
//! each stage's weight gradients before replicas add theirs, and in a repetition the parameters, which all
//! replicas of a stage must have with the same bits. Each expert is compared among the replicas that hold it.
//! Rows of parameters that one rank alone holds, with one replica or one group of replicas that holds them
//! together, are not compared with anything.
//!
//! The last computation counts if each of its results has the bits of an earlier one, on another rank if the
//! result was computed on several. Otherwise the step is repeated, at most [`REPETITIONS`] times.
//!
//! The first result that differs, in the order of the computation, shows which rank was wrong: its inputs had
//! the same bits in all computations. With bits that two ranks agree on, or that the only rank has computed
//! twice, the ranks that have computed other bits are named. A rank that has computed one result with
//! different bits is named in any case. Otherwise all ranks are reported that have computed the result, and
//! none of them is named. A message whose bits change between two ranks looks like a wrong result of its
//! receiver.
//!
//! The sums over replicas, the gradient norm and the update are not compared. A layer that stops at a number
//! that is not finite stops a repetition before the comparison, and the step fails with the error of its
//! rank.

mod checksum;
mod difference;
mod suspicion;
mod usual_norm;
mod verdict;
mod verify;

pub(crate) use checksum::{Checksums, RankChecksums, ResultKey, checksum};
pub use difference::{Content, Difference};
pub use suspicion::{Suspicion, Verification};
pub(crate) use usual_norm::UsualNorm;
pub use usual_norm::{FIRST_NORMS, JUMP, NORMS};
pub(crate) use verdict::{Verdict, judge};
pub use verify::{REPETITIONS, Verify};
