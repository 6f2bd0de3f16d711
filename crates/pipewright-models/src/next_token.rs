//! Whole models that predict the next token of a sequence.

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::error::SplitModel;

/// A stage with all layers of a model.
pub trait NextToken {
    /// Returns the logits of the token after `tokens`, computed from all of them. There must be at least one.
    ///
    /// # Errors
    /// When the stage has shards of its parameters, because several ranks compute it together.
    ///
    /// # Panics
    /// When the stage does not have all layers, or a token is outside the vocabulary.
    fn next_token(&self, tokens: &[u32]) -> Result<Vec<f32>, SplitModel>;

    /// Returns the model with a cache of what it keeps of earlier tokens; `None` if the family has no such
    /// cache, or if several ranks compute the stage together.
    fn cached(&self) -> Option<Box<dyn CachedModel + '_>> {
        None
    }
}

/// A model that keeps what it needs of the tokens so far.
pub trait CachedModel {
    /// Appends tokens, at least one, and returns the logits of the token after them.
    ///
    /// # Panics
    /// When the stage does not have all layers, or a token is outside the vocabulary.
    fn extend(&mut self, tokens: &[u32]) -> Vec<f32>;
}

/// Returns tokens as one row of ids.
pub(crate) fn ids(tokens: &[u32], device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    Tensor::from_data(TensorData::new(ids, [1, tokens.len()]), device)
}

/// Returns the last row of logits `[1, tokens, vocabulary]`.
pub(crate) fn last_row(logits: Tensor<3>) -> Vec<f32> {
    let tokens = logits.dims()[1];
    logits.narrow(1, tokens - 1, 1).into_data().iter::<f32>().collect()
}

/// Returns the device of a stage.
pub(crate) fn device_of<M: Module>(stage: &M) -> Device {
    stage.devices().into_iter().next().unwrap_or_else(Device::flex)
}
