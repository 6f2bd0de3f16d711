//! Operations of several ranks together: barriers, broadcasts, gathers and sums.
//!
//! A [`Group`] is an ordered list of ranks, such as a column of the mesh. A [`Communicator`] runs collectives
//! of a group over any transport, and blocks. Executors never block. They use the components of collectives:
//! an exchange (`exchange.rs`) collects messages without waiting, and a tree (`tree.rs`) determines senders
//! and receivers.
//!
//! # Why point to point
//!
//! Every collective consists of messages from rank to rank, over MPI too. So sums are added in one order on
//! every transport, and have the same bits with every MPI library. The deadlines of a step also detect a lost
//! member in a collective; a collective of the library would wait for it forever and cannot be cancelled. A
//! rank sends as many bytes as in a ring: `(n - 1) / n` of the tensors for gathering, and the same for
//! reducing.
//!
//! ```
//! use std::time::Duration;
//! use burn::tensor::{Device, Tensor};
//! use pipewright::tensor::{pack, unpack};
//! use pipewright::collective::{Communicator, Group};
//! use pipewright::transport::World;
//!
//! let ranks = World::local(3).into_endpoints().into_iter().map(|mut endpoint| {
//!     std::thread::spawn(move || {
//!         let group = Group::of_world(&endpoint);
//!         let mut communicator = Communicator::new(&mut endpoint, group, 0, Duration::from_secs(10));
//!         let ones = Tensor::<1>::ones([2], &Device::flex());
//!         communicator.all_reduce(pack(ones)).expect("all take part")
//!     })
//! });
//! for rank in ranks.collect::<Vec<_>>() {
//!     let sum: Tensor<1> = unpack(rank.join().expect("no panic")).expect("one tensor");
//!     assert_eq!(sum.into_data().try_to_vec::<f32>().expect("floats"), [3.0, 3.0]);
//! }
//! ```

mod communicator;
mod group;
mod tree;
mod exchange;
mod sum;

pub use communicator::{CollectiveError, Communicator};
pub(crate) use exchange::{Exchange, Slot};
pub use group::{Group, GroupError};
pub(crate) use sum::sum;
pub(crate) use tree::Tree;
