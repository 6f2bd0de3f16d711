//! Access to the parameters of a stage in training: values, gradient sums, the optimizer's update, checkpoints.

use std::sync::Arc;

use burn::tensor::TensorData;
use pipewright_schedule::StageIndex;

use super::body::StageBody;
use super::error::StageError;
use super::module_parameters::{NamedTensor, discrete_of, filled, parameters_of, with_discrete};
use super::runner::{Held, RestoredPaths, StageParameters};
use super::shards::Shards;
use super::statistics::changed;
use super::training::TrainingStage;
use super::visit::Visit;
use crate::checkpoint::{Checkpoint, CheckpointError, HeldParameter, StageState, Target, put_together};
use crate::device::computes_behind;
use crate::optimizer::{Factors, GradientHook};
use crate::tensor::shard::RowShard;
use crate::tensor::{OptionalTensor, OptionalTensors, Placement, TensorRank, Value, wait_until_computed};

/// The reason why a stage that needs its shards has them.
const SHARDED: &str = "a stage was cut before its parameters are gathered";

impl<M: StageBody> StageParameters for TrainingStage<M> {
    fn paths(&self) -> &[Arc<str>] {
        self.sums.paths()
    }

    fn shapes(&self) -> &[Vec<usize>] {
        self.sums.shapes()
    }

    fn row_shard(&self, place: usize) -> RowShard {
        self.shards.as_ref().map_or(RowShard::WHOLE, |shards| shards.row_shard(place))
    }

    fn is_gathered(&self) -> bool {
        self.shards.as_ref().is_none_or(Shards::is_gathered)
    }

    fn held(&self) -> Vec<Held> {
        let declared = self.module().shared();
        let shared = |path: &str, value: Value| {
            declared.iter().any(|declared| declared == path).then(|| value.into_data())
        };
        let paths = self.sums.paths().iter().zip(self.sums.shapes().iter().cloned());
        let placed = self.placements.iter().zip(paths);
        let floats =
            parameters_of(self.module()).into_iter().zip(placed).map(|(found, (placement, named))| {
                let (path, shape) = named;
                let is_copied = placement.copies(self.tensor_ranks) > 1;
                Held {
                    path: path.clone(),
                    shape,
                    copied: is_copied.then(|| found.value.clone().into_data()),
                    shared: shared(path, found.value),
                }
            });
        let discrete = discrete_of(self.module()).into_iter().zip(&self.discrete).map(|(found, path)| Held {
            path: path.clone(),
            shape: found.value.shape().to_vec(),
            copied: (self.tensor_ranks > 1).then(|| found.value.clone().into_data()),
            shared: shared(path, found.value),
        });
        floats.chain(discrete).collect()
    }

    fn undeferred(&self) -> Vec<(Arc<str>, usize)> {
        let (paths, shapes) = (self.sums.paths(), self.sums.shapes());
        self.sums.undeferred().map(|place| (paths[place].clone(), shapes[place].iter().product())).collect()
    }

    fn placement(&self, place: usize) -> Placement {
        // Integer and boolean parameters come after the others, and are not split.
        self.placements.get(place).copied().unwrap_or(Placement::REPLICATED)
    }

    fn gradient(&self, place: usize) -> OptionalTensor {
        self.sums.get(place)
    }

    fn set_gradient(&mut self, place: usize, gradient: OptionalTensor) {
        self.sums.set(place, gradient);
    }

    fn gradient_squares(&self, parts: u32) -> Vec<Vec<f64>> {
        self.sums.squares(parts)
    }

    fn rows(&self) -> OptionalTensors {
        let shards = self.shards.as_ref().expect(SHARDED);
        shards.rows(self.module())
    }

    fn gather(&mut self, whole: OptionalTensors) {
        let module = self.take_module();
        let shards = self.shards.as_mut().expect(SHARDED);
        self.module = Some(shards.gather(module, whole));
    }

    fn release(&mut self) {
        let Some(shards) = &mut self.shards else { return };
        drop(self.rounded.take());
        self.module = self.module.take().map(|module| shards.release(module));
    }

    fn note_statistics(&mut self) {
        self.statistics = self.statistics_of_module();
    }

    fn changed_statistics(&mut self) -> Option<OptionalTensors> {
        let before = std::mem::take(&mut self.statistics);
        (!before.is_empty()).then(|| changed(before, self.statistics_of_module()))
    }

    fn set_statistics(&mut self, values: OptionalTensors) {
        self.restore_buffers(values);
    }

