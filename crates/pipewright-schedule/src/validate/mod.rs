//! Proves that a program is sound, or lists everything that is wrong with it.
//!
//! One family of rules a file: `coverage` (what must be there, exactly once, and on the right rank), `order`
//! (what must come before what on one rank), `matching` (every receive has its send), `peer_order` (in the
//! same order for each pair of ranks), `deadlock` (the ranks together reach the end, even with unbuffered sends) and
//! `sharding` (gathered parameters, reduced gradients). `check` runs them in this order.
//!
//! The level says what must be there. Sharding and reduction may be there at any level, and are then checked.
//!
//! ```
//! use pipewright_schedule::{Level, csv, validate};
//! let program = csv::parse_program("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0\n")?;
//! let violations = validate(program, Level::Comms).expect_err("stage 1 runs before its input is there");
//! let expected = "rank 1, position 0: 1F0 needs 1RECV_F0, which comes only at position 1; move one of them";
//! assert_eq!(violations.listed()[0].to_string(), expected);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod check;
mod context;
mod coverage;
mod deadlock;
mod matching;
mod order;
mod peer_order;
mod sharding;
mod validated;
mod violation;

pub(crate) use check::check;
pub use validated::{ValidatedProgram, validate};
pub(crate) use violation::list_blocked;
pub use violation::{BlockedRank, Violation, ViolationKind, Violations};
