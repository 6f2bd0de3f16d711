//! The face of a stage towards the executor: no types of the user's model in sight.

use std::sync::Arc;

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::{Device, Tensor, TensorData};
use pipewright_schedule::Microbatch;

use super::body::{Skips, StageBody};
use super::module::{StageContext, StageModule};
use super::training::{Loss, TrainingStage};
use super::weights::{WeightRunner, WeightWork};
use crate::checkpoint::{Checkpoint, CheckpointError, StageState};
use crate::tensor::shard::RowShard;
use crate::tensor::{Boundary, BoundaryError, OptionalTensor, OptionalTensors, Values, unpack};

/// A stage, ready to be handed to a rank.
///
/// The last stage of a training pipeline has a loss; no other has.
pub struct Stage {
    pub(crate) runner: Box<dyn Runner>,
}

impl Stage {
    /// A stage whose output goes to the next stage.
    pub fn new<M: StageModule>(module: M) -> Self {
        Self::of_body(module, None)
    }

    /// The last stage: `loss` takes its output and the microbatch's targets, and returns a scalar (shape `[1]`), the
    /// *mean* over the microbatch. The loss of a step is the mean over its microbatches.
    pub fn with_loss<M, T, L>(module: M, loss: L) -> Self
    where
        M: StageModule,
        T: Boundary,
        L: Fn(M::Output, T) -> Tensor<1> + Send + 'static,
    {
        Self::with_context_loss(module, move |output, target, _: &StageContext| loss(output, target))
    }

    /// As [`Stage::with_loss`], for a loss that also reads what the step brought: side inputs
    /// ([`StageContext::side`], [`StageContext::value`]), or the microbatch's number. It may leave auxiliary losses.
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

    /// Hands weight gradients that wait for `W` to `runner` instead of computing them in order: to interleave them with
    /// something else, to time them, to put them off further within the action. It is called once a microbatch, in `W`
    /// or at the end of `B`; what it leaves undone is done after it.
    pub fn with_weight_runner(
        mut self,
        runner: impl FnMut(Microbatch, &mut WeightWork) + Send + 'static,
    ) -> Self {
        self.runner.set_weight_runner(Box::new(runner));
        self
    }

    /// Puts `prefix` and a dot in front of every parameter's path, for a module that does not know its place in the model:
    /// `linear.weight` becomes `blocks.1.linear.weight`. Paths that the module declares as shared stay as they are.
    ///
    /// Two stages must not have different parameters of one path. A prefix that follows from the part of the model, not
    /// from the stage's number, lets a checkpoint go on under another cut.
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

/// Losses of a microbatch by name, off the tape.
pub(crate) type NamedLosses = Vec<(Arc<str>, Tensor<1>)>;

/// What a forward is to do beside computing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForwardTask {
    /// What the microbatch counts for, 1 unless microbatches differ in size: all losses are multiplied by it on the
    /// tape.
    pub loss_weight: f64,
    /// Whether the last stage returns its outputs beside its loss.
    pub keep_outputs: bool,
}

/// What a forward leaves behind for the executor. Nothing of it is held by the stage.
pub(crate) struct Forwarded {
    /// The stage's outputs, off the tape; of a stage with a loss only where they are asked for.
    pub outputs: Values,
    /// The last stage's loss, off the tape (shape `[1]`).
    pub loss: Option<Tensor<1>>,
    /// Auxiliary losses by name, off the tape, without their weights.
    pub auxiliary: NamedLosses,
}

/// A parameter of a stage, as other ranks need to know it.
pub(crate) struct Held {
    pub path: Arc<str>,
    pub shape: Vec<usize>,
    /// Its values, if the stage declares it as shared.
    pub shared: Option<TensorData>,
}

/// What the executor asks of a stage.
pub(crate) trait Runner: Send {
    /// Runs the stage for a microbatch and keeps what its backward needs.
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

    /// Returns the gradients of the microbatch's inputs. Weight gradients that can wait do so until
    /// [`Runner::backward_weights`]; the others are added to the sums.
    fn backward_inputs(
        &mut self,
        microbatch: Microbatch,
        gradients: OptionalTensors,
    ) -> Result<OptionalTensors, StageError>;

    /// Adds the weight gradients that the microbatch's [`Runner::backward_inputs`] put off to the sums; how many
    /// products that were.
    fn backward_weights(&mut self, microbatch: Microbatch) -> usize;

    /// Global path of each float parameter, in the stage's own order.
    fn paths(&self) -> &[Arc<str>];

    /// Puts a prefix in front of every path but those of shared parameters.
    fn add_prefix(&mut self, prefix: &str);

    /// Whether the stage can be trained at all.
    fn check(&self) -> Result<(), StageError>;

    /// Every parameter of the stage, in the order of [`Runner::paths`], then the integer and boolean ones.
    fn held(&self) -> Vec<Held>;

    /// Tensors that come from or go to stages that are not neighbours.
    fn skips(&self) -> &Skips;

    /// The gradient sum of the parameter at `place` of [`Runner::paths`].
    fn gradient(&self, place: usize) -> OptionalTensor;

