//! Parameters and operations per token, as the authors of published runs count them.
//!
//! A parameter of a matrix takes 6 operations per token in a training step: 2 in the forward, and 4 in the
//! backward. Attention takes `12 l h s` operations per token in NeMo's count (its `flops_formulas.py`);
//! Megatron-Bridge counts half of that, because a token sees only the tokens before it. Norms, activations
//! and the lookup of the embedding do not count.

use crate::model::{Block, Matrix, Mixer, Model};

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
        self.of_one() * self.of_experts.map_or(1, |share| u128::from(share.of))
    }

    /// Returns the parameters that one token uses.
    pub fn active_parameters(&self) -> u128 {
        self.of_one() * self.of_experts.map_or(1, |share| u128::from(share.used))
    }

    /// The parameters without regard to the number of experts.
    fn of_one(&self) -> u128 {
        u128::from(self.input) * u128::from(self.output)
    }
}

impl Block {
    /// Returns the parameters of the block: matrices, biases and norms.
    pub fn parameters(&self, model: &Model) -> u128 {
        let matrices = self.matrices(model.hidden);
        let weights: u128 = matrices.iter().map(Matrix::parameters).sum();
        let biases = matrices.iter().map(|matrix| matrix.output).sum::<u64>() * u64::from(model.gpt);
        let norms = 2 * model.hidden * (1 + u64::from(model.gpt));
        weights + u128::from(biases + norms + self.mixer.other_parameters())
    }

    /// Returns the operations per token of a training step in scores and weighted values, or in a scan.
    pub fn attention_operations(&self, sequence: u64, count: AttentionCount) -> f64 {
        3.0 * self.mixer.pair_operations(sequence, count)
    }
}

impl Mixer {
    /// Returns the operations per token of a forward that are not products with parameters.
    pub fn pair_operations(&self, sequence: u64, count: AttentionCount) -> f64 {
        let keys = |window: Option<u64>| {
            let all = sequence as f64;
            match (count, window.filter(|&window| window < sequence)) {
                (AttentionCount::Full, None) => all,
                (AttentionCount::Causal, None) => all / 2.0,
                // The first tokens see fewer keys than the window has.
                (_, Some(window)) => window as f64 * (1.0 - window as f64 / (2.0 * all)),
            }
        };
        match self {
            Self::Attention(attention) => 4.0 * attention.query_width() as f64 * keys(attention.window),
            Self::Latent(latent) => {
                let widths = latent.plain_size + latent.rotary_size + latent.value_size;
                2.0 * (latent.heads * widths) as f64 * keys(None)
            }
            // Within a chunk, scores of `C` and `B` for each group and a product with the inputs; between
            // chunks, the update and the reading of the state (arXiv 2405.21060, section 6).
            Self::Mamba2(mamba) => {
                let chunk = mamba.chunk.min(sequence) as f64 / 2.0;
                let scores = 2.0 * (mamba.groups * mamba.state) as f64 * chunk;
                scores + 2.0 * mamba.inner() as f64 * (chunk + 2.0 * mamba.state as f64)
            }
            Self::None => 0.0,
        }
    }

    /// Returns the parameters that are not in matrices, biases or the block's norms.
    fn other_parameters(&self) -> u64 {
        match self {
            Self::Mamba2(mamba) => {
                let convolved = mamba.inner() + 2 * mamba.groups * mamba.state;
                convolved * (mamba.convolution + 1) + 3 * mamba.heads + mamba.inner()
            }
            Self::Latent(latent) => latent.query_rank.unwrap_or(0) + latent.key_value_rank,
            Self::Attention(_) | Self::None => 0,
        }
    }
}

impl Model {
    /// Returns the parameters of the table of the embedding, which are as many as the head's.
    pub fn table_parameters(&self) -> u128 {
        u128::from(self.vocabulary) * u128::from(self.hidden)
    }

    /// Returns all parameters. Tables of positions are not included.
    pub fn parameters(&self) -> u128 {
        let blocks: u128 = self.blocks.iter().map(|block| block.parameters(self)).sum();
        let tables = self.table_parameters() * (2 - u128::from(self.tied));
        let last_norm = u128::from(self.hidden * (1 + u64::from(self.gpt)));
        blocks + tables + last_norm + self.predictor_parameters()
    }

    fn predictor_parameters(&self) -> u128 {
        let last = self.blocks.last().map_or(0, |block| block.parameters(self));
        u128::from(self.predictors) * (last + u128::from(2 * self.hidden * self.hidden + 3 * self.hidden))
    }

    /// Returns the operations of a training step per token.
    pub fn operations_per_token(&self, sequence: u64, count: AttentionCount) -> f64 {
        let of_block = |block: &Block| {
            let active: u128 = block.matrices(self.hidden).iter().map(Matrix::active_parameters).sum();
            6.0 * active as f64 + block.attention_operations(sequence, count)
        };
        let blocks: f64 = self.blocks.iter().map(of_block).sum();
        let head = 6.0 * self.table_parameters() as f64;
        let joined = 12.0 * (self.hidden * self.hidden) as f64;
        let predictor = self.blocks.last().map_or(0.0, of_block) + joined + head;
        blocks + head + f64::from(self.predictors) * predictor
    }
}
