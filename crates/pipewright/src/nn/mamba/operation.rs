//! Convolution, scan and gated norm as one operation of the CPU back end.

use std::borrow::Cow;
use std::sync::Arc;

use burn::module::{Param, ParamId};
use burn::tensor::Tensor;
use pipewright_kernel::{convolution, gated_norm, scan};

use super::super::deferred::{ConvolutionTask, Deferred, KeptWeight, WeightTask, recorded_on};
use super::super::operation::{CpuTensor, Operation, cpu_tensor, elements, from_cpu, on_cpu};
use super::composed::on_device;
use super::mixer::{Mamba2, MambaSizes};

/// The place of the convolution's weight among the inputs.
const WEIGHT: usize = 1;

impl Mamba2 {
    /// Mixes sequences of `sequence` rows each. Shapes: `[rows, hidden]` in and out.
    ///
    /// `documents` has the document of each row. Rows of one document follow each other, and nothing of a
    /// document reaches another one.
    ///
    /// # Panics
    /// When the shapes do not fit the sizes, or the rows are not whole sequences.
    pub fn forward(&self, x: Tensor<2>, sequence: usize, documents: Option<&Arc<[u32]>>) -> Tensor<2> {
        let rows = x.dims()[0];
        assert!(sequence > 0 && rows.is_multiple_of(sequence), "{rows} rows are not sequences of {sequence}");
        assert!(
            documents.is_none_or(|documents| documents.len() == rows),
            "each of the {rows} rows has a document"
        );
        let mixed = mix(self, self.in_proj.forward(x), sequence, documents);
        self.out_proj.forward(mixed)
    }
}

/// Returns the mixed channels of `projected`, the result of the input projection.
///
/// # Panics
/// When the shapes do not fit the sizes.
pub(super) fn mix(
    mixer: &Mamba2,
    projected: Tensor<2>,
    sequence: usize,
    documents: Option<&Arc<[u32]>>,
) -> Tensor<2> {
    let (weight, id) = (mixer.conv1d.weight.val(), mixer.conv1d.weight.id);
    let bias = mixer.conv1d.bias.as_ref().map(Param::val);
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
    let (y, (out, scales)) = {
        let read = saved.read(&weight);
        // The tensor that the backward keeps is rounded first, so that it sees the numbers with which the
        // forward continues.
        let y = tape.kept(read.scanned(), [rows, mixer.sizes.width()]);
        let normed = gated_norm::forward(read.norm(&elements(&y)));
        (y, normed)
    };
    // The kept weight is of any number of dimensions.
    let weight = KeptWeight::new(from_cpu(weight), id, deferred.as_ref());
    let tape = recorded_on(tape, WEIGHT, deferred.as_ref());
    tape.record(out, [rows, mixer.sizes.width()], |_| MixBackward { saved, weight, id, deferred, y, scales })
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
    fn read<'a>(&'a self, weight: &'a CpuTensor) -> Read<'a> {
        Read {
            saved: self,
            weight: elements(weight),
            projected: elements(&self.projected),
            bias: self.bias.as_ref().map(elements),
            dt_bias: elements(&self.dt_bias),
            rates: elements(&self.rates),
            skip: elements(&self.skip),
            norm: elements(&self.norm),
        }
    }
}

/// The elements of the inputs in single precision.
struct Read<'a> {
    saved: &'a Saved,
    weight: Cow<'a, [f32]>,
    projected: Cow<'a, [f32]>,
    bias: Option<Cow<'a, [f32]>>,
    dt_bias: Cow<'a, [f32]>,
    rates: Cow<'a, [f32]>,
    skip: Cow<'a, [f32]>,
    norm: Cow<'a, [f32]>,
}

impl Read<'_> {
    fn convolution(&self) -> convolution::Inputs<'_> {
        convolution::Inputs {
            dims: self.saved.sizes.convolution(self.saved.sequence),
            v: &self.projected,
            weight: &self.weight,
            bias: self.bias.as_deref(),
            documents: self.saved.documents.as_deref(),
        }
    }

    fn steps(&self) -> Vec<f32> {
        scan::steps(self.saved.sizes.steps(), &self.projected, &self.dt_bias)
    }

    /// Returns `A` of each head.
    fn rates(&self) -> Vec<f32> {
        self.rates.iter().map(|log| -log.exp()).collect()
    }

    fn scan<'a>(&'a self, u: &'a [f32], steps: &'a [f32], rates: &'a [f32]) -> scan::Inputs<'a> {
        scan::Inputs {
            dims: self.saved.sizes.scan(self.saved.rows, self.saved.sequence),
            u,
            steps,
            rates,
            skip: &self.skip,
            documents: self.saved.documents.as_deref(),
        }
    }

    fn norm<'a>(&'a self, y: &'a [f32]) -> gated_norm::Inputs<'a> {
        gated_norm::Inputs {
            y,
            z: &self.projected,
            stride: self.saved.sizes.projected(),
            weight: &self.norm,
            runs: self.saved.sizes.groups,
            epsilon: self.saved.sizes.epsilon as f32,
        }
    }

    /// Returns the scan's result.
    fn scanned(&self) -> Vec<f32> {
        let u = convolution::forward(self.convolution());
        scan::forward(self.scan(&u, &self.steps(), &self.rates()))
    }
}

#[derive(Clone, Debug)]
struct MixBackward {
    saved: Saved,
    weight: KeptWeight,
    id: ParamId,
    deferred: Option<Deferred>,
    /// The scan's result.
    y: CpuTensor,
    scales: Vec<f32>,
}

impl Operation<7> for MixBackward {
    fn backward(self, gradient: CpuTensor, wanted: [bool; 7]) -> [Option<CpuTensor>; 7] {
        let Self { saved, weight, id, deferred, y, scales } = self;
        let (sizes, rows) = (saved.sizes, saved.rows);
        let weight = weight.get_on_cpu();
        let read = saved.read(&weight);
        let convolution = read.convolution();
        let mut d_projected = vec![0f32; rows * sizes.projected()];

        let (d_y, d_norm) =
            gated_norm::backward(read.norm(&elements(&y)), &scales, &elements(&gradient), &mut d_projected);
        drop(y);
        let (u, steps, rates) = (convolution::forward(convolution), read.steps(), read.rates());
        let of_scan = scan::backward(read.scan(&u, &steps, &rates), &d_y);
        drop((u, d_y));
        let steps = &of_scan.steps;
        let d_dt_bias =
            scan::steps_backward(sizes.steps(), &read.projected, &read.dt_bias, steps, &mut d_projected);
        // `A = -exp(A_log)` is its own derivative.
        let d_rates = of_scan.rates.iter().zip(&rates).map(|(d, rate)| d * rate).collect();
        let mut d_sums = of_scan.u;
        convolution::activation_backward(convolution, &mut d_sums);
        convolution::input_gradient(convolution, &d_sums, &mut d_projected);
        let d_bias = wanted[2].then(|| convolution::sum_rows(&d_sums, sizes.convolved()));

        let channels = sizes.convolved();
        let task = ConvolutionTask {
            weight: id,
            dims: convolution.dims,
            input: saved.projected.clone(),
            documents: saved.documents.clone(),
            gradient: cpu_tensor(d_sums, [rows, channels]),
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
        let d_projected = Some(cpu_tensor(d_projected, [rows, sizes.projected()]));
        let d_bias = d_bias.and_then(vector);
        [
            d_projected,
            d_weight,
            d_bias,
            vector(d_dt_bias),
            vector(d_rates),
            vector(of_scan.skip),
            vector(d_norm),
        ]
    }
}
