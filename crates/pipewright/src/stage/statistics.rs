//! Parameters that are not trained and that a forward may change: running statistics.
//!
//! Burn's batch normalisation has them, and so may a layer of the user's. They look like parameters that are frozen, which a
//! forward leaves as they are, so a step compares their values before and after its forwards. A value that no forward has
//! replaced still has its storage.

use burn::tensor::Tensor;

use super::body::StageBody;
use super::module_parameters::{NamedTensor, parameters_of};
use super::training::TrainingStage;
use crate::tensor::shard::RowShard;
use crate::tensor::{OptionalTensor, OptionalTensors, Value};

impl<M: StageBody> TrainingStage<M> {
    /// Returns the parameters that a forward may change, with the last changes; an empty list if there are none. Those that
    /// the user froze after the launch were trained before, and may be sharded.
    pub(super) fn statistics_of_module(&self) -> OptionalTensors {
        // A module of half precision has no running statistics.
        if self.precision.half().is_some() || !self.has_buffers {
            return OptionalTensors::new();
        }
        // Between two steps, the rows of sharded parameters count as not trained.
        let is_sharded =
            |place| self.shards.as_ref().is_some_and(|shards| shards.row_shard(place) != RowShard::WHOLE);
        let may_change = |place, found: &NamedTensor| {
            !found.is_trained && !self.frozen.contains(&found.id) && !is_sharded(place)
        };
        let found = parameters_of(self.settled()).into_iter().enumerate();
        found.map(|(place, found)| may_change(place, &found).then_some(found.value)).collect()
    }
}

/// Returns the tensors whose values differ from those before.
pub(super) fn changed(before: OptionalTensors, after: OptionalTensors) -> OptionalTensors {
    let differs = |(before, after): (OptionalTensor, OptionalTensor)| {
        let (before, after) = (before?, after?);
        (!is_same(&before, &after)).then_some(after)
    };
    before.into_iter().zip(after).map(differs).collect()
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
