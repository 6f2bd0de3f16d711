//! The mixers of a configuration.

use super::keys::{Keys, MAX_SIZE, contradiction};
use crate::error::ShapeError;
use crate::model::{Attention, Latent, Mamba2, Mixer};

/// The keys of the window of attention.
const WINDOW: [&str; 2] = ["sliding_window", "attention_chunk_size"];

/// Reads the attention of a block with a window, if the file has one.
pub(super) fn attention(keys: &mut Keys<'_>, hidden: u64) -> Result<Mixer, ShapeError> {
    let heads = keys.needed(&["num_attention_heads", "n_head", "n_heads"])?;
    if let Some(key_value_rank) = keys.size(&["kv_lora_rank"], 1, MAX_SIZE)? {
        keys.mark(&["num_key_value_heads", "head_dim"]);
        return Ok(Mixer::Latent(Latent {
            heads,
            query_rank: keys.size(&["q_lora_rank"], 1, MAX_SIZE)?,
            key_value_rank,
            plain_size: keys.needed(&["qk_nope_head_dim"])?,
            rotary_size: keys.needed(&["qk_rope_head_dim"])?,
            value_size: keys.needed(&["v_head_dim"])?,
        }));
    }
    // Some files have 0 for no window.
    let window = keys.size(&WINDOW, 0, MAX_SIZE)?.filter(|&window| window > 0);
    Ok(Mixer::Attention(Attention {
        heads,
        key_value_heads: key_value_heads(keys, heads)?,
        head_size: head_size(keys, heads, hidden)?,
        window,
    }))
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
    let is_automatic = keys.value(&size_names).is_some_and(|(_, value)| value == "auto");
    let head_size = match expand.filter(|_| is_automatic) {
        Some(expand) => (expand * hidden / heads).max(1),
        None => keys.needed(&size_names)?,
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
