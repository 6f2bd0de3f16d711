//! Access to the parameters of a stage in training: values, gradient sums, the optimizer's update,
//! checkpoints.

use std::collections::{BTreeMap, HashSet};
use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use burn::tensor::{Tensor, TensorData};
use pipewright_schedule::StageIndex;
use pipewright_schedule::error_text::panic_message;

use super::{BeforeUpdate, TrainingStage};
use crate::checkpoint::{
    CheckpointError, HeldParameter, Restored, StageState, StoredState, Target, put_together,
};
use crate::device::computes_behind;
use crate::optimizer::{Factors, GradientHook, ParameterGradient};
use crate::stage::body::StageBody;
use crate::stage::error::StageError;
use crate::stage::gradients::GradientSums;
use crate::stage::module_parameters::{NamedTensor, discrete_of, filled, parameters_of, with_discrete};
use crate::stage::parameter_table::ParameterTable;
use crate::stage::runner::{Held, RestoredPaths, StageParameters};
use crate::stage::shards::Shards;
use crate::stage::visit::Visit;
use crate::tensor::shard::RowShard;
use crate::tensor::{OptionalTensors, TensorRank, TensorShard, Value, wait_until_computed};

impl<M: StageBody> StageParameters for TrainingStage<M> {
    fn table(&self) -> &ParameterTable {
        &self.table
    }

    fn sums(&self) -> &GradientSums {
        &self.sums
    }

    fn sums_mut(&mut self) -> &mut GradientSums {
        &mut self.sums
    }

    fn row_shard(&self, index: usize) -> RowShard {
        self.module.row_shard(index)
    }

    fn is_gathered(&self) -> bool {
        self.module.shards().is_none_or(Shards::is_gathered)
    }

    fn held(&self) -> Vec<Held> {
        let declared = self.module.get().shared_parameters();
        let data = |value: &Value, is_needed: bool| is_needed.then(|| value.clone().into_data());
        let hold = |path: &Arc<str>, shape: Vec<usize>, value: &Value, is_copied| Held {
            path: path.clone(),
            shape,
            copied: data(value, is_copied),
            shared: data(value, declared.iter().any(|declared| **declared == **path)),
        };
        let floats = parameters_of(self.module.get()).into_iter().zip(&self.table.paths).enumerate();
        let floats = floats.map(|(index, (found, path))| {
            hold(path, self.table.shapes[index].clone(), &found.value, self.table.is_copied(index))
        });
        let discrete = discrete_of(self.module.get()).into_iter().zip(&self.table.discrete);
        let is_copied = self.settings.tensor_ranks > 1;
        let discrete =
            discrete.map(|(found, path)| hold(path, found.value.shape().to_vec(), &found.value, is_copied));
        floats.chain(discrete).collect()
    }

    fn undeferred(&self) -> Vec<(Arc<str>, usize)> {
        let (paths, shapes) = (&self.table.paths, &self.table.shapes);
        self.sums.undeferred().map(|index| (paths[index].clone(), shapes[index].iter().product())).collect()
    }

    fn gradient_squares(&self, copies: u32) -> Vec<Vec<f64>> {
        self.sums.squares(copies, |index| self.module.row_shard(index))
    }

    fn value(&self, index: usize) -> Value {
        parameters_of(self.module.settled()).swap_remove(index).value
    }

    fn borrow(&mut self, values: BTreeMap<usize, Value>) {
        self.fill(|index, _| values.get(&index).cloned());
        self.borrowed = values.into_keys().collect();
    }

    fn drop_borrowed(&mut self) {
        if !self.borrowed.is_empty() {
            let borrowed = std::mem::take(&mut self.borrowed);
            self.fill(|index, held| borrowed.contains(&index).then(|| held.narrow(0, 0, 0).copied()));
            self.borrowed = borrowed;
        }
    }

    fn is_borrowed(&self, index: usize) -> bool {
        self.borrowed.contains(&index)
    }

