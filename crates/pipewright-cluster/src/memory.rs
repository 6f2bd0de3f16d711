//! The memory of a rank.
//!
//! **Parameters** are counted for each rank of a tensor group. Heads of keys and values that are fewer than
//! the ranks have a copy on each rank ([`Block::with_copies`]). Training in 16 bits with AdamW takes 2 bytes
//! for a parameter, 4 for its gradient, and 12 for the optimizer: a copy of 4 bytes and two moments (arXiv
//! 2205.05198, section 6), and in f32 4, 4 and 8; a stack may have other formats
//! ([`StateFormats`](crate::implementation::StateFormats)). If the optimizer is sharded, replicas divide its bytes. If
//! gradients are
//! sharded, replicas divide these, too, and each microbatch reduces the gradients of one block after another.
//! If parameters are sharded, replicas divide 16 bytes (parameter, gradient and two moments of 4 bytes each),
//! and a rank holds copies of 2 bytes and gradients of 4 bytes: of the blocks at hand, or of all its blocks if the
//! copies stay, and in a pipeline. Muon has one moment of a matrix, and two of a table. Frozen parameters take 2 bytes,
//! or 4 in FP8 if they are not sharded or in f32, and have no gradient and no optimizer state. Adapters are trained in
//! the format of the copy that the optimizer updates, usually f32: 4 bytes, 4 for the gradient, and 8 for both moments.
//! Gradients of adapters are counted as a whole even if gradients are sharded.
//!
//! **Activations** of a block are the tensors that its backward reads. For GPT without recomputation, they
//! are `s b h (10 + 24 / t + 5 a s / (h t))` bytes (the same paper, equation 2); with sequence parallelism
//! the 10 is divided too, and fused attention or selective recomputation removes the last term.
//!
//! The tensors that operations keep are counted as in training (`kept` of `pipewright-shapes`). The rest follows other
//! systems, whose copy of parameters in single precision belongs to the optimizer, and whose gradients are sharded
//! too; `training_memory` of `pipewright-models` counts the tensors of Pipewright.

use std::ops::{Add, Mul};

use pipewright_schedule::held_bytes::HeldBytes;

use crate::implementation::{Loss, NumberFormat, Optimizer};
use crate::layout::{Layout, Modules, Recompute, Scores, ShardedState};
use crate::setting::Setting;
use pipewright_shapes::kept::{KeptNumbers, expert_rows, norm};
use pipewright_shapes::model::{Block, Dense, Division, Experts, FeedForward, Matrix, Mixer, Model};
use pipewright_shapes::training::{AdaptedLayer, Adapters, Training};

/// Parameters of a rank, by the ranks that have the same ones.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Parameters {
    /// Parameters of matrices that all replicas have.
    pub matrices: f64,
    /// Parameters of tables and vectors, which all replicas have.
    pub tables: f64,
    /// Parameters of experts, which only ranks with the same experts have.
    pub experts: f64,
}

impl Parameters {
    /// Makes parameters of matrices that all replicas have.
    pub fn of_matrices(matrices: f64) -> Self {
        Self { matrices, ..Self::default() }
    }

    /// Makes parameters of tables and vectors.
    pub fn of_tables(tables: f64) -> Self {
        Self { tables, ..Self::default() }
    }

    /// Returns the number of parameters that all replicas have.
    pub fn outside_experts(&self) -> f64 {
        self.matrices + self.tables
    }

    /// Returns the number of all parameters.
    pub fn total(&self) -> f64 {
        self.outside_experts() + self.experts
    }

    /// Returns the parameters that a rank updates if the ranks with the same parameters divide them.
    pub fn shards(&self, layout: &Layout) -> Self {
        let (shards, expert_shards) = (f64::from(layout.shards()), f64::from(layout.expert_shards()));
        Self {
            matrices: self.matrices / shards,
            tables: self.tables / shards,
            experts: self.experts / expert_shards,
        }
    }

    /// Returns their number.
    pub fn shard(&self, layout: &Layout) -> f64 {
        self.shards(layout).total()
    }
}

impl Add for Parameters {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            matrices: self.matrices + other.matrices,
            tables: self.tables + other.tables,
            experts: self.experts + other.experts,
        }
    }
}

impl Mul<f64> for Parameters {
    type Output = Self;

