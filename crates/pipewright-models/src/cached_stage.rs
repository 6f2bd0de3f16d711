//! A stage that generates text, and keeps what it needs of earlier tokens.
//!
//! The positions of some models depend on the length of the row. If a further token changes them, the row
//! starts again. In a hybrid, nothing of a document reaches another one, and positions are relative. So a cache is
//! of the document of the latest token, and is empty again when a document begins. A block with a mixture of
//! depths keeps the tokens that went through it, with their positions in the document.

use burn::module::Module;
use burn::tensor::{Device, Tensor, TensorData};
use pipewright::stage::StageModule;
use pipewright::tensor::{BoundaryError, Spread, Values, pack, unpack};

use crate::block::{Block, BlockCache};
use crate::boundary::StageTensors;
use crate::documents::host;
use crate::error::SplitModel;
use crate::generation_stage::{GenerationStage, StageCache};
use crate::hybrid::{HybridConfig, Tokens};
use crate::stage::{ModelStage, StageLayer, row_context};

impl GenerationStage for ModelStage {
    fn parameters(&self) -> usize {
        self.num_params() + self.frozen.elements
    }

    fn device(&self) -> Device {
        self.devices().into_iter().next().unwrap_or_else(Device::flex)
    }

    fn has_head(&self) -> bool {
        matches!(self.layers.last(), Some(StageLayer::Head(_)))
    }

    fn require_whole(&self) -> Result<(), SplitModel> {
        self.split.require_whole()
    }

    fn splits_logits(&self) -> bool {
        self.output_placement(0).tensor != Spread::Whole
    }

    fn compute(&self, input: Values) -> Result<Values, BoundaryError> {
        let (input, context) = (unpack(input)?, row_context());
        // Later tokens are not known.
        let rows = self.rows(&input, &context).in_generation(0);
        Ok(pack(self.layers.iter().fold(input, |input, layer| self.run_layer(layer, input, &rows))))
    }

    fn cache(&self) -> Option<Box<dyn StageCache + '_>> {
        Some(Box::new(CachedStage { stage: self, document: Vec::new(), known: 0, caches: self.caches(1) }))
    }

    fn restarts(&self, known: usize, length: usize) -> bool {
        let attentions = &self.facts.attentions;
        attentions.positions(known.max(1)) != attentions.positions(length)
    }
}

impl ModelStage {
    fn blocks_in_order(&self) -> impl Iterator<Item = &Block> {
        self.layers.iter().filter_map(|layer| match layer {
            StageLayer::Block(block) => Some(block),
            _ => None,
        })
    }

    /// Returns the empty caches of the blocks for rows of `length` tokens.
    fn caches(&self, length: usize) -> Vec<BlockCache> {
        self.blocks_in_order().map(|block| block.cache(&self.facts.attentions, length)).collect()
    }
}

/// A stage with what each of its blocks keeps of the tokens so far.
struct CachedStage<'a> {
    stage: &'a ModelStage,
    /// The ids of the document so far; empty unless it is the first stage of a hybrid.
    document: Vec<i64>,
    /// The number of tokens so far: of the row, or in a hybrid of the document.
    known: usize,
    caches: Vec<BlockCache>,
}

impl CachedStage<'_> {
    /// Returns the hidden states of the ids that are of the last document of a hybrid, and these ids.
    fn embed_in_document(
        &mut self,
        input: StageTensors,
        config: &HybridConfig,
        first: usize,
    ) -> StageTensors {
        let (Some(StageLayer::Embedding(embedding)), Some(ids)) = (self.stage.layers.first(), &input.ids)
        else {
            return input;
        };
        let (ids, device) = (host(ids), ids.device());
        let bos = config.bos_token_id.map(|bos| bos as i64);
        let beginning = ids.iter().rposition(|id| Some(*id) == bos);
        if first == 0 || beginning.is_some() {
            self.document.clear();
        }
        let ids = &ids[beginning.unwrap_or(0)..];
        let known = self.document.len();
        self.document.extend(ids);
        // The n-grams of the new tokens have earlier ones in them.
        let longest = config.ngram_orders.iter().max().copied().unwrap_or(1);
        let start = known.saturating_sub(longest.saturating_sub(1));
        let seen = TensorData::new(self.document[start..].to_vec(), [1, self.document.len() - start]);
        let seen = Tensor::from_data(seen, &device);
        let (input, context) = (StageTensors::from(seen.clone()), row_context());
        let rows = self.stage.rows(&input, &context);
        let hidden = embedding.forward(input, &rows).narrow(1, known - start, ids.len());
        StageTensors { floats: vec![hidden], ids: Some(seen.narrow(1, known - start, ids.len())) }
    }

    /// Empties the caches if a row or a document begins.
    fn begin(&mut self, input: &StageTensors, first: usize, length: usize) {
        let begins = match (&self.stage.facts.hybrid, &input.ids) {
            (Some(config), Some(ids)) => {
                host(ids).first().copied() == config.bos_token_id.map(|bos| bos as i64)
            }
            _ => false,
        };
        if first == 0 || begins {
            (self.caches, self.known) = (self.stage.caches(length), 0);
        }
    }
}

impl StageCache for CachedStage<'_> {
    /// Keys have the positions of a longer row if these depend on the length.
    fn can_be_shortened(&self) -> bool {
        let mut blocks = self.stage.blocks_in_order().zip(&self.caches);
        !self.stage.facts.attentions.depend_on_length()
            && blocks.all(|(block, cache)| block.can_be_shortened(cache))
    }

    fn shorten(&mut self, tokens: usize) {
        self.known = tokens;
        self.caches.iter_mut().for_each(|cache| cache.keys_values.shorten(tokens));
    }

    fn extend(&mut self, input: Values, first: usize) -> Result<Values, BoundaryError> {
        let (stage, context) = (self.stage, row_context());
        let mut input: StageTensors = unpack(input)?;
        if let Some(config) = &stage.facts.hybrid {
            input = self.embed_in_document(input, config, first);
        }
        let mut rows = stage.rows(&input, &context).in_generation(first);
        let count = rows.shape[1];
        self.begin(&input, first, count);
        if let Some(config) = &stage.facts.hybrid {
            let ids = input.ids.as_ref().expect("the stages of a hybrid take token ids");
            let mut tokens = Tokens::new(config, ids, &context);
            tokens.scope.positions = (self.known as u32..).take(count).collect();
            rows = rows.with_tokens(tokens);
        } else {
            assert_eq!(self.known, first, "tokens follow the tokens so far");
        }
        self.known += count;
        let mut caches = self.caches.iter_mut();
        for layer in &stage.layers {
            input = match layer {
                StageLayer::Embedding(_) if stage.facts.hybrid.is_some() => input,
                StageLayer::Block(block) => {
                    let (ids, cache) = (input.ids.clone(), caches.next());
                    let hidden = input.first().flatten(0, 1);
                    let hidden: Tensor<2> = block.forward(hidden, &rows, cache);
                    StageTensors { floats: vec![hidden.unsqueeze()], ids }
                }
                StageLayer::Head(head) => {
                    let ids = input.ids.clone();
                    let last = input.first().narrow(1, count - 1, 1);
                    stage.run_head(head, StageTensors { floats: vec![last], ids }, [1, 1], rows.context)
                }
                layer => stage.run_layer(layer, input, &rows),
            };
        }
        Ok(pack(input))
    }
}
