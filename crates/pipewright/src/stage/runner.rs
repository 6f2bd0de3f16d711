//! The interface between a stage and the executor, without the types of the user's model.

use std::sync::Arc;

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::{Device, Tensor, TensorData};
use pipewright_schedule::Microbatch;

use super::body::{Skips, StageBody};
use super::module::{Auxiliary, StageContext, StageModule};
use super::training::{Loss, TrainingStage};
use super::weights::{WeightRunner, WeightWork};
use crate::checkpoint::{Checkpoint, CheckpointError, StageState};
use crate::tensor::shard::RowShard;
use crate::tensor::{Boundary, BoundaryError, OptionalTensor, OptionalTensors, Values, unpack};

/// A stage that a pipeline can run on a rank.
///
/// Only the last stage of a training pipeline has a loss.
pub struct Stage {
    pub(crate) runner: Box<dyn Runner>,
}

impl Stage {
    /// Makes a stage that sends its output to the next stage.
    pub fn new<M: StageModule>(module: M) -> Self {
        Self::of_body(module, None)
    }

    /// Makes the last stage. `loss` takes the stage's output and the microbatch's targets, and returns a scalar (shape
    /// `[1]`), the *mean* over the microbatch. The loss of a step is the mean over its microbatches.
    pub fn with_loss<M, T, L>(module: M, loss: L) -> Self
    where
        M: StageModule,
        T: Boundary,
        L: Fn(M::Output, T) -> Tensor<1> + Send + 'static,
    {
        Self::with_context_loss(module, move |output, target, _: &StageContext| loss(output, target))
    }

    /// As [`Stage::with_loss`], for a loss that also reads side inputs ([`StageContext::side`]), values
    /// ([`StageContext::value`]) or the microbatch's number. It may add auxiliary losses.
    pub fn with_context_loss<M, T, L>(module: M, loss: L) -> Self
    where
        M: StageModule,
        T: Boundary,
        L: Fn(M::Output, T, &StageContext) -> Tensor<1> + Send + 'static,
    {
        let loss = move |output, target, context: &StageContext| {
            Ok(loss(output, unpack(target).map_err(StageError::Target)?, context))
        };
        Self::of_body(module, Some(Box::new(loss)))
    }

    /// Passes the weight gradients that wait for `W` to `runner` instead of computing them in order, for example to
    /// interleave them with other work, to time them, or to defer them further within the action. `runner` is called
    /// once per microbatch, in `W` or at the end of `B`. The stage then computes the weight gradients that `runner` has
    /// not computed.
    pub fn with_weight_runner(
        mut self,
        runner: impl FnMut(Microbatch, &mut WeightWork) + Send + 'static,
    ) -> Self {
        self.runner.set_weight_runner(Box::new(runner));
        self
    }

    /// Puts `prefix` and a dot in front of every parameter's path, for a module that does not know its place in the
    /// model: `linear.weight` becomes `blocks.1.linear.weight`. Paths that the module declares as shared do not change.
    ///
    /// Two stages must not use the same path for different parameters. If the prefix depends on the part of the model
    /// and not on the stage's number, a run can resume from a checkpoint under another cut.
    pub fn with_prefix(mut self, prefix: &str) -> Self {
        self.runner.add_prefix(prefix);
        self
    }

    pub(crate) fn of_body<M: StageBody>(body: M, loss: Option<Loss<M::Output>>) -> Self {
        Self { runner: Box::new(TrainingStage::new(body, loss)) }
    }
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stage").field("parameters", &self.runner.paths().len()).finish_non_exhaustive()
    }
}

/// The options of a forward.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForwardTask {
    /// The weight of the microbatch: all its losses are multiplied by it on the tape. It is 1 unless microbatches
    /// differ in size.
    pub loss_weight: f64,
    /// Whether the last stage returns its outputs in addition to its loss.
    pub keep_outputs: bool,
}

/// The results of a forward. The stage keeps none of them.
pub(crate) struct Forwarded {
    /// The stage's outputs, off the tape. A stage with a loss returns them only if they are asked for.
    pub outputs: Values,
    /// The last stage's loss, off the tape (shape `[1]`).
    pub loss: Option<Tensor<1>>,
    /// Auxiliary losses in the order in which they were added, off the tape.
    pub auxiliary: Vec<Auxiliary>,
}

