//! A stage in training: its module, the tape of every microbatch in flight, the gradient sums and the optimizer. This
//! file prepares it and runs the segments of its module. `compute.rs` has the actions, and `parameters.rs` the access to
//! its parameters.
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
use pipewright_schedule::Microbatch;

use super::backward::InFlight;
use super::body::StageBody;
use super::error::StageError;
use super::forward::Replacement;
use super::gradients::GradientSums;
use super::module::StageContext;
use super::module_parameters::{discrete_of, filled, parameters_of, running_statistics_of};
use super::recompute::Promises;
use super::runner::{Forwarded, device_of};
use super::shards::{Catches, Shards};
use super::tape::{Tape, all_off_tape, as_leaf, check_scalar, off_tape, scaled, split_auxiliary};
use super::update::ConfiguredOptimizer;
use super::weight_work::WeightRunner;
use crate::autodiff::inner_of;
use crate::nn::{Deferred, at_least_single};
use crate::optimizer::mixes_rows;
use crate::tensor::shard::RowShard;
use crate::tensor::{Placement, Precision, Values, pack, unpack};

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
    loss: Option<Loss<M::Output>>,
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
    pub(super) optimizer: Option<ModuleOptimizer>,
    pub(super) configured: ConfiguredOptimizer,
    /// The user's function that computes weight gradients instead of the stage.
    pub(super) weight_runner: Option<WeightRunner>,
    pub(super) device: Device,
    /// Present if the parameters are sharded over replicas.
    pub(super) shards: Option<Shards>,
    /// Whether a forward that is recomputed runs block by block.
    pub(super) by_block: bool,
    /// Which outputs of the recomputed forwards need a gradient.
    pub(super) promises: Promises,
    /// Whether some float parameters are not trained, such as running statistics.
    pub(super) has_buffers: bool,
}

/// The data that all forwards of a microbatch share: the first one, and the second one if it is recomputed.
pub(super) struct Pass {
    pub(super) context: StageContext,
    pub(super) target: Option<Values>,
    pub(super) loss_weight: f64,
}

/// A part of a stage's module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Segment {
    Whole,
    Block { index: usize, of: usize },
}

impl Segment {
    /// Returns the block; 0 for the whole module.
    pub(super) fn index(self) -> usize {
        match self {
            Self::Whole => 0,
            Self::Block { index, .. } => index,
        }
    }

    /// Returns the block after this segment.
    pub(super) fn next(self) -> Option<usize> {
        match self {
            Self::Whole => None,
            Self::Block { index, of } => (index + 1 < of).then_some(index + 1),
        }
    }

    pub(super) fn is_last(self) -> bool {
        self.next().is_none()
    }

    /// Runs the segment of `module`, or `replacement` in its place.
    pub(super) fn run<M: StageBody>(
        self,
        module: &M,
        inputs: Values,
        context: &StageContext,
        replacement: Option<Replacement<'_>>,
    ) -> Result<Values, StageError> {
        match (replacement, self) {
            (Some(replacement), _) => replacement(module.exposed(), inputs, context),
            (None, Self::Whole) => Ok(pack(module.run(inputs, context)?)),
            (None, Self::Block { index, .. }) => module.run_block(index, inputs, context),
        }
    }
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
        let has_buffers = parameters_of(&module).iter().any(|found| !found.is_trained);
        let device = device.autodiff();
        Self {
            parameters,
            module: Some(module),
            rounded: OnceCell::new(),
            precision: Precision::F32,
            stay_single,
            tensor_ranks: 1,
            placements,
            loss,
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
            by_block: false,
            promises: Promises::default(),
            has_buffers,
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
        if tensor_ranks > 1 { self.require_independent_elements() } else { Ok(()) }
    }

    /// Returns an error if the ranks of a tensor group cannot hold the parameters as the module says.
    fn check_placements(&self, tensor_ranks: u32) -> Result<(), StageError> {
        let parameters = self.placements.iter().zip(self.sums.paths()).zip(self.sums.shapes());
        for ((placement, path), shape) in parameters {
            let Placement { dimension, slices, .. } = *placement;
            let divides = slices > 0 && tensor_ranks.is_multiple_of(slices);
            if !divides || (slices > 1 && dimension >= shape.len()) {
                let (parameter, shape) = (path.clone(), shape.clone());
                return Err(StageError::Placement { parameter, shape, dimension, slices, tensor_ranks });
            }
        }
        Ok(())
    }

