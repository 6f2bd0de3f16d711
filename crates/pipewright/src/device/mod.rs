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
mod error;
mod found;
mod memory;
mod parse;
mod peak;
mod ranks;

pub use back_end::BackEnd;
pub use choice::{Adapter, DeviceChoice};
pub use error::DeviceError;
pub use found::{FoundDevice, describe, found};
pub(crate) use memory::{computes_behind, held_on};
pub use peak::thread_peak;
pub use ranks::{Devices, RankThreads};
