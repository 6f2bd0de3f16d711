//! The trait that a user implements: a Burn module with a typed forward.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use pipewright_schedule::{Microbatch, StageIndex};

use crate::batch::{SideInputError, SideInputs};
use crate::random::{RandomStream, StreamKey};
use crate::tensor::{Boundary, BoundaryError, Placement, Values, pack, unpack};

/// A stage: a contiguous part of the model, with ordinary tensors at both edges.
///
/// The first stage's input is the data of a microbatch; every other stage's input is the output of the previous stage.
/// Gradients flow back through float outputs only; integer and boolean outputs have none.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use pipewright::stage::{StageContext, StageModule};
///
/// #[derive(Module, Debug)]
/// struct Middle {
///     linear: Linear,
/// }
///
/// impl StageModule for Middle {
///     type Input = Tensor<2>;
///     type Output = Tensor<2>;
///
///     fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
///         self.linear.forward(input)
///     }
///
///     fn parameter_path(&self, local: &str) -> String {
///         format!("middle.{local}")
///     }
/// }
/// ```
///
/// A layer of a [`Layers`](crate::pipeline::Layers) implements this trait too. There, a stage consists of several
/// layers and puts the place of each layer in front of its paths.
pub trait StageModule: Module + 'static {
    /// Tensors that the stage takes.
    type Input: Boundary;
    /// Tensors that the stage returns.
    type Output: Boundary;

    /// Returns the stage's output for one microbatch. It must depend only on `self`, `input` and `context`.
    fn forward(&self, input: Self::Input, context: &StageContext) -> Self::Output;

    /// Returns the number of blocks: parts of the module that run one after another. If stages are recomputed block by
    /// block ([`Recompute::Block`](pipewright_schedule::Recompute::Block)), or a hook's function runs them
    /// ([`ForwardRun::run_block`](crate::hook::ForwardRun::run_block)), [`StageModule::forward_block`] runs them one by one.
    /// No two blocks use the same parameter.
    fn blocks(&self) -> usize {
        1
    }

    /// Runs one block, counted from 0. The first one takes the tensors of the stage's input, each other one those that
    /// the block before it returns, and the last one returns those of the stage's output. Together they compute what
    /// [`StageModule::forward`] computes. A module with several blocks must implement it.
    ///
    /// # Errors
    /// When the tensors are not those that the block takes.
    fn forward_block(
        &self,
        block: usize,
        input: Values,
        context: &StageContext,
    ) -> Result<Values, BoundaryError> {
        let _ = block;
        Ok(pack(self.forward(unpack(input)?, context)))
    }

    /// Returns the global path of the parameter that this module knows as `local`.
    ///
    /// Gradient norms, reports and checkpoints use the global path as the key, so a model must give a parameter the
    /// same path however the model is cut. A stage that holds layers 4 to 7 as `layers.0` to `layers.3` renames them
    /// here; see also [`Stage::with_prefix`](super::Stage::with_prefix). A pipeline does not launch if two parameters
    /// have the same path and do not declare it as shared.
    fn parameter_path(&self, local: &str) -> String {
        local.to_owned()
    }

    /// Returns whether the parameter that this module knows as `local` has single precision even if the pipeline has half
    /// precision ([`Precision`](crate::tensor::Precision)). The module casts between its types itself, in both
    /// directions.
    fn stays_in_single_precision(&self, local: &str) -> bool {
        let _ = local;
        false
    }

    /// Returns how the ranks of a tensor group hold the parameter that this module knows as `local`
    /// ([`Pipeline::launch_split`](crate::pipeline::Pipeline::launch_split)). By default every rank holds the whole parameter
    /// and computes its whole gradient.
    fn placement(&self, local: &str) -> Placement {
        let _ = local;
        Placement::REPLICATED
    }

    /// Returns the global paths of the parameters that other stages, or other places of this stage, hold too.
    ///
    /// Each holder has its own copy and names the path here. The copies must start equal. The pipeline sums their
    /// gradients and gives every copy the same update.
    fn shared_parameters(&self) -> Vec<String> {
        Vec::new()
    }
}

