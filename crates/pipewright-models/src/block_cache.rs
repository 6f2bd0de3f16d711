//! The tensors that a block of a model with attention and Mamba-2 layers keeps of the tokens of a row.

use pipewright::nn::{AttentionForm, KeyValueCache, MambaCache};

/// The cache of a block. Only the part for the kind of the block is used; the others stay empty.
#[derive(Clone, Debug)]
pub(crate) struct BlockCache {
    pub(crate) keys_values: KeyValueCache,
    pub(crate) mamba: MambaCache,
}

impl BlockCache {
    /// Returns the cache of a block without tokens. `form` is the form of its attention.
    pub(crate) fn new(form: AttentionForm) -> Self {
        Self { keys_values: KeyValueCache::new(form), mamba: MambaCache::default() }
    }
}
