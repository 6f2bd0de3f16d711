//! The back ends of Burn that a build may contain.

use std::fmt;

/// A back end: a way to compute on a kind of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BackEnd {
    /// The processor. It is in every build.
    Flex,
    /// GPUs by NVIDIA.
    Cuda,
    /// GPUs by AMD.
    Rocm,
    /// GPUs by Apple, with kernels in Metal's language.
    Metal,
    /// GPUs through Vulkan, with kernels in SPIR-V.
    Vulkan,
    /// GPUs through the graphics interface that the system offers, with kernels in WGSL unless the build has
    /// `vulkan` or `metal`.
    Wgpu,
}

impl BackEnd {
    /// All back ends.
    pub const ALL: [Self; 6] = [Self::Flex, Self::Cuda, Self::Rocm, Self::Metal, Self::Vulkan, Self::Wgpu];

    /// Returns the name, which is also the name of the Cargo feature.
    pub fn name(self) -> &'static str {
        match self {
            Self::Flex => "flex",
            Self::Cuda => "cuda",
            Self::Rocm => "rocm",
            Self::Metal => "metal",
            Self::Vulkan => "vulkan",
            Self::Wgpu => "wgpu",
        }
    }

    /// Returns the back end of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|back_end| back_end.name() == name)
    }

    /// Returns whether this build contains the back end.
    pub fn is_compiled_in(self) -> bool {
        match self {
            Self::Flex => true,
            Self::Cuda => cfg!(feature = "cuda"),
            Self::Rocm => cfg!(feature = "rocm"),
            Self::Metal => cfg!(feature = "metal"),
            Self::Vulkan => cfg!(feature = "vulkan"),
            Self::Wgpu => cfg!(any(feature = "wgpu", feature = "vulkan", feature = "metal")),
        }
    }

    /// Returns whether its devices are adapters of a graphics interface, which have kinds, and not just
    /// numbers.
    pub(super) fn has_adapters(self) -> bool {
        matches!(self, Self::Metal | Self::Vulkan | Self::Wgpu)
    }
}

impl fmt::Display for BackEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