    fn mul(self, factor: f64) -> Self {
        Self {
            matrices: self.matrices * factor,
            tables: self.tables * factor,
            experts: self.experts * factor,
        }
    }
}

/// Returns the parameters of a block on one rank of a tensor group.
pub fn block_parameters(block: &Block, model: &Model, layout: &Layout) -> Parameters {
    let block = &block.with_copies(layout.tensor);
    let matrices = block.matrices(model.hidden);
    let all: u128 = matrices.iter().map(Matrix::parameters).sum();
    let mut sum = Parameters::of_tables((block.parameters(model) - all) as f64);
    for matrix in &matrices {
        let own = matrix.parameters() as f64 / matrix_division(matrix, layout);
        match matrix.of_experts {
            Some(_) => sum.experts += own / f64::from(layout.expert),
            None => sum.matrices += own,
        }
    }
    sum
}

/// Returns the parameters of a block's adapters on one rank of a tensor group.
pub fn adapter_parameters(adapters: &Adapters, layout: &Layout) -> Parameters {
    let own = |matrix: Matrix| matrix.parameters() as f64 / matrix_division(&matrix, layout);
    let magnitudes = adapters.layers().filter(|_| adapters.sizes().has_magnitudes).map(|layer| {
        let [_, output] = layout.matrix_of([layer.input, layer.output], layer.division);
        output
    });
    Parameters { tables: magnitudes.sum(), ..Parameters::of_matrices(adapters.matrices().map(own).sum()) }
}

/// The number of ranks of a tensor group that divide a matrix.
fn matrix_division(matrix: &Matrix, layout: &Layout) -> f64 {
    match (matrix.division, matrix.of_experts) {
        (Division::Whole, _) => 1.0,
        (Division::Columns | Division::Rows, Some(_)) => f64::from(layout.expert_tensor),
        (Division::Columns | Division::Rows, None) => f64::from(layout.tensor),
    }
}

/// Returns the parameters of a predictor of a further token, on one rank of a tensor group. It uses the tables
/// of the embedding and the head.
pub fn predictor_parameters(model: &Model, layout: &Layout) -> Parameters {
    let blocks = model.predictor_blocks().iter().map(|block| block_parameters(block, model, layout));
    blocks.fold(Parameters::default(), Parameters::add)
        + Parameters::of_matrices((2 * model.hidden * model.hidden) as f64 / f64::from(layout.tensor))
}

/// Returns the parameters of the embedding's table or of the head, on one rank of a tensor group.
pub fn table_parameters(model: &Model, layout: &Layout) -> f64 {
    model.table_parameters() as f64 / f64::from(layout.tensor)
}

/// Returns the bytes of `parameters` on a rank with their gradients and optimizer. `largest_block` are the
/// parameters of the model's largest block.
pub fn state(parameters: Parameters, largest_block: Parameters, layout: &Layout) -> HeldBytes<f64> {
    let (own, shard) = (parameters.total(), parameters.shard(layout));
    let formats = layout.state_formats();
    let weights = weight_bytes(layout);
    let of_gradient = formats.gradients.bytes();
    let moments = layout.implementation.optimizer.moments();
    let optimizer = |updated: Parameters| {
        formats.optimizer_bytes(moments) * (updated.matrices + updated.experts)
            + formats.optimizer_bytes(Optimizer::TABLE_MOMENTS) * updated.tables
    };
    let of_shard = optimizer(parameters.shards(layout));
    let [parameters, gradients, optimizer] = match layout.sharding {
        ShardedState::Nothing => [weights * own, of_gradient * own, optimizer(parameters)],
        ShardedState::Optimizer => [weights * own, of_gradient * own, of_shard],
        // Each microbatch reduces its gradients, block by block.
        ShardedState::Gradients => [weights * own, of_gradient * (shard + largest_block.total()), of_shard],
        ShardedState::Parameters => {
            let gathered = if layout.keeps_gathered() { own } else { 2.0 * largest_block.total() };
            // A reduction reads a copy of a block's gradients.
            let summed = largest_block.total() + if layout.sums_gradients() { own } else { 0.0 };
            [
                formats.weights.bytes() * shard + layout.gathered_format().bytes() * gathered,
                of_gradient * (shard + summed),
                of_shard,
            ]
        }
    };
    HeldBytes { parameters, gradients, optimizer, ..HeldBytes::default() }
}

