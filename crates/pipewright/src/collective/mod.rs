//! What several ranks do together: wait for each other, hand tensors around, add them up.
//!
//! A [`Group`] is the ranks that take part, such as a column of the mesh; a [`Communicator`] is a rank's way to act
//! with its group over any transport. Executors, which never block, use the rounds (`round.rs`) that these are made of.
//!
//! # Why point to point
//!
//! Every collective is made of messages from each member to each other one, over MPI too. So sums are added in the
//! order of the members on every transport, and have the same bits whatever library is installed; a member that is lost
//! is found by the same deadlines as in a step, where a collective of the library's would wait for it for ever and
//! cannot be cancelled. As many bytes leave a rank as in a ring, `(n - 1) / n` of the tensors for each of gathering and
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
mod round;

pub use communicator::{CollectiveError, Communicator};
pub use group::{Group, GroupError};
pub(crate) use round::{Round, sum};