    /// Replaces the gradient sum of the parameter at `place`; in a sharded stage by the sum of its part, in the end.
    fn set_gradient(&mut self, place: usize, gradient: OptionalTensor);

    /// Sum of the squares of each parameter's gradient sum, in the order of [`Runner::paths`]: added up within each of
    /// so many parts first, so that replicas arrive at the same bits whether one has all parts or each has its own.
    fn gradient_squares(&self, parts: u32) -> Vec<f64>;

    /// From now on the stage holds its part of every parameter that is trained, and needs [`Runner::gather`] before it
    /// computes. Give it its optimizer first.
    fn shard(&mut self, part: RowShard) -> Result<(), StageError>;

    /// The rows of each parameter that a sharded stage holds; none where it has none, or all.
    fn rows(&self) -> OptionalTensors;

    /// Gives a sharded stage its whole parameters, in the order of [`Runner::paths`], until [`Runner::release`]; none
    /// for what it has whole.
    fn gather(&mut self, whole: OptionalTensors);

    /// Leaves a sharded stage its part of the parameters.
    fn release(&mut self);

    /// Multiplies the gradient sums by `factor`, takes one optimizer step with them and clears them.
    fn update(&mut self, factor: f64, learning_rate: f64);

    /// Forgets every microbatch in flight and every gradient: the state before the step.
    fn reset(&mut self);

    /// Gives weight gradients that wait into a user's hands.
    fn set_weight_runner(&mut self, runner: WeightRunner);

    /// Gives the stage its optimizer.
    fn set_optimizer(&mut self, optimizer: ModuleOptimizer);

    /// The parameters' values, in the order of [`Runner::paths`]; of a sharded stage its part of them, unless they are
    /// gathered.
    fn parameters(&self) -> Vec<TensorData>;

    /// The parameters and the optimizer as they stand, sharing storage.
    fn state(&self) -> StageState;

    /// Takes over parameters and optimizer state; with an error, some of them.
    fn restore(&mut self, checkpoint: &Checkpoint) -> Result<(), CheckpointError>;

    /// Where the stage computes.
    fn device(&self) -> Device;

    /// Whether the stage ends in a loss.
    fn has_loss(&self) -> bool;
}

/// Why a stage cannot run an action.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum StageError {
    /// The tensors that arrived are not those that the stage takes.
    #[error("the stage cannot take its input: {0}")]
    Input(#[source] BoundaryError),
    /// The targets are not those that the loss takes.
    #[error("the loss cannot take its targets: {0}")]
    Target(#[source] BoundaryError),
    /// The model's outputs are not those that the loss takes.
    #[error("the loss cannot take the model's outputs: {0}")]
    Output(#[source] BoundaryError),
    /// A layer of a graph was handed tensors that it does not take.
    #[error("the layer `{layer}` cannot take its inputs: {source}")]
    Layer {
        /// Its node.
        layer: Arc<str>,
        /// What is wrong with them.
        source: BoundaryError,
    },
    /// A layer of a graph returned another number of tensors than the graph says.
    #[error(
        "the layer `{layer}` returned {found} tensor(s), and the graph says {expected}: see `node_with_outputs`"
    )]
    LayerOutputs {
        /// Its node.
        layer: Arc<str>,
        /// Tensors that it returned.
        found: usize,
        /// Tensors of its node.
        expected: usize,
    },
    /// The stage has a loss and the step brought no targets.
    #[error("the stage ends in a loss, and the step brought no targets for it")]
    NoTarget,
    /// A loss that is not a scalar.
    #[error("{what} has {elements} elements; a loss is one number, the mean over the microbatch (shape [1])")]
    LossShape {
        /// The loss, or the auxiliary loss by name.
        what: String,
        /// Its elements.
        elements: usize,
    },
    /// One parameter at two places of a stage.
    #[error(
        "`{first}` and `{second}` are one parameter at two places of the stage: give each place a parameter of its own, \
         and the same path and `shared_parameters` if they are to stay equal"
    )]
    DuplicateParameter {
        /// Path of the first place.
        first: Arc<str>,
        /// Path of the second.
        second: Arc<str>,
    },
    /// Sharded parameters and an optimizer that looks at whole ones.
    #[error(
        "the optimizer's update of an element of `{parameter}` depends on other elements, and parameters are sharded: use \
         one that works element by element, such as `AdamW`, or keep parameters replicated"
    )]
    MixesRows {
        /// A parameter for which it does.
        parameter: Arc<str>,
    },
    /// Another number of gradients than of outputs.
    #[error("{gradients} gradient(s) arrived for {outputs} output(s)")]
    GradientCount {
        /// Outputs that the forward returned.
        outputs: usize,
        /// Gradients that arrived.
        gradients: usize,
    },
    /// A gradient of another shape than its output.
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

/// The first device of a module's parameters; the default one for a module without any.
pub(crate) fn device_of<M: Module>(module: &M) -> Device {
    module.devices().into_iter().next().unwrap_or_else(|| Device::flex().autodiff())
}
