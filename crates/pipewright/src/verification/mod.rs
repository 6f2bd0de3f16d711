//! Verification of suspicious steps: a step is computed again, and the rank that computed other bits is
//! named.
//!
//! A processor that computes wrong numbers without an error ruins a training silently. The results of a step
//! have the same bits for every cut, schedule and mesh, so a second computation of a step must give the same
//! bits, also on other ranks. With [`Verify::OnSuspicion`] each rank notes checksums of what it computes. If
//! a step is suspicious ([`Suspicion`]), no rank updates; all ranks compute the step again and compare the
//! checksums.
//!
//! A step is suspicious if a loss or a gradient is not finite, or if the gradient norm is more than
//! [`JUMP`] times the median of the last [`NORMS`] norms. A pipeline first observes [`FIRST_NORMS`] norms.
//!
//! # On other ranks
//!
//! If the pipeline has replicas, repetition `k` gives each replica the microbatches of the `k`-th next one. A
//! processor that always computes the same wrong bits is then found too. If parameters are sharded, the
//! microbatches move within the group of replicas that hold the parameters together. With one replica, a
//! repetition runs on the same ranks.
//!
//! # What is compared
//!
//! The outputs and the loss of each forward, the gradients of its inputs that each backward computes, the sum
//! of each stage's weight gradients before replicas add theirs, and in a repetition the parameters, which all
//! replicas of a stage must have with the same bits.
//!
//! The last computation counts if each of its results has the bits of an earlier one, on another rank if the
//! result was computed on several. Otherwise the step is repeated, at most [`REPETITIONS`] times.
//!
//! The first result that differs, in the order of the computation, tells who was wrong: its inputs had the same
//! bits in all computations. With bits that two ranks agree on, or that the only rank has computed twice, the
//! ranks that have computed others are named. A rank that has computed one result with different bits is named
//! in any case. Otherwise all ranks are reported that have computed the result, and none of them is named. A
//! message whose bits change between two ranks looks like a wrong result of its receiver.
//!
//! The sums over replicas, the gradient norm and the update are not compared.

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
