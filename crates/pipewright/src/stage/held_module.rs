//! The module of a stage in training, in the forms in which the stage holds it: with rounded parameters in
//! half precision, and with the rows of this replica if parameters are sharded over replicas.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::sync::Arc;

use burn::module::{ModuleMapper, Param, ParamId};
use burn::tensor::{DType, Device, Tensor};

use super::body::StageBody;
use super::error::StageError;
use super::module_parameters::{
    NamedTensor, device_of, filled, parameters_of, running_statistics_of, with_values,
};
use super::parameter_table::ParameterTable;
use super::shards::{Catches, Shards};
use crate::nn::{Deferred, rounded_to};
use crate::tensor::shard::{RowShard, RowShards};
use crate::tensor::{OptionalTensors, Precision, Value};

/// The module of a stage, on the stage's device.
pub(super) struct HeldModule<M: StageBody> {
    /// `None` only while the module is changed.
    module: Option<M>,
    /// The copy of the module with rounded parameters, with which a stage of half precision computes. It is
    /// made when it is needed, and dropped when the module is changed.
    rounded: OnceCell<M>,
    pub(super) precision: Precision,
    /// The device on which the stage computes, with a tape.
    pub(super) device: Device,
    table: Arc<ParameterTable>,
    /// The parameters that were frozen after the launch.
    pub(super) frozen: HashSet<ParamId>,
    /// Present if the parameters are sharded over replicas.
    shards: Option<Shards>,
}

/// A module for one forward that is recorded, and the collectors of the gradients of its parameters.
pub(super) struct Recording<'a, M: Clone> {
    pub(super) module: Cow<'a, M>,
    pub(super) catches: Catches,
    pub(super) deferred: Deferred,
}

impl<M: StageBody> HeldModule<M> {
    /// Holds `module`, which has the parameters of `table`. `row_shards` are this replica's rows of the
    /// parameters, if replicas share them, including the parameters in `frozen`.
    pub(super) fn new(
        Moved { module, device, precision }: Moved<M>,
        table: Arc<ParameterTable>,
        frozen: HashSet<ParamId>,
        row_shards: Option<RowShards>,
    ) -> Self {
        let (module, shards) = match row_shards {
            None => (module, None),
            Some(row_shards) => {
                let row_shard_of = |index| {
                    if table.is_on_one_replica(index) { row_shards.experts } else { row_shards.others }
                };
                let (module, shards) = Shards::cut(module, row_shard_of, &frozen);
                (module, Some(shards))
            }
        };
        Self { module: Some(module), rounded: OnceCell::new(), precision, device, table, frozen, shards }
    }

    /// Returns a module with the same parameters, which shares their storage. Whole parameters of a sharded stage
    /// stay with this one, which must not have them.
    pub(super) fn copy(&self) -> Self {
        Self {
            module: Some(self.settled().clone()),
            rounded: OnceCell::new(),
            precision: self.precision,
            device: self.device.clone(),
            table: self.table.clone(),
            frozen: self.frozen.clone(),
            shards: self.shards.as_ref().map(Shards::released_copy),
        }
    }

    /// Returns the module that is left when the parameters of a sharded stage are released.
    pub(super) fn released(&self) -> M {
        let module = self.settled().clone();
        match &self.shards {
            Some(shards) => shards.with_rows(module),
            None => module,
        }
    }

    pub(super) fn get(&self) -> &M {
        self.module.as_ref().expect("the module is away only while it is changed")
    }

    /// Returns whether a change of the module has failed, so that the stage has lost it.
    pub(super) fn is_lost(&self) -> bool {
        self.module.is_none()
    }

    /// Returns the module that computes: in half precision, the copy with rounded parameters.
    pub(super) fn computing(&self) -> &M {
        match self.precision.half() {
            Some(half) => self.rounded.get_or_init(|| self.rounded_to(half)),
            None => self.get(),
        }
    }

    fn rounded_to(&self, half: DType) -> M {
        let mut made: HashMap<usize, Value> = HashMap::new();
        let (module, outcome) = filled(self.get().clone(), |index, held| {
            let original = self.table.original(index).and_then(|original| made.get(&original).cloned());
            let value = original.or_else(|| rounded(index, held, half, &self.table, &|_| true));
            made.extend(value.clone().map(|value| (index, value)));
            Ok(value)
        });
        outcome.unwrap_or_else(|never: Infallible| match never {});
        if let Some(shards) = &self.shards {
            shards.look_up_in(&module);
        }
        module
    }

