//! The deferred gradient of a depthwise convolution's weight.

use std::sync::Arc;

use burn::module::ParamId;
use pipewright_kernel::convolution::{Dims, WeightInputs, add_weight_gradient};

use super::operation::{CpuTensor, elements};

/// The gradient of a convolution's weight that has not been computed yet.
#[derive(Clone, Debug)]
pub(crate) struct ConvolutionTask {
    pub weight: ParamId,
    pub dims: Dims,
    /// Rows that hold the convolution's input.
    pub input: CpuTensor,
    pub documents: Option<Arc<[u32]>>,
    /// The gradient of the sums before the activation.
    pub gradient: CpuTensor,
}

impl ConvolutionTask {
    /// Adds the gradient to `sum`, in the layout of the weight.
    pub(crate) fn add_to(&self, sum: &mut [f32]) {
        let (input, gradient) = (elements(&self.input), elements(&self.gradient));
        let inputs = WeightInputs {
            dims: self.dims,
            v: &input,
            documents: self.documents.as_deref(),
            gradient: &gradient,
        };
        add_weight_gradient(inputs, sum);
    }
}
