//! Proves that a program is sound, or lists its violations.
//!
//! Each family of rules has its own file: `coverage` (the required actions are present exactly once, on the
//! right rank), `order` (on each rank, actions follow the actions that they need), `matching` (every receive
//! has its send), `peer_order` (each pair of ranks agrees on the order of messages), `deadlock` (all ranks
//! reach their end, even with unbuffered sends), `batches` (each batch reads one version of delayed parameters),
//! `sharding` (gathered parameters, reduced gradients) and `offload` (what has left memory is back before its backward). `check` reports them in this order.
//! `pytorch_loader` has what PyTorch refuses in sound programs.
//!
//! The level decides which actions are required. Sharding, reduction and offloading are allowed at any level, and
//! are checked if they are present.
//!
//! ```
//! use pipewright_schedule::{Level, csv, validate};
//! let program = csv::parse_program("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0\n")?;
//! let violations = validate(program, Level::Comms).expect_err("stage 1 runs before its input is there");
//! let expected = "rank 1, position 0: 1F0 needs 1RECV_F0, which comes only at position 1; move one of them";
//! assert_eq!(violations.listed()[0].to_string(), expected);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod batches;
mod check;
mod context;
mod coverage;
mod deadlock;
mod matching;
mod offload;
mod order;
mod peer_order;
mod pytorch_loader;
mod sharding;
mod validated;
mod violation;

pub(crate) use check::{check, check_content};
pub use pytorch_loader::{LoaderFormat, check_pytorch_loader};
pub use validated::{ValidatedProgram, validate};
pub(crate) use violation::list_blocked;
pub use violation::{BlockedRank, Violation, Violations};