    /// Rounds the parameters whose paths `contains` accepts to the precision in which the stage computes, so
    /// that the computing copy shares their storage.
    pub(super) fn round(&mut self, contains: &dyn Fn(&str) -> bool) {
        let Some(half) = self.precision.half() else { return };
        let table = self.table.clone();
        let outcome = self.replace_with(|module| {
            filled(module, |index, held| Ok(rounded(index, held, half, &table, contains)))
        });
        outcome.unwrap_or_else(|never: Infallible| match never {});
    }

    /// Returns the module that the last forward has used, if it still exists, and otherwise the module
    /// itself.
    pub(super) fn last_computing(&self) -> &M {
        self.rounded.get().unwrap_or_else(|| self.get())
    }

    /// Returns the module with the running statistics that the last forward left. Burn keeps a thread's last
    /// update separate until the statistics are read, and visiting or mapping the module does not read them.
    pub(super) fn settled(&self) -> &M {
        drop(self.get().valid());
        self.get()
    }

    /// Returns the module for a forward that is recorded.
    pub(super) fn recording(&self) -> Recording<'_, M> {
        let deferred = Deferred::new(self.table.ids.clone());
        let Some(shards) = &self.shards else {
            return Recording { module: Cow::Borrowed(self.computing()), catches: Catches::new(), deferred };
        };
        let (module, catches, deferred) = shards.forward(self.computing().clone(), deferred);
        Recording { module: Cow::Owned(module), catches, deferred }
    }

    /// Puts the module that `change` returns in place of this one. It has the same parameters.
    pub(super) fn replace(&mut self, change: impl FnOnce(M) -> M) {
        self.replace_with(|module| (change(module), ()));
    }

    /// Like [`HeldModule::replace`], but also returns the result of `change`.
    pub(super) fn replace_with<R>(&mut self, change: impl FnOnce(M) -> (M, R)) -> R {
        drop(self.rounded.take());
        let module = self.module.take().expect("the module is away only while it is changed");
        let (module, result) = change(module);
        self.module = Some(module);
        result
    }

    /// Replaces the module by `module`, which has the same parameters. A change that has panicked may have lost
    /// the old module.
    pub(super) fn put(&mut self, module: M) {
        drop(self.rounded.take());
        self.module = Some(module);
    }

    /// Returns the state of sharded parameters; `None` if this replica holds all parameters.
    pub(super) fn shards(&self) -> Option<&Shards> {
        self.shards.as_ref()
    }

    /// Returns the rows of a parameter that this replica holds.
    pub(super) fn row_shard(&self, index: usize) -> RowShard {
        self.shards.as_ref().map_or(RowShard::WHOLE, |shards| shards.row_shard(index))
    }

    /// Returns whether a parameter is gathered before the stage computes with it.
    pub(super) fn is_sharded(&self, index: usize) -> bool {
        self.row_shard(index) != RowShard::WHOLE
    }

    /// Puts whole parameters in place of the rows of a sharded stage. A copy of a parameter gets the storage of
    /// the first copy.
    pub(super) fn gather(&mut self, mut whole: OptionalTensors) {
        for index in 0..whole.len() {
            if let Some(original) = self.table.original(index) {
                whole[index] = whole[original].clone();
            }
        }
        let mut shards = self.shards.take().expect("a stage is sharded before its parameters are gathered");
        self.replace(|module| shards.gather(module, whole));
        self.shards = Some(shards);
    }

    /// Puts the rows of a sharded stage back in place of its whole parameters.
    pub(super) fn release(&mut self) {
        let Some(mut shards) = self.shards.take() else { return };
        if !self.is_lost() {
            self.replace(|module| shards.release(module));
        }
        self.shards = Some(shards);
    }

    /// Returns the values of the parameters that are not trained, such as running statistics; `None` for the
    /// others, and an empty list if all are trained.
    pub(super) fn buffers(&self) -> OptionalTensors {
        self.floats_if(self.table.has_buffers, |_, parameter| !parameter.is_trained)
    }

    /// Returns the parameters that a forward may change, with the last changes; an empty list if there are
    /// none. Parameters that were frozen after the launch were trained before, and may be sharded. An expert
    /// that other replicas do not have is not averaged with theirs.
    pub(super) fn running_statistics(&self) -> OptionalTensors {
        // Between two steps, the rows of sharded parameters count as not trained.
        self.floats_if(self.table.has_statistics, |index, parameter| {
            !parameter.is_trained
                && !self.frozen.contains(&parameter.id)
                && !self.is_sharded(index)
                && !self.table.is_on_one_replica(index)
        })
    }

    /// Returns the values that are wanted, by index; an empty list if the table says that there are none.
    fn floats_if(&self, has_any: bool, is_wanted: impl Fn(usize, &NamedTensor) -> bool) -> OptionalTensors {
        // A module of half precision has no running statistics.
        if self.precision.half().is_some() || !has_any {
            return OptionalTensors::new();
        }
        let floats = parameters_of(self.settled()).into_iter().enumerate();
        floats.map(|(index, parameter)| is_wanted(index, &parameter).then_some(parameter.value)).collect()
    }

    /// Undoes the changes of a second forward, or of a failed step, to the running statistics.
    pub(super) fn restore_buffers(&mut self, buffers: OptionalTensors) {
        if !buffers.is_empty() {
            self.settled();
            self.replace(|module| with_values(module, buffers));
        }
    }

    /// Freezes the parameters whose paths `contains` accepts, or trains them if they are frozen. Returns the
    /// parameters that it has changed.
    pub(super) fn freeze(&mut self, contains: &dyn Fn(&str) -> bool, freeze: bool) -> HashSet<ParamId> {
        let floats = parameters_of(self.get());
        let can_change = |parameter: &NamedTensor| {
            if freeze { parameter.is_trained } else { self.frozen.contains(&parameter.id) }
        };
        let chosen = floats.iter().zip(&self.table.paths);
        let chosen = chosen.filter(|(parameter, path)| can_change(parameter) && contains(path));
        let chosen: HashSet<ParamId> = chosen.map(|(parameter, _)| parameter.id).collect();
        drop(floats);
        self.replace(|module| module.map(&mut RequireGrad { of: &chosen, requires: !freeze }));
        if freeze {
            self.frozen.extend(&chosen);
        } else {
            self.frozen.retain(|id| !chosen.contains(id));
        }
        chosen
    }
}

