//! [`RestoredState`]: the state of one of Burn's optimizers, restored in the processor's memory.

use burn::optim::{RecordState, StateSink, StateSource};
use burn::tensor::Device;

/// The state of one of Burn's optimizers for a parameter. Its records are Burn's.
///
/// It is restored in the processor's memory, and the next step moves it to the device of the parameter. Burn
/// restores state on the default device of the build. That may be one that the machine does not have.
#[derive(Clone)]
pub struct RestoredState<S>(pub(super) S);

impl<S: RecordState> RecordState for RestoredState<S> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        self.0.state_flatten(prefix, out);
    }

    fn state_unflatten(prefix: &str, from: &mut StateSource, _device: &Device) -> Option<Self> {
        S::state_unflatten(prefix, from, &Device::flex()).map(Self)
    }
}
