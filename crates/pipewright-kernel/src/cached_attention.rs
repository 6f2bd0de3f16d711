//! Attention of one token over the keys and values of earlier tokens, for generation.

use multiversion::multiversion;

use super::pointwise::exp;
use super::simd::{max, sum};
use super::soft_cap::bound;

/// Sizes of an attention of one token. Each key head serves `heads / kv_heads` neighbouring query heads.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Elements of a head of queries and keys.
    pub head_dim: usize,
    /// Elements of a head of values.
    pub value_dim: usize,
    /// The factor of the scores.
    pub scale: f32,
    /// The bound of the scores: `cap tanh(score / cap)` takes the place of a score. `None` for no bound.
    pub cap: Option<f32>,
}

/// Returns `softmax(scale q kᵀ) v` for each head, `[heads * value_dim]`. With `sinks`, each head has a
/// further score, whose value is zero.
///
/// `query` is rotated already. `keys` have a row of `kv_heads * head_dim` for each token that it sees, and
/// are rotated. `values` have a row of `kv_heads * value_dim`.
#[multiversion(targets = "simd")]
pub fn attend(query: &[f32], keys: &[f32], values: &[f32], heads: Heads, sinks: Option<&[f32]>) -> Vec<f32> {
    let Heads { heads, kv_heads, head_dim, value_dim, scale, cap } = heads;
    let (width, value_width, group) = (kv_heads * head_dim, kv_heads * value_dim, heads / kv_heads);
    let mut out = vec![0f32; heads * value_dim];
    let mut weights = vec![0f32; keys.len() / width];
    for (head, out) in out.chunks_exact_mut(value_dim).enumerate() {
        let (query, key_head) = (&query[head * head_dim..][..head_dim], head / group);
        for (weight, keys) in weights.iter_mut().zip(keys.chunks_exact(width)) {
            let key = &keys[key_head * head_dim..][..head_dim];
            *weight = scale * sum(head_dim, |i| query[i] * key[i]);
        }
        if let Some(cap) = cap {
            bound(&mut weights, cap);
        }
        let sink = sinks.map(|sinks| sinks[head]);
        let largest = sink.map_or_else(|| max(&weights), |sink| max(&weights).max(sink));
        for weight in &mut weights {
            *weight = exp(*weight - largest);
        }
        let sink_weight = sink.map_or(0.0, |sink| exp(sink - largest));
        let share = 1.0 / (sum(weights.len(), |i| weights[i]) + sink_weight);
        for (weight, values) in weights.iter().zip(values.chunks_exact(value_width)) {
            let (weight, value) = (weight * share, &values[key_head * value_dim..][..value_dim]);
            for (out, value) in out.iter_mut().zip(value) {
                *out += weight * value;
            }
        }
    }
    out
}
