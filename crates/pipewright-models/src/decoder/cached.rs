//! A stage that generates text, and keeps what it needs of earlier tokens.

use burn::module::Module;
use burn::tensor::Device;
use pipewright::nn::{KeyValueCache, RotaryPositions};
use pipewright::stage::StageContext;
use pipewright::tensor::{BoundaryError, Values, pack, unpack};
use pipewright_schedule::{Microbatch, StageIndex};

use super::stage::{DecoderInput, DecoderStage};
use crate::error::SplitModel;
use crate::generation_stage::{GenerationStage, StageCache, device_of};

impl GenerationStage for DecoderStage {
    fn parameters(&self) -> usize {
        self.num_params()
    }

    fn device(&self) -> Device {
        device_of(self)
    }

    fn has_head(&self) -> bool {
        self.head.is_some()
    }

    fn require_whole(&self) -> Result<(), SplitModel> {
        self.split.require_whole()
    }

    fn compute(&self, input: Values) -> Result<Values, BoundaryError> {
        Ok(pack(self.run(unpack(input)?)))
    }

    fn cache(&self) -> Option<Box<dyn StageCache + '_>> {
        Some(Box::new(CachedDecoder::new(self)))
    }

    fn restarts(&self, known: usize, length: usize) -> bool {
        self.attentions.positions(known.max(1)) != self.attentions.positions(length)
    }
}

/// A stage with the keys and values of the tokens so far, for each of its blocks.
///
/// The positions of some models depend on the length of the row. If a further token changes them, the row
/// starts again.
struct CachedDecoder<'a> {
    stage: &'a DecoderStage,
    caches: Vec<KeyValueCache>,
}

impl<'a> CachedDecoder<'a> {
    fn new(stage: &'a DecoderStage) -> Self {
        Self { stage, caches: caches(stage, &stage.attentions.positions(1)) }
    }
}

/// Returns the empty caches of a stage's blocks.
fn caches(stage: &DecoderStage, positions: &RotaryPositions) -> Vec<KeyValueCache> {
    let blocks = stage.model.layers.iter().enumerate().filter(|(_, block)| block.is_some());
    blocks.map(|(index, _)| KeyValueCache::new(stage.attentions.cached_form(index, positions))).collect()
}

impl StageCache for CachedDecoder<'_> {
    fn extend(&mut self, input: Values, first: usize) -> Result<Values, BoundaryError> {
        let stage = self.stage;
        let input: DecoderInput = unpack(input)?;
        let hidden = if stage.model.embed_tokens.is_some() {
            stage.embed(input)
        } else {
            input.embed(None, &stage.split)
        };
        let [_, count, width] = hidden.dims();
        if first == 0 {
            self.caches = caches(stage, &stage.attentions.positions(count));
        }
        assert!(self.caches.iter().all(|cache| cache.tokens() == first), "tokens follow the tokens so far");
        let context = StageContext::new(StageIndex::new(0), Microbatch::new(0));
        let mut hidden = hidden.reshape([count, width]);
        for (block, cache) in stage.model.layers.iter().flatten().zip(&mut self.caches) {
            hidden = block.forward_cached(hidden, cache, &stage.split.tensor, &context);
        }
        if stage.head.is_some() {
            hidden = stage.logits(hidden.narrow(0, count - 1, 1));
        }
        Ok(pack(hidden.unsqueeze::<3>()))
    }
}
