//! Access to the module of a stage between two steps: reading it, changing it, and freezing its parameters.

use std::any::Any;
use std::collections::HashSet;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Device, Tensor};
use pipewright_schedule::StageIndex;

use super::body::StageBody;
use super::error::StageError;
use super::module_parameters::parameters_of;
use super::place::ModulePlace;
use super::shards::Shards;
use super::training::TrainingStage;
use crate::optimizer::with_state_of;
use crate::tensor::TensorRank;

/// A visit to the module of a stage.
#[derive(Clone)]
pub(crate) enum Visit {
    /// Reads the module at a place, in the first replica. All ranks of a tensor group read theirs, so that they can run
    /// it, and the first one's result is kept.
    Read { place: ModulePlace, read: Arc<ReadModule>, keep: bool },
    /// Changes the module at a place.
    Change { place: ModulePlace, change: Arc<ChangeModule> },
    /// Freezes the parameters with certain paths, or trains those of them that are frozen.
    Freeze { contains: Arc<dyn Fn(&str) -> bool + Send + Sync>, freeze: bool },
}

/// Gets the module at the place, the name of its type, and whether the result is kept.
pub(crate) type ReadModule = dyn Fn(&dyn Any, &'static str, bool) + Send + Sync;

/// Gets the module, the name of its type, and the device of its stage. Returns whether it has changed it.
pub(crate) type ChangeModule = dyn Fn(&mut dyn Any, &'static str, &Device) -> bool + Send + Sync;

impl Visit {
    /// Returns the visit of a rank of a tensor group: only the first one keeps the result.
    pub(crate) fn on(mut self, rank: TensorRank) -> Self {
        if let Self::Read { keep, .. } = &mut self {
            *keep = rank.index == 0;
        }
        self
    }
}

impl<M: StageBody> TrainingStage<M> {
    /// Visits the module, which has its whole parameters. Returns the number of modules or parameters that it found.
    pub(super) fn visited(&mut self, stage: StageIndex, visit: &Visit) -> Result<usize, StageError> {
        if !matches!(visit, Visit::Read { .. }) {
            self.draws.forget();
        }
        match visit {
            Visit::Read { place, read, keep } if is_at(place, stage) => {
                let found = self.settled().part(place);
                found.inspect(|(module, name)| read(*module, name, *keep));
                Ok(usize::from(found.is_some()))
            }
            Visit::Change { place, change } if is_at(place, stage) => self.change(place, &**change),
            Visit::Freeze { contains, freeze } => Ok(self.freeze(&**contains, *freeze)),
            Visit::Read { .. } | Visit::Change { .. } => Ok(0),
        }
    }

    fn change(&mut self, place: &ModulePlace, change: &ChangeModule) -> Result<usize, StageError> {
        // A copy is changed, so that an error or a panic leaves the module as it is. It shares the storage.
        let mut module = self.settled().clone();
        let Some((part, name)) = module.part_mut(place) else { return Ok(0) };
        if change(part, name, &self.device) {
            module.parts_changed();
            self.adopt(module)?;
        }
        Ok(1)
    }

    /// Puts `module`, with whole parameters, in place of the stage's. Parameters with the same id and shape keep the
    /// optimizer's state.
    fn adopt(&mut self, module: M) -> Result<(), StageError> {
        let mut fresh = Self::new(module, None);
        fresh.compute_in(self.precision)?;
        std::mem::take(&mut self.prefixes).iter().for_each(|prefix| fresh.add_prefix(prefix));
        self.prefixes = std::mem::take(&mut fresh.prefixes);
        fresh.check_paths()?;
        let is_kept = |id: &ParamId| {
            self.sums.shape_of(*id).is_some() && self.sums.shape_of(*id) == fresh.sums.shape_of(*id)
        };
        let kept: HashSet<ParamId> = fresh.sums.ids().filter(is_kept).collect();
        fresh.configured = self.configured.clone();
        let optimizer = fresh.fresh_optimizer();
        fresh.split_over(self.tensor_ranks)?;
        if let Some(part) = self.shards.as_ref().map(Shards::part) {
            fresh.frozen.clone_from(&self.frozen);
            fresh.shard(part)?;
        }
        fresh.optimizer = match (optimizer, &self.optimizer) {
            (Some(optimizer), Some(old)) => {
                Some(with_state_of(optimizer, old, &kept).map_err(StageError::OptimizerState)?)
            }
            (optimizer, _) => optimizer,
        };
        drop(self.take_module());
        self.promises.clear();
        Self {
            module: self.module,
            sums: self.sums,
            discrete: self.discrete,
            parameters: self.parameters,
            stay_single: self.stay_single,
            placements: self.placements,
            has_buffers: self.has_buffers,
            float_type: self.float_type,
            configured: self.configured,
            optimizer: self.optimizer,
            shards: self.shards,
            ..
        } = fresh;
        Ok(())
    }

    /// Freezes or trains parameters. Returns their number.
    pub(super) fn freeze(&mut self, contains: &dyn Fn(&str) -> bool, freeze: bool) -> usize {
        let found = parameters_of(self.module());
        let paths = self.sums.paths();
        let mut chosen = HashSet::new();
        for (found, path) in found.iter().zip(paths) {
            let can_change = if freeze { found.is_trained } else { self.frozen.contains(&found.id) };
            if can_change && contains(path) {
                chosen.insert(found.id);
            }
        }
        drop(found);
        let module = self.take_module().map(&mut RequireGrad { of: &chosen, requires: !freeze });
        self.module = Some(module);
        // Which outputs need a gradient may change.
        self.promises.clear();
        for id in &chosen {
            match freeze {
                true => self.frozen.insert(*id),
                false => self.frozen.remove(id),
            };
            self.sums.drop_sum(*id);
        }
        chosen.len()
    }
}

/// Returns whether `stage` may have the module at a place. A layer or a node may be on any stage.
fn is_at(place: &ModulePlace, stage: StageIndex) -> bool {
    !matches!(place, ModulePlace::Stage(asked) if *asked != stage)
}

/// Returns `module` on the device of its stage, and on a tape if it is not.
pub(crate) fn for_stage<M: Module>(module: M, device: &Device) -> M {
    let is_on_tape = module.devices().iter().all(Device::is_autodiff);
    let module = if is_on_tape { module } else { module.train() };
    match module.devices().iter().all(|found| found == device) {
        true => module,
        false => module.fork(device),
    }
}

struct RequireGrad<'a> {
    of: &'a HashSet<ParamId>,
    requires: bool,
}

impl ModuleMapper for RequireGrad<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.of.contains(&param.id) {
            true => param.set_require_grad(self.requires),
            false => param,
        }
    }
}
