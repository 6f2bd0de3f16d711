//! Lowers a schedule to a program: a list of small passes, each with its own file, rules and tests.
//!
//! [`lower`] runs the passes in order, [`for_training`] with the settings of training, and [`apply`] runs a list of the
//! user's choice. [`ProgramSource`] is the way from a name, a schedule or the rows of a file to a proved
//! program. In debug builds, `lower` validates the program after each pass. Passes other than
//! [`limit_sends`] take time linear in the program, and all take ownership of rows instead of copying them.
//!
//! ```
//! use pipewright_schedule::{Level, LowerConfig, csv, lower};
//! let schedule = csv::parse_schedule("0F0,,0B0\n,1F0,1B0\n")?;
//! let program = lower(&schedule, &LowerConfig::from(Level::Comms))?;
//! assert_eq!(csv::print_program(&program), "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod defer_recv;
mod drop_bubbles;
mod drop_frozen;
mod error;
mod forward_part;
mod limit_sends;
mod merge_bw;
mod named_passes;
mod offload;
mod order_safe;
mod pass_list;
mod passes;
mod reduce_grad;
mod send_early;
mod send_recv;
mod source;
mod training;
mod unshard;
mod wait_send;

pub use defer_recv::defer_recv;
pub use drop_bubbles::drop_bubbles;
pub use drop_frozen::drop_frozen;
pub use error::LowerError;
pub use forward_part::{forward_part, most_gathered};
pub use limit_sends::limit_sends;
pub use merge_bw::merge_bw;
pub use named_passes::{Pass, PassInput, apply};
pub use offload::{OffloadConfig, offload, unmovable};
pub use order_safe::order_safe;
pub use pass_list::{check_messages, check_order};
pub use passes::{LowerConfig, Messages, lower};
pub use reduce_grad::{ReduceWait, reduce_grad};
pub use send_early::{Overlaps, send_early};
pub use send_recv::send_recv;
pub use source::{Lowered, ProgramSource, SourceError};
pub use training::{TrainingLowering, for_training};
pub use unshard::{ParseLookaheadError, UnshardConfig, UnshardLookahead, unshard};
pub use wait_send::wait_send;
