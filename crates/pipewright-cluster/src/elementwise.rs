//! The bytes that elementwise operations, norms and the loss read and write for each token.
//!
//! All values have two bytes. With fused kernels, a chain of operations reads its inputs and writes its
//! outputs once. With separate kernels, each operation does, and norms and rotary positions work on copies of
//! four bytes, as eager PyTorch does.

use crate::layout::{Kernels, Layout, Precision};
use crate::model::{Block, Division, FeedForward, Matrix, Mixer, Model};

/// Bytes that the kernels of one microbatch read and write, and the number of kernels.
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
/// Bytes per logit in the loss: cast, maximum, exponentials, sum and their backward in four bytes.
const LOSS: Traffic = Traffic { forward: 26.0, backward: 10.0 };
/// Bytes per element of the inner width of a Mamba-2 mixer: convolution, step, gate and norm.
const MAMBA: Traffic = Traffic { forward: 24.0, backward: 48.0 };

/// Returns the bytes of a block's elementwise operations for one microbatch on one rank.
pub fn block_traffic(block: &Block, model: &Model, layout: &Layout) -> Traffic {
    let bytes = match layout.kernels {
        Kernels::Fused => &FUSED,
        Kernels::Separate => &SEPARATE,
    };
    let (tensor, division) = (f64::from(layout.tensor), layout.sequence_division());
    let mut traffic = Traffic::default();
    let mut add = |per_element: Traffic, elements: f64| {
        traffic.forward += per_element.forward * elements * layout.tokens();
        traffic.backward += per_element.backward * elements * layout.tokens();
    };
    let parts = u8::from(block.mixer != Mixer::None) + u8::from(block.feed_forward != FeedForward::None);
    let outer = f64::from(parts) * model.hidden as f64 / division;
    add(bytes.norm, outer);
    add(bytes.residual, outer);
    if model.gpt {
        add(DROPOUT, outer);
    }
    match block.mixer {
        Mixer::Attention(attention) if !model.gpt => {
            add(bytes.rotary, (attention.query_width() + attention.key_width()) as f64 / tensor);
        }
        Mixer::Latent(latent) => {
            // Parts with and without positions are joined for each head.
            let joined = latent.heads * (2 * latent.plain_size + 2 * latent.rotary_size + latent.value_size);
            add(bytes.rotary, joined as f64 / tensor);
        }
        Mixer::Mamba2(mamba) => add(MAMBA, mamba.inner() as f64 / tensor),
        Mixer::Attention(_) | Mixer::None => {}
    }
    let activation = |gated: bool| if gated { bytes.gated } else { bytes.plain };
    match block.feed_forward {
        FeedForward::Dense(dense) => add(activation(dense.gated), dense.inner as f64 / tensor),
        FeedForward::Experts(experts) => {
            let inner = experts.per_token * experts.expert.inner + experts.shared_inner;
            add(activation(experts.expert.gated), inner as f64 / tensor);
            // Tokens are sorted by expert, and their outputs are weighted and summed.
            add(
                Traffic { forward: 10.0, backward: 10.0 },
                (experts.per_token * model.hidden) as f64 / division,
            );
        }
        FeedForward::None => {}
    }
    if layout.precision == Precision::Fp8 {
        let matrices = block.matrices(model.hidden);
        let elements = |count: &dyn Fn(&Matrix) -> f64| matrices.iter().map(count).sum::<f64>();
        add(Traffic { forward: CAST, backward: 0.0 }, elements(&|matrix| cast_input(matrix, tensor)));
        add(Traffic { forward: 0.0, backward: CAST }, elements(&|matrix| cast_output(matrix, tensor)));
    }
    traffic
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
