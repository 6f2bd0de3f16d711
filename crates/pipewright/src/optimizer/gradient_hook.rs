//! [`GradientHook`]: user code that reads or changes gradients between the backward passes and the update.
//!
//! ```
//! use std::sync::Arc;
//!
//! use pipewright::optimizer::ParameterGradient;
//! use pipewright::pipeline::PipelineConfig;
//!
//! /// Clips every element, as PyTorch's `clip_grad_value_` does.
//! fn clip(gradient: &mut ParameterGradient<'_>) {
//!     gradient.map(|flat| flat.clamp(-0.5, 0.5));
//! }
//!
//! let config = PipelineConfig { gradient_hook: Some(Arc::new(clip)), ..PipelineConfig::default() };
//! ```

use burn::tensor::Tensor;
use pipewright_schedule::StageIndex;

use crate::tensor::{BoundaryError, Value, unpack};

/// Called in each step that updates: on each rank, once for each of its parameters that has a gradient.
///
/// At that point gradients are summed over microbatches, accumulated batches, replicas and copies of shared
/// parameters. The norm is computed after it, and clipping follows. The copies of a parameter must stay
/// equal: what a hook makes of a gradient may depend only on the gradient and its path. A panic in a hook
/// fails the step, and no rank updates. An element that is infinite or not a number stays so, whatever a hook
/// makes of it: the step fails, or in f16 is skipped.
///
/// A function that takes a [`ParameterGradient`] is a hook.
pub trait GradientHook: Send + Sync {
    /// Reads or changes a gradient, on the thread of its rank.
    fn change(&self, gradient: &mut ParameterGradient<'_>);
}

impl<F: Fn(&mut ParameterGradient<'_>) + Send + Sync> GradientHook for F {
    fn change(&self, gradient: &mut ParameterGradient<'_>) {
        self(gradient);
    }
}

/// The gradient of the loss for one parameter, as the optimizer would get it without clipping. If parameters
/// are sharded over replicas, it has the rows of this replica. If several ranks compute the stage together,
/// it has the shard of this rank, and all ranks that hold the shard call the hook for it.
#[derive(Debug)]
pub struct ParameterGradient<'a> {
    stage: StageIndex,
    path: &'a str,
    value: Value,
    is_changed: bool,
}

impl<'a> ParameterGradient<'a> {
    pub(crate) fn new(stage: StageIndex, path: &'a str, value: Value) -> Self {
        Self { stage, path, value, is_changed: false }
    }

    /// Returns the stage that has the parameter.
    pub fn stage(&self) -> StageIndex {
        self.stage
    }

    /// Returns the parameter's global path.
    pub fn path(&self) -> &str {
        self.path
    }

    /// Returns the shape of the gradient.
    pub fn shape(&self) -> Vec<usize> {
        self.value.shape().to_vec()
    }

    /// Returns the gradient as a tensor.
    ///
    /// # Errors
    /// When it has another number of dimensions.
    pub fn tensor<const D: usize>(&self) -> Result<Tensor<D>, BoundaryError> {
        unpack(vec![self.value.clone()])
    }

    /// Replaces the elements of the gradient by the elements that `change` returns for them. Both are in the
    /// order of the storage, row by row.
    pub fn map(&mut self, change: impl FnOnce(Tensor<1>) -> Tensor<1>) {
        let shape = self.shape();
        let flat = self.value.clone().reshaped(&[shape.iter().product()]);
        self.value = Value::of(change(Tensor::from_dispatch(flat.into_dispatch())));
        self.is_changed = true;
    }

    /// Returns the elements that a hook has put in place of the gradient's; `None` if it has not changed it.
    pub(crate) fn changed(self) -> Option<Value> {
        self.is_changed.then_some(self.value)
    }
}
