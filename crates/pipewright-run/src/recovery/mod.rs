//! How a run continues after a fault: what failed, whether the run may continue, and the record of it in the
//! folder of the run.
//!
//! A fault is the failure of a rank or a full disk. Other failures, such as a mistake in the configuration or
//! a folder that was moved, end a run in any case. The run continues from its newest checkpoint, so its
//! losses and parameters have the bits of an undisturbed run. `Attempts` decides for the ranks of one
//! process, and the command `pipewright launch` for ranks that are processes, both with [`Restarts`].
//!
//! A rank that becomes slow is not a fault: it is recorded ([`SlowRank`]), and the run continues. So are layers that move
//! to other ranks because of that ([`LayerMove`]), and a step that
//! was computed again because it was suspicious ([`VerifiedStep`]). A run that
//! continues on more processes again ([`GROWTH`]) has a record like a restart's record.

mod disk_space;
mod injected;
mod restart;
mod slow_rank;
mod layer_move;
mod record;
mod launch_mark;
mod verified_step;
mod restarts;
mod attempts;

pub(crate) use attempts::Attempts;
pub use disk_space::is_full;
pub(crate) use disk_space::wait_for_space;
pub(crate) use launch_mark::{Heartbeat, leave_loss};
pub use launch_mark::{Sign, renewed};
pub(crate) use layer_move::kept;
pub use layer_move::{LayerMove, MoveEvent, MovedRun};
pub(crate) use record::RECORDS;
pub use record::{GROWTH, RESTART, Record, SLOW_RANKS};
pub use restart::{Restart, StateSource};
pub use restarts::{NextRestart, Restarts};
pub use slow_rank::{SlowRank, SpeedEvent};
pub use verified_step::{VerificationEvent, VerifiedStep};
