//! How many bytes each rank of a process holds, measured at the allocator.
//!
//! If a program installs [`TrackingAllocator`], every block of at least one kibibyte is counted for the rank
//! whose thread allocates it, until any thread frees it. A tensor that moves to another rank is removed from
//! the sender's count and added to the receiver's, so each count is the number of bytes that the rank holds.
//! Storage that the sender still uses stays on the sender's count. The batch of a step belongs to the caller
//! and is on no rank's count. Without the allocator all counts are zero.
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
mod rank_memory;
mod streamed_matrix;
mod frozen_tensors;

pub use allocator::TrackingAllocator;
pub use blocks::limit_memory;
pub use count::RankPosition;
pub use exhaustion::{Exhaustion, on_exhaustion};
pub(crate) use frozen_tensors::FrozenTensors;
pub(crate) use rank_memory::{RankMemory, held_and_peak, restart_peak};
pub use streamed_matrix::{FrozenMatrix, LoadedMatrices, ReadError, StreamedMatrix, read_ahead};
