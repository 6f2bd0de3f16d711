//! The bytes that elementwise operations, norms and the loss read and write for each token.
//!
//! All values have two bytes, or four in f32. With fused kernels, a chain of operations reads its inputs and writes its
//! outputs once. With separate kernels, each operation does, and norms and rotary positions work on copies of
//! four bytes, as eager PyTorch does.

use crate::implementation::{Dispatcher, KernelFusion, NumberFormat};
use crate::layout::{Layout, Precision};
use crate::machine::Machine;
use crate::measured_times::Kernel;
use crate::setting::Setting;
use pipewright_shapes::model::{Block, Dense, Division, FeedForward, Matrix, Mixer, Model};
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

impl PerElement {
    /// Returns the bytes with the kernels of a layout's stack.
    fn of(layout: &Layout) -> &'static Self {
        match layout.implementation.kernels {
            KernelFusion::Fused => &FUSED,
            KernelFusion::Separate => &SEPARATE,
        }
    }
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
/// Bytes per element of tokens that are copied in the order of their experts (2 + 2), and of the experts' outputs,
/// which are weighted (2 + 2) and summed (2). Rows that are gathered and scattered move at half of the rate of
/// other kernels.
const SORTED: Traffic = Traffic { forward: 20.0, backward: 20.0 };
/// The same if the library that exchanges tokens also sorts them.
const WEIGHTED: Traffic = Traffic { forward: 12.0, backward: 12.0 };
/// Bytes per element of further copies if a library exchanges the rows of ranks alone: in the order of the ranks
/// before the exchange, and in the order of the experts behind it, there and back.
const SORTED_AGAIN: Traffic = Traffic { forward: 8.0, backward: 8.0 };
/// Bytes per token and expert of the router: scores in four bytes, their largest ones, and the maps of tokens.
const ROUTED: Traffic = Traffic { forward: 24.0, backward: 12.0 };
/// Bytes per logit in the loss: cast, maximum, exponentials, sum and their backward in four bytes.
const LOSS: Traffic = Traffic { forward: 26.0, backward: 10.0 };
/// Bytes per logit that a hyperbolic tangent limits, in two bytes: read and written, and its output and a gradient
/// read to write another.
const CAP: Traffic = Traffic { forward: 4.0, backward: 6.0 };
/// Bytes per element of the inner width of a Mamba-2 mixer, at the rate of other elementwise kernels: convolution,
/// step, gate and norm read and write 24 bytes in the forward. Most of the time are the kernels of the scan, which
/// keep states in four bytes and reach a small part of the rates of products (fitted to Nemotron 3 in
/// Megatron-Bridge's performance summary).
const MAMBA: Traffic = Traffic { forward: 130.0, backward: 330.0 };

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
    let is_single = layout.adapter_format() == NumberFormat::F32;
    for layer in adapters.layers() {
        let widths = [layer.input, layer.output];
        let [input, output] = layout.widths_of(widths, layer.division);
        let copied = if layer.shares_input || !is_single { 0.0 } else { 6.0 * input };
        // An output in the format of the layer's is added with the adapter's last product.
        let added = if has_magnitudes {
            16.0
        } else if is_single {
            8.0
        } else {
            2.0
        } * output;
        let passed = (copied + added) * layout.tokens();
        let [inputs, outputs] = layout.matrix_of(widths, layer.division);
        let norms = if has_magnitudes { NORMS * inputs * outputs } else { 0.0 };
        traffic.forward += passed + norms;
        traffic.backward += passed;
    }
    traffic
}

/// Kernels of one kind for one microbatch on one rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KernelShape {
    /// The kind.
    pub kernel: Kernel,
    /// The elements of each token.
    pub width: f64,
    /// The bytes of all tokens.
    pub bytes: Traffic,
}

/// Returns the bytes of a block's elementwise operations for one microbatch on one rank. The bytes of measured
/// kernels count as many times as the kernels are slower than the machine's rate.
pub fn block_traffic(block: &Block, setting: &Setting<'_>) -> Traffic {
    traffic(&block_kernels(block, setting.model, setting.layout), setting.machine)
}

