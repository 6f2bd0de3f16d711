//! Measured times that replace predicted ones.

use crate::implementation::Implementation;
use crate::layout::{Layout, Precision};
use pipewright_shapes::model::Block;
use pipewright_shapes::training::Training;

/// The measured times of a machine.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MeasuredTimes {
    /// Products of single shapes.
    pub products: Vec<MeasuredProduct>,
    /// Kinds of blocks.
    pub blocks: Vec<MeasuredBlock>,
    /// Fused attention of single shapes.
    pub scores: Vec<MeasuredScores>,
    /// Kinds of elementwise kernels.
    pub kernels: Vec<MeasuredKernel>,
    /// Messages and collectives.
    pub links: Vec<MeasuredLink>,
    /// The share of a collective of replicas that computation hides, if there is enough of it; `None` for all of it.
    pub overlap: Option<f64>,
}

/// Fused attention, without its products with parameters, for one microbatch on one rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredScores {
    /// The sizes.
    pub shape: ScoresShape,
    /// The measured seconds of the forward and the backward.
    pub seconds: [f64; 2],
}

/// The sizes of fused attention on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScoresShape {
    /// The rows of the microbatch.
    pub rows: u32,
    /// The tokens of a row.
    pub sequence: u32,
    /// The heads of queries.
    pub heads: u64,
    /// The heads of keys and values.
    pub key_value_heads: u64,
    /// The numbers of a head.
    pub head_size: u64,
    /// The precision.
    pub precision: Precision,
}

/// A kind of elementwise kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// Norms of hidden states.
    Norm,
    /// Sums of residuals.
    Residual,
    /// Rotary positions of queries and keys.
    Rotary,
    /// Activations that multiply two inputs.
    Gated,
    /// Activations of one input.
    Plain,
    /// The loss of the logits.
    Loss,
    /// The lookup in the embedding's table.
    Embedding,
    /// The update of the parameters.
    Optimizer,
    /// All others, which are not measured.
    Other,
}

impl Kernel {
    /// The kinds that a file may have, with their names.
    pub const NAMED: [(&str, Self); 8] = [
        ("norm", Self::Norm),
        ("residual", Self::Residual),
        ("rotary", Self::Rotary),
        ("gated", Self::Gated),
        ("plain", Self::Plain),
        ("loss", Self::Loss),
        ("embedding", Self::Embedding),
        ("optimizer", Self::Optimizer),
    ];

    /// Returns its name in files.
    pub fn name(self) -> &'static str {
        Self::NAMED.iter().find(|(_, kernel)| *kernel == self).map_or("other", |(name, _)| name)
    }
}

/// The rate of a kind of kernels: the bytes that the cost model counts for them, per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredKernel {
    /// The kind.
    pub kernel: Kernel,
    /// The rates of the forward and the backward.
    pub rates: [f64; 2],
}

/// The use of a link, which decides its rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkUse {
    /// Messages between two ranks.
    Message,
    /// Sums over all ranks, and gathers.
    AllReduce,
    /// Exchanges between all ranks.
    AllToAll,
}

impl LinkUse {
    /// All uses, with their names in files.
    pub const NAMED: [(&str, Self); 3] =
        [("message", Self::Message), ("all_reduce", Self::AllReduce), ("all_to_all", Self::AllToAll)];
}

/// The measured rate of a link in one use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredLink {
    /// The use.
    pub purpose: LinkUse,
    /// Whether the ranks are in one node.
    pub is_inside_node: bool,
    /// Bytes per second of a rank in each direction.
    pub bandwidth: f64,
    /// Seconds of a message, or of each round of messages of a collective.
    pub latency: f64,
}

/// A measured product of `rows x inner` and `inner x columns`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredProduct {
    /// `m`.
    pub rows: f64,
    /// `n`.
    pub columns: f64,
    /// `k`.
    pub inner: f64,
    /// The precision of the inputs.
    pub precision: Precision,
    /// The measured seconds.
    pub seconds: f64,
}

