//! A stage that generates text, and keeps what it needs of earlier tokens.

use pipewright::nn::{KeyValueCache, RotaryPositions};
use pipewright::tensor::{BoundaryError, Values, pack, unpack};

use super::stage::{DecoderInput, DecoderStage};
use crate::generation_stage::{GeneratingModule, StageCache, row_context};
use crate::split::SplitStage;

impl GeneratingModule for DecoderStage {
    fn has_head(&self) -> bool {
        self.head.is_some()
    }

    fn split(&self) -> &SplitStage {
        &self.split
    }

    fn new_cache(&self) -> Option<Box<dyn StageCache + '_>> {
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
    /// Keys have the positions of a longer row if these depend on the length.
    fn can_be_shortened(&self) -> bool {
        !self.stage.attentions.depend_on_length() && self.caches.iter().all(KeyValueCache::can_be_shortened)
    }

    fn shorten(&mut self, tokens: usize) {
        self.caches.iter_mut().for_each(|cache| cache.shorten(tokens));
    }

    fn extend(&mut self, input: Values, first: usize) -> Result<Values, BoundaryError> {
        let stage = self.stage;
        let input: DecoderInput = unpack(input)?;
        let hidden = if stage.model.embed_tokens.is_some() {
            stage.embed(input, |[_, count]| (first as u32..).take(count).collect())
        } else {
            input.embed(None, &stage.split)
        };
        let [_, count, width] = hidden.dims();
        if first == 0 {
            self.caches = caches(stage, &stage.attentions.positions(count));
        }
        assert!(self.caches.iter().all(|cache| cache.tokens() == first), "tokens follow the tokens so far");
        let context = row_context();
        let mut hidden = hidden.reshape([count, width]);
        let (attentions, device) = (&stage.attentions, hidden.device());
        let blocks = stage.model.layers.iter().enumerate();
        let blocks = blocks.filter_map(|(index, block)| Some((index, block.as_ref()?)));
        for ((index, block), cache) in blocks.zip(&mut self.caches) {
            let whole = || attentions.get(index, count, &attentions.positions(first + count), &device);
            hidden = block.forward_cached(hidden, cache, whole, &stage.split.tensor, &context);
        }
        if stage.head.is_some() {
            hidden = stage.logits(hidden.narrow(0, count - 1, 1));
        }
        Ok(pack(hidden.unsqueeze::<3>()))
    }
}
