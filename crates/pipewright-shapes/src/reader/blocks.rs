//! The blocks of a configuration: which block has which parts.

use serde_json::Value;

use super::feed_forward::FeedForwards;
use super::keys::{Keys, MAX_BLOCKS, MAX_SIZE, contradiction, missing};
use super::mixer::{attention, linear, mamba};
use crate::error::ShapeError;
use crate::family::{Family, LinearKind};
use crate::model::{Attention, Block, FeedForward, Mixer};

/// The keys of the number of blocks.
const LAYERS: [&str; 4] = ["num_hidden_layers", "n_layer", "n_layers", "num_layers"];
/// The keys of a list of the kinds of blocks.
const KINDS: [&str; 2] = ["layer_types", "layers_block_type"];
/// The kinds of blocks of Mamba-2, and of attention, in models whose blocks have one part.
const MAMBA: [&str; 3] = ["M", "mamba", "linear_attention"];
const ATTENTION: [&str; 3] = ["*", "attention", "full_attention"];
/// The keys of mixers, which have no meaning in a model without the mixer.
const SIZES_OF_MIXERS: [&str; 9] = [
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "mamba_num_heads",
    "mamba_head_dim",
    "n_groups",
    "ssm_state_size",
    "conv_kernel",
    "chunk_size",
];
/// The most predictors of further tokens.
const MAX_PREDICTORS: u64 = 64;
/// The kinds of blocks with costs.
const KNOWN_KINDS: &str =
    "full_attention, sliding_attention, chunked_attention, mamba, and linear_attention in families with it";
/// The keys of every how many blocks one has full attention, if the others have linear attention.
const INTERVAL: [&str; 2] = ["full_attention_interval", "layer_group_size"];

/// The keys of every how many blocks one has no window; the last one is Cohere's.
const WHOLE_EVERY: [&str; 3] = ["sliding_window_pattern", "_sliding_window_pattern", "layer_switch"];

/// Reads the blocks of a model.
pub(super) fn blocks(keys: &mut Keys<'_>, family: &Family, hidden: u64) -> Result<Vec<Block>, ShapeError> {
    let layers = keys.size(&LAYERS, 1, MAX_BLOCKS)?;
    let model_type = keys.text(&["model_type"])?;
    // A file with both has the same blocks in both.
    let pattern = keys.text(&["hybrid_override_pattern"])?;
    let kinds = keys.words(&KINDS)?;
    if let Some(pattern) = pattern {
        keys.set_blocks(letters(pattern).len() as u64);
        return single_parts(keys, family, hidden, "hybrid_override_pattern", &letters(pattern));
    }
    match (model_type, kinds) {
        (Some("nemotron_h"), Some((key, kinds))) => {
            keys.set_blocks(kinds.len() as u64);
            single_parts(keys, family, hidden, &key, &kinds)
        }
        (Some("mamba2"), _) => {
            keys.mark(&["hidden_act"]);
            let mixer = Mixer::Mamba2(mamba(keys, hidden, &["head_dim"])?);
            Ok(vec![Block::new(mixer, FeedForward::None); counted(layers)? as usize])
        }
        // In transformers 5, the list of a hybrid says `linear_attention` for Mamba-2.
        (Some("granitemoehybrid"), Some((key, kinds))) => {
            let renamed = |kind| if kind == "linear_attention" { "mamba" } else { kind };
            let kinds = kinds.into_iter().map(renamed).collect();
            whole_blocks(keys, family, hidden, counted(layers)?, Some((key, kinds)))
        }
        // Without a list of blocks with attention, these have only Mamba-2.
        (Some("bamba" | "granitemoehybrid"), None) if !keys.has("attn_layer_indices") => {
            let layers = counted(layers)?;
            let kinds = vec!["mamba"; layers as usize];
            whole_blocks(keys, family, hidden, layers, Some(("layer_types".into(), kinds)))
        }
        (_, kinds) => {
            let layers = counted(layers)?;
            let by_other_keys = linear_kinds(keys, family, layers)?;
            let kinds = kinds.or(by_other_keys);
            if kinds.is_none() && family.linear != LinearKind::None {
                return Err(missing(&[KINDS[0], "attn_type_list"]));
            }
            whole_blocks(keys, family, hidden, layers, kinds)
        }
    }
}

