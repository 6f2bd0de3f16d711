//! Measured blocks of a model, and their comparison with predictions.

use thiserror::Error;

use crate::implementation::{Implementation, Stack};
use crate::machine::Machine;
use crate::measured_times::{MeasuredBlock, MeasuredSizes};
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

/// The reason why a measured block does not fit the model.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("[[layer]] {0}")]
pub struct MeasuredError(pub(crate) String);

pipewright_schedule::message_as_debug!(MeasuredError);

impl MeasuredLayer {
    /// Returns the block of the model that was measured.
    pub(crate) fn of_model(&self, model: &Model) -> Result<MeasuredBlock, MeasuredError> {
        let number = self.block;
        let blocks = model.blocks.len();
        let block = *model.blocks.get(number).ok_or_else(|| {
            let last = blocks - 1;
            MeasuredError(format!(
                "is of block {number}, and the model has {blocks}; use a number from 0 to {last}"
            ))
        })?;
        let fits = self.sizes.layout(Implementation::usual(Stack::default())).check(model);
        fits.map_err(|error| MeasuredError(format!("of block {number} does not fit the model: {error}")))?;
        Ok(MeasuredBlock { block, sizes: self.sizes, forward: self.forward, backward: self.backward })
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
