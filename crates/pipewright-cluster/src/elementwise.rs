//! The bytes that elementwise operations, norms and the loss read and write for each token.
//!
//! All values have two bytes. With fused kernels, a chain of operations reads its inputs and writes its
//! outputs once. With separate kernels, each operation does, and norms and rotary positions work on copies of
//! four bytes, as eager PyTorch does.

use crate::layout::{Kernels, Layout, Precision};
use pipewright_shapes::model::{Block, Division, FeedForward, Matrix, Mixer, Model};
use pipewright_shapes::training::Adapters;

/// Bytes that the kernels of one microbatch read and write.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Traffic {
    /// In the forward.
    pub forward: f64,
    /// In the backward.
    pub backward: f64,
}

/// The bytes of one element, for each kind of kernels.
struct PerElement {
    norm: Traffic,
    residual: Traffic,
    rotary: Traffic,
    gated: Traffic,
    plain: Traffic,
}

/// Fused: a norm reads and writes in its forward, and reads two tensors and writes one in its backward. The
/// gradients of both branches of a residual are summed in the backward.
const FUSED: PerElement = PerElement {
    norm: Traffic { forward: 4.0, backward: 6.0 },
    residual: Traffic { forward: 6.0, backward: 6.0 },
    rotary: Traffic { forward: 4.0, backward: 4.0 },
    gated: Traffic { forward: 6.0, backward: 10.0 },
    plain: Traffic { forward: 4.0, backward: 6.0 },
};

/// Separate: a norm is a cast, a square, a mean, a product, a cast and a product; rotary positions are a
/// cast, a product and a cast.
const SEPARATE: PerElement = PerElement {
    norm: Traffic { forward: 34.0, backward: 56.0 },
    residual: Traffic { forward: 6.0, backward: 6.0 },
    rotary: Traffic { forward: 20.0, backward: 20.0 },
    gated: Traffic { forward: 10.0, backward: 16.0 },
    plain: Traffic { forward: 8.0, backward: 12.0 },
};

/// Bytes per element of a dropout's mask, which is written and read, and of a dropout's own pass backwards.
const DROPOUT: Traffic = Traffic { forward: 1.0, backward: 5.0 };
/// Bytes per element of a cast to FP8 with its transpose: 2 read, 1 + 1 written.
const CAST: f64 = 4.0;
/// Bytes per element of tokens that are sorted by expert, and of outputs that are weighted and summed.
const SORTED: Traffic = Traffic { forward: 10.0, backward: 10.0 };
/// Bytes per logit in the loss: cast, maximum, exponentials, sum and their backward in four bytes.
const LOSS: Traffic = Traffic { forward: 26.0, backward: 10.0 };
/// Bytes per element of the inner width of a Mamba-2 mixer: convolution, step, gate and norm.
const MAMBA: Traffic = Traffic { forward: 24.0, backward: 48.0 };

/// Bytes per element of a matrix whose columns have norms: the matrix is cast (2 read, 4 written), the
/// product of both matrices of the adapter is scaled (4, 4) and added (8, 4), and the sum is squared (4, 4)
/// and summed (4).
const NORMS: f64 = 38.0;

/// Returns the bytes of the elementwise operations of a block's adapters for one microbatch on one rank: the
/// inputs are copied to single precision, and outputs in single precision are added to the layers' outputs,
/// or multiplied with magnitudes. For magnitudes, each forward computes the norms of the columns of the
/// layer's matrix with its adapter.
pub fn adapter_traffic(adapters: &Adapters, layout: &Layout) -> Traffic {
    let mut traffic = Traffic::default();
    let has_magnitudes = adapters.sizes().has_magnitudes;
    for layer in adapters.layers() {
        let widths = [layer.input, layer.output];
        let [input, output] = layout.widths_of(widths, layer.division);
        let copied = if layer.shares_input { 0.0 } else { 6.0 * input };
        let added = if has_magnitudes { 16.0 } else { 8.0 } * output;
        let passed = (copied + added) * layout.tokens();
        let [inputs, outputs] = layout.matrix_of(widths, layer.division);
        let norms = if has_magnitudes { NORMS * inputs * outputs } else { 0.0 };
        traffic.forward += passed + norms;
        traffic.backward += passed;
    }
    traffic
}

