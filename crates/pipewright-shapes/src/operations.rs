//! Parameters and operations per token, as the authors of published runs count them.
//!
//! A parameter of a matrix takes 6 operations per token in a training step: 2 in the forward, and 4 in the
//! backward. Attention takes `12 l h s` operations per token in NeMo's count (its `flops_formulas.py`);
//! Megatron-Bridge counts half of that, because a token sees only the tokens before it. Norms, activations
//! and the lookup of the embedding do not count.

use crate::model::{Attention, Block, Experts, FeedForward, Latent, Matrix, Mixer, Model};
use crate::training::Training;
use crate::vectors::{QueryKeyNorm, Vectors};

/// Which products of attention count as operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionCount {
    /// All pairs of tokens, including pairs in which a token would see a later one.
    Full,
    /// The pairs that are used.
    Causal,
}

impl Matrix {
    /// Returns the parameters of the matrix, of all experts.
    pub fn parameters(&self) -> u128 {
        self.one_parameters() * self.of_experts.map_or(1, |share| u128::from(share.of))
    }

    /// Returns the parameters that one token uses.
    pub fn active_parameters(&self) -> u128 {
        self.one_parameters() * self.of_experts.map_or(1, |share| u128::from(share.used))
    }

    /// The parameters of one matrix, without regard to the number of experts.
    fn one_parameters(&self) -> u128 {
        u128::from(self.input) * u128::from(self.output)
    }
}

/// The counts of a layer of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayerCount {
    /// The parameters. A table that several layers have counts with the embedding.
    pub parameters: u64,
    /// The parameters of matrices with which a token is multiplied. Each takes 6 operations in a training step.
    pub products: u64,
}

impl LayerCount {
    fn new(parameters: u128, products: u128) -> Self {
        let count = |number| u64::try_from(number).unwrap_or(u64::MAX);
        Self { parameters: count(parameters), products: count(products) }
    }
}

impl Block {
    /// Returns the parameters of the block: matrices, biases and norms.
    pub fn parameters(&self, model: &Model) -> u128 {
        let weights: u128 = self.matrices(model.hidden).iter().map(Matrix::parameters).sum();
        weights + u128::from(self.other_parameters(model, |experts| experts.count))
    }

    /// Returns the parameters of the block that one token uses.
    pub fn active_parameters(&self, model: &Model) -> u128 {
        self.products(model.hidden) + u128::from(self.other_parameters(model, |experts| experts.per_token))
    }

    /// Returns the parameters of matrices with which a token is multiplied.
    fn products(&self, hidden: u64) -> u128 {
        self.matrices(hidden).iter().map(Matrix::active_parameters).sum()
    }

    /// The parameters that are not in matrices, with the biases of `counted` experts.
    fn other_parameters(&self, model: &Model, counted: fn(&Experts) -> u64) -> u64 {
        let vectors = &model.vectors;
        let parts = u64::from(self.mixer != Mixer::None) + u64::from(self.feed_forward != FeedForward::None);
        let norms = if vectors.shares_norm { parts.min(1) } else { parts * vectors.norms_per_part };
        let router = u64::from(self.chooses_tokens);
        (norms * vectors.norm_parameters + router) * model.hidden
            + self.mixer.other_parameters(vectors, model.hidden)
            + self.feed_forward.other_parameters(vectors, model.hidden, counted)
    }

    /// Returns the operations per token of a training step in scores and weighted values, or in a scan.
    pub fn attention_operations(&self, sequence: u64, count: AttentionCount) -> f64 {
        3.0 * self.mixer.pair_operations(sequence, count)
    }
}

impl Mixer {
    /// Returns the operations per token of a forward that are not products with parameters.
    pub fn pair_operations(&self, sequence: u64, count: AttentionCount) -> f64 {
        let keys = |window| keys(sequence, count, window);
        match self {
            Self::Attention(attention) => 4.0 * attention.query_width() as f64 * keys(attention.window),
            Self::Latent(latent) => {
                let widths = latent.plain_size + latent.rotary_size + latent.value_size;
                let seen = latent.indexer.map(|indexer| indexer.keys);
                2.0 * (latent.heads * widths) as f64 * keys(seen) + self.indexer_operations(sequence, count)
            }
            // Within a chunk, scores of `C` and `B` for each group and a product with the inputs; between
            // chunks, the update and the reading of the state (arXiv 2405.21060, section 6).
            Self::Mamba2(mamba) => {
                let chunk = mamba.chunk.min(sequence) as f64 / 2.0;
                let scores = 2.0 * (mamba.groups * mamba.state) as f64 * chunk;
                scores + 2.0 * mamba.inner() as f64 * (chunk + 2.0 * mamba.state as f64)
            }
            Self::Delta(delta) => delta.scan_operations(delta.chunk.min(sequence) as f64),
            Self::None => 0.0,
        }
    }

