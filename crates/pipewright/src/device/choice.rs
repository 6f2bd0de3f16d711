//! How a configuration names a device.
//!
//! ```text
//! flex              the processor
//! cuda, cuda:1      the first GPU, or the one with this number; also rocm
//! wgpu              the adapter that the graphics interface prefers; also metal and vulkan
//! wgpu:1            the discrete GPU with this number
//! wgpu:integrated   the first integrated GPU; wgpu:integrated:1 the next; also wgpu:virtual
//! wgpu:cpu          an adapter that computes on the processor
//! ```

use std::fmt;

use serde::{Deserialize, Serialize};

use super::back_end::BackEnd;

/// A device by its name in a configuration. It need not be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct DeviceChoice {
    /// The back end that computes on it.
    pub back_end: BackEnd,
    /// Which of the back end's devices it is.
    pub adapter: Adapter,
}

/// One of a back end's devices. Numbers start at 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Adapter {
    /// The first device or, with a graphics interface, the preferred one.
    #[default]
    Default,
    /// The GPU with this number; with a graphics interface, the discrete GPU.
    Gpu(usize),
    /// The integrated GPU with this number.
    Integrated(usize),
    /// The virtual GPU with this number.
    Virtual(usize),
    /// An adapter that computes on the processor.
    Cpu,
}

impl DeviceChoice {
    /// The processor.
    pub const FLEX: Self = Self { back_end: BackEnd::Flex, adapter: Adapter::Default };

    /// Returns the choice with the number of the first GPU, if that is what it means without a number.
    pub fn resolved(self) -> Self {
        let is_numbered = self.back_end != BackEnd::Flex && !self.back_end.has_adapters();
        match self.adapter {
            Adapter::Default if is_numbered => Self { adapter: Adapter::Gpu(0), ..self },
            _ => self,
        }
    }

    /// Returns the choice of the first device of the same kind: the numbers of devices do not tell how fast
    /// they are.
    pub fn kind(self) -> Self {
        let resolved = self.resolved();
        let adapter = match resolved.adapter {
            Adapter::Gpu(_) => Adapter::Gpu(0),
            Adapter::Integrated(_) => Adapter::Integrated(0),
            Adapter::Virtual(_) => Adapter::Virtual(0),
            adapter @ (Adapter::Default | Adapter::Cpu) => adapter,
        };
        Self { adapter, ..resolved }
    }
}

impl Default for DeviceChoice {
    fn default() -> Self {
        Self::FLEX
    }
}

impl From<DeviceChoice> for String {
    fn from(choice: DeviceChoice) -> Self {
        choice.to_string()
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { back_end, adapter } = self;
        match adapter {
            Adapter::Default => write!(f, "{back_end}"),
            Adapter::Gpu(number) => write!(f, "{back_end}:{number}"),
            Adapter::Integrated(0) => write!(f, "{back_end}:integrated"),
            Adapter::Integrated(number) => write!(f, "{back_end}:integrated:{number}"),
            Adapter::Virtual(0) => write!(f, "{back_end}:virtual"),
            Adapter::Virtual(number) => write!(f, "{back_end}:virtual:{number}"),
            Adapter::Cpu => write!(f, "{back_end}:cpu"),
        }
    }
}
