//! The shapes of a decoder, as far as its costs depend on them.
//!
//! A model is an embedding, blocks and a head. A block has a mixer, in which tokens exchange information, and
//! a feed-forward part. Either may be missing. All sizes are numbers of elements.

use std::slice;

pub use crate::delta::{Delta, StateDecay};
pub use crate::matrix::{Division, Matrix, Share};
use crate::training::{AdaptedLayer, AdapterError, AdapterSizes, Adapters, Training};
use crate::vectors::Vectors;

/// A decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// The name in messages and tables.
    pub name: String,
    /// The width of the hidden states.
    pub hidden: u64,
    /// The number of token ids.
    pub vocabulary: u64,
    /// The number of labels, if the head has an output for each label in place of each token id.
    pub labels: Option<u64>,
    /// Whether the head uses the table of the embedding. A head of labels does not.
    pub tied: bool,
    /// The blocks, from the first to the last.
    pub blocks: Vec<Block>,
    /// The predictors of further tokens (multi-token prediction). Each has the blocks of
    /// [`Model::predictor_blocks`], a product that joins two hidden states, and a pass through the head.
    pub predictors: u32,
    /// The blocks of one predictor; empty if it has the shapes of the last block.
    pub predictor: Vec<Block>,
    /// Whether the predictors belong to the number of parameters that the model is known by. In most families
    /// they are an addition, which training may leave out.
    pub counts_predictors: bool,
    /// Whether all predictors have the same weights.
    pub shares_predictors: bool,
    /// The parameters of the embedding in addition to the table of tokens: learned positions, further tables
    /// and the small parameters that are in no block.
    pub further_embedding: u64,
    /// The norms and biases of the blocks.
    pub vectors: Vectors,
    /// Whether dropout follows each residual branch, and positions are not rotary, as in GPT-3.
    pub gpt: bool,
    /// Whether a hyperbolic tangent limits the logits.
    pub caps_logits: bool,
}

/// A block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// The part in which tokens exchange information.
    pub mixer: Mixer,
    /// The part that is computed for each token by itself.
    pub feed_forward: FeedForward,
    /// Whether a router chooses the tokens that pass the block (mixture of depths). Its costs are those of all
    /// tokens.
    pub chooses_tokens: bool,
    /// The parameters that are trained.
    pub training: Training,
}

/// The part of a block in which tokens exchange information.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mixer {
    /// Attention with keys and values that groups of heads share.
    Attention(Attention),
    /// Attention whose keys and values are made from a small vector per token.
    Latent(Latent),
    /// A state space with scalar decay per head.
    Mamba2(Mamba2),
    /// Linear attention, with or without a delta rule.
    Delta(Delta),
    /// No mixer.
    None,
}

/// Attention with grouped keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attention {
    /// The heads of queries.
    pub heads: u64,
    /// The heads of keys and values.
    pub key_value_heads: u64,
    /// The width of a head.
    pub head_size: u64,
    /// The number of keys that a token sees; `None` for all before it.
    pub window: Option<u64>,
    /// The part of a head of queries or keys with rotary positions.
    pub rotary_size: u64,
    /// The width of a gate that multiplies the output: the width of all queries, the number of heads, or 0 without
    /// a gate.
    pub gate: u64,
}

/// Latent attention (arXiv 2405.04434).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latent {
    /// The heads.
    pub heads: u64,
    /// The width of the queries' latent vector; `None` if queries are made from the hidden states.
    pub query_rank: Option<u64>,
    /// The width of the latent vector of keys and values.
    pub key_value_rank: u64,
    /// The part of a query and a key without positions.
    pub plain_size: u64,
    /// The part of a query and a key with rotary positions.
    pub rotary_size: u64,
    /// The width of a value.
    pub value_size: u64,
    /// The width of a gate that multiplies the output: the number of heads, or 0 without a gate.
    pub gate: u64,
    /// The part that chooses the keys that a token sees; `None` if it sees all before it.
    pub indexer: Option<Indexer>,
}

/// A part of latent attention that scores all keys with heads of its own and keeps the best (DeepSeek V3.2,
/// arXiv 2512.02556). Each rank of a tensor group has all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Indexer {
    /// The heads of its queries, which share one key and have a weight each.
    pub heads: u64,
    /// The width of a head.
    pub head_size: u64,
    /// The keys that a token sees.
    pub keys: u64,
}

/// The shapes of a Mamba-2 mixer (arXiv 2405.21060).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mamba2 {
    /// The heads.
    pub heads: u64,
    /// The width of a head.
    pub head_size: u64,
    /// The width of the state for each element of a head.
    pub state: u64,
    /// The groups of heads that share `B` and `C`.
    pub groups: u64,
    /// The width of the convolution.
    pub convolution: u64,
    /// The tokens of a chunk of the scan.
    pub chunk: u64,
}

