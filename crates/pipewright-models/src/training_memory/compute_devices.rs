//! The devices of a run, as far as they decide which tensors its layers keep.

use pipewright_schedule::LayerDesc;

/// The devices on which the layers of a run compute. They decide which tensors they keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeDevices {
    /// The processor.
    Processor,
    /// Other devices.
    Others,
    /// Some layers compute on the processor and some on other devices. Each counts with the larger size.
    Mixed,
}

impl ComputeDevices {
    /// Returns the bytes that the layer keeps on these devices.
    pub(super) fn kept_bytes(self, layer: &LayerDesc) -> u64 {
        let on_others = layer.device_activation_bytes.unwrap_or(layer.activation_bytes);
        match self {
            Self::Processor => layer.activation_bytes,
            Self::Others => on_others,
            Self::Mixed => layer.activation_bytes.max(on_others),
        }
    }
}