/// Returns the value of a parameter, rounded; `None` if it is not rounded: `contains` does not accept its path,
/// or it stays in single precision.
fn rounded(
    index: usize,
    held: &Value,
    half: DType,
    table: &ParameterTable,
    contains: &dyn Fn(&str) -> bool,
) -> Option<Value> {
    let is_rounded =
        held.dtype() == DType::F32 && !table.stays_single(index) && contains(&table.paths[index]);
    // The number of dimensions does not matter here; 1 is arbitrary.
    let value = || Tensor::<1>::from_dispatch(held.clone().into_dispatch());
    is_rounded.then(|| Value::of(rounded_to(value(), half)))
}

/// A module on the device of its stage, which computes in the precision of its stage.
pub(super) struct Moved<M> {
    pub(super) module: M,
    device: Device,
    precision: Precision,
}

impl<M: StageBody> Moved<M> {
    /// Moves `module` to `device` and onto a tape of its own. Without a device it stays where its first
    /// parameter is.
    ///
    /// # Errors
    /// When the module or the device does not compute in the precision.
    pub(super) fn new(module: M, device: Option<&Device>, precision: Precision) -> Result<Self, StageError> {
        let own = device_of(&module);
        let module = if own.is_autodiff() { module } else { module.train() };
        let device = device.unwrap_or(&own).clone().autodiff();
        // Also on the same device: the module may be a copy that has the leaves of another stage's
        // parameters. Burn locks the graph of a leaf for a whole backward, in which the other stage may
        // compute (`executor/turns.rs`).
        let module = module.fork(&device);
        if let Some(layer) = precision.half().and_then(|_| running_statistics_of(&module)) {
            return Err(StageError::Mistake(format!(
                "the layer `{layer}` keeps running statistics, which are not updated in {precision}: use the precision f32, or \
                 a normalisation without running statistics"
            )));
        }
        if !precision.is_computed_on(&device) {
            return Err(StageError::Mistake(format!(
                "the device {:?} does not compute in {precision}: use another device, or the precision f32 (run.precision, \
                 `PipelineConfig::precision`)",
                device.inner()
            )));
        }
        Ok(Self { module, device, precision })
    }
}

struct RequireGrad<'a> {
    of: &'a HashSet<ParamId>,
    requires: bool,
}

impl ModuleMapper for RequireGrad<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.of.contains(&param.id) { param.set_require_grad(self.requires) } else { param }
    }
}