    fn rows(&self) -> OptionalTensors {
        let shards = self.module.shards().expect("a stage is sharded before its rows are read");
        shards.rows(self.module.get())
    }

    fn gather(&mut self, whole: OptionalTensors) {
        self.module.gather(whole);
    }

    fn release(&mut self) {
        self.module.release();
    }

    fn note_statistics(&mut self) {
        self.statistics.note(self.module.running_statistics());
    }

    fn changed_statistics(&mut self) -> Option<OptionalTensors> {
        self.statistics.take_changed(|| self.module.running_statistics())
    }

    fn set_statistics(&mut self, values: OptionalTensors) {
        self.module.restore_buffers(values);
    }

    fn change_gradients(
        &mut self,
        stage: StageIndex,
        factor: f64,
        hook: &dyn GradientHook,
    ) -> Result<(), StageError> {
        for index in 0..self.table.paths.len() {
            let Some(sum) = self.sums.get(index) else { continue };
            let (path, shape) = (self.table.paths[index].clone(), sum.shape().to_vec());
            let mut gradient = ParameterGradient::new(stage, &path, sum.clone().scaled(factor));
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| hook.change(&mut gradient))) {
                let message = panic_message(&*panic);
                return Err(StageError::Mistake(format!(
                    "the gradient hook panicked at `{path}`: {message}"
                )));
            }
            let Some(changed) = gradient.changed() else { continue };
            let (found, expected) = (changed.shape().to_vec(), shape.iter().product::<usize>());
            if found != [expected] {
                return Err(StageError::Mistake(format!(
                    "the gradient hook returned a tensor of shape {found:?} for the {expected} elements of the gradient of \
                     `{path}`: return as many elements as it got, in one dimension"
                )));
            }
            let changed = not_finite_where(sum.reshaped(&[expected]), changed);
            self.sums.set(index, Some(changed.reshaped(&shape).scaled(factor.recip())));
        }
        Ok(())
    }

    fn switch_version(&mut self) {
        self.switch();
    }

    fn skip_update(&mut self) {
        self.take_newer();
        self.sums.clear();
    }

    fn update(&mut self, factors: &Factors, learning_rate: f64) {
        self.take_newer();
        self.optimizer.update(&mut self.module, &mut self.sums, factors, learning_rate);
    }

    fn update_early(&mut self, factors: &Factors, learning_rate: f64) -> bool {
        let Some(optimizer) = self.optimizer.get().cloned() else { return false };
        self.before_update = Some(BeforeUpdate { module: self.module.settled().clone(), optimizer });
        self.take_newer();
        let mut sums = self.sums.clone();
        let update = || self.optimizer.update(&mut self.module, &mut sums, factors, learning_rate);
        let is_updated = catch_unwind(AssertUnwindSafe(update)).is_ok();
        if !is_updated {
            self.undo_update();
        }
        is_updated
    }

    fn keep_update(&mut self) -> bool {
        let is_early = self.before_update.take().is_some();
        if is_early {
            self.sums.clear();
        }
        is_early
    }

    fn undo_update(&mut self) -> bool {
        let Some(BeforeUpdate { module, optimizer }) = self.before_update.take() else { return false };
        self.module.put(module);
        self.optimizer.set(optimizer);
        true
    }

    fn visit(&mut self, stage: StageIndex, visit: &Visit) -> Result<usize, StageError> {
        if !matches!(visit, Visit::Read { .. } | Visit::Shift { .. }) {
            self.draws.forget();
        }
        match visit {
            Visit::Read { place, read, keep } if place.may_be_on(stage) => {
                let found = self.module.settled().part(place);
                found.inspect(|(module, name)| read(*module, name, *keep));
                Ok(usize::from(found.is_some()))
            }
            Visit::Change { place, change } if place.may_be_on(stage) => self.change(place, &**change),
            Visit::Freeze { contains, freeze } => {
                let chosen = self.freeze(&**contains, *freeze);
                if !freeze {
                    self.optimizer.forget_last_updates(&chosen)?;
                }
                Ok(chosen.len())
            }
            Visit::Shift { by } => {
                if self.other.is_some() {
                    self.switch();
                    self.shift(by);
                    self.switch();
                }
                Ok(self.shift(by))
            }
            Visit::Read { .. } | Visit::Change { .. } => Ok(0),
        }
    }

    fn await_parameters(&self) -> Result<(), String> {
        if !computes_behind(&self.module.device) {
            return Ok(());
        }
        wait_until_computed(parameters_of(self.module.get()).into_iter().map(|found| found.value))
    }

    fn parameters(&self) -> Vec<TensorData> {
        parameters_of(self.module.settled()).into_iter().map(|found| found.value.into_data()).collect()
    }

    fn held_state(&self, rank: TensorRank) -> StageState {
        let floats = parameters_of(self.module.settled()).into_iter().zip(&self.table.paths);
        let discrete = discrete_of(self.module.get()).into_iter().zip(&self.table.discrete);
        let row_shard = self.settings.row_shards.map(|shards| shards.others);
        let found = floats.chain(discrete).enumerate().filter(|(_, (_, path))| !self.is_base(path));
        let older = self.older_values();
        let parameters = found.map(|(index, (found, path))| {
            let NamedTensor { id, value, is_trained, .. } = found;
            let shard = self.table.placement(index).shard_of(rank);
            // The rows of a sharded parameter have no gradient of their own.
            let is_trained = is_trained || self.module.is_sharded(index);
            let is_frozen = self.module.frozen.contains(&id);
            let rows = self.module.row_shard(index);
            let older = older.get(index).filter(|_| is_trained || is_frozen).cloned();
            HeldParameter { index, path: path.clone(), id, shard, rows, is_frozen, value, older, is_trained }
        });
        StageState { parameters: parameters.collect(), optimizer: self.optimizer.get().cloned(), row_shard }
    }

    fn state(&self, rank: TensorRank) -> StageState {
        let mut state = self.held_state(rank);
        if let Some((shards, others)) = self.module.shards().zip(state.row_shard) {
            state.parameters.retain(|parameter| shards.counts(parameter.index, others));
        }
        state
    }

    fn restore(
        &mut self,
        stored: &dyn StoredState,
        rank: TensorRank,
        may_miss: bool,
    ) -> Result<RestoredPaths, CheckpointError> {
        self.module.release();
        self.module.settled();
        self.other = None;
        let table = self.table.clone();
        let all = || table.paths.iter().chain(&table.discrete).cloned();
        let base: HashSet<Arc<str>> = all().filter(|path| self.is_base(path)).collect();
        let keeps = |path: &str| base.contains(path) || (may_miss && !stored.has_parameter(path));
        self.restore_values(stored, rank, &keeps)?;
        self.restore_optimizer(stored, rank)?;
        self.freeze(&|path| stored.is_frozen(path), true);
        let (missing, restored) = all().filter(|path| !base.contains(path)).partition(|path| keeps(path));
        Ok(RestoredPaths { restored, missing })
    }
}

