//! Convolution, scan and gated norm as one operation of the CPU back end.

use std::borrow::Cow;
use std::sync::Arc;

use burn::module::{Param, ParamId};
use burn::tensor::Tensor;
use pipewright_kernel::convolution::sum_rows;
use pipewright_kernel::mamba;

use super::super::deferred::{
    ConvolutionTask, Deferred, DeferredWeight, KeptWeight, WeightTask, recorded_on,
};
use super::super::operation::{
    CpuTensor, Operation, cpu_tensor, elements, from_cpu, in_bf16, on_cpu, tensor_of, with_dtype,
};
use super::composed::on_device;
use super::mixer::{Mamba2, MambaScan, MambaSizes};
use crate::tensor::Value;

/// The places of the convolution's weight and bias among the inputs.
const WEIGHT: usize = 1;
const BIAS: usize = 2;

impl Mamba2 {
    /// Mixes sequences of `sequence` rows each. Shapes: `[rows, hidden]` in and out.
    ///
    /// `documents` has the document of each row. Rows of one document follow each other, and nothing of a
    /// document reaches another one.
    ///
    /// # Panics
    /// When the shapes do not fit the sizes, or the rows are not whole sequences.
    pub fn forward(&self, x: Tensor<2>, sequence: usize, documents: Option<&Arc<[u32]>>) -> Tensor<2> {
        self.out_proj.forward(self.scan().forward(self.in_proj.forward(x), sequence, documents))
    }
}

impl MambaScan {
    /// Returns the mixed channels `[rows, heads * head_dim]` of `projected [rows, projected]`, the result of the input
    /// projection; see [`Mamba2::forward`].
    ///
    /// # Panics
    /// As [`Mamba2::forward`].
    pub fn forward(
        &self,
        projected: Tensor<2>,
        sequence: usize,
        documents: Option<&Arc<[u32]>>,
    ) -> Tensor<2> {
        let rows = projected.dims()[0];
        assert!(sequence > 0 && rows.is_multiple_of(sequence), "{rows} rows are not sequences of {sequence}");
        assert!(
            documents.is_none_or(|documents| documents.len() == rows),
            "each of the {rows} rows has a document"
        );
        mix(self, projected, sequence, documents)
    }
}

/// Returns the mixed channels of `projected`, the result of the input projection.
///
/// # Panics
/// When the shapes do not fit the sizes.
fn mix(
    mixer: &MambaScan,
    projected: Tensor<2>,
    sequence: usize,
    documents: Option<&Arc<[u32]>>,
) -> Tensor<2> {
    let (weight, id) = (mixer.conv1d.weight.val(), mixer.conv1d.weight.id);
    let bias = mixer.conv1d.bias.as_ref().map(Param::val);
    let deferred_bias = mixer.conv1d.bias.as_ref().and_then(|bias| DeferredWeight::of(&bias.val(), bias.id));
    let has_bias = bias.is_some();
    // A constant is not on the tape.
    let bias = bias.unwrap_or_else(|| Tensor::zeros([mixer.sizes.convolved()], &weight.device().inner()));
    let others = [bias, mixer.dt_bias.val(), mixer.A_log.val(), mixer.D.val(), mixer.norm.weight.val()];
    check(&mixer.sizes, &projected, &weight, &others);
    let rows = projected.dims()[0];
    let deferred = Deferred::current(&weight, id);
    let [bias, dt_bias, rates, skip, norm] = others.each_ref().map(|other| other.clone().into_dispatch());
    let inputs =
        [projected.clone().into_dispatch(), weight.clone().into_dispatch(), bias, dt_bias, rates, skip, norm];
    let Some(([projected, weight, bias, dt_bias, rates, skip, norm], tape)) = on_cpu(inputs) else {
        return on_device(mixer.sizes, projected, weight, others, sequence, documents.cloned());
    };
    let saved = Saved {
        sizes: mixer.sizes,
        rows,
        sequence,
        documents: documents.cloned(),
        projected,
        bias: has_bias.then_some(bias),
        dt_bias,
        rates,
        skip,
        norm,
    };
    let shape = [rows, mixer.sizes.width()];
    let parameters = saved.parameters(&weight);
    let (y, out, scales) = match in_bf16([&saved.projected]) {
        Some([projected]) => {
            let inputs = parameters.with(projected);
            let y = mamba::scanned_bf16(inputs);
            let (out, scales) = mamba::gated_bf16(inputs, &y);
            (tensor_of(y, shape), tensor_of(out, shape), scales)
        }
        None => {
            let projected = elements(&saved.projected);
            let inputs = parameters.with(&projected);
            // The tensor that the backward keeps is rounded first, so that it sees the numbers with which the
            // forward continues.
            let y = tape.kept(mamba::scanned(inputs), shape);
            let (out, scales) = mamba::gated(inputs, &elements(&y));
            (y, tape.kept(out, shape), scales)
        }
    };
    drop(parameters);
    // The kept weight is of any number of dimensions.
    let weight = KeptWeight::new(from_cpu(weight), id, deferred.as_ref());
    let tape = recorded_on(tape, WEIGHT, deferred.as_ref());
    let tape = recorded_on(tape, BIAS, deferred_bias.as_ref().map(|bias| &bias.deferred));
    tape.record_tensor(out, |_| MixBackward { saved, weight, id, deferred, deferred_bias, y, scales })
}

