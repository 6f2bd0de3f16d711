//! The time of attention without its products with parameters, and of the scan of a state space.
//!
//! Fused attention computes the pairs that are not masked. Its rate grows with the number of keys, because
//! the first and the last block of keys of each tile are computed in part (FlashAttention 3,
//! arXiv 2407.08608, figure 5, has half of the final rate at some hundred keys). Its backward computes the
//! scores again: 5 products against 2 in the forward.
//!
//! Unfused attention computes all pairs with two products per head, and reads and writes the scores for the
//! softmax and the dropout between them.

use crate::layout::{Layout, Scores};
use crate::machine::Machine;
use crate::measured_times::ScoresShape;
use crate::product::Product;
use crate::setting::Setting;
use pipewright_shapes::model::{Attention, Mixer};
use pipewright_shapes::operations::AttentionCount;

/// The keys at which fused attention has half of its final rate: at 2,048 keys it has three quarters of the
/// rate at 16,384 (arXiv 2407.08608, figure 5).
const HALF_RATE_KEYS: f64 = 700.0;
/// The time of fused attention with dropout, divided by the time without: it draws a random number per score
/// in the forward and in the backward. FlashAttention 2's benchmarks differ by about this much.
const DROPOUT: f64 = 1.25;
/// The operations of a fused backward, divided by the forward's.
const BACKWARD_OPERATIONS: f64 = 2.5;
/// The rate of a fused backward, divided by the forward's (arXiv 2407.08608, figures 5 and 6).
const BACKWARD_RATE: f64 = 0.8;
/// The bytes of a score in 16 bits that softmax and dropout read and write in the forward: softmax 2 + 2, dropout
/// 2 + 2, and its mask 1.
const FORWARD_SCORE_BYTES: f64 = 9.0;
/// The same in the backward: the mask and two gradients for dropout, scores and two gradients for softmax.
const BACKWARD_SCORE_BYTES: f64 = 11.0;

/// The seconds of attention for one microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct AttentionTime {
    /// In the forward.
    pub forward: f64,
    /// In the backward, without a forward that is computed again.
    pub backward: f64,
}

/// Returns the time of a block's mixer without its products with parameters, on one rank.
pub fn attention_time(mixer: &Mixer, setting: &Setting<'_>) -> AttentionTime {
    match (mixer, setting.layout.scores) {
        (Mixer::None, _) => AttentionTime::default(),
        (Mixer::Attention(attention), Scores::Unfused) => unfused(attention, setting),
        _ => fused(mixer, setting),
    }
}

/// Returns the seconds of the forward and the backward of a block's mixer, without its products with
/// parameters, at the best rates: long sequences, large products, and no launches. It is 0 if some shapes were
/// measured, because they may be faster.
pub(crate) fn best_attention_seconds(mixer: &Mixer, setting: &Setting<'_>) -> f64 {
    let (layout, machine) = (setting.layout, setting.machine);
    let shared = layout.tokens() / f64::from(layout.tensor);
    if !machine.measured.scores.is_empty() {
        return 0.0;
    }
    match (mixer, layout.scores) {
        (Mixer::Attention(attention), Scores::Unfused) => {
            let pairs = shared * (attention.heads * u64::from(layout.sequence)) as f64;
            // Two products in the forward, and twice as many in the backward.
            let operations = 3.0 * 4.0 * pairs * attention.head_size as f64;
            let precision = layout.precision.outside_products();
            let moved = pairs
                * (FORWARD_SCORE_BYTES + BACKWARD_SCORE_BYTES)
                * (layout.precision.element_bytes() / 2.0);
            operations / setting.product_rate(precision) + moved / machine.kernel_bandwidth()
        }
        _ => {
            let per_token =
                mixer.pair_operations(u64::from(layout.attention_tokens()), AttentionCount::Causal);
            let operations = per_token * shared * (1.0 + BACKWARD_OPERATIONS / BACKWARD_RATE);
            let dropout = if setting.model.gpt { DROPOUT } else { 1.0 };
            operations * dropout / setting.attention_rate(head_size(mixer))
        }
    }
}

