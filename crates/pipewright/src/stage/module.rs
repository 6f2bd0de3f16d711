//! What a user writes: a Burn module with a typed forward.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use pipewright_schedule::{Microbatch, StageIndex};

use crate::batch::{SideInputError, SideInputs};
use crate::random::{RandomStream, StreamKey};
use crate::tensor::Boundary;

/// A stage: a contiguous part of the model, with ordinary tensors at both edges.
///
/// The first stage's input is the data of a microbatch; every other stage's input is the output of the stage before.
/// Float outputs carry gradients back; integer and boolean ones pass without.
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
/// A layer of a [`Layers`](crate::pipeline::Layers) is one too: there, a stage is several of them, and puts the layer's
/// place before its paths.
pub trait StageModule: Module + 'static {
    /// Tensors that the stage takes.
    type Input: Boundary;
    /// Tensors that the stage returns.
    type Output: Boundary;

    /// The stage's output for one microbatch. It must depend on nothing but `self`, `input` and `context`.
    fn forward(&self, input: Self::Input, context: &StageContext) -> Self::Output;

    /// The global path of the parameter that this module knows as `local`.
    ///
    /// Gradient norms, reports and checkpoints are keyed by the global path, so a model must give a parameter the same
    /// one however it is cut. A stage that holds layers 4 to 7 as `layers.0` to `layers.3` renames them here; see also
    /// [`Stage::with_prefix`](super::Stage::with_prefix). A pipeline is not launched when two parameters have one path
    /// that is not declared as shared.
    fn parameter_path(&self, local: &str) -> String {
        local.to_owned()
    }

    /// Global paths of the parameters that other stages, or other places of this one, hold too.
    ///
    /// Each holder has a copy of its own and names the path here; copies must start equal. The pipeline sums their
    /// gradients, and gives every copy the same update.
    fn shared_parameters(&self) -> Vec<String> {
        Vec::new()
    }
}

/// Where a forward stands in the step, what it may look at beside its input, and where it leaves auxiliary losses.
#[derive(Clone, Debug)]
pub struct StageContext {
    stage: StageIndex,
    microbatch: Microbatch,
    device: Device,
    side_inputs: Arc<SideInputs>,
    /// Absent in an evaluation.
    random: Option<StreamKey>,
    auxiliary: Arc<Mutex<Vec<Auxiliary>>>,
}

/// An auxiliary loss of a stage.
#[derive(Clone, Debug)]
pub(crate) struct Auxiliary {
    pub name: Arc<str>,
    pub weight: f64,
    pub loss: Tensor<1>,
}

impl StageContext {
    /// The context of `stage` for `microbatch`; the runtime makes them, tests and unpipelined runs may.
    pub fn new(stage: StageIndex, microbatch: Microbatch) -> Self {
        Self {
            stage,
            microbatch,
            device: Device::flex(),
            side_inputs: Arc::default(),
            random: None,
            auxiliary: Arc::default(),
        }
    }

    pub(crate) fn with_side_inputs(mut self, side_inputs: Arc<SideInputs>, device: Device) -> Self {
        self.side_inputs = side_inputs;
        self.device = device;
        self
    }

    /// Gives the context the random numbers of a training step. The runtime calls it; tests and unpipelined runs may.
    pub fn with_random(mut self, key: StreamKey) -> Self {
        self.random = Some(key);
        self
    }

    /// The stage that runs.
    pub fn stage(&self) -> StageIndex {
        self.stage
    }

    /// The microbatch that it runs for.
    pub fn microbatch(&self) -> Microbatch {
        self.microbatch
    }

    /// The random numbers of the layer `name` for this microbatch and step.
    ///
    /// Name layers as their parameters are named, by a path that does not depend on the cut (`layers.3.dropout`): the
    /// numbers follow from the run's seed, the step, the microbatch and this name. In an evaluation the stream is
    /// [`RandomStream::evaluation`].
    pub fn random(&self, name: &str) -> RandomStream {
        self.random.map_or_else(RandomStream::evaluation, |key| RandomStream::new(key, name))
    }

    /// The side input `name` of this microbatch: tensors that came with
    /// [`Batch::with_split`](crate::batch::Batch::with_split) or
    /// [`with_replicated`](crate::batch::Batch::with_replicated).
    ///
    /// # Errors
    /// When the step brought none of that name, or other tensors than `T` names.
    pub fn side<T: Boundary>(&self, name: &str) -> Result<T, SideInputError> {
        self.side_inputs.tensors(name, self.microbatch, &self.device)
    }

    /// The value `name` that came with [`Batch::with_value`](crate::batch::Batch::with_value).
    ///
    /// # Errors
    /// When the step brought none of that name, or one of another type.
    pub fn value<T: Any>(&self, name: &str) -> Result<&T, SideInputError> {
        self.side_inputs.value(name)
    }

    /// Adds `weight * loss` to what the step minimises; `loss` is a scalar (shape `[1]`), the mean over the microbatch.
    ///
    /// Its gradient flows through this stage and those before it, scaled as that of the main loss. The report has the
    /// mean of `loss`, without the weight, under `name`; losses of one name are added.
    pub fn auxiliary_loss(&self, name: &str, weight: f64, loss: Tensor<1>) {
        let auxiliary = Auxiliary { name: name.into(), weight, loss };
        self.auxiliary.lock().unwrap_or_else(PoisonError::into_inner).push(auxiliary);
    }

    /// Takes the auxiliary losses that the forward left.
    pub(crate) fn take_auxiliary(&self) -> Vec<Auxiliary> {
        std::mem::take(&mut self.auxiliary.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