    fn change_gradients(
        &mut self,
        stage: StageIndex,
        factor: f64,
        hook: &dyn GradientHook,
    ) -> Result<(), StageError> {
        self.show_gradients(stage, factor, hook)
    }

    fn update(&mut self, factors: &Factors, learning_rate: f64) {
        self.take_step(factors, learning_rate);
    }

    fn visit(&mut self, stage: StageIndex, visit: &Visit) -> Result<usize, StageError> {
        self.visited(stage, visit)
    }

    fn await_parameters(&self) -> Result<(), String> {
        match computes_behind(&self.device) {
            true => wait_until_computed(parameters_of(self.module()).into_iter().map(|found| found.value)),
            false => Ok(()),
        }
    }

    fn drop_gradients(&mut self) {
        self.sums.clear();
    }

    fn parameters(&self) -> Vec<TensorData> {
        parameters_of(self.settled()).into_iter().map(|found| found.value.into_data()).collect()
    }

    fn state(&self, rank: TensorRank) -> StageState {
        let floats = parameters_of(self.settled()).into_iter().zip(self.sums.paths());
        let found = floats.chain(discrete_of(self.module()).into_iter().zip(&self.discrete)).enumerate();
        let counts = |place| self.shards.as_ref().is_none_or(|shards| shards.counts(place));
        let parameters = found.filter(|(place, _)| counts(*place)).map(|(place, (found, path))| {
            let NamedTensor { id, value, is_trained, .. } = found;
            let shard = self.placement(place).shard_of(rank);
            // The rows of a sharded parameter have no gradient of their own.
            let is_sharded =
                self.shards.as_ref().is_some_and(|shards| shards.row_shard(place) != RowShard::WHOLE);
            let is_trained = is_trained || is_sharded;
            let is_frozen = self.frozen.contains(&id);
            HeldParameter { place, path: path.clone(), id, shard, is_frozen, value, is_trained }
        });
        let row_shard = self.shards.as_ref().map(Shards::part);
        StageState { parameters: parameters.collect(), optimizer: self.optimizer.clone(), row_shard }
    }

    fn restore(
        &mut self,
        checkpoint: &Checkpoint,
        rank: TensorRank,
        may_miss: bool,
    ) -> Result<RestoredPaths, CheckpointError> {
        self.release();
        self.settled();
        let module = self.take_module();
        let (sums, shards, placements) = (&self.sums, &self.shards, &self.placements);
        let keeps = |path: &str| may_miss && !checkpoint.has(path);
        let shard = |place: usize| placements[place].shard_of(rank);
        let part = |place| shards.as_ref().map_or(RowShard::WHOLE, |shards| shards.row_shard(place));
        let (module, outcome) = filled(module, |place, held| {
            let (path, shape) = (&sums.paths()[place], &sums.shapes()[place]);
            if keeps(path) {
                return Ok(None);
            }
            let data = checkpoint.rows(path, shape, held.dtype(), (shard(place), part(place)))?;
            Ok(Some(Value::from_data(data, &held.device())))
        });
        let discrete = &self.discrete;
        let (module, discrete_outcome) = with_discrete(module, |place, held| {
            if keeps(&discrete[place]) {
                return Ok(held.clone());
            }
            let data = checkpoint.parameter(&discrete[place], &held.shape(), held.dtype())?;
            Ok(Value::from_data(data.convert_dtype(held.dtype()), &held.device()))
        });
        self.module = Some(module);
        outcome?;
        discrete_outcome?;
        if let Some(optimizer) = &self.optimizer {
            let found = parameters_of(self.module());
            // The optimizer does not know a parameter of which this replica has no rows.
            let held = found.iter().zip(self.sums.paths()).zip((0..found.len()).map(shard));
            let held = held.filter(|((found, _), _)| found.value.shape()[0] > 0);
            let targets = held.map(|((found, path), shard)| {
                let NamedTensor { id, local, .. } = found;
                Target { id: *id, path, shard, local }
            });
            let targets: Vec<Target<'_>> = targets.collect();
            // A parameter that is not sharded is not trained either, so it has no optimizer state.
            let part = shards.as_ref().map_or(RowShard::WHOLE, Shards::part);
            self.optimizer = Some(put_together(optimizer.clone(), &targets, part, checkpoint)?);
        }
        self.freeze(&|path| checkpoint.is_frozen(path), true);
        let paths = self.sums.paths().iter().chain(&self.discrete).cloned();
        let (missing, restored) = paths.partition(|path| keeps(path));
        Ok(RestoredPaths { restored, missing })
    }
}