/// The bytes of a parameter and of the copies of it that products read. Weights in a narrow format, and their
/// transpose, are all that there is, or are kept in addition to wider weights.
fn weight_bytes(layout: &Layout) -> f64 {
    let narrow = 2.0 * layout.precision.bytes();
    match layout.state_formats().weights {
        NumberFormat::Fp8 | NumberFormat::Nvfp4 => narrow,
        wide @ (NumberFormat::F32 | NumberFormat::Bf16 | NumberFormat::Int8) => {
            wide.bytes() + if layout.precision.is_narrow() { narrow } else { 0.0 }
        }
    }
}

/// Returns the bytes of adapters on a rank with their gradients and optimizer, and of the `frozen` parameters
/// of the model. `largest_block` are the parameters of the model's largest block.
pub fn adapted_state(
    adapters: Parameters,
    frozen: Parameters,
    largest_block: Parameters,
    layout: &Layout,
) -> HeldBytes<f64> {
    let (own, shard) = (adapters.total(), adapters.shard(layout));
    let (of_frozen, of_adapter) = (weight_bytes(layout), layout.adapter_format().bytes());
    let [parameters, gradients, optimizer] = match layout.sharding {
        ShardedState::Nothing => {
            [of_adapter * own + of_frozen * frozen.total(), of_adapter * own, 2.0 * of_adapter * own]
        }
        ShardedState::Optimizer | ShardedState::Gradients => {
            [of_adapter * own + of_frozen * frozen.total(), of_adapter * own, 2.0 * of_adapter * shard]
        }
        ShardedState::Parameters => {
            let is_kept = layout.keeps_gathered();
            let gathered = if is_kept { frozen.total() } else { 2.0 * largest_block.total() };
            let element = layout.precision.element_bytes();
            let held = element * frozen.shard(layout) + element * gathered;
            let trained = of_adapter * (shard + own);
            [trained + held, trained, 2.0 * of_adapter * shard]
        }
    };
    HeldBytes { parameters, gradients, optimizer, ..HeldBytes::default() }
}

/// Returns the bytes of activations that a block keeps for one microbatch: none before all adapters.
pub fn block_activations(block: &Block, model: &Model, layout: &Layout) -> f64 {
    if block.training == Training::ForwardOnly {
        return 0.0;
    }
    let block = &block.with_copies(layout.tensor);
    let kept = match (layout.recompute, layout.scores) {
        (Recompute::Full, _) => {
            layout.precision.element_bytes() * model.hidden as f64 / layout.sequence_division()
        }
        (Recompute::Selective, Scores::Fused) => selected(block, model, layout),
        (Recompute::Modules(modules), _) => everything(block, model, layout, modules),
        (Recompute::None | Recompute::Selective, _) => everything(block, model, layout, Modules::default()),
    };
    kept * layout.tokens()
}

/// Returns the bytes that a block keeps for the gradients of its weights if these are computed later than the
/// gradients of its inputs: the inputs of products and the gradients of their outputs, for one microbatch.
/// For GPT they are 32 s b h bytes (arXiv 2401.10241, table 1).
pub fn block_stash(block: &Block, model: &Model, layout: &Layout) -> f64 {
    match &block.training {
        Training::Whole => {}
        Training::Adapters(adapters) => return adapter_stash(adapters, layout) * layout.tokens(),
        Training::ForwardOnly => return 0.0,
    }
    let block = &block.with_copies(layout.tensor);
    let bytes = layout.precision.bytes();
    let kept = |matrix: &Matrix| {
        let [input, output] = layout.widths_of([matrix.input, matrix.output], matrix.division);
        layout.rows_per_token(matrix) * bytes * (input + output)
    };
    block.matrices(model.hidden).iter().map(kept).sum::<f64>() * layout.tokens()
}

/// Returns the bytes of the gradients that a block's backward has at once for one microbatch: of the input and of the
/// output of its largest product.
pub fn block_gradients(block: &Block, model: &Model, layout: &Layout) -> f64 {
    if block.training == Training::ForwardOnly {
        return 0.0;
    }
    let gradients = |matrix: &Matrix| {
        let widths = layout.widths_of([matrix.input, matrix.output], matrix.division);
        layout.rows_per_token(matrix) * widths.iter().sum::<f64>()
    };
    let block = block.with_copies(layout.tensor);
    let most = block.matrices(model.hidden).iter().map(gradients).fold(0.0, f64::max);
    layout.precision.element_bytes() * most * layout.tokens()
}

