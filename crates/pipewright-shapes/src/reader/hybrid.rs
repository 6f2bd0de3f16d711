//! The shape of this project's hybrids, which follows from the configuration that training reads.

use crate::family::HYBRID;
use crate::hybrid::{BlockKind, HybridConfig};
use crate::model::{Attention, Block, Dense, Experts, FeedForward, Mamba2, Mixer, Model};
use crate::vectors::Vectors;

/// Training scans in chunks of this many tokens.
const CHUNK: u64 = 64;

/// Returns the shape of a model.
pub(super) fn shape(config: &HybridConfig) -> Model {
    let windows = config.window_sizes.iter().copied().chain(std::iter::repeat(None));
    let blocks = config.blocks().iter().zip(windows).enumerate().map(|(index, (&kind, window))| Block {
        chooses_tokens: config.mod_layers.contains(&index),
        ..block(config, kind, window)
    });
    let predictor = config.prediction_block().map(|kind| block(config, kind, None));
    Model {
        name: HYBRID.names[0].to_owned(),
        hidden: config.hidden_size as u64,
        vocabulary: config.vocab_size as u64,
        labels: None,
        tied: config.tie_word_embeddings,
        blocks: blocks.collect(),
        predictors: config.prediction_depth() as u32,
        predictor: predictor.into_iter().collect(),
        counts_predictors: true,
        shares_predictors: false,
        further_embedding: config.further_embedding() as u64,
        vectors: Vectors::LLAMA,
        gpt: false,
        caps_logits: false,
    }
}

fn block(config: &HybridConfig, kind: BlockKind, window: Option<usize>) -> Block {
    let dense = |inner: usize| Dense { inner: inner as u64, gated: true };
    let (mixer, feed_forward) = match kind {
        BlockKind::Attention => {
            let attention = Attention {
                heads: config.num_attention_heads as u64,
                key_value_heads: config.kv_heads() as u64,
                head_size: config.head_dim() as u64,
                window: window.filter(|&size| size > 0).map(|size| size as u64),
                rotary_size: config.head_dim() as u64,
                gate: 0,
            };
            (Mixer::Attention(attention), FeedForward::None)
        }
        BlockKind::Mamba => {
            let mamba = Mamba2 {
                heads: config.mamba_num_heads as u64,
                head_size: config.mamba_head_dim as u64,
                state: config.ssm_state_size as u64,
                groups: config.n_groups as u64,
                convolution: config.conv_kernel as u64,
                chunk: CHUNK,
            };
            (Mixer::Mamba2(mamba), FeedForward::None)
        }
        BlockKind::Experts => {
            let experts = Experts {
                count: config.num_experts as u64,
                per_token: config.num_experts_per_tok as u64,
                expert: dense(config.moe_intermediate_size),
                shared_inner: config.shared_expert_intermediate_size as u64,
                groups: 1,
                groups_per_token: 1,
            };
            (Mixer::None, FeedForward::Experts(experts))
        }
        BlockKind::Dense => (Mixer::None, FeedForward::Dense(dense(config.intermediate_size))),
    };
    Block::new(mixer, feed_forward)
}

/// Returns the sizes of Mamba-2 that files of the family may leave out, if a block has it.
pub(super) fn usual_sizes(config: &HybridConfig) -> Vec<(&'static str, u64)> {
    if !config.blocks().contains(&BlockKind::Mamba) {
        return Vec::new();
    }
    vec![("n_groups", config.n_groups as u64), ("conv_kernel", config.conv_kernel as u64)]
}

/// Returns sentences about parts whose costs are assumed.
pub(super) fn assumed(config: &HybridConfig) -> Vec<String> {
    let notes = [
        (
            config.further_rows() > 0,
            "tables of n-grams, structure and platforms: their parameters count, and their lookups take no time",
        ),
        (
            config.num_relations > 0,
            "`num_relations`: the parameters count, and attention takes the same time as without them",
        ),
        (
            !config.mod_layers.is_empty(),
            "`mod_layers`: blocks that only some tokens pass take the time of all tokens",
        ),
    ];
    notes.into_iter().filter(|(holds, _)| *holds).map(|(_, note)| note.to_owned()).collect()
}