/// A parameter of a stage, as described to other ranks.
pub(crate) struct Held {
    pub path: Arc<str>,
    pub shape: Vec<usize>,
    /// Its values if the stage declares it as shared, otherwise `None`.
    pub shared: Option<TensorData>,
}

/// The operations of a stage that the executor uses.
pub(crate) trait Runner: Send {
    /// Runs the stage for a microbatch and keeps the tensors that its backward needs.
    fn forward(
        &mut self,
        context: &StageContext,
        inputs: Values,
        target: Option<Values>,
        task: ForwardTask,
    ) -> Result<Forwarded, StageError>;

    /// Runs the stage without a tape.
    fn infer(
        &self,
        context: &StageContext,
        inputs: Values,
        target: Option<Values>,
    ) -> Result<Forwarded, StageError>;

    /// Returns the gradients of the microbatch's inputs. Defers weight gradients until [`Runner::backward_weights`]
    /// where possible, and adds the others to the sums.
    fn backward_inputs(
        &mut self,
        microbatch: Microbatch,
        gradients: OptionalTensors,
    ) -> Result<OptionalTensors, StageError>;

    /// Adds the weight gradients that the microbatch's [`Runner::backward_inputs`] deferred to the sums. Returns the
    /// number of products that this took.
    fn backward_weights(&mut self, microbatch: Microbatch) -> usize;

    /// Returns the global path of each float parameter, in the stage's own order.
    fn paths(&self) -> &[Arc<str>];

    /// Puts a prefix in front of every path except those of shared parameters.
    fn add_prefix(&mut self, prefix: &str);

    /// Checks that the stage can be trained.
    fn check(&self) -> Result<(), StageError>;

    /// Returns every float parameter of the stage, in the order of [`Runner::paths`], then the integer and boolean
    /// parameters.
    fn held(&self) -> Vec<Held>;

    /// Returns the tensors that come from or go to stages that are not neighbours.
    fn skips(&self) -> &Skips;

    /// Returns the gradient sum of the parameter at `place` of [`Runner::paths`].
    fn gradient(&self, place: usize) -> OptionalTensor;

    /// Replaces the gradient sum of the parameter at `place`. In a sharded stage the last replacement is the sum of its
    /// part.
    fn set_gradient(&mut self, place: usize, gradient: OptionalTensor);

    /// Returns the sum of the squares of each parameter's gradient sum, in the order of [`Runner::paths`]. Squares are
    /// added within each of `parts` parts first, so that replicas get the same bits whether each has all parts or only
    /// its own.
    fn gradient_squares(&self, parts: u32) -> Vec<f64>;

    /// Moves the stage's parameters to `device`, where it then computes. Must be called before any other method that
    /// changes the stage.
    fn move_to(&mut self, device: &Device);

    /// Shards the stage: from this call on it holds only its part of every trained parameter, and needs
    /// [`Runner::gather`] before it computes. The optimizer must be set first.
    fn shard(&mut self, part: RowShard) -> Result<(), StageError>;

    /// Returns the rows of each parameter that a sharded stage holds; `None` if it holds no rows or the whole
    /// parameter.
    fn rows(&self) -> OptionalTensors;

    /// Gives a sharded stage its whole parameters, in the order of [`Runner::paths`], until [`Runner::release`]. The
    /// entry of a parameter that is not sharded is `None`.
    fn gather(&mut self, whole: OptionalTensors);

    /// Reduces the parameters of a sharded stage to its part again.
    fn release(&mut self);

    /// Multiplies the gradient sums by `factor`, takes one optimizer step with them and clears them.
    fn update(&mut self, factor: f64, learning_rate: f64);

    /// Drops every microbatch in flight and every gradient, which restores the state before the step.
    fn reset(&mut self);

    /// Sets the user's function that computes deferred weight gradients.
    fn set_weight_runner(&mut self, runner: WeightRunner);

    /// Sets the optimizer of the stage.
    fn set_optimizer(&mut self, optimizer: ModuleOptimizer);

