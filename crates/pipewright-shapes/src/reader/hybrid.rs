//! The family `hybrid` of this project: blocks of one part by a pattern of letters, further tables next to that of
//! tokens, and predictors with blocks of their own.

use serde_json::Value;

use super::blocks::{MAX_PREDICTORS, letters, single_parts, unknown_block};
use super::keys::{Keys, MAX_SIZE, MAX_VOCABULARY, contradiction, wrong};
use crate::error::ShapeError;
use crate::family::Family;
use crate::model::{Attention, Block, Mixer};

/// The key of the blocks.
const PATTERN: &str = "pattern";
/// The kinds of blocks: attention, Mamba-2, experts and a dense feed-forward part.
const KNOWN: &str = "A, M, D, -, and E if there are experts";

/// Reads the blocks. A bar of the pattern is a place where stages may be cut.
pub(super) fn blocks(keys: &mut Keys<'_>, family: &Family, hidden: u64) -> Result<Vec<Block>, ShapeError> {
    let pattern = keys.text(&[PATTERN])?.unwrap_or_default().replace('|', "");
    keys.mark(&["num_hidden_layers"]);
    let mut blocks = blocks_of(keys, family, hidden, PATTERN, &pattern)?;
    let windows = keys.optional_sizes("window_sizes", MAX_SIZE)?;
    if !windows.is_empty() && windows.len() != blocks.len() {
        let expected = format!("as many as the {} blocks", blocks.len());
        return Err(contradiction("the number of windows in window_sizes", windows.len() as u64, expected));
    }
    for (block, size) in blocks.iter_mut().zip(windows) {
        if let Mixer::Attention(attention) = block.mixer {
            block.mixer = Mixer::Attention(Attention { window: size, ..attention });
        }
    }
    Ok(blocks)
}

/// The blocks of a pattern, in the letters that Nemotron-H's files have for them.
fn blocks_of(
    keys: &mut Keys<'_>,
    family: &Family,
    hidden: u64,
    key: &str,
    pattern: &str,
) -> Result<Vec<Block>, ShapeError> {
    if let Some(other) = pattern.chars().find(|letter| !"AMED-".contains(*letter)) {
        return Err(unknown_block(key, &other.to_string(), KNOWN));
    }
    single_parts(keys, family, hidden, key, &letters(&pattern.replace('A', "*").replace('D', "-")))
}

/// Reads the number of predictors, and the block of each.
pub(super) fn predictors(
    keys: &mut Keys<'_>,
    family: &Family,
    hidden: u64,
) -> Result<(u32, Vec<Block>), ShapeError> {
    let weight = keys.value(&["mtp_loss_weight"]).and_then(|(_, value)| value.as_f64());
    let depth = keys.size(&["mtp_depth"], 1, MAX_PREDICTORS)?.unwrap_or(1);
    let letter = keys.text(&["mtp_block"])?.unwrap_or("A");
    if weight.is_none_or(|weight| weight <= 0.0) {
        return Ok((0, Vec::new()));
    }
    Ok((depth as u32, blocks_of(keys, family, hidden, "mtp_block", letter)?))
}

/// Reads the parameters of the first stage in addition to the table of tokens, and of the routers of blocks
/// that only some tokens pass.
pub(super) fn further_embedding(keys: &mut Keys<'_>, hidden: u64) -> Result<u64, ShapeError> {
    let orders = keys.optional_sizes("ngram_orders", MAX_SIZE)?.len() as u64;
    let buckets = keys.size(&["ngram_buckets"], 0, MAX_VOCABULARY)?.unwrap_or(0);
    let platforms = keys.size(&["platform_vocab_size"], 0, MAX_VOCABULARY)?.unwrap_or(0);
    let rows = orders * buckets + structure_rows(keys)? + platforms;
    if rows > 0 {
        keys.note("tables of n-grams, structure and platforms: their parameters count, and their lookups take no time");
    }
    let norm = match keys.text(&["embed_norm"])? {
        None | Some("none") => 0,
        Some("rms") => hidden,
        Some("dyt") => 2 * hidden + 1,
        Some(other) => return Err(wrong("embed_norm".into(), &other.into(), "none, rms or dyt")),
    };
    let heads = keys.size(&["num_attention_heads"], 0, MAX_SIZE)?.unwrap_or(0);
    let relations = keys.size(&["num_relations"], 0, MAX_SIZE)?.unwrap_or(0);
    if relations > 0 {
        keys.note("`num_relations`: the parameters count, and attention takes the same time as without them");
    }
    let routers = keys.optional_sizes("mod_layers", MAX_SIZE)?.len() as u64;
    keys.mark(&["mod_capacity_factor"]);
    if routers > 0 {
        keys.note("`mod_layers`: blocks that only some tokens pass take the time of all tokens");
    }
    Ok((rows + routers).saturating_mul(hidden).saturating_add(norm + relations * heads))
}

/// Reads the rows of all tables of structure.
fn structure_rows(keys: &mut Keys<'_>) -> Result<u64, ShapeError> {
    let Some((key, value)) = keys.value(&["structure_vocab_sizes"]) else { return Ok(0) };
    let rows = |value: &Value| value.as_u64().filter(|rows| *rows <= MAX_VOCABULARY);
    let tables = value.as_object();
    let sum = tables.and_then(|tables| tables.values().map(rows).sum());
    sum.ok_or_else(|| wrong(key, value, "a table with a number of rows for each input"))
}