    /// Returns the part of [`Self::pair_operations`] that the indexer of latent attention has, which each rank of a
    /// tensor group computes. It scores all keys, and its products do not depend on what it chooses.
    pub fn indexer_operations(&self, sequence: u64, count: AttentionCount) -> f64 {
        let Self::Latent(Latent { indexer: Some(indexer), .. }) = self else { return 0.0 };
        2.0 * (indexer.heads * indexer.head_size) as f64 * keys(sequence, count, None)
    }

    /// The parameters of the mixer that are not in matrices.
    fn other_parameters(&self, vectors: &Vectors, hidden: u64) -> u64 {
        let biases = vectors.biases;
        let bias = |has_bias: bool, width: u64| u64::from(has_bias) * width;
        match self {
            Self::Mamba2(mamba) => {
                let convolved = mamba.inner() + 2 * mamba.groups * mamba.state;
                let taps = mamba.convolution + u64::from(biases.convolution);
                let own = convolved * taps + 3 * mamba.heads + mamba.inner();
                own + bias(biases.mamba, mamba.projected() + hidden)
            }
            Self::Latent(latent) => {
                let small = latent.query_rank.unwrap_or(0) + latent.key_value_rank;
                // The norm of the indexer's key has an offset.
                let indexer = latent.indexer.map_or(0, |indexer| 2 * indexer.head_size);
                indexer
                    + small
                    + bias(biases.query_key_value, small + latent.rotary_size)
                    + bias(biases.output, hidden)
            }
            Self::Attention(attention) => {
                attention.norm_parameters(vectors.query_key_norm)
                    + bias(vectors.sinks, attention.heads)
                    + bias(biases.query_key_value, attention.projected())
                    + bias(biases.output, hidden)
            }
            Self::Delta(delta) => delta.other_parameters(),
            Self::None => 0,
        }
    }
}

impl Attention {
    fn norm_parameters(&self, norm: QueryKeyNorm) -> u64 {
        match norm {
            QueryKeyNorm::None => 0,
            QueryKeyNorm::Head => 2 * self.head_size,
            QueryKeyNorm::All => self.query_width() + self.key_width(),
        }
    }
}

impl FeedForward {
    /// The parameters of the gate of shared experts.
    fn shared_gate(&self, vectors: &Vectors, hidden: u64) -> u64 {
        let has_shared = self.experts().is_some_and(|experts| experts.shared_inner > 0);
        if vectors.shared_gate && has_shared { hidden } else { 0 }
    }

    /// The parameters of the feed-forward part that are not in matrices, and the gate of shared experts.
    fn other_parameters(&self, vectors: &Vectors, hidden: u64, counted: fn(&Experts) -> u64) -> u64 {
        let bias = |has_bias: bool, width: u64| u64::from(has_bias) * width;
        let has_bias = vectors.biases.feed_forward;
        match self {
            Self::Dense(dense) => bias(has_bias, dense.up_products() * dense.inner + hidden),
            Self::Experts(experts) | Self::LatentExperts { experts, .. } => {
                let width = self.expert_width(hidden);
                let of_one = experts.expert.up_products() * experts.expert.inner + width;
                bias(has_bias, counted(experts) * of_one)
                    + bias(vectors.biases.router, experts.count)
                    + self.shared_gate(vectors, hidden)
            }
            Self::None => 0,
        }
    }
}

impl Model {
    /// Returns the parameters of the table of the embedding.
    pub fn table_parameters(&self) -> u128 {
        u128::from(self.vocabulary) * u128::from(self.hidden)
    }

    /// Returns the parameters of the head's matrix, which may be the table of the embedding.
    pub fn head_matrix_parameters(&self) -> u128 {
        u128::from(self.outputs()) * u128::from(self.hidden)
    }

    /// Returns the counts of the layers into which training cuts the model: the embedding, the blocks, the
    /// predictors of further tokens, and the norms with the head.
    pub fn layers(&self) -> Vec<LayerCount> {
        let (hidden, table) = (u128::from(self.hidden), self.head_matrix_parameters());
        let block = |block: &Block| {
            let gate = block.feed_forward.shared_gate(&self.vectors, self.hidden);
            LayerCount::new(block.parameters(self), block.products(self.hidden) + u128::from(gate))
        };
        let joined = self.predictor_blocks().iter().map(|block| block.products(self.hidden)).sum::<u128>();
        let predictor = LayerCount::new(self.predictor_layer(), joined + 2 * hidden * hidden);
        let predictors = u128::from(self.predictors);
        let head = LayerCount::new(self.head_parameters() + predictors * hidden, (1 + predictors) * table);
        let mut layers = vec![LayerCount::new(self.embedding_parameters(), 0)];
        layers.extend(self.blocks.iter().map(block));
        layers.extend((0..self.predictors).map(|_| predictor));
        layers.push(head);
        layers
    }