/// Returns the bytes of a block's elementwise operations for one microbatch on one rank.
pub fn block_traffic(block: &Block, model: &Model, layout: &Layout) -> Traffic {
    let bytes = match layout.kernels {
        Kernels::Fused => &FUSED,
        Kernels::Separate => &SEPARATE,
    };
    let mut sum = Sum { traffic: Traffic::default(), tokens: layout.tokens() };
    let parts = u8::from(block.mixer != Mixer::None) + u8::from(block.feed_forward != FeedForward::None);
    let outer = f64::from(parts) * model.hidden as f64 / layout.sequence_division();
    sum.add(bytes.norm, outer);
    sum.add(bytes.residual, outer);
    if model.gpt {
        sum.add(DROPOUT, outer);
    }
    sum.add_mixer(block, model, layout, bytes);
    sum.add_feed_forward(block, model, layout, bytes);
    if layout.precision == Precision::Fp8 {
        let (matrices, tensor) = (block.matrices(model.hidden), f64::from(layout.tensor));
        let inputs = matrices.iter().map(|matrix| cast_input(matrix, tensor)).sum();
        let outputs = matrices.iter().map(|matrix| cast_output(matrix, tensor)).sum();
        sum.add(Traffic { forward: CAST, backward: 0.0 }, inputs);
        sum.add(Traffic { forward: 0.0, backward: CAST }, outputs);
    }
    sum.traffic
}

/// The bytes of operations that are added one after another.
struct Sum {
    traffic: Traffic,
    tokens: f64,
}

impl Sum {
    /// Adds an operation on `elements` of each token.
    fn add(&mut self, per_element: Traffic, elements: f64) {
        self.traffic.forward += per_element.forward * elements * self.tokens;
        self.traffic.backward += per_element.backward * elements * self.tokens;
    }

    fn add_mixer(&mut self, block: &Block, model: &Model, layout: &Layout, bytes: &PerElement) {
        let tensor = f64::from(layout.tensor);
        match block.mixer {
            Mixer::Attention(attention) if !model.gpt => {
                let rotated = attention.query_width() + attention.key_width();
                self.add(bytes.rotary, rotated as f64 / tensor);
            }
            Mixer::Latent(latent) => {
                // Parts with and without positions are joined for each head.
                let keys = latent.plain_size + latent.rotary_size;
                let joined = latent.heads * (2 * keys + latent.value_size);
                self.add(bytes.rotary, joined as f64 / tensor);
            }
            Mixer::Mamba2(mamba) => self.add(MAMBA, mamba.inner() as f64 / tensor),
            Mixer::Attention(_) | Mixer::None => {}
        }
    }

    fn add_feed_forward(&mut self, block: &Block, model: &Model, layout: &Layout, bytes: &PerElement) {
        let (tensor, division) = (f64::from(layout.tensor), layout.sequence_division());
        let activation = |gated: bool| if gated { bytes.gated } else { bytes.plain };
        match block.feed_forward {
            FeedForward::Dense(dense) => self.add(activation(dense.gated), dense.inner as f64 / tensor),
            FeedForward::Experts(experts) | FeedForward::LatentExperts { experts, .. } => {
                let inner = experts.per_token * experts.expert.inner + experts.shared_inner;
                self.add(activation(experts.expert.gated), inner as f64 / tensor);
                let width = block.feed_forward.expert_width(model.hidden);
                self.add(SORTED, (experts.per_token * width) as f64 / division);
            }
            FeedForward::None => {}
        }
    }
}

/// The elements of an input that is cast by itself. A norm writes the input of a matrix that is divided by
/// its outputs, and casts it too.
fn cast_input(matrix: &Matrix, tensor: f64) -> f64 {
    let used = matrix.of_experts.map_or(1, |share| share.used) as f64;
    match matrix.division {
        Division::Rows => used * matrix.input as f64 / tensor,
        Division::Columns | Division::Whole => 0.0,
    }
}

/// The elements of the gradient of an output.
fn cast_output(matrix: &Matrix, tensor: f64) -> f64 {
    let used = matrix.of_experts.map_or(1, |share| share.used) as f64;
    match matrix.division {
        Division::Columns => used * matrix.output as f64 / tensor,
        Division::Rows => used * matrix.output as f64,
        Division::Whole => 0.0,
    }
}

/// Returns the bytes of the loss and the last norm for one microbatch on one rank.
pub fn loss_traffic(model: &Model, layout: &Layout) -> Traffic {
    let logits = layout.tokens() * model.vocabulary as f64 / f64::from(layout.tensor);
    let hidden = layout.tokens() * model.hidden as f64 / layout.sequence_division();
    let norm = match layout.kernels {
        Kernels::Fused => FUSED.norm,
        Kernels::Separate => SEPARATE.norm,
    };
    Traffic {
        forward: LOSS.forward * logits + norm.forward * hidden,
        backward: LOSS.backward * logits + norm.backward * hidden,
    }
}

/// Returns the bytes of the lookup in the embedding's table, for one microbatch on one rank. The backward adds
/// to gradients of four bytes.
pub fn embedding_traffic(model: &Model, layout: &Layout) -> Traffic {
    let hidden = layout.tokens() * model.hidden as f64;
    Traffic { forward: 4.0 * hidden, backward: 10.0 * hidden }
}