/// The stage and the microbatch of a forward, the further inputs that it may read, and the auxiliary losses that it
/// adds.
#[derive(Clone, Debug)]
pub struct StageContext {
    stage: StageIndex,
    microbatch: Microbatch,
    device: Device,
    side_inputs: Arc<SideInputs>,
    /// `None` in an evaluation.
    random: Option<StreamKey>,
    auxiliary: Arc<Mutex<Vec<Auxiliary>>>,
    not_finite: Arc<Mutex<Option<String>>>,
}

/// An auxiliary loss of a stage.
#[derive(Clone, Debug)]
pub(crate) struct Auxiliary {
    pub name: Arc<str>,
    pub weight: f64,
    pub loss: Tensor<1>,
}

impl StageContext {
    /// Makes the context of `stage` for `microbatch`. The runtime calls it; tests and code without a pipeline may too.
    pub fn new(stage: StageIndex, microbatch: Microbatch) -> Self {
        Self {
            stage,
            microbatch,
            device: Device::flex(),
            side_inputs: Arc::default(),
            random: None,
            auxiliary: Arc::default(),
            not_finite: Arc::default(),
        }
    }

    pub(crate) fn with_side_inputs(mut self, side_inputs: Arc<SideInputs>, device: Device) -> Self {
        self.side_inputs = side_inputs;
        self.device = device;
        self
    }

    /// Sets the key of the random numbers of a training step. The runtime calls it; tests and code without a pipeline
    /// may too.
    pub fn with_random(mut self, key: StreamKey) -> Self {
        self.random = Some(key);
        self
    }

    /// Returns the stage that runs.
    pub fn stage(&self) -> StageIndex {
        self.stage
    }

    /// Returns the microbatch for which the stage runs.
    pub fn microbatch(&self) -> Microbatch {
        self.microbatch
    }

    /// Returns the random numbers of the layer `name` for this microbatch and step.
    ///
    /// Name layers as their parameters are named, by a path that does not depend on the cut (`layers.3.dropout`): the
    /// numbers depend only on the run's seed, the step, the microbatch and this name. In an evaluation the stream is
    /// [`RandomStream::evaluation`].
    pub fn random(&self, name: &str) -> RandomStream {
        self.random.map_or_else(RandomStream::evaluation, |key| RandomStream::new(key, name))
    }

    /// Returns the side input `name` of this microbatch. [`Batch::with_split`](crate::batch::Batch::with_split) and
    /// [`with_replicated`](crate::batch::Batch::with_replicated) add side inputs to a step.
    ///
    /// # Errors
    /// When the step has no side input of that name, or its tensors are not those of `T`.
    pub fn side<T: Boundary>(&self, name: &str) -> Result<T, SideInputError> {
        self.side_inputs.tensors(name, self.microbatch, &self.device)
    }

    /// Returns the value `name` that [`Batch::with_value`](crate::batch::Batch::with_value) added to the step.
    ///
    /// # Errors
    /// When the step has no value of that name, or one of another type.
    pub fn value<T: Any>(&self, name: &str) -> Result<&T, SideInputError> {
        self.side_inputs.value(name)
    }

    /// Adds `weight * loss` to the loss of the step. `loss` is a scalar (shape `[1]`), the mean over the microbatch.
    ///
    /// Its gradient flows through this stage and those before it, with the same scale as that of the main loss. The
    /// report has the mean of `loss`, without the weight, under `name`. Losses of the same name are added, in the order
    /// of the layers whatever the cut.
    pub fn auxiliary_loss(&self, name: &str, weight: f64, loss: Tensor<1>) {
        let auxiliary = Auxiliary { name: name.into(), weight, loss };
        self.auxiliary.lock().unwrap_or_else(PoisonError::into_inner).push(auxiliary);
    }

    /// Fails the step because a number inside the stage is infinite or not a number. Without this call the failure
    /// would only show in the loss. `what` names the number and its layer. The parameters keep their values from before
    /// the step. An evaluation continues.
    pub fn not_finite(&self, what: &str) {
        let mut first = self.not_finite.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert_with(|| what.to_owned());
    }

    /// Takes out the name of the number that the forward reported as not finite.
    pub(crate) fn take_not_finite(&self) -> Option<String> {
        self.not_finite.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Takes out the auxiliary losses that the forward added.
    pub(crate) fn take_auxiliary(&self) -> Vec<Auxiliary> {
        std::mem::take(&mut self.auxiliary.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
