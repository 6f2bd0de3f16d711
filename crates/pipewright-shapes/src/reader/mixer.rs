//! The mixers of a configuration.

use super::keys::{Keys, MAX_SIZE, contradiction, missing};
use crate::error::ShapeError;
use crate::family::{Family, LinearKind};
use crate::model::{Attention, Delta, Indexer, Latent, Mamba2, Mixer, StateDecay};

/// The keys of the window of attention.
const WINDOW: [&str; 2] = ["sliding_window", "attention_chunk_size"];
/// The keys of the heads of queries.
const HEADS: [&str; 3] = ["num_attention_heads", "n_head", "n_heads"];
/// The keys of the share of a head with rotary positions.
const ROTARY: [&str; 3] = ["partial_rotary_factor", "rotary_pct", "rope_parameters.partial_rotary_factor"];
/// The key of the part of a query and a key of latent attention with rotary positions.
const ROTARY_OF_LATENT: [&str; 1] = ["qk_rope_head_dim"];
/// The tokens of a chunk of a delta rule, in the kernels of flash-linear-attention and in transformers.
const DELTA_CHUNK: u64 = 64;
/// The tokens of a chunk of lightning attention, unless the file says otherwise.
const LIGHTNING_CHUNK: u64 = 256;

/// Reads the attention of a block with a window, if the file has one.
pub(super) fn attention(keys: &mut Keys<'_>, family: &Family, hidden: u64) -> Result<Mixer, ShapeError> {
    let heads = keys.needed(&HEADS)?;
    if let Some(key_value_rank) = keys.size(&["kv_lora_rank"], 1, MAX_SIZE)? {
        keys.mark(&["num_key_value_heads", "head_dim", "qk_head_dim"]);
        // 0 is a model without positions.
        let rotary_size = keys.size(&ROTARY_OF_LATENT, 0, MAX_SIZE)?;
        return Ok(Mixer::Latent(Latent {
            heads,
            query_rank: keys.size(&["q_lora_rank"], 1, MAX_SIZE)?,
            key_value_rank,
            plain_size: keys.needed(&["qk_nope_head_dim"])?,
            rotary_size: rotary_size.ok_or_else(|| missing(&ROTARY_OF_LATENT))?,
            value_size: keys.needed(&["v_head_dim"])?,
            gate: if family.gate { heads } else { 0 },
            indexer: indexer(keys)?,
        }));
    }
    // Some files have 0 for no window.
    let window = keys.size(&WINDOW, 0, MAX_SIZE)?.filter(|&window| window > 0);
    let head_size = head_size(keys, heads, hidden)?;
    let has_gate = keys.flag("attn_output_gate")?.unwrap_or(family.gate);
    Ok(Mixer::Attention(Attention {
        heads,
        key_value_heads: key_value_heads(keys, heads)?,
        head_size,
        window,
        rotary_size: rotary_size(keys, family, head_size)?,
        gate: if has_gate { heads * head_size } else { 0 },
    }))
}

fn indexer(keys: &mut Keys<'_>) -> Result<Option<Indexer>, ShapeError> {
    let Some(seen) = keys.size(&["index_topk"], 1, MAX_SIZE)? else { return Ok(None) };
    // Blocks that share the choice of an earlier one have no costs yet.
    keys.size(&["index_topk_freq"], 1, 1)?;
    if let Some((key, kinds)) = keys.words_of_blocks("indexer_types")?
        && kinds.iter().any(|kind| *kind != "full")
    {
        let message =
            format!("`{key}` has blocks without an indexer of their own, whose costs are not known");
        return Err(ShapeError::new(&[&key], message));
    }
    let (heads, head_size) = (keys.needed(&["index_n_heads"])?, keys.needed(&["index_head_dim"])?);
    Ok(Some(Indexer { heads, head_size, keys: seen }))
}

/// Reads the part of a head with rotary positions.
fn rotary_size(keys: &mut Keys<'_>, family: &Family, head_size: u64) -> Result<u64, ShapeError> {
    let kind = keys.text(&["position_embedding_type"])?;
    let is_rotary = keys.flag("alibi")? != Some(true) && kind != Some("nope");
    let usual = if kind == Some("rope") { 1.0 } else { family.rotary };
    let share = keys.share(&ROTARY)?.unwrap_or(usual);
    let share = if is_rotary { share } else { 0.0 };
    let given = keys.size(&["rotary_dim", "attn_rotary_emb"], 0, head_size)?;
    Ok(given.unwrap_or((share * head_size as f64).round() as u64))
}