/// The measured times of a kind of block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredBlock {
    /// The kind.
    pub block: Block,
    /// The sizes in which it was measured.
    pub sizes: MeasuredSizes,
    /// Seconds of the forward.
    pub forward: f64,
    /// Seconds of the backward, without what it computes again.
    pub backward: f64,
}

/// The sizes in which a block was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeasuredSizes {
    /// The rows of the microbatch.
    pub rows: u32,
    /// The tokens of a row.
    pub sequence: u32,
    /// The ranks of the tensor group.
    pub tensor: u32,
    /// The precision of the products.
    pub precision: Precision,
}

impl MeasuredProduct {
    /// Returns whether two products have the same shape and precision.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        Self { seconds: other.seconds, ..*self } == *other
    }
}

impl MeasuredSizes {
    /// Returns the layout of a stack in which a block was measured.
    pub(crate) fn layout(&self, implementation: Implementation) -> Layout {
        let Self { rows, sequence, tensor, precision } = *self;
        Layout {
            gpus: tensor,
            tensor,
            expert_tensor: tensor,
            microbatch: rows,
            batch: rows,
            sequence_parallel: tensor > 1,
            implementation,
            ..Layout::on_one_gpu(sequence, precision)
        }
    }

    /// Returns how much a layout differs: whether its precision is another one, and the sum of the logarithms of
    /// the ratios of its other sizes.
    fn distance(&self, layout: &Layout) -> (bool, f64) {
        let pairs = [
            (self.rows, layout.microbatch),
            (self.sequence, layout.sequence / layout.context.max(1)),
            (self.tensor, layout.tensor),
        ];
        let ratio = |(own, other): (u32, u32)| (f64::from(own.max(1)) / f64::from(other.max(1))).ln().abs();
        (self.precision != layout.precision, pairs.map(ratio).iter().sum())
    }
}

impl MeasuredTimes {
    /// Returns the measured seconds of a product, if its shape was measured.
    pub(crate) fn product(&self, shape: [f64; 3], precision: Precision) -> Option<f64> {
        let [rows, columns, inner] = shape;
        let sought = MeasuredProduct { rows, columns, inner, precision, seconds: 0.0 };
        self.products.iter().find(|product| product.is_like(&sought)).map(|product| product.seconds)
    }

    /// Returns the measured seconds of the forward and the backward of fused attention, if its shape was measured.
    pub(crate) fn scores(&self, shape: ScoresShape) -> Option<[f64; 2]> {
        self.scores.iter().find(|scores| scores.shape == shape).map(|scores| scores.seconds)
    }

    /// Returns the measured rate of a link, if this use of it was measured.
    pub(crate) fn link(&self, purpose: LinkUse, is_inside_node: bool) -> Option<&MeasuredLink> {
        self.links.iter().find(|link| (link.purpose, link.is_inside_node) == (purpose, is_inside_node))
    }

    /// Returns these times, and the `known` ones of shapes and kinds that these do not have.
    pub(crate) fn over(mut self, known: &Self) -> Self {
        self.products.extend(&known.products);
        self.blocks.extend(&known.blocks);
        self.scores.extend(&known.scores);
        self.kernels.extend(&known.kernels);
        self.links.extend(&known.links);
        self.overlap = self.overlap.or(known.overlap);
        self
    }

    /// Returns the measured times of a block, if its kind was measured. If it was
    /// measured several times, the sizes nearest to the layout count: first the precision, then the others.
    pub(crate) fn block(&self, block: &Block, layout: &Layout) -> Option<&MeasuredBlock> {
        // Blocks are measured without adapters.
        let whole = Block { training: Training::Whole, ..*block };
        let of_kind = self.blocks.iter().filter(|measured| measured.block == whole);
        let with_distance = of_kind.map(|measured| (measured.sizes.distance(layout), measured));
        let nearest = with_distance.min_by(|((precision, one), _), ((other_precision, other), _)| {
            precision.cmp(other_precision).then(one.total_cmp(other))
        });
        nearest.map(|(_, measured)| measured)
    }
}