/// The bytes per token that a block's adapters keep for their backward.
fn adapter_activations(block: &Block, layout: &Layout) -> f64 {
    let Training::Adapters(adapters) = &block.training else { return 0.0 };
    let kept = |layer: AdaptedLayer| {
        let widths = layout.widths_of([layer.input, layer.output], layer.division);
        adapters.sizes().kept(widths, !layer.shares_input)
    };
    let bytes = layout.adapter_format().bytes();
    // An adapter in the format of the block's tensors keeps no copy of an input.
    let copies =
        |layer: AdaptedLayer| if bytes < 4.0 { AdaptedLayer { shares_input: true, ..layer } } else { layer };
    bytes * adapters.layers().map(copies).map(kept).sum::<f64>()
}

/// The bytes per token that a block's adapters keep for the gradients of their matrices.
fn adapter_stash(adapters: &Adapters, layout: &Layout) -> f64 {
    let kept = |layer: AdaptedLayer| {
        let widths = layout.widths_of([layer.input, layer.output], layer.division);
        adapters.sizes().stash(widths, layer.shares_input).iter().sum::<f64>()
    };
    4.0 * adapters.layers().map(kept).sum::<f64>()
}

/// Returns the bytes of activations of a block with nothing computed again, for one microbatch.
pub fn whole_block_activations(block: &Block, model: &Model, layout: &Layout) -> f64 {
    if block.training == Training::ForwardOnly {
        return 0.0;
    }
    everything(&block.with_copies(layout.tensor), model, layout, Modules::default()) * layout.tokens()
}

/// The bytes per token of all tensors of a block that its backward reads, without the parts that `modules` name.
fn everything(block: &Block, model: &Model, layout: &Layout, modules: Modules) -> f64 {
    let (tensor, division) = (f64::from(layout.tensor), layout.sequence_division());
    // A frozen matrix has no gradient, so nothing keeps its input, unless an adapter does.
    let of_inputs = match &block.training {
        Training::Adapters(adapters) if adapters.layers().count() == 0 => 0.0,
        _ => layout.precision.bytes(),
    };
    let element = layout.precision.element_bytes();
    let bytes = |kept: KeptNumbers| element * kept.others as f64 + of_inputs * kept.inputs as f64;
    let without_inputs = |kept: KeptNumbers| KeptNumbers { inputs: 0, ..kept };
    // The mask of the dropout after the part.
    let mask = if model.gpt { model.hidden } else { 0 };
    let of_norm = norm(model.hidden);
    let of_norm = if modules.has(Modules::NORMS) { without_inputs(of_norm) } else { of_norm };
    let norms = model.vectors.norms_per_part as f64 * bytes(of_norm);
    let outer = (norms + mask as f64) / division;
    let mixer = match block.mixer {
        Mixer::Attention(attention) => {
            let keeps_scores = layout.scores == Scores::Unfused
                && layout.recompute != Recompute::Selective
                && !modules.has(Modules::SCORES);
            // Scores, their softmax, and the mask of the dropout.
            let per_score = 2.0 * element + 1.0;
            let pairs = if keeps_scores { attention.heads * u64::from(layout.sequence) } else { 0 };
            let norms = bytes(attention.norms_kept(model.vectors.query_key_norm));
            outer + (bytes(attention.kept()) + norms + per_score * pairs as f64) / tensor
        }
        Mixer::Latent(latent) => {
            let kept = latent.kept();
            // Queries, keys and values are made again from the latent vectors.
            let kept = if modules.has(Modules::LATENT) { KeptNumbers { others: 0, ..kept } } else { kept };
            outer + bytes(latent.norms_kept()) / division + bytes(kept) / tensor
        }
        Mixer::Mamba2(mamba) => outer + bytes(mamba.kept()) / tensor,
        Mixer::Delta(delta) => outer + bytes(delta.ranks_kept()) / division + bytes(delta.kept()) / tensor,
        Mixer::None => 0.0,
    };
    let feed_forward = match block.feed_forward {
        FeedForward::Dense(_) if modules.has(Modules::DENSE) => outer,
        FeedForward::Dense(dense) => outer + bytes(dense.kept()) / tensor,
        FeedForward::Experts(_) | FeedForward::LatentExperts { .. } if modules.has(Modules::EXPERTS) => outer,
        FeedForward::Experts(experts) | FeedForward::LatentExperts { experts, .. } => {
            let load = layout.expert_load();
            let width = block.feed_forward.expert_width(model.hidden);
            let rows = of_inputs * expert_rows(experts.per_token, width) as f64 * load;
            let shared = if modules.has(Modules::SHARED_EXPERT) { 0 } else { experts.shared_inner };
            let routed = Experts { shared_inner: 0, ..experts }.kept();
            let drops = modules.has(Modules::EXPERT_ACTIVATIONS);
            let routed = if drops { without_inputs(routed) } else { routed };
            let shared = Dense { inner: shared, ..experts.expert }.kept();
            outer + rows / division + (bytes(routed) * load + bytes(shared)) / tensor
        }
        FeedForward::None => 0.0,
    };
    mixer + feed_forward + adapter_activations(block, layout)
}

