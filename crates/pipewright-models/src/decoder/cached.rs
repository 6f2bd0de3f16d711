//! A whole model that predicts the next token, and keeps what it needs of earlier tokens.

use burn::tensor::Tensor;
use pipewright::nn::{KeyValueCache, RotaryPositions};
use pipewright::stage::StageContext;
use pipewright_schedule::{Microbatch, StageIndex};

use super::stage::{DecoderInput, DecoderStage};
use crate::error::SplitModel;
use crate::next_token::{CachedModel, NextToken, device_of, ids, last_row};

impl NextToken for DecoderStage {
    fn next_token(&self, tokens: &[u32]) -> Result<Vec<f32>, SplitModel> {
        self.split.require_whole()?;
        Ok(last_row(self.run(DecoderInput::Tokens(ids(tokens, &device_of(self))))))
    }

    fn cached(&self) -> Option<Box<dyn CachedModel + '_>> {
        self.split.require_whole().ok()?;
        Some(Box::new(CachedDecoder::new(self)))
    }
}

/// A whole model with the keys and values of the tokens so far, for each block.
///
/// The positions of some models depend on the length of the sequence. If a further token changes them, all
/// tokens are computed again.
struct CachedDecoder<'a> {
    stage: &'a DecoderStage,
    tokens: Vec<u32>,
    positions: RotaryPositions,
    caches: Vec<KeyValueCache>,
}

impl<'a> CachedDecoder<'a> {
    fn new(stage: &'a DecoderStage) -> Self {
        let positions = stage.attentions.positions(1);
        let caches = caches(stage, &positions);
        Self { stage, tokens: Vec::new(), positions, caches }
    }
}

/// Returns the empty caches of all blocks.
fn caches(stage: &DecoderStage, positions: &RotaryPositions) -> Vec<KeyValueCache> {
    let blocks = 0..stage.model.layers.len();
    blocks.map(|block| KeyValueCache::new(stage.attentions.form(block, positions))).collect()
}

impl CachedModel for CachedDecoder<'_> {
    fn extend(&mut self, tokens: &[u32]) -> Vec<f32> {
        let stage = self.stage;
        self.tokens.extend(tokens);
        let positions = stage.attentions.positions(self.tokens.len());
        let mut count = tokens.len();
        if positions != self.positions {
            self.caches = caches(stage, &positions);
            self.positions = positions;
            count = self.tokens.len();
        }
        let context = StageContext::new(StageIndex::new(0), Microbatch::new(0));
        let tokens = &self.tokens[self.tokens.len() - count..];
        let hidden = stage.embed(DecoderInput::Tokens(ids(tokens, &device_of(stage))));
        let [_, count, width] = hidden.dims();
        let mut hidden = hidden.reshape([count, width]);
        for (block, cache) in stage.model.layers.iter().flatten().zip(&mut self.caches) {
            let attend = |[q, k, v]: [Tensor<2>; 3]| cache.attend(q, k, v);
            hidden = block.forward(hidden, 1, attend, &stage.split.tensor, &context);
        }
        let logits = stage.logits(hidden.narrow(0, count - 1, 1));
        last_row(logits.unsqueeze())
    }
}
