//! A stage in training: its module, the tape of every microbatch in flight, the gradient sums and the optimizer. This
//! file has its state and prepares it. `compute.rs` has the actions, and `parameters.rs` the access to its parameters.
//!
//! # What a forward keeps
//!
//! The inputs become leaves of the tape. The outputs are taken off the tape and returned *by value*. The stage keeps
//! the leaves, one gradient root per float output (or the loss), and the tensors that the operations recorded for their
//! own backward. It keeps no output storage unless an operation needs it. A forward that is recomputed keeps its inputs
//! only (`recompute.rs`).

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::sync::Arc;

use burn::module::ParamId;
use burn::optim::ModuleOptimizer;
use burn::tensor::{DType, Device, Tensor};
use pipewright_schedule::{Microbatch, Slices};

use super::backward::InFlight;
use super::body::StageBody;
use super::carry::SequenceCarry;
use super::error::StageError;
use super::gradients::GradientSums;
use super::module::StageContext;
use super::module_parameters::{discrete_of, filled, parameters_of, running_statistics_of};
use super::optimizer::ConfiguredOptimizer;
use super::recompute::Promises;
use super::runner::device_of;
use super::shards::Shards;
use super::weight_work::WeightRunner;
use crate::nn::Deferred;
use crate::optimizer::mixes_rows;
use crate::random::LayerDraws;
use crate::tensor::shard::RowShard;
use crate::tensor::{OptionalTensors, Placement, Precision, Values, float_type_of};

/// A loss without the type of its target.
pub(crate) type Loss<O> = Box<dyn Fn(O, Values, &StageContext) -> Result<Tensor<1>, StageError> + Send>;

pub(crate) struct TrainingStage<M: StageBody> {
    /// `None` only while the module is changed: by the optimizer, or when parameters are gathered or released.
    pub(super) module: Option<M>,
    /// The copy of the module with rounded parameters, with which a stage of half precision computes. It is made when it
    /// is needed, and dropped when the module is changed.
    pub(super) rounded: OnceCell<M>,
    pub(super) precision: Precision,
    /// Whether each parameter has single precision in the copy too.
    pub(super) stay_single: Vec<bool>,
    /// The number of ranks that compute the stage together.
    pub(super) tensor_ranks: u32,
    /// How these ranks hold each float parameter.
    pub(super) placements: Vec<Placement>,
    pub(super) loss: Option<Loss<M::Output>>,
    /// The number of slices into which microbatches are cut.
    pub(super) slices: Slices,
    /// What the slices of microbatches in flight pass to each other.
    pub(super) carries: HashMap<Microbatch, SequenceCarry>,
    /// By the number of the microbatch, or of the slice.
    pub(super) in_flight: HashMap<Microbatch, InFlight>,
    /// Weight gradients of microbatches whose input gradients are done, of each segment from the last to the first.
    pub(super) deferred: HashMap<Microbatch, Vec<Deferred>>,
    pub(super) sums: GradientSums,
    /// The global path of each integer and boolean parameter.
    pub(super) discrete: Vec<Arc<str>>,
    /// The parameters whose gradients are summed.
    pub(super) parameters: Arc<HashSet<ParamId>>,
    /// The parameters that were frozen after the launch.
    pub(super) frozen: HashSet<ParamId>,
    /// The prefixes of the paths, the innermost first.
    pub(super) prefixes: Vec<String>,
    /// The optimizer with its state; `None` if the stage is not trained, and during an update.
    pub(super) optimizer: Option<ModuleOptimizer>,
    /// The same without state, with the groups.
    pub(super) configured: ConfiguredOptimizer,
    /// The user's function that computes weight gradients instead of the stage.
    pub(super) weight_runner: Option<WeightRunner>,
    pub(super) device: Device,
    /// Present if the parameters are sharded over replicas.
    pub(super) shards: Option<Shards>,
    /// Runs the layers, some of which may draw from the generator of their device.
    pub(super) draws: Arc<LayerDraws>,
    /// Whether a forward that is recomputed runs block by block.
    pub(super) by_block: bool,
    /// Which outputs of the recomputed forwards need a gradient.
    pub(super) promises: Promises,
    /// Whether some float parameters are not trained, such as running statistics.
    pub(super) has_buffers: bool,
    /// Their values before the first batch of the step in progress; empty between two steps.
    pub(super) kept_buffers: OptionalTensors,
    /// The element type of all float parameters; `None` if they differ or there are none.
    pub(super) float_type: Option<DType>,
    /// The values that they had before a step, if the step compares them.
    pub(super) statistics: OptionalTensors,
}

