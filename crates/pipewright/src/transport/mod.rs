//! Moves messages between ranks. The executor decides what is sent and when.
//!
//! A [`World`] is made before the ranks start and is split into one [`Endpoint`] per rank. An endpoint
//! belongs to its rank's thread: it sends without blocking, takes messages that have arrived by their
//! [`Tag`](crate::message::Tag), and waits, with a deadline, until a message arrives. Messages carry their
//! tag, so they may arrive in any order.
//!
//! Every transport passes the suite in `tests/ranks/transport/checks.rs`. `mpi/README.md` describes the
//! protocol of the MPI transport.
//!
//! # Waits always end
//!
//! Sending never blocks. A wait ends when a message arrives, at the deadline, or when the shared
//! [`Abort`](crate::failure::Abort) flag is raised, whichever comes first. Raising the flag wakes every
//! waiting rank.

mod agreement;
mod vote;
#[cfg(any(feature = "mpi", test))]
mod clock;
mod controlled;
mod endpoint;
mod link_speed;
mod local;
mod mailbox;
mod sync;
mod wait;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(any(feature = "mpi", test))]
mod wire;
mod world;
mod launched;

pub use agreement::{AgreementError, Differences, Fields};
pub use controlled::{ControlledEndpoint, InFlight, Traffic};
pub use endpoint::Endpoint;
pub use launched::Mpi;
pub use link_speed::LinkSpeed;
pub use local::LocalEndpoint;
#[cfg(feature = "mpi")]
#[cfg_attr(not(feature = "testing"), doc(hidden))]
pub use mpi::ClockError;
#[cfg(feature = "mpi")]
pub use mpi::{MpiEndpoint, MpiError};
pub use wait::Waited;
pub(crate) use wait::{LONGEST_WAIT, end_of_wait};
pub use world::{World, WorldError};