/// Returns the bytes of the elementwise operations of a block's feed-forward part, like [`block_traffic`].
pub(crate) fn feed_forward_traffic(block: &Block, setting: &Setting<'_>) -> Traffic {
    let mut sum = Sum::new(setting.layout);
    sum.add_feed_forward(block, setting.model, setting.layout);
    traffic(&sum.kernels, setting.machine)
}

/// Returns the bytes of the activations of a block's feed-forward part, like [`block_traffic`].
pub(crate) fn activation_traffic(block: &Block, setting: &Setting<'_>) -> Traffic {
    let mut sum = Sum::new(setting.layout);
    sum.add_activation(block, setting.layout);
    traffic(&sum.kernels, setting.machine)
}

/// Returns the bytes of the norms before a block's parts, like [`block_traffic`].
pub(crate) fn norm_traffic(block: &Block, setting: &Setting<'_>) -> Traffic {
    let mut sum = Sum::new(setting.layout);
    let width = parts(block) * setting.model.hidden as f64 / setting.layout.sequence_division();
    sum.add(Kernel::Norm, PerElement::of(setting.layout).norm, width);
    traffic(&sum.kernels, setting.machine)
}

/// The parts of a block, each with a norm and a residual.
fn parts(block: &Block) -> f64 {
    f64::from(u8::from(block.mixer != Mixer::None) + u8::from(block.feed_forward != FeedForward::None))
}

/// Returns one kernel of each kind that a model has, for measurements, without the optimizer.
pub fn kernel_shapes(setting: &Setting<'_>) -> Vec<KernelShape> {
    let (model, layout) = (setting.model, setting.layout);
    let mut kernels: Vec<KernelShape> = Vec::new();
    let blocks = model.blocks.iter().flat_map(|block| block_kernels(block, model, layout));
    let all = blocks.chain(loss_kernels(model, layout)).chain([embedding_kernel(model, layout)]);
    for shape in all.filter(|shape| shape.kernel != Kernel::Other) {
        if kernels.iter().all(|known| known.kernel != shape.kernel) {
            kernels.push(shape);
        }
    }
    kernels
}

/// Sums the bytes of kernels, at the machine's rate.
fn traffic(kernels: &[KernelShape], machine: &Machine) -> Traffic {
    let mut sum = Traffic::default();
    for KernelShape { kernel, bytes, .. } in kernels {
        let [forward, backward] = machine.kernel_slowdown(*kernel);
        sum.forward += bytes.forward * forward;
        sum.backward += bytes.backward * backward;
    }
    sum
}

impl Machine {
    /// Returns how many times slower than [`Self::kernel_bandwidth`] the forward and the backward of a kind of
    /// kernels are; 1 if it was not measured.
    pub(crate) fn kernel_slowdown(&self, kernel: Kernel) -> [f64; 2] {
        let measured = self.measured.kernels.iter().find(|measured| measured.kernel == kernel);
        measured.map_or([1.0; 2], |measured| measured.rates.map(|rate| self.kernel_bandwidth() / rate))
    }
}

/// The elementwise operations of a block for one microbatch on one rank.
fn block_kernels(block: &Block, model: &Model, layout: &Layout) -> Vec<KernelShape> {
    let bytes = PerElement::of(layout);
    let mut sum = Sum::new(layout);
    let outer = parts(block) * model.hidden as f64 / layout.sequence_division();
    sum.add(Kernel::Norm, bytes.norm, outer);
    sum.add(Kernel::Residual, bytes.residual, outer);
    if model.gpt {
        sum.add(Kernel::Other, DROPOUT, outer);
    }
    sum.add_mixer(block, model, layout);
    sum.add_feed_forward(block, model, layout);
    if layout.precision.is_narrow() {
        let matrices = block.matrices(model.hidden);
        let inputs = matrices.iter().map(|matrix| cast_input(matrix, layout)).sum();
        let outputs = matrices.iter().map(|matrix| cast_output(matrix, layout)).sum();
        let cast = cast_bytes(layout.precision);
        sum.add(Kernel::Other, Traffic { forward: cast, backward: 0.0 }, inputs);
        sum.add(Kernel::Other, Traffic { forward: 0.0, backward: cast }, outputs);
    }
    sum.kernels
}

