//! The parameters of a block that are not in matrices: norms, biases and a few others.
//!
//! They take next to no time and memory, but they belong to the number of parameters that authors publish.

/// The vectors of parameters in each block of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vectors {
    /// The norms of hidden states in each part of a block: 1, or 2 if the output of a part has a norm too.
    pub norms_per_part: u64,
    /// Whether both parts of a block read the output of one norm.
    pub shares_norm: bool,
    /// The parameters of a norm for each element: 1, 2 with an offset, or 0.
    pub norm_parameters: u64,
    /// The norms of queries and keys.
    pub query_key_norm: QueryKeyNorm,
    /// The products with a bias.
    pub biases: Biases,
    /// Whether each head of attention has a score without a key.
    pub sinks: bool,
    /// Whether the shared experts have a gate of one output.
    pub shared_gate: bool,
}

/// The norms of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum QueryKeyNorm {
    /// No norm.
    #[default]
    None,
    /// One for each head, all with the same parameters.
    Head,
    /// One over all heads.
    All,
}

/// The products with a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Biases {
    /// The products that make queries, keys and values.
    pub query_key_value: bool,
    /// The product behind attention.
    pub output: bool,
    /// The products of feed-forward parts and experts.
    pub feed_forward: bool,
    /// The product that routes tokens to experts.
    pub router: bool,
    /// The products of Mamba-2 mixers.
    pub mamba: bool,
    /// The convolutions of Mamba-2 mixers.
    pub convolution: bool,
}

impl Biases {
    /// No product has a bias; convolutions have one.
    pub const NONE: Self = Self {
        query_key_value: false,
        output: false,
        feed_forward: false,
        router: false,
        mamba: false,
        convolution: true,
    };
    /// All products of dense blocks with attention have one.
    pub const DENSE: Self = Self { query_key_value: true, output: true, feed_forward: true, ..Self::NONE };
}

impl Vectors {
    /// A norm before each part, and no bias.
    pub const LLAMA: Self = Self {
        norms_per_part: 1,
        shares_norm: false,
        norm_parameters: 1,
        query_key_norm: QueryKeyNorm::None,
        biases: Biases::NONE,
        sinks: false,
        shared_gate: false,
    };
    /// Norms with offsets, and biases in all products.
    pub const GPT: Self = Self { norm_parameters: 2, biases: Biases::DENSE, ..Self::LLAMA };
}
