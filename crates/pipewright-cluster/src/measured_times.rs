//! Measured times that take the place of predicted ones.

use crate::layout::Precision;
use crate::model::Block;

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
    /// The factor of the forward.
    pub forward: f64,
    /// The factor of the backward.
    pub backward: f64,
}

impl MeasuredTimes {
    /// Returns the measured seconds of a product, if its shape was measured.
    pub(crate) fn product(&self, shape: [f64; 3], precision: Precision) -> Option<f64> {
        let is_it = |product: &&MeasuredProduct| {
            [product.rows, product.columns, product.inner] == shape && product.precision == precision
        };
        self.products.iter().find(is_it).map(|product| product.seconds)
    }

    /// Returns the factors of the forward and the backward of a block, if its kind was measured.
    pub(crate) fn block(&self, block: &Block) -> Option<&MeasuredBlock> {
        self.blocks.iter().find(|measured| measured.block == *block)
    }
}