/// Returns the kinds of the blocks of a model with linear attention whose file does not list them by their names.
fn linear_kinds(
    keys: &mut Keys<'_>,
    family: &Family,
    layers: u64,
) -> Result<Option<(String, Vec<&'static str>)>, ShapeError> {
    let given = keys.size(&INTERVAL, 1, MAX_BLOCKS)?;
    let every = if family.linear == LinearKind::None { given } else { given.or(family.whole_every) };
    let full = "linear_attn_config.full_attn_layers";
    let (flags, numbers) = ("attn_type_list", keys.layer_numbers(full, layers + 1)?);
    // The rest of the other list follows.
    keys.mark(&["linear_attn_config.kda_layers"]);
    let (key, is_full): (&str, Box<dyn Fn(u64) -> bool>) = match (numbers, keys.layer_numbers(flags, 2)?) {
        (_, Some(list)) if list.len() as u64 != layers => {
            let expected = format!("as many numbers as `num_hidden_layers`, {layers}");
            return Err(contradiction(flags, list.len() as u64, expected));
        }
        (_, Some(list)) => (flags, Box::new(move |layer| list[layer as usize] == 1)),
        // The blocks are counted from 1.
        (Some(numbers), None) => (full, Box::new(move |layer| numbers.contains(&(layer + 1)))),
        (None, None) => match every {
            Some(every) => (INTERVAL[0], Box::new(move |layer| (layer + 1).is_multiple_of(every))),
            None => return Ok(None),
        },
    };
    if family.linear == LinearKind::None && !(0..layers).all(&is_full) {
        return Err(unknown_block(key, "linear_attention", KNOWN_KINDS));
    }
    let kind = |layer| if is_full(layer) { "full_attention" } else { "linear_attention" };
    Ok(Some((key.to_owned(), (0..layers).map(kind).collect())))
}

/// Returns the letters of a pattern.
fn letters(pattern: &str) -> Vec<String> {
    pattern.chars().map(String::from).collect()
}

/// Reads the number of predictors of further tokens, and the blocks of one; none if it has the shapes of the
/// last block.
pub(super) fn predictors(
    keys: &mut Keys<'_>,
    family: &Family,
    hidden: u64,
) -> Result<(u32, Vec<Block>), ShapeError> {
    let names = ["num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules"];
    let is_used = keys.flag("use_mtp")? != Some(false);
    let count = keys.size(&names, 0, MAX_PREDICTORS)?.filter(|_| is_used).unwrap_or(0) as u32;
    let depth = keys.size(&["mtp_transformer_layers"], 1, MAX_BLOCKS)?.unwrap_or(1);
    if depth > 1 {
        return Err(contradiction(
            "mtp_transformer_layers",
            depth,
            "1: a predictor has one block".to_owned(),
        ));
    }
    let listed = keys.words(&["mtp_layers_block_type"])?;
    let pattern = keys.text(&["mtp_hybrid_override_pattern"])?;
    let blocks = match (count, listed, pattern) {
        (0, ..) | (_, None, None) => Vec::new(),
        (_, Some((key, kinds)), _) => single_parts(keys, family, hidden, &key, &kinds)?,
        (_, None, Some(pattern)) => {
            single_parts(keys, family, hidden, "mtp_hybrid_override_pattern", &letters(pattern))?
        }
    };
    Ok((count, blocks))
}

/// Returns the error of a kind of block without costs.
fn unknown_block(key: &str, kind: &str, known: &str) -> ShapeError {
    let kind: String = kind.chars().take(64).collect();
    let message =
        format!("`{key}` names the kind of block `{kind}`, whose costs are not known; known are {known}");
    ShapeError::new(&[key], message)
}

