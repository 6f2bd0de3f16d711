//! The losses of routers, each a mean over tokens with weights of their own.

use super::pointwise::{exp, ln, sigmoid, softplus};

/// Returns `sum_t w_t sum_e p_te loads_e` and `sum_t w_t (log sum_e exp l_te)²`, for `p` the softmax of the
/// logits.
pub fn forward(logits: &[f32], loads: &[f32], weights: &[f32]) -> [f32; 2] {
    let (mut balance, mut z) = (0f64, 0f64);
    for (logits, weight) in logits.chunks_exact(loads.len()).zip(weights) {
        let normaliser = normaliser(logits);
        let chosen_load: f32 =
            logits.iter().zip(loads).map(|(logit, load)| exp(logit - normaliser) * load).sum();
        balance += f64::from(weight * chosen_load);
        z += f64::from(weight * normaliser * normaliser);
    }
    [balance as f32, z as f32]
}

/// Returns the gradient of the logits from the gradients of both losses.
pub fn backward(logits: &[f32], loads: &[f32], weights: &[f32], [balance, z]: [f32; 2]) -> Vec<f32> {
    let mut d_logits = vec![0f32; logits.len()];
    let experts = loads.len();
    let rows = logits.chunks_exact(experts).zip(d_logits.chunks_exact_mut(experts));
    for ((logits, d_logits), weight) in rows.zip(weights) {
        let normaliser = normaliser(logits);
        let chosen_load: f32 =
            logits.iter().zip(loads).map(|(logit, load)| exp(logit - normaliser) * load).sum();
        for ((d, logit), load) in d_logits.iter_mut().zip(logits).zip(loads) {
            *d = weight * exp(logit - normaliser) * (balance * (load - chosen_load) + 2.0 * z * normaliser);
        }
    }
    d_logits
}

/// Returns `log sum exp`.
fn normaliser(logits: &[f32]) -> f32 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    largest + ln(logits.iter().map(|logit| exp(logit - largest)).sum::<f32>())
}

/// Returns the weighted sum of the binary cross entropies of scores against what was chosen.
pub fn choice(scores: &[f32], was_chosen: &[f32], weights: &[f32]) -> f32 {
    let tokens = scores.iter().zip(was_chosen).zip(weights);
    let loss = |((score, chosen), weight): ((&f32, &f32), &f32)| {
        f64::from(weight * (softplus(*score) - score * chosen))
    };
    tokens.map(loss).sum::<f64>() as f32
}

/// Returns the gradient of the scores of [`choice`].
pub fn choice_backward(scores: &[f32], was_chosen: &[f32], weights: &[f32], gradient: f32) -> Vec<f32> {
    let tokens = scores.iter().zip(was_chosen).zip(weights);
    let d = |((score, chosen), weight): ((&f32, &f32), &f32)| gradient * weight * (sigmoid(*score) - chosen);
    tokens.map(d).collect()
}