    /// Returns all parameters, including the blocks that predict further tokens.
    pub fn parameters(&self) -> u128 {
        let blocks: u128 = self.blocks.iter().map(|block| block.parameters(self)).sum();
        blocks + self.outer_parameters() + self.predictor_parameters()
    }

    /// Returns the number of parameters that the model is known by: all except the parameters of predictors that are an
    /// addition to it.
    pub fn own_parameters(&self) -> u128 {
        self.parameters() - if self.counts_predictors { 0 } else { self.predictor_parameters() }
    }

    /// Returns the parameters that one token uses: all except experts that it does not pass, and the
    /// blocks that predict further tokens.
    pub fn active_parameters(&self) -> u128 {
        let blocks: u128 = self.blocks.iter().map(|block| block.active_parameters(self)).sum();
        blocks + self.outer_parameters()
    }

    /// The parameters outside of blocks: tables and the last norm.
    fn outer_parameters(&self) -> u128 {
        self.embedding_parameters() + self.head_parameters()
    }

    fn embedding_parameters(&self) -> u128 {
        self.table_parameters() + u128::from(self.further_embedding)
    }

    /// The parameters of the last norm, and of the head if it has a matrix of its own.
    fn head_parameters(&self) -> u128 {
        let matrix = if self.tied { 0 } else { self.head_matrix_parameters() };
        matrix + u128::from(self.hidden * self.vectors.norm_parameters)
    }

    /// Returns the parameters of the predictors of further tokens. They use the tables of the model.
    pub fn predictor_parameters(&self) -> u128 {
        u128::from(self.own_predictors()) * (self.predictor_layer() + u128::from(self.hidden))
    }

    /// Returns the number of predictors that have weights of their own.
    pub fn own_predictors(&self) -> u32 {
        if self.shares_predictors { self.predictors.min(1) } else { self.predictors }
    }

    /// The parameters of a predictor without its norm in front of the head.
    fn predictor_layer(&self) -> u128 {
        let blocks: u128 = self.predictor_blocks().iter().map(|block| block.parameters(self)).sum();
        blocks + u128::from(2 * self.hidden * self.hidden + 2 * self.hidden)
    }

    /// Returns the number of parameters that are trained.
    pub fn trained_parameters(&self) -> u128 {
        if !self.is_adapted() {
            return self.parameters();
        }
        let of_block = |block: &Block| match block.training {
            Training::Adapters(adapters) => adapters.parameters(),
            Training::Whole | Training::ForwardOnly => 0,
        };
        self.blocks.iter().map(of_block).sum()
    }

    /// Returns the operations per parameter and token of the head's product: 2 in the forward, 2 for the
    /// gradients of inputs, and 2 for the gradients of weights, unless adapters are trained.
    pub fn head_operations_per_parameter(&self) -> f64 {
        if self.is_adapted() { 4.0 } else { 6.0 }
    }

    /// Returns the operations of a training step per token. With adapters, the products for the gradients of
    /// frozen matrices, all backward products of blocks before the adapters, and the products of the adapters
    /// do not count.
    pub fn operations_per_token(&self, sequence: u64, count: AttentionCount) -> f64 {
        let block_operations = |block: &Block| {
            let attention = block.attention_operations(sequence, count);
            let attention = if block.training == Training::ForwardOnly { attention / 3.0 } else { attention };
            block.training.operations_per_parameter() * block.products(self.hidden) as f64 + attention
        };
        let blocks: f64 = self.blocks.iter().map(block_operations).sum();
        let per_parameter = self.head_operations_per_parameter();
        let head = per_parameter * self.head_matrix_parameters() as f64;
        let joined = per_parameter * (2 * self.hidden * self.hidden) as f64;
        let predictor = self.predictor_blocks().iter().map(block_operations).sum::<f64>() + joined + head;
        blocks + head + f64::from(self.predictors) * predictor
    }
}

/// The mean number of keys that a token of a row sees, within a window if there is one.
fn keys(sequence: u64, count: AttentionCount, window: Option<u64>) -> f64 {
    let all = sequence as f64;
    match (count, window.filter(|&window| window < sequence)) {
        (AttentionCount::Full, None) => all,
        (AttentionCount::Causal, None) => all / 2.0,
        // The first tokens see fewer keys than the window has.
        (_, Some(window)) => window as f64 * (1.0 - window as f64 / (2.0 * all)),
    }
}
