//! The devices that ranks compute on: how a configuration names them, which of them exist, and which rank has
//! which.
//!
//! The back ends for devices other than the processor are Cargo features: `cuda`, `rocm`, `metal`, `vulkan`,
//! `wgpu`.
//!
//! ```
//! use pipewright::device::{DeviceChoice, Devices};
//!
//! let choices: Vec<DeviceChoice> = ["flex", "flex"].map(str::parse).into_iter().collect::<Result<_, _>>()?;
//! let devices = Devices::open(&choices)?;
//! assert_eq!(devices.len(), 2);
//! assert!("wgpu:cpu".parse::<DeviceChoice>().is_ok());
//! # Ok::<(), pipewright::device::DeviceError>(())
//! ```

mod back_end;
mod choice;
mod found;
mod memory;

pub use back_end::BackEnd;
pub use choice::{Adapter, DeviceChoice, DeviceError, Devices};
pub use found::{FoundDevice, describe, found};
pub use memory::thread_peak;
pub(crate) use memory::{computes_behind, held_on};