/// The width of the heads of a mixer.
fn head_size(mixer: &Mixer) -> u64 {
    match mixer {
        Mixer::Attention(attention) => attention.head_size,
        Mixer::Latent(latent) => latent.plain_size + latent.rotary_size,
        // A scan fills the units with its chunks.
        Mixer::Mamba2(_) | Mixer::Delta(_) | Mixer::None => u64::MAX,
    }
}

/// The measured time of fused attention, if its shape on a rank was measured.
fn measured(attention: &Attention, layout: &Layout, machine: &Machine) -> Option<AttentionTime> {
    let tensor = u64::from(layout.tensor);
    let shape = ScoresShape {
        rows: layout.microbatch,
        sequence: layout.sequence,
        heads: attention.heads / tensor,
        key_value_heads: attention.key_value_heads / tensor,
        head_size: attention.head_size,
        precision: layout.precision.outside_products(),
    };
    // A window, documents in a row, or a sequence that is divided, have other pairs.
    let sees_all = layout.attention_tokens() == layout.sequence;
    let has_all_pairs = attention.window.is_none() && sees_all && layout.context == 1;
    let [forward, backward] = machine.measured.scores(shape).filter(|_| has_all_pairs)?;
    Some(AttentionTime { forward, backward })
}

fn fused(mixer: &Mixer, setting: &Setting<'_>) -> AttentionTime {
    let (layout, machine) = (setting.layout, setting.machine);
    if let Mixer::Attention(attention) = mixer
        && let Some(time) = measured(attention, layout, machine)
    {
        return time;
    }
    let seen = layout.attention_tokens();
    let per_token = mixer.pair_operations(u64::from(seen), AttentionCount::Causal);
    let on_each_rank = mixer.indexer_operations(u64::from(seen), AttentionCount::Causal);
    let divided = (per_token - on_each_rank) / f64::from(layout.tensor);
    let operations = (divided + on_each_rank) * layout.tokens();
    // Each kernel has the keys of one rank of the sequence.
    let own_keys = u64::from((layout.sequence / layout.context).min(seen));
    let keys = match mixer {
        Mixer::Attention(attention) => attention.window.unwrap_or(u64::MAX).min(own_keys),
        Mixer::Mamba2(mamba) => mamba.chunk,
        Mixer::Delta(delta) => delta.chunk,
        Mixer::Latent(_) | Mixer::None => own_keys,
    } as f64;
    let rate = setting.attention_rate(head_size(mixer)) * keys / (keys + HALF_RATE_KEYS);
    let dropout = if setting.model.gpt { DROPOUT } else { 1.0 };
    let ring = 1.0 + setting.stack().ring_step * f64::from(layout.context - 1);
    let forward = operations / rate * dropout * ring;
    let kernels = if matches!(mixer, Mixer::Mamba2(_) | Mixer::Delta(_)) { 1 } else { layout.context };
    let launch = f64::from(kernels) * machine.constants.launch;
    AttentionTime {
        forward: forward + launch,
        backward: forward * BACKWARD_OPERATIONS / BACKWARD_RATE + launch,
    }
}

fn unfused(attention: &Attention, setting: &Setting<'_>) -> AttentionTime {
    let (layout, machine) = (setting.layout, setting.machine);
    let sequence = f64::from(layout.sequence);
    let tensor = f64::from(layout.tensor);
    // All heads of all rows are one batch of products. Its outputs lie next to each other.
    let pairs_per_row = attention.heads as f64 * sequence / tensor;
    let rows = layout.tokens() / sequence * pairs_per_row;
    let head = attention.head_size as f64;
    let (precision, element) = (layout.precision.outside_products(), layout.precision.element_bytes());
    let scores = Product { rows, columns: sequence, inner: head, output_bytes: element };
    let values = Product { rows, columns: head, inner: sequence, output_bytes: element };
    let products = scores.seconds(setting, precision) + values.seconds(setting, precision);
    let moved = |bytes: f64| rows * sequence * bytes * (element / 2.0) / machine.kernel_bandwidth();
    AttentionTime {
        forward: products + moved(FORWARD_SCORE_BYTES),
        backward: 2.0 * products + moved(BACKWARD_SCORE_BYTES),
    }
}