/// Operations that are added one after another.
struct Sum {
    kernels: Vec<KernelShape>,
    tokens: f64,
    /// The bytes of an element, divided by two.
    scale: f64,
}

impl Sum {
    fn new(layout: &Layout) -> Self {
        let scale = layout.precision.element_bytes() / 2.0;
        Self { kernels: Vec::new(), tokens: layout.tokens(), scale }
    }

    /// Adds an operation on `width` elements of each token, with bytes of elements of two bytes.
    fn add(&mut self, kernel: Kernel, per_element: Traffic, width: f64) {
        let scaled = |bytes: f64| bytes * self.scale;
        let per_element =
            Traffic { forward: scaled(per_element.forward), backward: scaled(per_element.backward) };
        self.add_single(kernel, per_element, width);
    }

    /// Adds an operation whose elements have four bytes in each precision.
    fn add_single(&mut self, kernel: Kernel, per_element: Traffic, width: f64) {
        if width == 0.0 {
            return;
        }
        let bytes = Traffic {
            forward: per_element.forward * width * self.tokens,
            backward: per_element.backward * width * self.tokens,
        };
        self.kernels.push(KernelShape { kernel, width, bytes });
    }

    fn add_mixer(&mut self, block: &Block, model: &Model, layout: &Layout) {
        let (tensor, bytes) = (f64::from(layout.tensor), PerElement::of(layout));
        match block.mixer {
            Mixer::Attention(attention) if !model.gpt => {
                let rotated = (attention.heads + attention.key_value_heads) * attention.rotary_size;
                self.add(Kernel::Rotary, bytes.rotary, rotated as f64 / tensor);
                let gated = if attention.gate > 0 { attention.query_width() } else { 0 };
                self.add(Kernel::Gated, bytes.gated, gated as f64 / tensor);
            }
            Mixer::Latent(latent) => {
                // Parts with and without positions are joined for each head.
                let keys = latent.plain_size + latent.rotary_size;
                let joined = latent.heads * (2 * keys + latent.value_size);
                self.add(Kernel::Rotary, bytes.rotary, joined as f64 / tensor);
                let gated = if latent.gate > 0 { latent.heads * latent.value_size } else { 0 };
                self.add(Kernel::Gated, bytes.gated, gated as f64 / tensor);
            }
            Mixer::Mamba2(mamba) => self.add(Kernel::Other, MAMBA, mamba.inner() as f64 / tensor),
            Mixer::Delta(delta) => {
                // The convolution with its activation, the norms of queries and keys under a delta rule, the decays, and
                // the norm and the gate of the outputs.
                let normed = if delta.has_rule() { 2 * delta.key_width() } else { 0 };
                self.add(Kernel::Other, bytes.plain, delta.scanned() as f64 / tensor);
                self.add(Kernel::Other, bytes.norm, (normed + delta.value_width()) as f64 / tensor);
                self.add(Kernel::Other, bytes.gated, delta.value_width() as f64 / tensor);
            }
            Mixer::Attention(_) | Mixer::None => {}
        }
    }

    fn add_feed_forward(&mut self, block: &Block, model: &Model, layout: &Layout) {
        self.add_activation(block, layout);
        let Some(experts) = block.feed_forward.experts() else { return };
        let (division, implementation) = (layout.sequence_division(), &layout.implementation);
        let width = block.feed_forward.expert_width(model.hidden);
        let copied = (experts.per_token * width) as f64 / division * layout.expert_load();
        let is_fused = implementation.dispatcher == Dispatcher::HybridEp;
        self.add(Kernel::Other, if is_fused { WEIGHTED } else { SORTED }, copied);
        if layout.expert > 1 && implementation.dispatcher == Dispatcher::AllToAll {
            self.add(Kernel::Other, SORTED_AGAIN, copied);
        }
        self.add_single(Kernel::Other, ROUTED, experts.count as f64 / division);
    }

