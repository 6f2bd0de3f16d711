//! The running statistics of a stage before its step: to put them back if the step fails, and to see which
//! ones have changed.
//!
//! Burn's batch normalisation has them, and so may a layer of the user's. They look like parameters that are
//! frozen, which a forward leaves as they are, so a step compares their values before and after its forwards.
//! A value that no forward has replaced still has its storage.

use burn::tensor::Tensor;

use crate::tensor::{OptionalTensor, OptionalTensors, Value};

/// The values of parameters that a forward may change, by index. A list is empty between two steps.
#[derive(Default)]
pub(super) struct StatisticsBefore {
    /// The values before the first batch of the step, which a failed step puts back.
    kept: OptionalTensors,
    /// The values before the forwards of a batch, if the step compares them.
    noted: OptionalTensors,
}

impl StatisticsBefore {
    pub(super) fn keep(&mut self, values: OptionalTensors) {
        self.kept = values;
    }

    pub(super) fn take_kept(&mut self) -> OptionalTensors {
        std::mem::take(&mut self.kept)
    }

    pub(super) fn note(&mut self, values: OptionalTensors) {
        self.noted = values;
    }

    /// Returns the values that differ from the noted ones, and forgets these; `None` if no value was noted.
    pub(super) fn take_changed(
        &mut self,
        after: impl FnOnce() -> OptionalTensors,
    ) -> Option<OptionalTensors> {
        let before = std::mem::take(&mut self.noted);
        let changed = |(before, after): (OptionalTensor, OptionalTensor)| {
            let (before, after) = (before?, after?);
            (!is_same(&before, &after)).then_some(after)
        };
        (!before.is_empty()).then(|| before.into_iter().zip(after()).map(changed).collect())
    }
}

fn is_same(before: &Value, after: &Value) -> bool {
    let addresses = [before, after].map(|value| value.storage().map(|storage| storage.address));
    if addresses[0].is_some() && addresses[0] == addresses[1] {
        return true;
    }
    // The number of dimensions does not matter here; 1 is arbitrary.
    let [before, after] =
        [before, after].map(|value| Tensor::<1>::from_dispatch(value.clone().into_dispatch()));
    before.equal(after).all().into_scalar::<bool>()
}
