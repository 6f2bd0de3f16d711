//! Convolution and delta rule as one operation of the CPU back end, and the state that generation keeps.

use std::sync::Arc;

use burn::tensor::{Tensor, TensorData};
use pipewright_kernel::{convolution, delta};

use super::super::composed::at_least_single;
use super::super::operation::{CpuTensor, Operation, cpu_tensor, elements, on_cpu};
use super::super::pointwise::{exp, sigmoid, softplus};
use super::composed::on_device;
use super::rule::{DeltaRule, DeltaSizes};

impl DeltaRule {
    /// Mixes sequences of `sequence` rows each. `mixed` has all queries, all keys and all values, `[rows, channels]`,
    /// `strengths` and `decays` are `[rows, value_heads]` before their activations, and the result is `[rows,
    /// value_width]`.
    ///
    /// `documents` has the document of each row. Rows of one document follow each other, and nothing of a document
    /// reaches another one.
    ///
    /// # Panics
    /// When the shapes do not fit the sizes, or the rows are not whole sequences.
    pub fn forward(
        &self,
        mixed: Tensor<2>,
        [strengths, decays]: [Tensor<2>; 2],
        sequence: usize,
        documents: Option<&Arc<[u32]>>,
    ) -> Tensor<2> {
        let (rows, sizes) = (mixed.dims()[0], self.sizes);
        let (heads, weight) = (sizes.value_heads, self.conv1d.weight.val());
        assert!(sequence > 0 && rows.is_multiple_of(sequence), "{rows} rows are not sequences of {sequence}");
        assert!(
            documents.is_none_or(|documents| documents.len() == rows),
            "each of the {rows} rows has a document"
        );
        let found = (mixed.dims(), weight.dims(), strengths.dims(), decays.dims());
        let expected =
            ([rows, sizes.channels()], [sizes.channels(), 1, sizes.taps], [rows, heads], [rows, heads]);
        assert_eq!(found, expected, "the tensors fit {sizes:?}");
        let (strengths, log_decays) = self.gates(strengths, decays);
        apply(sizes, mixed, weight, [strengths, log_decays], sequence, documents)
    }

    /// Mixes the next rows of the sequence of `cache`, which are of one document. Gradients are not computed. The
    /// results differ from [`DeltaRule::forward`]'s in rounding only.
    ///
    /// # Panics
    /// When the shapes do not fit the sizes.
    pub fn extend(
        &self,
        mixed: Tensor<2>,
        [strengths, decays]: [Tensor<2>; 2],
        cache: &mut DeltaCache,
    ) -> Tensor<2> {
        let ([rows, channels], dtype, device) = (mixed.dims(), mixed.dtype(), mixed.device());
        assert_eq!(channels, self.sizes.channels(), "the rows fit {:?}", self.sizes);
        let (strengths, log_decays) = self.gates(strengths, decays);
        let earlier = cache.rows.len() / channels;
        cache.rows.extend(floats(mixed));
        let u = convolution::forward(convolution::Inputs {
            dims: self.sizes.convolution(earlier + rows),
            v: &cache.rows,
            weight: &floats(self.conv1d.weight.val()),
            bias: None,
            documents: None,
        });
        cache.rows.drain(..(earlier + rows).saturating_sub(self.sizes.taps - 1) * channels);
        let inputs = delta::Inputs {
            dims: self.sizes.rule(rows),
            u: &u[earlier * channels..],
            log_decays: &floats(log_decays),
            strengths: &floats(strengths),
            documents: None,
        };
        let y = delta::forward(inputs, &mut cache.states);
        Tensor::<2>::from_data(TensorData::new(y, [rows, self.sizes.value_width()]), &device).cast(dtype)
    }

    /// Returns the strengths, and the logarithms of the decays, in single precision.
    fn gates(&self, strengths: Tensor<2>, decays: Tensor<2>) -> (Tensor<2>, Tensor<2>) {
        let [bias, rates] =
            [&self.dt_bias, &self.A_log].map(|vector| at_least_single(vector.val()).unsqueeze::<2>());
        let steps = softplus(at_least_single(decays) + bias);
        (sigmoid(at_least_single(strengths)), steps * exp(rates).neg())
    }
}

