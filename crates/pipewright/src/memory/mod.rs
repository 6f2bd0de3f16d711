//! How many bytes each rank of a process holds, measured at the allocator.
//!
//! A program that installs [`TrackingAllocator`] gets every block of a kibibyte or more counted for the rank whose thread
//! allocates it, until it is freed, on whatever thread that is. A tensor that moves to another rank is taken off the
//! sender's count and put on the receiver's, so that each count is what that rank holds; of storage that both keep,
//! the receiver's. The batch of a step belongs to the caller and is on no rank's count. Without the allocator all counts
//! are zero.
//!
//! ```
//! use pipewright::memory::TrackingAllocator;
//!
//! #[global_allocator]
//! static ALLOCATOR: TrackingAllocator<std::alloc::System> = TrackingAllocator(std::alloc::System);
//! # fn main() {}
//! ```

mod allocator;
mod blocks;
mod count;
mod exhaustion;

pub use allocator::TrackingAllocator;
pub(crate) use count::RankMemory;
pub use count::RankPlace;
pub use exhaustion::{Exhaustion, on_exhaustion};
