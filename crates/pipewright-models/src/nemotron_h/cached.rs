//! A stage that generates text, and keeps what it needs of earlier tokens.

use pipewright::nn::AttentionForm;
use pipewright::tensor::{BoundaryError, Values, pack, unpack};

use super::stage::NemotronHStage;
use crate::block_cache::BlockCache;
use crate::decoder::DecoderInput;
use crate::generation_stage::{GeneratingModule, StageCache, row_context};
use crate::split::SplitStage;

impl GeneratingModule for NemotronHStage {
    fn has_head(&self) -> bool {
        self.head.is_some()
    }

    fn split(&self) -> &SplitStage {
        &self.split
    }

    fn new_cache(&self) -> Option<Box<dyn StageCache + '_>> {
        Some(Box::new(CachedNemotronH { stage: self, caches: caches(self) }))
    }
}

/// A stage with the keys and values, or the states, of each of its blocks.
struct CachedNemotronH<'a> {
    stage: &'a NemotronHStage,
    caches: Vec<BlockCache>,
}

/// Returns the empty caches of a stage's blocks.
fn caches(stage: &NemotronHStage) -> Vec<BlockCache> {
    let form = AttentionForm::without_positions(stage.head_dim);
    stage.blocks().map(|_| BlockCache::new(form.clone())).collect()
}

impl StageCache for CachedNemotronH<'_> {
    fn extend(&mut self, input: Values, first: usize) -> Result<Values, BoundaryError> {
        let stage = self.stage;
        if first == 0 {
            self.caches = caches(stage);
        }
        let hidden = stage.enter(unpack::<DecoderInput>(input)?);
        let [_, count, width] = hidden.dims();
        let context = row_context();
        let mut hidden = hidden.reshape([count, width]);
        for (block, cache) in stage.blocks().zip(&mut self.caches) {
            hidden = block.extend(hidden, cache, &stage.split.tensor, &context);
        }
        if let Some(head) = &stage.head {
            hidden = head.forward(hidden.narrow(0, count - 1, 1), &stage.split.tensor);
        }
        Ok(pack(hidden.unsqueeze::<3>()))
    }
}