/// The state that a delta rule keeps of a sequence that grows. It is in the processor's memory, and its size does not
/// depend on the number of tokens.
#[derive(Clone, Debug, Default)]
pub struct DeltaCache {
    /// The latest rows, which the convolution of the next token sees.
    rows: Vec<f32>,
    /// The states of the heads; empty before the first token.
    states: Vec<f32>,
}

fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// Applies the convolution and the rule. `gates` are the strengths and the logarithms of the decays.
pub(super) fn apply(
    sizes: DeltaSizes,
    mixed: Tensor<2>,
    weight: Tensor<3>,
    gates: [Tensor<2>; 2],
    sequence: usize,
    documents: Option<&Arc<[u32]>>,
) -> Tensor<2> {
    let rows = mixed.dims()[0];
    let [strengths, log_decays] = gates.clone().map(Tensor::into_dispatch);
    let inputs = [mixed.clone().into_dispatch(), weight.clone().into_dispatch(), strengths, log_decays];
    let Some(([mixed, weight, strengths, log_decays], tape)) = on_cpu(inputs) else {
        return on_device(sizes, mixed, weight, gates, sequence, documents.cloned());
    };
    let documents = documents.cloned();
    let saved = Saved { sizes, sequence, documents, mixed, weight, strengths, log_decays };
    let y = saved.with_rule(|inputs| delta::forward(inputs, &mut Vec::new()));
    tape.record(y, [rows, sizes.value_width()], |_| saved)
}

/// The inputs of the operation, which its backward pass needs.
#[derive(Clone, Debug)]
struct Saved {
    sizes: DeltaSizes,
    sequence: usize,
    documents: Option<Arc<[u32]>>,
    mixed: CpuTensor,
    weight: CpuTensor,
    strengths: CpuTensor,
    log_decays: CpuTensor,
}

impl Saved {
    fn with_convolution<R>(&self, pass: impl FnOnce(convolution::Inputs<'_>) -> R) -> R {
        pass(convolution::Inputs {
            dims: self.sizes.convolution(self.sequence),
            v: &elements(&self.mixed),
            weight: &elements(&self.weight),
            bias: None,
            documents: self.documents.as_deref(),
        })
    }

    fn with_rule<R>(&self, pass: impl FnOnce(delta::Inputs<'_>) -> R) -> R {
        pass(delta::Inputs {
            dims: self.sizes.rule(self.sequence),
            u: &self.with_convolution(convolution::forward),
            log_decays: &elements(&self.log_decays),
            strengths: &elements(&self.strengths),
            documents: self.documents.as_deref(),
        })
    }
}

impl Operation<4> for Saved {
    fn backward(self, gradient: CpuTensor, wanted: [bool; 4]) -> [Option<CpuTensor>; 4] {
        let found = self.with_rule(|inputs| delta::backward(inputs, &elements(&gradient)));
        drop(gradient);
        let delta::Gradients { u: mut sums, log_decays, strengths } = found;
        let rows = sums.len() / self.sizes.channels();
        let d_mixed = self.with_convolution(|inputs| convolution::backward(inputs, &mut sums));
        let d_weight = wanted[1].then(|| {
            let mut sum = vec![0f32; self.sizes.channels() * self.sizes.taps];
            let inputs = convolution::WeightInputs {
                dims: self.sizes.convolution(self.sequence),
                v: &elements(&self.mixed),
                documents: self.documents.as_deref(),
                gradient: &sums,
            };
            convolution::add_weight_gradient(inputs, &mut sum);
            cpu_tensor(sum, [self.sizes.channels(), 1, self.sizes.taps])
        });
        let gates = [rows, self.sizes.value_heads];
        [
            Some(cpu_tensor(d_mixed, [rows, self.sizes.channels()])),
            d_weight,
            Some(cpu_tensor(strengths, gates)),
            Some(cpu_tensor(log_decays, gates)),
        ]
    }
}