/// Reads the linear attention of a family's blocks.
pub(super) fn linear(keys: &mut Keys<'_>, family: &Family, hidden: u64) -> Result<Mixer, ShapeError> {
    let heads = keys.needed(&HEADS)?;
    let delta = match family.linear {
        LinearKind::None => return Ok(Mixer::None),
        LinearKind::Gated => {
            // OLMo's files may leave out sizes, which follow from others.
            let mut size = |name, usual| {
                keys.size(&[name], 1, MAX_SIZE).map(|given: Option<u64>| given.unwrap_or(usual))
            };
            let key_heads = size("linear_num_key_heads", heads)?;
            let key_size = size("linear_key_head_dim", (3 * hidden / (4 * key_heads)).max(1))?;
            Delta {
                key_heads,
                value_heads: size("linear_num_value_heads", heads)?,
                key_size,
                value_size: size("linear_value_head_dim", 2 * key_size)?,
                convolution: size("linear_conv_kernel_dim", 4)?,
                decay: StateDecay::Head,
                chunk: DELTA_CHUNK,
            }
        }
        LinearKind::Channel { has_ranks } => {
            let given = keys.size(&["linear_attn_config.num_heads", "linear_num_heads"], 1, MAX_SIZE)?;
            let heads = given.unwrap_or(heads);
            let size = keys.needed(&["linear_attn_config.head_dim", "linear_head_dim", "head_dim"])?;
            let names = [
                "linear_attn_config.short_conv_kernel_size",
                "short_conv_kernel_size",
                "linear_conv_kernel_dim",
            ];
            Delta {
                key_heads: heads,
                value_heads: heads,
                key_size: size,
                value_size: size,
                convolution: keys.needed(&names)?,
                decay: StateDecay::Channel { rank: has_ranks.then_some(size) },
                chunk: DELTA_CHUNK,
            }
        }
        LinearKind::Lightning => {
            let size = head_size(keys, heads, hidden)?;
            Delta {
                key_heads: heads,
                value_heads: heads,
                key_size: size,
                value_size: size,
                convolution: 0,
                decay: StateDecay::Fixed,
                chunk: keys.size(&["block_size"], 1, MAX_SIZE)?.unwrap_or(LIGHTNING_CHUNK),
            }
        }
    };
    if delta.value_heads.is_multiple_of(delta.key_heads) {
        return Ok(Mixer::Delta(delta));
    }
    let expected = format!("a number that divides the {} heads of values", delta.value_heads);
    Err(contradiction("linear_num_key_heads", delta.key_heads, expected))
}

fn key_value_heads(keys: &mut Keys<'_>, heads: u64) -> Result<u64, ShapeError> {
    // GPT-BigCode and the first Falcon share the keys and values of one head. In the second Falcon, the flag
    // has no meaning.
    let is_second = keys.flag("new_decoder_architecture")? == Some(true);
    let is_shared = keys.flag("multi_query")? == Some(true) && !is_second;
    let names = ["num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"];
    let given = keys.size(&names, 1, MAX_SIZE)?.filter(|_| !is_shared);
    let key_value_heads = given.unwrap_or(if is_shared { 1 } else { heads });
    if heads.is_multiple_of(key_value_heads) {
        return Ok(key_value_heads);
    }
    // The family's value belongs to its usual number of heads.
    if !names.iter().any(|name| keys.has(name)) {
        keys.empty("num_key_value_heads");
        return Ok(heads);
    }
    let expected = format!("a number that divides the {heads} heads of queries");
    Err(contradiction("num_key_value_heads", key_value_heads, expected))
}

fn head_size(keys: &mut Keys<'_>, heads: u64, hidden: u64) -> Result<u64, ShapeError> {
    let names = ["head_dim", "attention_head_dim", "kv_channels"];
    if let Some(size) = keys.size(&names, 1, MAX_SIZE)? {
        return Ok(size);
    }
    if heads > hidden {
        let message = format!(
            "{heads} heads are more than the hidden size of {hidden}; use fewer heads, or give `head_dim`"
        );
        return Err(ShapeError::new(&["num_attention_heads"], message));
    }
    if hidden.is_multiple_of(heads) {
        return Ok(hidden / heads);
    }
    let expected = format!("a multiple of the {heads} heads, or give `head_dim`");
    Err(contradiction("hidden_size", hidden, expected))
}

/// Reads a Mamba-2 mixer. `further_names` are further names of the width of a head.
pub(super) fn mamba(keys: &mut Keys<'_>, hidden: u64, further_names: &[&str]) -> Result<Mamba2, ShapeError> {
    let expand = keys.size(&["mamba_expand", "expand"], 1, MAX_SIZE)?;
    let heads = keys.needed(&["mamba_num_heads", "mamba_n_heads", "num_heads"])?;
    let size_names = [&["mamba_head_dim", "mamba_d_head"], further_names].concat();
    let left = expand.map(|expand| (expand.saturating_mul(hidden) / heads.max(1)).max(1));
    let given = keys.value(&size_names).map(|(_, value)| value == "auto");
    let head_size = match (given, left, keys.needed(&size_names)) {
        // Without the key too, transformers takes the width that the others leave, unless a family has a usual one.
        (Some(true), Some(left), _) | (None, Some(left), Err(_)) => left,
        (.., needed) => needed?,
    };
    let groups = keys.needed(&["mamba_n_groups", "n_groups"])?;
    if !heads.is_multiple_of(groups) {
        let expected = format!("a number that divides the {heads} heads of Mamba-2");
        return Err(contradiction("n_groups", groups, expected));
    }
    Ok(Mamba2 {
        heads,
        head_size,
        state: keys.needed(&["ssm_state_size", "mamba_d_state", "state_size"])?,
        groups,
        convolution: keys.needed(&["conv_kernel", "mamba_d_conv"])?,
        chunk: keys.needed(&["mamba_chunk_size", "chunk_size"])?,
    })
}