/// The bytes per token that selective recomputation with fused attention keeps: the input of the block, the
/// output of attention, and every second output of a product.
fn selected(block: &Block, model: &Model, layout: &Layout) -> f64 {
    let (tensor, division) = (f64::from(layout.tensor), layout.sequence_division());
    let output = |matrix: &Matrix| {
        let [_, output] = layout.widths_of([matrix.input, matrix.output], matrix.division);
        layout.rows_per_token(matrix) * output
    };
    let outputs: f64 = block.matrices(model.hidden).iter().map(output).sum();
    let values = match block.mixer {
        Mixer::Attention(attention) => attention.query_width(),
        Mixer::Latent(latent) => latent.heads * latent.value_size,
        Mixer::Mamba2(mamba) => mamba.inner(),
        Mixer::Delta(delta) => delta.value_width(),
        Mixer::None => 0,
    };
    let element = layout.precision.element_bytes();
    let base = element * (model.hidden as f64 / division + values as f64 / tensor + outputs / 2.0);
    base + adapter_activations(block, layout)
}

/// Returns the bytes of tensors that collectives and messages are sending or receiving. With sequence
/// parallelism, the hidden states of one product and their gradient are gathered. In a pipeline, two tensors
/// arrive and two leave. Tokens of experts and their outputs have a buffer on each side of their exchange.
/// The buffers of the library that sends them are not included.
pub fn buffers(model: &Model, layout: &Layout) -> f64 {
    let hidden = layout.precision.element_bytes() * layout.tokens() * model.hidden as f64;
    let gathered = if layout.sequence_parallel { 2.0 * hidden } else { 0.0 };
    // The last message has the states of all predictors before it.
    let states = layout.passed_states(layout.stages().saturating_sub(2) as usize, model);
    let passed = if layout.pipeline > 1 { 4.0 * states * hidden / f64::from(layout.tensor) } else { 0.0 };
    let copies = |block: &Block| {
        let width = block.feed_forward.expert_width(model.hidden) as f64;
        let experts = block.feed_forward.experts();
        experts.map_or(0.0, |experts| experts.per_token as f64 * width / model.hidden as f64)
    };
    let copies = model.blocks.iter().map(copies).fold(0.0, f64::max);
    let copies = copies * layout.expert_load();
    let sent = if layout.expert > 1 { 2.0 * hidden * copies / layout.sequence_division() } else { 0.0 };
    gathered + passed + sent
}

/// The bytes of a logit if its gradient replaces it: 2, and as many in a copy that the product for the gradient of
/// the head's input reads.
const FUSED_LOGIT: f64 = 4.0;
/// The part of the tokens whose logits exist at the same time, if the loss is computed in chunks.
const CHUNK: f64 = 1.0 / 8.0;

/// Returns the bytes of the logits of a microbatch and of the other arrays of the loss: the gradient, and the
/// logarithms of probabilities unless the loss is fused. The ranks of a tensor group divide them.
pub fn logits(setting: &Setting<'_>) -> f64 {
    let (model, layout) = (setting.model, setting.layout);
    let bytes = match layout.implementation.loss {
        Loss::Separate if layout.tensor > 1 => setting.stack().divided_logit_bytes,
        Loss::Separate => setting.stack().logit_bytes,
        Loss::Fused => FUSED_LOGIT,
        Loss::Chunked => FUSED_LOGIT * CHUNK,
    };
    bytes * layout.tokens() * model.outputs() as f64 / f64::from(layout.tensor)
}