/// The part of a block that is computed for each token by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeedForward {
    /// One or two products into `inner`, and one back.
    Dense(Dense),
    /// Experts behind a router.
    Experts(Experts),
    /// Experts behind a router whose routed experts work in a width of their own: one product computes their inputs
    /// from the hidden states, and another one computes hidden states from the sum of their outputs.
    LatentExperts {
        /// The experts. The shared expert has the width of the hidden states.
        experts: Experts,
        /// The width of the routed experts' inputs and outputs.
        width: u64,
    },
    /// No feed-forward part.
    None,
}

/// A dense feed-forward part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dense {
    /// The width between the products.
    pub inner: u64,
    /// Whether a second product gates the first.
    pub gated: bool,
}

/// The most groups of experts, so that the number of ways to choose among them fits into a double.
pub const MAX_GROUPS: u64 = 512;

/// Experts behind a router.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Experts {
    /// The number of experts.
    pub count: u64,
    /// The experts of a token.
    pub per_token: u64,
    /// One expert.
    pub expert: Dense,
    /// The width of the experts that all tokens pass; 0 for none.
    pub shared_inner: u64,
    /// The number of groups of neighbouring experts.
    pub groups: u64,
    /// The number of groups from which the router chooses the experts of a token. It equals `groups` if the router
    /// chooses among all experts.
    pub groups_per_token: u64,
}

impl Model {
    /// Returns whether some block has experts.
    pub fn has_experts(&self) -> bool {
        self.blocks.iter().any(|block| block.feed_forward.experts().is_some())
    }

    /// Returns the number of outputs of the head for a token.
    pub fn outputs(&self) -> u64 {
        self.labels.unwrap_or(self.vocabulary)
    }

    /// Returns the blocks of one predictor of a further token.
    pub fn predictor_blocks(&self) -> &[Block] {
        match self.blocks.last() {
            Some(last) if self.predictor.is_empty() => slice::from_ref(last),
            _ => &self.predictor,
        }
    }

    /// Returns the model with adapters on these layers, each with the index of its block, in place of the
    /// training of its parameters. Heads that predict further tokens are left out: nothing trains them.
    ///
    /// # Errors
    /// If `layers` is empty, if it names a block that the model does not have, or if a block has more than
    /// eight layers with an adapter.
    pub fn with_adapters(
        mut self,
        sizes: AdapterSizes,
        layers: impl IntoIterator<Item = (usize, AdaptedLayer)>,
    ) -> Result<Self, AdapterError> {
        let blocks = self.blocks.len();
        let mut adapters = vec![Adapters::none(sizes); blocks];
        for (block, layer) in layers {
            let adapters = adapters.get_mut(block).ok_or(AdapterError::Block { block, blocks })?;
            if !adapters.add(layer) {
                return Err(AdapterError::Layers { block });
            }
        }
        let is_adapted = |adapters: &Adapters| adapters.layers().next().is_some();
        let first = adapters.iter().position(is_adapted).ok_or(AdapterError::NoLayer)?;
        for (index, (block, adapters)) in self.blocks.iter_mut().zip(adapters).enumerate() {
            block.training = if index < first { Training::ForwardOnly } else { Training::Adapters(adapters) };
        }
        self.predictors = 0;
        Ok(self)
    }

    /// Returns whether adapters are trained in place of the model's own parameters.
    pub fn is_adapted(&self) -> bool {
        self.blocks.iter().any(|block| block.training != Training::Whole)
    }

    /// Returns whether adapters drop elements of their inputs. Tensor groups cannot divide such a model.
    pub fn has_dropout(&self) -> bool {
        let drops = |block: &Block| match &block.training {
            Training::Adapters(adapters) => adapters.sizes().has_dropout,
            Training::Whole | Training::ForwardOnly => false,
        };
        self.blocks.iter().any(drops)
    }
}

impl Attention {
    /// Returns the width of all queries.
    pub fn query_width(&self) -> u64 {
        self.heads * self.head_size
    }

    /// Returns the width of all keys, which is also the width of all values.
    pub fn key_width(&self) -> u64 {
        self.key_value_heads * self.head_size
    }

    /// Returns the width of the first product: queries, keys, values and the gate.
    pub fn projected(&self) -> u64 {
        self.query_width() + 2 * self.key_width() + self.gate
    }
}

impl Mamba2 {
    /// Returns the width of all heads.
    pub fn inner(&self) -> u64 {
        self.heads * self.head_size
    }

    /// Returns the width of the first product: gate, input, `B`, `C` and the step of each head.
    pub fn projected(&self) -> u64 {
        2 * self.inner() + 2 * self.groups * self.state + self.heads
    }
}

impl Dense {
    /// Returns the number of products into the inner width.
    pub fn up_products(&self) -> u64 {
        1 + u64::from(self.gated)
    }
}

impl Block {
    /// Returns a block of these parts, all of whose parameters are trained.
    pub fn new(mixer: Mixer, feed_forward: FeedForward) -> Self {
        Self { mixer, feed_forward, chooses_tokens: false, training: Training::Whole }
    }