    /// Adds the activation of a block's feed-forward part. A rank of a tensor group has all columns of whole experts
    /// and a share of the tokens, or the other way round.
    fn add_activation(&mut self, block: &Block, layout: &Layout) {
        let (Dense { gated, .. }, inner) = match block.feed_forward {
            FeedForward::Dense(dense) => (dense, dense.inner as f64),
            FeedForward::Experts(experts) | FeedForward::LatentExperts { experts, .. } => {
                let routed = (experts.per_token * experts.expert.inner) as f64 * layout.expert_load();
                (experts.expert, routed + experts.shared_inner as f64)
            }
            FeedForward::None => return,
        };
        let bytes = PerElement::of(layout);
        let (kernel, bytes) = if gated { (Kernel::Gated, bytes.gated) } else { (Kernel::Plain, bytes.plain) };
        self.add(kernel, bytes, inner / f64::from(layout.tensor));
    }
}

/// Bytes per element of a cast to a narrow format with its transpose. A scale of a tensor needs a pass for the
/// largest element (2 read) before the cast (2 read, 1 + 1 written); scales of blocks are found on the way.
fn cast_bytes(precision: Precision) -> f64 {
    match precision {
        Precision::Half | Precision::Single => 0.0,
        Precision::Fp8 => 6.0,
        Precision::Mxfp8 => 4.1,
        Precision::Nvfp4 => 5.1,
    }
}

/// The elements of an input that is cast by itself. A norm writes the input of a matrix that is divided by
/// its outputs, and casts it too.
fn cast_input(matrix: &Matrix, layout: &Layout) -> f64 {
    let (used, tensor) = (layout.rows_per_token(matrix), f64::from(layout.tensor));
    match (matrix.division, matrix.of_experts) {
        (Division::Rows, _) => used * matrix.input as f64 / tensor,
        // Copies of tokens come from an exchange, not from a norm.
        (Division::Columns, Some(_)) => used * matrix.input as f64 / tensor,
        (Division::Columns | Division::Whole, _) => 0.0,
    }
}

/// The elements of the gradient of an output.
fn cast_output(matrix: &Matrix, layout: &Layout) -> f64 {
    let (used, tensor) = (layout.rows_per_token(matrix), f64::from(layout.tensor));
    match matrix.division {
        Division::Columns => used * matrix.output as f64 / tensor,
        Division::Rows => used * matrix.output as f64,
        Division::Whole => 0.0,
    }
}

/// Returns the bytes of the loss and the last norm for one microbatch on one rank, like [`block_traffic`].
pub fn loss_traffic(setting: &Setting<'_>) -> Traffic {
    traffic(&loss_kernels(setting.model, setting.layout), setting.machine)
}

fn loss_kernels(model: &Model, layout: &Layout) -> Vec<KernelShape> {
    let norm = PerElement::of(layout).norm;
    let logits = model.outputs() as f64 / f64::from(layout.tensor);
    let mut sum = Sum::new(layout);
    sum.add_single(Kernel::Loss, LOSS, logits);
    if model.caps_logits {
        sum.add(Kernel::Other, CAP, logits);
    }
    sum.add(Kernel::Norm, norm, model.hidden as f64 / layout.sequence_division());
    sum.kernels
}

/// Returns the bytes of the lookup in the embedding's table, for one microbatch on one rank, like
/// [`block_traffic`]. The backward adds to gradients of four bytes.
pub fn embedding_traffic(setting: &Setting<'_>) -> Traffic {
    traffic(&[embedding_kernel(setting.model, setting.layout)], setting.machine)
}

fn embedding_kernel(model: &Model, layout: &Layout) -> KernelShape {
    let width = model.hidden as f64;
    let read = 2.0 * layout.precision.element_bytes() * layout.tokens() * width;
    let bytes = Traffic { forward: read, backward: 10.0 * layout.tokens() * width };
    KernelShape { kernel: Kernel::Embedding, width, bytes }
}
