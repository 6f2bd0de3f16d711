//! A stage that generates text, and keeps what it needs of earlier tokens.

use burn::module::Module;
use burn::tensor::Device;
use pipewright::nn::AttentionForm;
use pipewright::stage::StageContext;
use pipewright::tensor::{BoundaryError, Values, pack, unpack};
use pipewright_schedule::{Microbatch, StageIndex};

use super::stage::NemotronHStage;
use crate::block_cache::BlockCache;
use crate::decoder::DecoderInput;
use crate::error::SplitModel;
use crate::generation_stage::{GenerationStage, StageCache, device_of};

impl GenerationStage for NemotronHStage {
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
        let context = StageContext::new(StageIndex::new(0), Microbatch::new(0));
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
