//! What a user writes: a Burn module with a typed forward.

use burn::module::Module;
use pipewright_schedule::{Microbatch, StageIndex};

use crate::boundary::Boundary;

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
/// }
/// ```
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
    /// one however it is cut. A stage that holds layers 4 to 7 as `layers.0` to `layers.3` renames them here.
    fn parameter_path(&self, local: &str) -> String {
        local.to_owned()
    }
}

/// Where a forward stands in the step.
#[derive(Clone, Debug)]
pub struct StageContext {
    pub(crate) stage: StageIndex,
    pub(crate) microbatch: Microbatch,
}

impl StageContext {
    /// The context of `stage` for `microbatch`; the runtime makes them, tests and unpipelined runs may.
    pub fn new(stage: StageIndex, microbatch: Microbatch) -> Self {
        Self { stage, microbatch }
    }

    /// The stage that runs.
    pub fn stage(&self) -> StageIndex {
        self.stage
    }

    /// The microbatch that it runs for.
    pub fn microbatch(&self) -> Microbatch {
        self.microbatch
    }
}
