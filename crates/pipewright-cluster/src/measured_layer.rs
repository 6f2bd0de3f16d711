//! Measured blocks of a model, and their comparison with predictions.

use thiserror::Error;

use crate::layout::{Cut, Kernels, Layout, LayoutError, Recompute, Scores, ShardedState};
use crate::machine::Machine;
use crate::measured_times::{MeasuredBlock, MeasuredSizes};
use crate::setting::Setting;
use pipewright_shapes::model::{Block, Matrix, Model};

/// A measured block of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredLayer {
    /// The number of the block, from 0.
    pub block: usize,
    /// The sizes in which it was measured.
    pub sizes: MeasuredSizes,
    /// Seconds of the forward.
    pub forward: f64,
    /// Seconds of the backward, without what it computes again.
    pub backward: f64,
}

/// A measured block that does not fit the model.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum MeasuredError {
    /// The model has no block of this number.
    #[error("[[layer]] is of block {block}, and the model has {blocks}; use a number from 0 to {}", .blocks - 1)]
    Block {
        /// The number.
        block: usize,
        /// The blocks of the model.
        blocks: usize,
    },
    /// Two blocks of the same kind were measured in the same sizes.
    #[error(
        "[[layer]] of block {block} measures the same kind of block in the same sizes as block {other}; keep one of them"
    )]
    Twice {
        /// The number.
        block: usize,
        /// The number of the block that was measured before it.
        other: usize,
    },
    /// The tensor group does not divide the model.
    #[error("[[layer]] of block {block} does not fit the model")]
    Layout {
        /// The number.
        block: usize,
        /// The cause.
        #[source]
        error: LayoutError,
    },
}

pipewright_schedule::message_as_debug!(MeasuredError);

impl MeasuredLayer {
    /// The layout in which a block was measured.
    fn layout(&self) -> Layout {
        let MeasuredSizes { rows, sequence, tensor, precision } = self.sizes;
        Layout {
            gpus: tensor,
            tensor,
            pipeline: 1,
            chunks: 1,
            context: 1,
            expert: 1,
            expert_tensor: tensor,
            microbatch: rows,
            batch: rows,
            sequence,
            schedule: None,
            cut: Cut::Even,
            precision,
            recompute: Recompute::None,
            sequence_parallel: tensor > 1,
            scores: Scores::Fused,
            sharding: ShardedState::Optimizer,
            kernels: Kernels::Fused,
        }
    }

    /// Compares the measured times with the predicted times for `machine`.
    pub(crate) fn compared(&self, model: &Model, machine: &Machine) -> Result<MeasuredBlock, MeasuredError> {
        let number = self.block;
        let blocks = model.blocks.len();
        let block = *model.blocks.get(number).ok_or(MeasuredError::Block { block: number, blocks })?;
        let layout = self.layout();
        layout.check(model).map_err(|error| MeasuredError::Layout { block: number, error })?;
        let predicted = Setting { model, layout: &layout, machine }.block(&block);
        Ok(MeasuredBlock {
            block,
            sizes: self.sizes,
            forward: self.forward / predicted.forward.total(),
            backward: self.backward / predicted.backward.total(),
        })
    }

    /// Returns the share of the peak that the products with parameters reach in the forward or the backward,
    /// whichever is larger. The backward has twice the products of the forward.
    pub(crate) fn share_of_peak(&self, block: &Block, model: &Model, machine: &Machine) -> f64 {
        let MeasuredSizes { rows, sequence, tensor, precision } = self.sizes;
        let active: u128 = block.matrices(model.hidden).iter().map(Matrix::active_parameters).sum();
        let tokens = f64::from(rows) * f64::from(sequence);
        let operations = 2.0 * active as f64 * tokens / f64::from(tensor);
        let seconds = self.forward.min(self.backward / 2.0);
        operations / seconds / machine.peak(precision)
    }
}
