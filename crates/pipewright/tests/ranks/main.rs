//! How ranks work together: transports, orders of messages, failures, and ranks that hold the same parameters
//! or parts of them.

mod transport;
mod seeded;
mod waits;
mod failures;
mod first_not_finite;
mod own_batches;
mod sharing;
mod replicas;
mod sharded;
mod verification;
mod tensor_parallel;
mod traffic;
#[path = "../support/mod.rs"]
mod support;