    /// Returns the block as the ranks of a tensor group divide it. If it has fewer heads of keys and values, or
    /// groups of Mamba-2, than there are ranks, each rank has a copy of one of them.
    pub fn with_copies(&self, ranks: u32) -> Self {
        let ranks = u64::from(ranks);
        let mixer = match self.mixer {
            Mixer::Attention(attention) => Mixer::Attention(Attention {
                key_value_heads: attention.key_value_heads.max(ranks),
                ..attention
            }),
            Mixer::Mamba2(mamba) => Mixer::Mamba2(Mamba2 { groups: mamba.groups.max(ranks), ..mamba }),
            Mixer::Latent(_) | Mixer::Delta(_) | Mixer::None => self.mixer,
        };
        Self { mixer, ..*self }
    }

    /// Returns the products of the block with matrices of parameters. Products with the same input are joined.
    pub fn matrices(&self, hidden: u64) -> Vec<Matrix> {
        let mut matrices = self.mixer.matrices(hidden);
        matrices.extend(self.feed_forward.matrices(hidden));
        matrices
    }
}

impl Mixer {
    /// Returns the products of the mixer.
    pub fn matrices(&self, hidden: u64) -> Vec<Matrix> {
        match self {
            Self::Attention(attention) => {
                vec![columns(hidden, attention.projected()), rows(attention.query_width(), hidden)]
            }
            Self::Latent(latent) => latent.matrices(hidden),
            Self::Mamba2(mamba) => vec![columns(hidden, mamba.projected()), rows(mamba.inner(), hidden)],
            Self::Delta(delta) => delta.matrices(hidden),
            Self::None => Vec::new(),
        }
    }
}

impl Latent {
    /// Returns the products that make queries, keys and values from latent vectors.
    pub fn up_matrices(&self) -> Vec<Matrix> {
        let query_width = self.heads * (self.plain_size + self.rotary_size);
        let queries = self.query_rank.map(|rank| columns(rank, query_width));
        let key_value_width = self.heads * (self.plain_size + self.value_size);
        queries.into_iter().chain([columns(self.key_value_rank, key_value_width)]).collect()
    }

    fn matrices(&self, hidden: u64) -> Vec<Matrix> {
        let query_width = self.heads * (self.plain_size + self.rotary_size);
        let mut matrices = match self.query_rank {
            Some(rank) => vec![whole(hidden, rank), columns(rank, query_width)],
            None => vec![columns(hidden, query_width)],
        };
        let key_value_width = self.heads * (self.plain_size + self.value_size);
        matrices.push(whole(hidden, self.key_value_rank + self.rotary_size));
        matrices.push(columns(self.key_value_rank, key_value_width));
        matrices.push(rows(self.heads * self.value_size, hidden));
        if self.gate > 0 {
            matrices.push(columns(hidden, self.gate));
        }
        if let Some(Indexer { heads, head_size, .. }) = self.indexer {
            matrices.push(whole(self.query_rank.unwrap_or(hidden), heads * head_size));
            matrices.push(whole(hidden, head_size + heads));
        }
        matrices
    }
}

impl FeedForward {
    /// Returns the experts.
    pub fn experts(&self) -> Option<&Experts> {
        match self {
            Self::Experts(experts) | Self::LatentExperts { experts, .. } => Some(experts),
            Self::Dense(_) | Self::None => None,
        }
    }

    /// Returns the width of the routed experts' inputs and outputs, in a model with hidden states of the width
    /// `hidden`.
    pub fn expert_width(&self, hidden: u64) -> u64 {
        if let Self::LatentExperts { width, .. } = self { *width } else { hidden }
    }

    /// Returns the products of the feed-forward part.
    pub fn matrices(&self, hidden: u64) -> Vec<Matrix> {
        match self {
            Self::Dense(dense) => dense.matrices(hidden).to_vec(),
            Self::Experts(experts) => experts.matrices(hidden, hidden),
            Self::LatentExperts { experts, width } => {
                let mut matrices = experts.matrices(hidden, *width);
                matrices.extend([whole(hidden, *width), whole(*width, hidden)]);
                matrices
            }
            Self::None => Vec::new(),
        }
    }
}

impl Dense {
    fn matrices(&self, hidden: u64) -> [Matrix; 2] {
        [columns(hidden, self.up_products() * self.inner), rows(self.inner, hidden)]
    }
}

impl Experts {
    /// Returns the products of routed experts whose inputs have the width `width`, the router and the shared
    /// expert.
    fn matrices(&self, hidden: u64, width: u64) -> Vec<Matrix> {
        let share = Share { used: self.per_token, of: self.count };
        let routed =
            self.expert.matrices(width).map(|of_expert| Matrix { of_experts: Some(share), ..of_expert });
        let mut matrices = vec![whole(hidden, self.count)];
        matrices.extend(routed);
        if self.shared_inner > 0 {
            matrices.extend(Dense { inner: self.shared_inner, ..self.expert }.matrices(hidden));
        }
        matrices
    }
}

fn columns(input: u64, output: u64) -> Matrix {
    Matrix { input, output, division: Division::Columns, of_experts: None }
}

fn rows(input: u64, output: u64) -> Matrix {
    Matrix { input, output, division: Division::Rows, of_experts: None }
}

fn whole(input: u64, output: u64) -> Matrix {
    Matrix { input, output, division: Division::Whole, of_experts: None }
}