    pub(super) fn set_up(&mut self, weight_runner: Option<WeightRunner>, by_block: bool) {
        self.weight_runner = weight_runner;
        self.by_block = by_block;
    }

    /// Returns an error if the optimizer's update of a parameter is not that of its parts.
    fn require_independent_elements(&mut self) -> Result<(), StageError> {
        let Some(optimizer) = self.fresh_optimizer() else { return Ok(()) };
        match mixes_rows(&optimizer, self.module()) {
            Some(place) => Err(StageError::MixesRows { parameter: self.sums.paths()[place].clone() }),
            None => Ok(()),
        }
    }

    /// Shards the stage: from this call on it holds only its part of every trained parameter, and needs
    /// [`StageParameters::gather`](super::runner::StageParameters::gather) before it computes. The optimizer must be set.
    pub(super) fn shard(&mut self, part: RowShard) -> Result<(), StageError> {
        self.require_independent_elements()?;
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

    pub(super) fn loss_of(
        &self,
        output: Values,
        target: Option<Values>,
        context: &StageContext,
    ) -> Result<Option<Tensor<1>>, StageError> {
        let Some(loss) = &self.loss else { return Ok(None) };
        let target = target.ok_or(StageError::NoTarget)?;
        let loss = loss(unpack(output).map_err(StageError::Input)?, target, context)?;
        check_scalar(&loss, || "the loss".to_owned())?;
        Ok(Some(at_least_single(loss)))
    }

    /// Runs a segment of the stage's module and records its backward.
    pub(super) fn record(
        &self,
        segment: Segment,
        inputs: Values,
        pass: &Pass,
        keep_outputs: bool,
        replacement: Option<Replacement<'_>>,
    ) -> Result<(Forwarded, Tape), StageError> {
        let deferred = Deferred::new(self.parameters.clone());
        let Some(shards) = &self.shards else {
            let run = || self.run_segment(self.computing(), segment, inputs, pass, keep_outputs, replacement);
            let (forwarded, tape) = deferred.collect(run)?;
            return Ok((forwarded, tape.with(deferred, Catches::new())));
        };
        let (module, catches, deferred) = shards.forward(self.computing().clone(), deferred);
        let run = || self.run_segment(&module, segment, inputs, pass, keep_outputs, replacement);
        let (forwarded, tape) = deferred.collect(run)?;
        Ok((forwarded, tape.with(deferred, catches)))
    }

    /// Runs a segment of `module`; after the last one, the loss. The tape is empty if nothing in `module` and no input
    /// requires a gradient.
    pub(super) fn run_segment(
        &self,
        module: &M,
        segment: Segment,
        inputs: Values,
        pass: &Pass,
        keep_outputs: bool,
        replacement: Option<Replacement<'_>>,
    ) -> Result<(Forwarded, Tape), StageError> {
        let Pass { context, target, loss_weight } = pass;
        let rounded = inputs.into_iter().map(|input| self.precision.rounded(input));
        let (inputs, leaves) = rounded.map(|input| as_leaf(input, &self.device)).unzip();
        let output = segment.run(module, inputs, context, replacement)?;
        if let Some(what) = context.take_not_finite() {
            return Err(StageError::NotFinite { what });
        }
        if self.loss.is_some() && segment.is_last() {
            let output: Values = output.into_iter().map(|output| self.precision.widened(output)).collect();
            let outputs = if keep_outputs { all_off_tape(&output) } else { Values::new() };
            let loss =
                self.loss_of(output, target.clone(), context)?.expect("a stage with a loss computes it");
            let (auxiliary, weighted) = split_auxiliary(context.take_auxiliary(), *loss_weight)?;
            let report = inner_of(loss.clone());
            let tape = Tape::new(leaves, Some(scaled(loss, *loss_weight)), Vec::new(), weighted);
            return Ok((Forwarded { outputs, loss: Some(report), auxiliary }, tape));
        }
        let (auxiliary, weighted) = split_auxiliary(context.take_auxiliary(), *loss_weight)?;
        let rounded = output.into_iter().map(|output| self.precision.rounded(output));
        let (outputs, roots) = rounded.map(off_tape).unzip();
        Ok((Forwarded { outputs, loss: None, auxiliary }, Tape::new(leaves, None, roots, weighted)))
    }
}
