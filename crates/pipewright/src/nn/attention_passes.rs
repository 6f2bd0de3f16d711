//! The passes of an attention on the CPU back end, in single precision or in bfloat16.

use burn::tensor::{Shape, bf16};
use pipewright_kernel::attention::{Gradients, Inputs, backward, backward_bf16, forward, forward_bf16};

use super::operation::{CpuTensor, ReadElement, are_multiplied_in_bf16, cpu_tensor, elements, tensor_of};

/// The inputs that an attention keeps for its backward pass.
pub(super) trait AttentionInputs {
    /// Returns the queries, the keys and the values.
    fn operands(&self) -> impl Iterator<Item = &CpuTensor>;

    /// Calls `pass` with the inputs in the type of its operands.
    fn with_inputs<T: ReadElement, R>(&self, pass: impl FnOnce(Inputs<'_, T>) -> R) -> R;

    /// Returns the result, of the shape of the queries, and the normaliser of each row of scores.
    fn forward(&self, shape: impl Into<Shape>) -> (CpuTensor, Vec<f32>) {
        if are_multiplied_in_bf16(self.operands()) {
            let (out, normalisers) = self.with_inputs(forward_bf16);
            (tensor_of(out, shape), normalisers)
        } else {
            let (out, normalisers) = self.with_inputs(forward);
            (cpu_tensor(out, shape), normalisers)
        }
    }

    /// Returns the gradients of queries, keys and values, of these shapes, of the table of the bias, and of
    /// the sinks.
    fn backward(
        &self,
        (out, normalisers): (&CpuTensor, &[f32]),
        gradient: &CpuTensor,
        shapes: [Shape; 3],
    ) -> ([CpuTensor; 3], Vec<f32>, Vec<f32>) {
        let [of_q, of_k, of_v] = shapes;
        if are_multiplied_in_bf16(self.operands()) {
            let (out, gradient) = (bf16::read(out), bf16::read(gradient));
            let Gradients { q, k, v, table, sinks } =
                self.with_inputs(|inputs| backward_bf16(inputs, &out, normalisers, &gradient));
            ([tensor_of(q, of_q), tensor_of(k, of_k), tensor_of(v, of_v)], table, sinks)
        } else {
            let (out, gradient) = (elements(out), elements(gradient));
            let Gradients { q, k, v, table, sinks } =
                self.with_inputs(|inputs| backward(inputs, &out, normalisers, &gradient));
            ([cpu_tensor(q, of_q), cpu_tensor(k, of_k), cpu_tensor(v, of_v)], table, sinks)
        }
    }
}
