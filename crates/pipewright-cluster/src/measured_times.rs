//! Measured times that replace predicted ones.

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

/// The measured times of a kind of block, divided by the predicted ones.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredBlock {
    /// The kind.
    pub block: Block,
    /// The sizes in which it was measured.
    pub sizes: MeasuredSizes,
    /// The factor of the forward.
    pub forward: f64,
    /// The factor of the backward.
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

    /// Returns the factors of the forward and the backward of a block, if its kind was measured. If it was
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
