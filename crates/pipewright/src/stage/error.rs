//! The errors of a stage.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use burn::tensor::DType;
use pipewright_schedule::error_text::panic_message;
use pipewright_schedule::words::counted;
use pipewright_schedule::{Action, Slices};

use crate::tensor::{BoundaryError, Precision};

/// Why a stage cannot be prepared or cannot run an action.
#[derive(Clone, PartialEq, thiserror::Error)]
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
    /// A tensor of the batch has another element type than the stage computes with.
    #[error(transparent)]
    ElementType(Box<ElementTypeError>),
    /// A layer of a graph returned a number of tensors that differs from the graph.
    #[error(
        "the layer `{layer}` returned {}, and the graph says {expected}: see `node_with_outputs`",
        counted(*.found, "tensor")
    )]
    LayerOutputs {
        /// The layer's node.
        layer: Arc<str>,
        /// The number of tensors that it returned.
        found: usize,
        /// The number of tensors that the graph declares.
        expected: usize,
    },
    /// The ranks of a tensor group cannot hold a parameter as its module says.
    #[error(
        "the parameter `{parameter}` of shape {shape:?} is cut into {} along dimension {dimension} for {}: the number of \
         shards must divide the number of ranks, a layer's own shard must be one of them and needs a single rank, and the \
         dimension must exist (`StageModule::placement`)",
        counted(*.shards, "shard"), counted(*.tensor_ranks, "tensor rank")
    )]
    Placement {
        /// The parameter.
        parameter: Arc<str>,
        /// The shape of this rank's shard.
        shape: Vec<usize>,
        /// The dimension.
        dimension: usize,
        /// The number of shards.
        shards: u32,
        /// The number of ranks that compute the stage together.
        tensor_ranks: u32,
    },
    /// A parameter is trained, and the program has no weight gradients of its stage.
    #[error(
        "the parameter `{parameter}` is trained, and the program computes no weight gradients of its stage: freeze it, or \
         make a program in which the stage is trained (`TrainedStages`)"
    )]
    NoBackward {
        /// The parameter.
        parameter: Arc<str>,
    },
    /// The device does not compute in the precision of the pipeline.
    #[error(
        "the device {device} does not compute in {precision}: use another device, or the precision f32 (run.precision, \
         `PipelineConfig::precision`)"
    )]
    Precision {
        /// The device.
        device: Arc<str>,
        /// The precision.
        precision: Precision,
    },
    /// The schedule cuts microbatches into slices, and the stage's module cannot run them.
    #[error(
        "its module cannot run microbatches in {slices} slices: {reason}; use a schedule of whole microbatches, such as `1f1b`"
    )]
    Slices {
        /// The number of slices of each microbatch.
        slices: Slices,
        /// Why it cannot.
        reason: String,
    },
    /// A layer has running statistics, which a pipeline of half precision would not update.
    #[error(
        "the layer `{layer}` keeps running statistics, which are not updated in {precision}: use the precision f32, or a \
         normalisation without running statistics"
    )]
    RunningStatistics {
        /// The layer's path inside its module.
        layer: Arc<str>,
        /// The precision.
        precision: Precision,
    },
    /// The module says that an output is split along a dimension that it does not have.
    #[error(
        "output {output} has the shape {shape:?}, and its module says that tensor ranks split it along dimension {dimension} \
         (`StageModule::output_split`)"
    )]
    OutputSplit {
        /// The output, counted from 0.
        output: usize,
        /// The dimension.
        dimension: usize,
        /// The shape of the output.
        shape: Vec<usize>,
    },
    /// A number inside the stage is infinite or not a number
    /// ([`StageContext::not_finite`](super::StageContext::not_finite)). The parameters are those before the
    /// step.
    #[error(
        "{what} is not finite; the parameters are still those before this step: lower the learning rate, clip gradients, \
         or look at the data of this step"
    )]
    NotFinite {
        /// The number and its layer.
        what: String,
    },
    /// The stage has a loss, but the step has no targets.
    #[error("the stage ends in a loss, and the step has no targets for it")]
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
    /// A parameter is cut, but the optimizer's update of an element depends on other elements.
    #[error(
        "the optimizer's update of an element of `{parameter}` depends on other elements, and parameters are sharded or cut \
         into shards: use one that works element by element, such as `AdamW`, or keep parameters replicated and whole"
    )]
    MixesRows {
        /// A parameter with such an update.
        parameter: Arc<str>,
    },
    /// The number of gradients differs from the number of outputs.
    #[error("{} arrived for {}", counted(*.gradients, "gradient"), counted(*.outputs, "output"))]
    GradientCount {
        /// The number of outputs that the forward returned.
        outputs: usize,
        /// The number of gradients that arrived.
        gradients: usize,
    },
    /// The stage is the last one of a pipeline that trains, and has no loss.
    #[error("it is the last one and has no loss: make it with `Stage::with_loss`")]
    NoLoss,
    /// The second run of a forward gave a gradient to an output that had no gradient in the first run.
    #[error(
        "output {index} of a forward needs a gradient when the forward is computed again, and needed none the first time: \
         `forward` must depend only on the module, its input and its context; random numbers come from \
         `StageContext::random`"
    )]
    RecomputedOutput {
        /// The output's place.
        index: usize,
    },
    /// The second run of a forward had other results than the first.
    #[error(
        "a forward has other results when it is computed again: `forward` must depend only on the module, its input and its \
         context; random numbers come from `StageContext::random`, as in `nn::Dropout`"
    )]
    RecomputedResult,
    /// A layer draws from the generator of its device in a stage whose ranks wait for each other: tensor
    /// ranks, or replicas that hold experts together.
    #[error(
        "`{layer}`, or a layer that ran at the same time, draws from the generator of its device, and other ranks \
         wait for this one inside the stage (tensor ranks, or replicas that hold experts together): use `nn::Dropout` \
         instead of Burn's, or the random numbers of `StageContext::random`"
    )]
    DrawsTogether {
        /// The layer.
        layer: Arc<str>,
    },
    /// An expert that one of several replicas holds has double precision.
    #[error(
        "the expert parameter `{parameter}` has double precision, and replicas that hold experts together \
         (`expert_parallel`) exchange rows of at most single precision: make it a parameter of single precision, or set \
         `expert_parallel` to 1"
    )]
    DoublePrecisionExpert {
        /// The parameter's path.
        parameter: Arc<str>,
    },
    /// A layer returned a weight gradient of another shape than the weight.
    #[error(
        "the layer `{layer}` returned a gradient of shape {found:?} for its parameter `{parameter}` of shape {expected:?}: \
         `SplitBackward::backward_weights` returns the gradients in the order and the shapes of the weights"
    )]
    WeightGradientShape {
        /// The type that implements [`SplitBackward`](crate::nn::SplitBackward).
        layer: &'static str,
        /// The parameter's path.
        parameter: Arc<str>,
        /// Shape of the parameter.
        expected: Vec<usize>,
        /// Shape of the gradient.
        found: Vec<usize>,
    },
    /// The state of the optimizer could not be carried over to a changed module.
    #[error("the optimizer's state cannot be carried over to the changed module: {0}")]
    OptimizerState(String),
    /// A gradient hook returned another number of elements.
    #[error(
        "the gradient hook returned a tensor of shape {found:?} for the {expected} elements of the gradient of \
         `{parameter}`: return as many elements as it got, in one dimension"
    )]
    HookShape {
        /// The parameter's path.
        parameter: Arc<str>,
        /// The number of its elements.
        expected: usize,
        /// The shape that the hook returned.
        found: Vec<usize>,
    },
    /// A gradient hook panicked.
    #[error("the gradient hook panicked at `{parameter}`: {message}")]
    HookPanicked {
        /// The parameter's path.
        parameter: Arc<str>,
        /// The message.
        message: String,
    },
    /// A gradient has another element type than its output.
    #[error("the gradient of output {index} has the type {gradient:?}, the output had {output:?}")]
    GradientType {
        /// The output's place.
        index: usize,
        /// Element type of the output.
        output: DType,
        /// Element type of the gradient.
        gradient: DType,
    },
    /// A block failed that a function of the user's ran ([`ActionHook`](crate::hook::ActionHook)).
    #[error("block {block} of {action}: {source}")]
    InBlock {
        /// The action.
        action: Action,
        /// The block.
        block: usize,
        /// Why it failed.
        source: Box<StageError>,
    },
    /// A function that runs an action left another number of outputs than its stage returns.
    #[error(
        "the function left {}, and the stage returned {expected}: replace outputs one by one",
        counted(*.found, "output")
    )]
    OutputCount {
        /// The number of outputs that the function left.
        found: usize,
        /// The number of outputs that the stage returned.
        expected: usize,
    },
    /// A function that runs a backward left another number of gradients than the backward returns.
    #[error(
        "the function left {}, and the backward returned {expected}: replace gradients one by one",
        counted(*.found, "gradient")
    )]
    GradientsLeft {
        /// The number of gradients that the function left.
        found: usize,
        /// The number of gradients that the backward returned.
        expected: usize,
    },
    /// A function that runs an action failed ([`StageError::function`]).
    #[error("the function failed: {message}")]
    Function {
        /// The function's message.
        message: String,
    },
    /// The stage's module is not of the type that a function names.
    #[error(
        "the stage's module is not a `{expected}`: name the type of the module that the stage was made of, or \
         `Vec<L>` in a pipeline of layers `L`"
    )]
    ModuleType {
        /// The type that the function names.
        expected: &'static str,
    },
    /// A function computed a gradient for a parameter that the stage does not have.
    #[error(
        "the stage has no parameter `{parameter}`{}",
        .known.as_ref().map(|known| format!("; its first one is `{known}`")).unwrap_or_default()
    )]
    NoParameter {
        /// The path that the function names.
        parameter: Arc<str>,
        /// The stage's first parameter.
        known: Option<Arc<str>>,
    },
    /// A function computed a gradient that is not one float tensor of the parameter's shape.
    #[error(
        "the function added a gradient {found} to the parameter `{parameter}`, which takes one float tensor of shape \
         {expected:?}"
    )]
    AddedGradient {
        /// The parameter's path.
        parameter: Arc<str>,
        /// Shape of the parameter.
        expected: Vec<usize>,
        /// Type and shape of each tensor of the gradient.
        found: String,
    },
    /// A function gave another number of tensors than the stage has parameters.
    #[error(
        "the function gave {}, and the stage has {}: give one for each path",
        counted(*.found, "tensor"), counted(*.expected, "parameter")
    )]
    TensorsOfParameters {
        /// The number of tensors.
        found: usize,
        /// The number of parameters.
        expected: usize,
    },
    /// A function between replicas left a tensor that does not fit its parameter.
    #[error(
        "the function left {} for the parameter `{parameter}`, which takes {}",
        .found.as_deref().unwrap_or("no tensor"),
        .expected.as_ref().map_or("none".to_owned(), |shape| format!("a float tensor of shape {shape:?}"))
    )]
    TensorOfParameter {
        /// The parameter's path.
        parameter: Arc<str>,
        /// The shape that it takes; `None` if it takes no tensor.
        expected: Option<Vec<usize>>,
        /// Type and shape of the tensor; `None` if there is none.
        found: Option<String>,
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

pipewright_schedule::message_as_debug!(ElementTypeError, StageError);

impl StageError {
    /// Makes the error of a function of the caller's that runs an action
    /// ([`ActionHook`](crate::hook::ActionHook)).
    pub fn function(message: impl std::fmt::Display) -> Self {
        Self::Function { message: message.to_string() }
    }
}

/// A tensor of the batch has another element type than the stage computes with, and a conversion would lose
/// something.
#[derive(Clone, PartialEq, thiserror::Error)]
#[error("{what} has elements of type {found:?}, and the stage computes with {expected:?}: {}", advice(.value.as_deref(), *.expected))]
pub struct ElementTypeError {
    /// The input or the target, with its number.
    pub what: String,
    /// Its element type.
    pub found: DType,
    /// The type with which the stage computes.
    pub expected: DType,
    /// The integer that does not fit; `None` if digits would be lost.
    pub value: Option<String>,
}

/// Returns what to do about a tensor that is not converted.
fn advice(value: Option<&str>, expected: DType) -> String {
    match value {
        Some(value) => format!("the value {value} does not fit into it"),
        None => {
            format!("a conversion would lose digits, so make it yourself with `cast(DType::{expected:?})`")
        }
    }
}

/// Runs a layer. If it panics, the panic continues with the layer's name in its message.
pub(crate) fn in_layer<T>(layer: &str, run: impl FnOnce() -> T) -> T {
    // The panic continues, so nothing sees a state that it has left half changed.
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(result) => result,
        Err(payload) if payload.is::<&str>() || payload.is::<String>() => {
            resume_unwind(Box::new(format!("the layer `{layer}`: {}", panic_message(&*payload))))
        }
        Err(payload) => resume_unwind(payload),
    }
}
