//! A stage that generates text, and keeps what it needs of earlier tokens.
//!
//! Nothing of a document reaches another one, and positions are relative. So a cache is of the document of
//! the latest token, and is empty again when a document begins. A block with a mixture of depths keeps the
//! tokens that went through it, with their positions in the document.

use burn::tensor::{Int, Tensor, TensorData};
use pipewright::tensor::{BoundaryError, Values, pack, unpack};

use super::block::Block;
use super::boundary::{HybridInput, HybridOutput};
use super::stage::HybridStage;
use super::tokens::Tokens;
use crate::block_cache::BlockCache;
use crate::documents::host;
use crate::generation_stage::{GeneratingModule, StageCache, row_context};
use crate::split::SplitStage;

impl GeneratingModule for HybridStage {
    fn has_head(&self) -> bool {
        self.head.is_some()
    }

    fn split(&self) -> &SplitStage {
        &self.split
    }

    fn compute_row(&self, input: Values) -> Result<Values, BoundaryError> {
        Ok(pack(self.run_text(unpack(input)?, &row_context())))
    }

    fn new_cache(&self) -> Option<Box<dyn StageCache + '_>> {
        Some(Box::new(CachedHybrid { stage: self, document: Vec::new(), known: 0, caches: caches(self) }))
    }
}

/// A stage with the keys and values, or the states, of each of its blocks.
struct CachedHybrid<'a> {
    stage: &'a HybridStage,
    /// The ids of the document so far; empty unless it is the first stage.
    document: Vec<i64>,
    /// The number of tokens of the document so far.
    known: usize,
    caches: Vec<BlockCache>,
}

/// Returns the empty caches of a stage's blocks.
fn caches(stage: &HybridStage) -> Vec<BlockCache> {
    stage.blocks().map(Block::cache).collect()
}

impl CachedHybrid<'_> {
    /// Returns the hidden states of the ids that are of the last document, and these ids.
    fn embed(&mut self, ids: &Tensor<2, Int>, first: usize) -> (Tensor<3>, Tensor<2, Int>) {
        let (config, device) = (&self.stage.config, ids.device());
        let ids = host(ids);
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
        let seen = Tensor::<2, Int>::from_data(seen, &device);
        let context = row_context();
        let tokens = Tokens::new(config, &seen, &context);
        let hidden = self.stage.embed(None, &seen, &tokens, &context);
        (hidden.narrow(1, known - start, ids.len()), seen.narrow(1, known - start, ids.len()))
    }
}

impl StageCache for CachedHybrid<'_> {
    fn extend(&mut self, input: Values, first: usize) -> Result<Values, BoundaryError> {
        let (stage, context) = (self.stage, row_context());
        let (hidden, ids) = match unpack(input)? {
            HybridInput::Tokens(ids) => self.embed(&ids, first),
            HybridInput::Hidden(hidden, ids) => (hidden, ids),
        };
        let begins = host(&ids).first().copied() == stage.config.bos_token_id.map(|bos| bos as i64);
        if first == 0 || begins {
            (self.caches, self.known) = (caches(stage), 0);
        }
        let [_, count, width] = hidden.dims();
        let mut tokens = Tokens::new(&stage.config, &ids, &context);
        tokens.scope.positions = (self.known as u32..).take(count).collect();
        self.known += count;
        let mut hidden = hidden.reshape([count, width]);
        for (block, cache) in stage.blocks().zip(&mut self.caches) {
            hidden = block.extend(hidden, cache, &tokens, &stage.split.tensor, &context);
        }
        Ok(pack(match &stage.head {
            Some(head) => {
                let logits = head.forward(hidden.narrow(0, count - 1, 1), &stage.split.tensor);
                HybridOutput::Logits { logits: logits.unsqueeze(), further: Vec::new() }
            }
            None => HybridOutput::Hidden(hidden.unsqueeze(), ids),
        }))
    }
}