fn counted(layers: Option<u64>) -> Result<u64, ShapeError> {
    layers.ok_or_else(|| missing(&LAYERS))
}

/// The blocks of a hybrid, each with one part: `M` Mamba-2, `*` attention, `-` feed-forward, `E` experts. The
/// sizes of a kind of block that the model does not have are not needed.
fn single_parts(
    keys: &mut Keys<'_>,
    family: &Family,
    hidden: u64,
    key: &str,
    kinds: &[impl AsRef<str>],
) -> Result<Vec<Block>, ShapeError> {
    let blocks = kinds.len();
    if !(1..=MAX_BLOCKS).contains(&(blocks as u64)) {
        let message = format!("`{key}` has {blocks} blocks; use from 1 to {MAX_BLOCKS}");
        return Err(ShapeError::new(&[key], message));
    }
    let parts = FeedForwards::read(keys, family, hidden, blocks as u64)?;
    keys.mark(&SIZES_OF_MIXERS);
    let has = |names: [&str; 3]| kinds.iter().any(|kind| names.contains(&kind.as_ref()));
    let attention = if has(ATTENTION) { attention(keys, family, hidden)? } else { Mixer::None };
    let mamba = if has(MAMBA) { Mixer::Mamba2(mamba(keys, hidden, &[])?) } else { Mixer::None };
    let of_kind = |kind: &str| match (kind, parts.experts) {
        (kind, _) if MAMBA.contains(&kind) => Ok((mamba, FeedForward::None)),
        (kind, _) if ATTENTION.contains(&kind) => Ok((attention, FeedForward::None)),
        ("-" | "mlp", _) => Ok((Mixer::None, parts.dense()?)),
        ("E" | "moe", Some(experts)) => Ok((Mixer::None, experts)),
        (other, _) => Err(unknown_block(key, other, "M, *, -, and E if there are experts")),
    };
    let block = |kind: &_| {
        let (mixer, feed_forward) = of_kind(AsRef::<str>::as_ref(kind))?;
        Ok(Block::new(mixer, feed_forward))
    };
    kinds.iter().map(block).collect()
}

/// The blocks of a model whose blocks all have a mixer and a feed-forward part.
fn whole_blocks(
    keys: &mut Keys<'_>,
    family: &Family,
    hidden: u64,
    layers: u64,
    kinds: Option<(String, Vec<&str>)>,
) -> Result<Vec<Block>, ShapeError> {
    if let Some((key, kinds)) = kinds.as_ref().filter(|(_, kinds)| kinds.len() as u64 != layers) {
        let expected = format!("as many kinds as `num_hidden_layers`, {layers}");
        return Err(contradiction(&format!("the number of kinds in {key}"), kinds.len() as u64, expected));
    }
    keys.set_blocks(layers);
    let attention = attention(keys, family, hidden)?;
    let attention_layers = keys.layer_numbers("attn_layer_indices", layers)?;
    let is_mamba = |kind: &str| kind == "mamba";
    let has_mamba = attention_layers.is_some()
        || kinds.as_ref().is_some_and(|(_, kinds)| kinds.iter().any(|kind| is_mamba(kind)));
    let mamba = if has_mamba { Some(Mixer::Mamba2(mamba(keys, hidden, &["head_dim"])?)) } else { None };
    let has_linear = kinds.as_ref().is_some_and(|(_, kinds)| kinds.contains(&"linear_attention"));
    let linear = if has_linear { linear(keys, family, hidden)? } else { Mixer::None };
    let parts = FeedForwards::read(keys, family, hidden, layers)?;
    let windows = Windows::read(keys, family, kinds.is_some())?;
    let without_positions = without_positions(keys, family, layers, kinds.is_some())?;
    let mixer = |layer: u64| {
        let kind = kinds.as_ref().and_then(|(key, kinds)| Some((key, *kinds.get(layer as usize)?)));
        match (kind, &attention_layers) {
            (
                Some((_, "full_attention" | "attention" | "indexed_attention" | "deepseek_sparse_attention")),
                _,
            ) => Ok(without_window(attention)),
            (Some((_, "linear_attention")), _) if linear != Mixer::None => Ok(linear),
            (Some((_, "sliding_attention" | "chunked_attention")), _) => Ok(attention),
            (Some((_, "mamba")), _) => Ok(mamba.unwrap_or(attention)),
            (Some((key, kind)), _) => Err(unknown_block(key, kind, KNOWN_KINDS)),
            (None, Some(layers)) if !layers.contains(&layer) => Ok(mamba.unwrap_or(attention)),
            (None, _) if windows.is_whole(layer) => Ok(without_window(attention)),
            (None, _) => Ok(attention),
        }
    };
    let block = |layer: u64| {
        let mut mixer = mixer(layer)?;
        if let Mixer::Attention(attention) = &mut mixer {
            let is_rotary = !without_positions.contains(&layer);
            attention.rotary_size = if is_rotary { attention.rotary_size } else { 0 };
        }
        Ok(Block::new(mixer, parts.of_block(layer)?))
    };
    (0..layers).map(block).collect()
}

