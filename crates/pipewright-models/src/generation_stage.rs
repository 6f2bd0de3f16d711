//! Stages of a model that generates text: any contiguous range of its layers, one row of tokens at a time.

use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::tensor::{BoundaryError, Values, pack, unpack};

use crate::error::SplitModel;

/// A stage of a model, for generation.
pub trait GenerationStage {
    /// Returns the number of its parameters.
    fn parameters(&self) -> usize;

    /// Returns the device that holds its parameters.
    fn device(&self) -> Device;

    /// Returns whether it has the model's head, so that its results are logits.
    fn has_head(&self) -> bool;

    /// Returns an error if other ranks have shards of the stage's parameters.
    ///
    /// # Errors
    /// When several ranks compute the stage together.
    fn require_whole(&self) -> Result<(), SplitModel>;

    /// Returns whether each of the ranks that compute the stage together has the logits of its part of the
    /// vocabulary, so that the logits of all ranks in their order are the whole.
    fn splits_logits(&self) -> bool {
        false
    }

    /// Computes the stage for one whole row: from token ids `[1, tokens]` or the previous stage's result, to
    /// what the next stage takes, or logits `[1, tokens, vocabulary]`.
    ///
    /// # Errors
    /// When the input is not what the stage takes.
    ///
    /// # Panics
    /// When a token is outside the vocabulary.
    fn compute(&self, input: Values) -> Result<Values, BoundaryError>;

    /// Returns an empty cache for a row; `None` if the model cannot continue a row.
    fn cache(&self) -> Option<Box<dyn StageCache + '_>>;

    /// Returns whether a row of `known` tokens must be computed again when it gets `length` tokens, because
    /// the positions of its tokens change.
    fn restarts(&self, _known: usize, _length: usize) -> bool {
        false
    }
}

/// The state of a stage for a row, with which the row can continue.
pub trait StageCache {
    /// Computes the next tokens of the row like [`GenerationStage::compute`], but may return the logits of
    /// the last token only. `first` is the index of the first of these tokens in the row; at 0 the row starts
    /// again.
    ///
    /// # Errors
    /// When the input is not what the stage takes.
    ///
    /// # Panics
    /// When a token is outside the vocabulary, or `first` is neither 0 nor the number of tokens so far.
    fn extend(&mut self, input: Values, first: usize) -> Result<Values, BoundaryError>;

    /// Returns whether [`StageCache::shorten`] is possible, whatever the row is. A state of all tokens so far
    /// cannot be shortened.
    fn can_be_shortened(&self) -> bool {
        false
    }

    /// Removes the tokens of the row after the first `tokens`, which is at least 1.
    ///
    /// # Panics
    /// When the cache cannot be shortened.
    fn shorten(&mut self, _tokens: usize) {
        panic!("the cache cannot be shortened")
    }
}

/// A row of tokens at a stage.
pub struct StageRow<'a> {
    stage: &'a dyn GenerationStage,
    cache: Option<Box<dyn StageCache + 'a>>,
    /// The tokens so far; empty unless it is the first stage.
    tokens: Vec<u32>,
}

/// The result of a stage for the latest tokens of a row.
#[derive(Clone, Debug)]
pub struct RowPart {
    /// The index of the first of these tokens in the row.
    pub first: usize,
    /// The input of the next stage, or the logits.
    pub values: Values,
}

impl<'a> StageRow<'a> {
    /// Returns a row without tokens. `uses_cache` says whether to use a cache if the model has one. Otherwise
    /// all tokens are computed again each time.
    pub fn new(stage: &'a dyn GenerationStage, uses_cache: bool) -> Self {
        let cache = if uses_cache { stage.cache() } else { None };
        Self { stage, cache, tokens: Vec::new() }
    }

    /// Returns whether a cache is used.
    pub fn has_cache(&self) -> bool {
        self.cache.is_some()
    }

    /// Returns whether [`StageRow::shorten`] is possible, whatever the row is.
    pub fn can_be_shortened(&self) -> bool {
        self.cache.as_ref().is_none_or(|cache| cache.can_be_shortened())
    }

    /// Removes the tokens of the row after the first `tokens`, which is at least 1.
    ///
    /// # Panics
    /// When the row cannot be shortened.
    pub fn shorten(&mut self, tokens: usize) {
        if let Some(cache) = &mut self.cache {
            cache.shorten(tokens);
        }
        // Only the first stage has tokens here.
        self.tokens.truncate(tokens);
    }

    /// Appends tokens, at least one, and computes the first stage.
    ///
    /// # Errors
    /// When the stage does not take tokens.
    ///
    /// # Panics
    /// When a token is outside the vocabulary.
    pub fn append(&mut self, tokens: &[u32]) -> Result<RowPart, BoundaryError> {
        let known = self.tokens.len();
        self.tokens.extend(tokens);
        let restarts = self.cache.is_none() || self.stage.restarts(known, self.tokens.len());
        let first = if restarts { 0 } else { known };
        let ids = ids(&self.tokens[first..], &self.stage.device());
        self.advance(RowPart { first, values: pack(ids) })
    }

    /// Computes a later stage from the result of the previous one, on the stage's device.
    ///
    /// # Errors
    /// When the stage does not take this result.
    pub fn advance(&mut self, RowPart { first, values }: RowPart) -> Result<RowPart, BoundaryError> {
        let device = self.stage.device();
        let values = values.into_iter().map(|value| value.to_device(&device)).collect();
        let values = match &mut self.cache {
            Some(cache) => cache.extend(values, first)?,
            None => self.stage.compute(values)?,
        };
        Ok(RowPart { first, values })
    }
}

impl RowPart {
    /// Returns the logits after the last token, from the result of the stage with the head.
    ///
    /// # Errors
    /// When the values are not one row of them.
    pub fn last_logits(self) -> Result<Vec<f32>, BoundaryError> {
        let logits: Tensor<3> = unpack(self.values)?;
        let tokens = logits.dims()[1];
        Ok(logits.narrow(1, tokens - 1, 1).into_data().iter::<f32>().collect())
    }
}

/// Returns tokens as one row of ids.
fn ids(tokens: &[u32], device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    Tensor::from_data(TensorData::new(ids, [1, tokens.len()]), device)
}