fn check(sizes: &MambaSizes, projected: &Tensor<2>, weight: &Tensor<3>, others: &[Tensor<1>; 5]) {
    let found = (projected.dims()[1], weight.dims(), others.each_ref().map(|other| other.dims()[0]));
    let (heads, channels) = (sizes.heads, sizes.convolved());
    let expected =
        (sizes.projected(), [channels, 1, sizes.taps], [channels, heads, heads, heads, sizes.width()]);
    assert_eq!(found, expected, "the tensors fit {sizes:?}");
}

/// The inputs of both passes, without the weight of the convolution.
#[derive(Clone, Debug)]
struct Saved {
    sizes: MambaSizes,
    rows: usize,
    sequence: usize,
    documents: Option<Arc<[u32]>>,
    projected: CpuTensor,
    bias: Option<CpuTensor>,
    dt_bias: CpuTensor,
    /// The logarithms of the rates.
    rates: CpuTensor,
    skip: CpuTensor,
    norm: CpuTensor,
}

impl Saved {
    fn parameters<'a>(&'a self, weight: &'a CpuTensor) -> Parameters<'a> {
        Parameters {
            saved: self,
            weight: elements(weight),
            bias: self.bias.as_ref().map(elements),
            dt_bias: elements(&self.dt_bias),
            rates: elements(&self.rates),
            skip: elements(&self.skip),
            norm: elements(&self.norm),
        }
    }
}

/// The parameters in single precision.
struct Parameters<'a> {
    saved: &'a Saved,
    weight: Cow<'a, [f32]>,
    bias: Option<Cow<'a, [f32]>>,
    dt_bias: Cow<'a, [f32]>,
    rates: Cow<'a, [f32]>,
    skip: Cow<'a, [f32]>,
    norm: Cow<'a, [f32]>,
}

impl Parameters<'_> {
    /// Returns the inputs of the mixer, with the elements of the input projection's result.
    fn with<'a, T>(&'a self, projected: &'a [T]) -> mamba::Inputs<'a, T> {
        let Saved { sizes, rows, sequence, documents, .. } = self.saved;
        mamba::Inputs {
            projected,
            convolution: sizes.convolution(*sequence),
            scan: sizes.scan(*rows, *sequence),
            steps: sizes.steps(),
            weight: &self.weight,
            bias: self.bias.as_deref(),
            dt_bias: &self.dt_bias,
            log_rates: &self.rates,
            skip: &self.skip,
            norm: &self.norm,
            epsilon: sizes.epsilon as f32,
            documents: documents.as_deref(),
        }
    }
}

#[derive(Clone, Debug)]
struct MixBackward {
    saved: Saved,
    weight: KeptWeight,
    id: ParamId,
    deferred: Option<Deferred>,
    deferred_bias: Option<DeferredWeight>,
    /// The scan's result.
    y: CpuTensor,
    scales: Vec<f32>,
}

impl Operation<7> for MixBackward {
    fn backward(self, gradient: CpuTensor, wanted: [bool; 7]) -> [Option<CpuTensor>; 7] {
        let Self { saved, weight, id, deferred, deferred_bias, y, scales } = self;
        let (sizes, rows) = (saved.sizes, saved.rows);
        let weight = weight.get_on_cpu();
        let parameters = saved.parameters(&weight);
        let shape = [rows, sizes.projected()];
        let operands = (in_bf16([&saved.projected]), in_bf16([&y, &gradient]));
        let (d_projected, of_others) = match operands {
            (Some([projected]), Some([scanned, of_result])) => {
                let inputs = parameters.with(projected);
                let gated = mamba::gated_backward_bf16(inputs, scanned, &scales, of_result);
                drop((y, gradient));
                let found = mamba::scanned_backward_bf16(inputs, gated);
                (tensor_of(found.projected, shape), found.others)
            }
            _ => {
                let projected = elements(&saved.projected);
                let inputs = parameters.with(&projected);
                let gated = mamba::gated_backward(inputs, &elements(&y), &scales, &elements(&gradient));
                drop((y, gradient));
                let found = mamba::scanned_backward(inputs, gated);
                (cpu_tensor(found.projected, shape), found.others)
            }
        };
        let mamba::OtherGradients { sums, dt_bias, log_rates, skip, norm } = of_others;
        let channels = sizes.convolved();
        let sums = cpu_tensor(sums, [rows, channels]);
        let d_bias = match (deferred_bias, &saved.bias) {
            (Some(weight), Some(bias)) if wanted[BIAS] => {
                let (sums, dtype) = (sums.clone(), bias.dtype());
                weight.leave("DepthwiseConvolution", move || {
                    let sum = cpu_tensor(sum_rows(&elements(&sums), channels), [channels]);
                    Value::of(from_cpu::<1>(with_dtype(sum, dtype)))
                });
                None
            }
            _ => wanted[BIAS].then(|| sum_rows(&elements(&sums), channels)),
        };
        let task = ConvolutionTask {
            weight: id,
            dims: sizes.convolution(saved.sequence),
            input: saved.projected.clone(),
            documents: saved.documents.clone(),
            gradient: sums,
        };
        let d_weight = match deferred {
            Some(deferred) => {
                if wanted[WEIGHT] {
                    deferred.push(WeightTask::Convolution(task));
                }
                None
            }
            None => wanted[WEIGHT].then(|| {
                let mut sum = vec![0f32; channels * sizes.taps];
                task.add_to(&mut sum);
                cpu_tensor(sum, [channels, 1, sizes.taps])
            }),
        };
        let vector = |d: Vec<f32>| {
            let len = d.len();
            Some(cpu_tensor(d, [len]))
        };
        [
            Some(d_projected),
            d_weight,
            d_bias.and_then(vector),
            vector(dt_bias),
            vector(log_rates),
            vector(skip),
            vector(norm),
        ]
    }
}