/// Reads the blocks whose attention has no positions: those with a 0 in a list, or every so many.
/// `are_listed` says whether the file lists the kinds of the blocks.
fn without_positions(
    keys: &mut Keys<'_>,
    family: &Family,
    layers: u64,
    are_listed: bool,
) -> Result<Vec<u64>, ShapeError> {
    let every = keys.size(&["no_rope_layer_interval", "nope_layer_interval"], 1, MAX_BLOCKS)?;
    // In such families, blocks without a window have no positions.
    let of_windows = match family.without_positions_every {
        Some(usual) if !are_listed => keys.size(&WHOLE_EVERY, 1, MAX_BLOCKS)?.or(Some(usual)),
        usual => usual,
    };
    let every = every.or(of_windows);
    let is_nth = |layer: &u64| every.is_some_and(|every| (layer + 1).is_multiple_of(every));
    // Llama 4's files have an empty list if the rule counts.
    let is_empty = keys.value(&["no_rope_layers"]).is_some_and(|(_, list)| list == &Value::Array(Vec::new()));
    let flags = if is_empty { None } else { keys.flags_of_blocks("no_rope_layers")? };
    Ok(match flags {
        Some(list) => (0..).zip(list).filter(|(_, flag)| *flag == 0).map(|(layer, _)| layer).collect(),
        None => (0..layers).filter(is_nth).collect(),
    })
}

/// The blocks whose attention has a window.
struct Windows {
    is_used: bool,
    /// Every how many blocks one has no window.
    whole_every: Option<u64>,
    /// The first blocks, which have no window (Qwen 2).
    whole_at_start: u64,
}

impl Windows {
    /// `are_listed` says whether the file lists the kinds of the blocks, which then have the last word.
    fn read(keys: &mut Keys<'_>, family: &Family, are_listed: bool) -> Result<Self, ShapeError> {
        keys.mark(&WHOLE_EVERY);
        let given = if are_listed { None } else { keys.size(&WHOLE_EVERY, 1, MAX_BLOCKS)? };
        Ok(Self {
            is_used: keys.flag("use_sliding_window")? != Some(false),
            whole_every: given.or(family.whole_every),
            whole_at_start: keys.size(&["max_window_layers"], 0, MAX_SIZE)?.unwrap_or(0),
        })
    }

    fn is_whole(&self, layer: u64) -> bool {
        let by_pattern = self.whole_every.is_some_and(|every| (layer + 1).is_multiple_of(every));
        !self.is_used || by_pattern || layer < self.whole_at_start
    }
}

fn without_window(mixer: Mixer) -> Mixer {
    match mixer {
        Mixer::Attention(attention) => Mixer::Attention(Attention { window: None, ..attention }),
        other => other,
    }
}