    /// Returns the parameters' values, in the order of [`Runner::paths`]. A sharded stage returns its part of them
    /// unless they are gathered.
    fn parameters(&self) -> Vec<TensorData>;

    /// Returns the current parameters and optimizer. They share storage with the stage.
    fn state(&self) -> StageState;

    /// Restores parameters and optimizer state. After an error, some of them are restored and others are not.
    fn restore(&mut self, checkpoint: &Checkpoint) -> Result<(), CheckpointError>;

    /// Returns the device on which the stage computes.
    fn device(&self) -> Device;

    /// Returns whether the stage ends in a loss.
    fn has_loss(&self) -> bool;
}

/// Why a stage cannot run an action.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum StageError {
    /// The tensors that arrived do not fit the stage's input type.
    #[error("the stage cannot take its input: {0}")]
    Input(#[source] BoundaryError),
    /// The targets do not fit the type that the loss takes.
    #[error("the loss cannot take its targets: {0}")]
    Target(#[source] BoundaryError),
    /// The model's outputs do not fit the type that the loss takes.
    #[error("the loss cannot take the model's outputs: {0}")]
    Output(#[source] BoundaryError),
    /// A layer of a graph received tensors that it does not take.
    #[error("the layer `{layer}` cannot take its inputs: {source}")]
    Layer {
        /// The layer's node.
        layer: Arc<str>,
        /// The error of the boundary.
        source: BoundaryError,
    },
    /// A layer of a graph returned a number of tensors that differs from the graph.
    #[error(
        "the layer `{layer}` returned {found} tensor(s), and the graph says {expected}: see `node_with_outputs`"
    )]
    LayerOutputs {
        /// The layer's node.
        layer: Arc<str>,
        /// The number of tensors that it returned.
        found: usize,
        /// The number of tensors that the graph declares.
        expected: usize,
    },
    /// A number inside the stage is infinite or not a number ([`StageContext::not_finite`]). The parameters are those
    /// before the step.
    #[error(
        "{what} is not finite; the parameters are still those before this step: lower the learning rate, clip gradients, \
         or look at the data of this step"
    )]
    NotFinite {
        /// The number and its layer.
        what: String,
    },
    /// The stage has a loss, but the step has no targets.
    #[error("the stage ends in a loss, and the step brought no targets for it")]
    NoTarget,
    /// A loss that is not a scalar.
    #[error("{what} has {elements} elements; a loss is one number, the mean over the microbatch (shape [1])")]
    LossShape {
        /// The name of the loss.
        what: String,
        /// The number of its elements.
        elements: usize,
    },
    /// Two places of a stage hold the same parameter.
    #[error(
        "`{first}` and `{second}` are one parameter at two places of the stage: give each place a parameter of its own, \
         and the same path and `shared_parameters` if they are to stay equal"
    )]
    DuplicateParameter {
        /// The path of the first place.
        first: Arc<str>,
        /// The path of the second place.
        second: Arc<str>,
    },
    /// Parameters are sharded, but the optimizer's update of an element depends on other elements.
    #[error(
        "the optimizer's update of an element of `{parameter}` depends on other elements, and parameters are sharded: use \
         one that works element by element, such as `AdamW`, or keep parameters replicated"
    )]
    MixesRows {
        /// A parameter with such an update.
        parameter: Arc<str>,
    },
    /// The number of gradients differs from the number of outputs.
    #[error("{gradients} gradient(s) arrived for {outputs} output(s)")]
    GradientCount {
        /// The number of outputs that the forward returned.
        outputs: usize,
        /// The number of gradients that arrived.
        gradients: usize,
    },
    /// A gradient has another shape than its output.
    #[error("the gradient of output {index} has shape {gradient:?}, the output had {output:?}")]
    GradientShape {
        /// The output's place.
        index: usize,
        /// Shape of the output.
        output: Vec<usize>,
        /// Shape of the gradient.
        gradient: Vec<usize>,
    },
}

/// Returns the device of a module's first parameter, or the default device for a module without parameters.
pub(crate) fn device_of<M: Module>(module: &M) -> Device {
    module.devices().into_iter().next().unwrap_or_else(|| Device::flex().autodiff())
}
