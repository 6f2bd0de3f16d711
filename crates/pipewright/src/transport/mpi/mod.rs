//! Ranks as processes, over any installed MPI library.
//!
//! A process has one rank. Its [`MpiEndpoint`] has a mailbox as in the local transport, and the *MPI thread*
//! moves frames between the mailbox and MPI while the rank computes. `README.md` in this folder describes the
//! protocol and why it cannot deadlock.

mod heartbeats;
mod clock_probe;
mod process_clock;
mod sends;
mod calls;
mod posted;
mod same_machine;
mod mpi_thread;
mod device_sends;
mod endpoint;
mod process;
mod joined;

pub use self::calls::MpiError;
pub use self::endpoint::MpiEndpoint;
pub(super) use self::joined::MpiProcess;
pub use self::process_clock::ClockError;
