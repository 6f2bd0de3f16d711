//! The bytes that ranks hold, as the allocator of this program counts them.

mod drift;
mod frozen;
mod limit;
mod offload;
mod shards;
mod shares;
mod shared;
mod slices;
#[path = "../support/mod.rs"]
mod support;
mod tied;

use pipewright::memory::TrackingAllocator;

#[global_allocator]
static ALLOCATOR: TrackingAllocator<std::alloc::System> = TrackingAllocator(std::alloc::System);