impl<M: StageBody> TrainingStage<M> {
    /// Replaces the parameters for whose index `value` returns a value.
    fn fill(&mut self, mut value: impl FnMut(usize, &Value) -> Option<Value>) {
        self.module.settled();
        let outcome = self.module.replace_with(|module| filled(module, |index, held| Ok(value(index, held))));
        outcome.unwrap_or_else(|never: Infallible| match never {});
    }

    /// Adds numbers to parameters that are not trained, by path. Returns the number of parameters.
    fn shift(&mut self, by: &BTreeMap<Arc<str>, Vec<f32>>) -> usize {
        let table = self.table.clone();
        let found = parameters_of(self.module.settled()).into_iter();
        let is_trained: Vec<bool> = found.map(|found| found.is_trained).collect();
        // The rows of a sharded parameter have no gradient of their own.
        let is_trained = |index: usize| is_trained[index] || self.module.is_sharded(index);
        let is_trained: Vec<bool> = (0..table.paths.len()).map(is_trained).collect();
        let added = |index: usize, held: &Value| {
            let added = by.get(&table.paths[index]).filter(|_| !is_trained[index])?;
            (held.shape().as_slice() == [added.len()]).then_some(added)
        };
        let mut found = 0;
        let outcome = self.module.replace_with(|module| {
            filled(module, |index, held| {
                let Some(added) = added(index, held) else { return Ok(None) };
                found += 1;
                let sums: Vec<f32> = held
                    .clone()
                    .into_data()
                    .iter::<f32>()
                    .zip(added)
                    .map(|(held, added)| held + added)
                    .collect();
                let sums = TensorData::new(sums, [added.len()]).convert_dtype(held.dtype());
                Ok(Some(Value::from_data(sums, &held.device())))
            })
        });
        outcome.unwrap_or_else(|never: Infallible| match never {});
        found
    }