impl<M: StageBody> TrainingStage<M> {
    pub(super) fn new(module: M, loss: Option<Loss<M::Output>>) -> Self {
        let device = device_of(&module);
        let module = if device.is_autodiff() { module } else { module.train() };
        let sums = GradientSums::new(&module);
        let discrete = discrete_of(&module).iter().map(|found| module.path(&found.local).into()).collect();
        let parameters = Arc::new(sums.ids().collect());
        let stay_single =
            parameters_of(&module).iter().map(|found| module.stays_single(&found.local)).collect();
        let placements = parameters_of(&module).iter().map(|found| module.placement(&found.local)).collect();
        let found = parameters_of(&module);
        let has_buffers = found.iter().any(|found| !found.is_trained);
        let float_type = float_type_of(found.iter().map(|found| &found.value));
        drop(found);
        let device = device.autodiff();
        let draws = Arc::new(LayerDraws::new(&device, false));
        Self {
            parameters,
            module: Some(module),
            rounded: OnceCell::new(),
            precision: Precision::F32,
            stay_single,
            tensor_ranks: 1,
            placements,
            loss,
            slices: Slices::ONE,
            carries: HashMap::new(),
            in_flight: HashMap::new(),
            deferred: HashMap::new(),
            sums,
            discrete,
            optimizer: None,
            configured: ConfiguredOptimizer::default(),
            frozen: HashSet::new(),
            prefixes: Vec::new(),
            weight_runner: None,
            device,
            shards: None,
            draws,
            by_block: false,
            promises: Promises::default(),
            has_buffers,
            kept_buffers: OptionalTensors::new(),
            float_type,
            statistics: OptionalTensors::new(),
        }
    }

    /// Puts a prefix in front of every path except those of shared parameters.
    pub(super) fn add_prefix(&mut self, prefix: &str) {
        let shared = self.module().shared();
        let path = |old: &str| match shared.iter().any(|shared| shared == old) {
            true => old.into(),
            false => format!("{prefix}.{old}").into(),
        };
        self.sums.rename(path);
        self.discrete.iter_mut().for_each(|old| *old = path(old));
        self.prefixes.push(prefix.to_owned());
    }

    /// Moves the parameters to `device`, where the stage then computes. Must be called before the other methods that
    /// prepare the stage.
    pub(super) fn move_to(&mut self, device: &Device) {
        if *device != self.device {
            let device = device.clone().autodiff();
            let module = self.take_module().fork(&device);
            (self.module, self.device) = (Some(module), device);
        }
    }

    /// Sets the precision in which the stage computes. Must be called after [`TrainingStage::move_to`].
    pub(super) fn compute_in(&mut self, precision: Precision) -> Result<(), StageError> {
        self.precision = precision;
        let layer = precision.half().and_then(|_| running_statistics_of(self.module()));
        if let Some(layer) = layer {
            return Err(StageError::RunningStatistics { layer: layer.into(), precision });
        }
        if !precision.is_computed_on(&self.device) {
            return Err(StageError::Precision {
                device: format!("{:?}", self.device.clone().inner()).into(),
                precision,
            });
        }
        Ok(())
    }

    /// Sets the number of slices of microbatches. Returns an error if the module cannot run slices.
    pub(super) fn run_slices(&mut self, slices: Slices) -> Result<(), StageError> {
        self.slices = slices;
        match self.module().refuses_slices() {
            Some(reason) if !slices.is_one() => Err(StageError::Slices { slices, reason }),
            _ => Ok(()),
        }
    }

    /// Drops what the forwards of a microbatch have passed to each other, when they are done.
    pub(super) fn end_forwards_of(&mut self, microbatch: Microbatch, is_trained: bool) {
        match self.carries.get(&microbatch) {
            Some(carry) if is_trained => carry.drop_values(),
            _ => drop(self.carries.remove(&microbatch)),
        }
    }

    /// Returns an error if two places of the stage hold one parameter.
    pub(super) fn check_paths(&self) -> Result<(), StageError> {
        match self.sums.duplicate() {
            Some((first, second)) => Err(StageError::DuplicateParameter { first, second }),
            None => Ok(()),
        }
    }