    /// Restores all parameters except the ones whose paths `keeps` accepts.
    fn restore_values(
        &mut self,
        stored: &dyn StoredState,
        rank: TensorRank,
        keeps: &dyn Fn(&str) -> bool,
    ) -> Result<(), CheckpointError> {
        let table = self.table.clone();
        let row_shards: Vec<_> = (0..table.paths.len()).map(|index| self.module.row_shard(index)).collect();
        let borrowed = &self.borrowed;
        self.module.replace_with(|module| {
            filled(module, |index, held| {
                let (path, shape) = (&table.paths[index], &table.shapes[index]);
                if keeps(path) || borrowed.contains(&index) {
                    return Ok(None);
                }
                let shard = table.placement(index).shard_of(rank);
                let data = stored.read_rows(path, shape, held.dtype(), shard, row_shards[index])?;
                Ok(Some(Value::from_data(data, &held.device())))
            })
        })?;
        self.module.replace_with(|module| {
            with_discrete(module, |index, held| {
                let path = &table.discrete[index];
                if keeps(path) {
                    return Ok(held.clone());
                }
                let (shape, dtype) = (held.shape(), held.dtype());
                let (shard, part) = (TensorShard::WHOLE, RowShard::WHOLE);
                let data = stored.read_rows(path, &shape, dtype, shard, part)?;
                Ok(Value::from_data(data.convert_dtype(held.dtype()), &held.device()))
            })
        })
    }

    fn restore_optimizer(
        &mut self,
        stored: &dyn StoredState,
        rank: TensorRank,
    ) -> Result<(), CheckpointError> {
        let Some(optimizer) = self.optimizer.get().cloned() else { return Ok(()) };
        let found = parameters_of(self.module.get());
        let held = found.iter().zip(&self.table.paths).enumerate();
        // The optimizer does not know a parameter that it does not update, or that has no rows on this replica.
        let is_updated =
            |index, found: &NamedTensor| found.value.shape()[0] > 0 && !self.borrowed.contains(&index);
        let held = held.filter(|(index, (found, _))| is_updated(*index, found));
        let targets = held.map(|(index, (NamedTensor { id, local, .. }, path))| {
            let shard = self.table.placement(index).shard_of(rank);
            Target { id: *id, path, shard, rows: self.module.row_shard(index), local }
        });
        let Restored { optimizer, older } = put_together(optimizer, &targets.collect::<Vec<_>>(), stored)?;
        drop(found);
        self.optimizer.set(optimizer);
        self.restore_older(older);
        Ok(())
    }
}

/// Returns `changed` with an element that is not a number wherever `before` is infinite or not a number: the
/// norm is checked after the hook, which must not hide such an element. Both have one dimension. Nothing is
/// read from the device.
fn not_finite_where(before: Value, changed: Value) -> Value {
    let is_finite = Tensor::<1>::from_dispatch(before.into_dispatch()).is_finite();
    let changed = Tensor::<1>::from_dispatch(changed.into_dispatch());
    Value::of(changed.mask_fill(is_finite.bool_not(), f32::NAN))
}