    /// Sets the number of ranks that compute the stage together. Returns an error if they cannot hold the parameters as the
    /// module says, or if the optimizer's update of a parameter is not that of its parts. The optimizer must be set.
    pub(super) fn split_over(&mut self, tensor_ranks: u32) -> Result<(), StageError> {
        self.check_placements(tensor_ranks)?;
        self.tensor_ranks = tensor_ranks;
        self.draws = Arc::new(LayerDraws::new(&self.device, tensor_ranks > 1));
        let of_layer: Vec<bool> =
            self.placements.iter().map(|placement| placement.of_layer.is_some()).collect();
        match (tensor_ranks, of_layer.contains(&true)) {
            (1, false) => Ok(()),
            (1, true) => self.require_independent_elements(|place| of_layer[place]),
            _ => self.require_independent_elements(|_| true),
        }
    }

    /// Returns an error if the ranks of a tensor group cannot hold the parameters as the module says.
    fn check_placements(&self, tensor_ranks: u32) -> Result<(), StageError> {
        let parameters = self.placements.iter().zip(self.sums.paths()).zip(self.sums.shapes());
        for ((placement, path), shape) in parameters {
            let Placement { dimension, shards, of_layer, .. } = *placement;
            let fits = match of_layer {
                None => shards > 0 && tensor_ranks.is_multiple_of(shards),
                Some(index) => index < shards && tensor_ranks == 1,
            };
            if !fits || (shards > 1 && dimension >= shape.len()) {
                let (parameter, shape) = (path.clone(), shape.clone());
                return Err(StageError::Placement { parameter, shape, dimension, shards, tensor_ranks });
            }
        }
        Ok(())
    }

    pub(super) fn set_up(&mut self, weight_runner: Option<WeightRunner>, by_block: bool) {
        self.weight_runner = weight_runner;
        self.by_block = by_block;
    }

    /// Returns an error if the optimizer's update of a parameter that is cut is not that of its parts.
    fn require_independent_elements(&mut self, is_cut: impl Fn(usize) -> bool) -> Result<(), StageError> {
        let Some(optimizer) = self.fresh_optimizer() else { return Ok(()) };
        match mixes_rows(&optimizer, self.module(), is_cut) {
            Some(place) => Err(StageError::MixesRows { parameter: self.sums.paths()[place].clone() }),
            None => Ok(()),
        }
    }

    /// Shards the stage: from this call on it holds only its part of every trained parameter, and needs
    /// [`StageParameters::gather`](super::runner::StageParameters::gather) before it computes. The optimizer must be set.
    pub(super) fn shard(&mut self, part: RowShard) -> Result<(), StageError> {
        self.require_independent_elements(|_| true)?;
        let (module, shards) = Shards::cut(self.take_module(), part, &self.frozen);
        (self.module, self.shards) = (Some(module), Some(shards));
        Ok(())
    }

    pub(super) fn take_module(&mut self) -> M {
        drop(self.rounded.take());
        self.module.take().expect("the module is away only while it is changed")
    }

    pub(super) fn module(&self) -> &M {
        self.module.as_ref().expect("the module is away only while it is changed")
    }

    /// Returns the module that computes: in half precision, the copy with rounded parameters.
    pub(super) fn computing(&self) -> &M {
        match self.precision.half() {
            Some(half) => self.rounded.get_or_init(|| self.rounded_to(half)),
            None => self.module(),
        }
    }

    fn rounded_to(&self, half: DType) -> M {
        let (module, outcome) = filled(self.module().clone(), |place, held| {
            let is_rounded = held.dtype() == DType::F32 && !self.stay_single[place];
            Ok(is_rounded.then(|| held.clone().cast(half)))
        });
        outcome.unwrap_or_else(|never: Infallible| match never {});
        if let Some(shards) = &self.shards {
            shards.look_up_in(&module);
        }
        module
    }

    /// Returns the module with the running statistics that the last forward left. Burn keeps a thread's last update
    /// separate until the statistics are read, and visiting or mapping the module does not read them.
    pub(super) fn settled(&self) -> &M {
        drop(self.module().valid());
        self.module()
    }

    pub(super) fn has_loss(&self) -> bool {
        self.loss.is_some()
    }
}
