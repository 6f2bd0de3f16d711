//! The choice of experts (Shazeer et al., 2017): probabilities over all experts, the largest of each token,
//! and the balance of the choices (Fedus et al., 2022).
//!
//! Rows are tokens. `probabilities` and `logits` have `experts` columns; `chosen` and the weights have
//! `count` columns.

use multiversion::multiversion;

use super::pointwise::exp;
use super::simd::{max, sum};

/// Returns `softmax(logits)` row by row.
#[multiversion(targets = "simd")]
pub fn softmax(logits: &[f32], experts: usize) -> Vec<f32> {
    let mut probabilities = vec![0.0; logits.len()];
    for (p, logits) in probabilities.chunks_exact_mut(experts).zip(logits.chunks_exact(experts)) {
        let largest = max(logits);
        for (p, logit) in p.iter_mut().zip(logits) {
            *p = exp(logit - largest);
        }
        let total = sum(experts, |i| p[i]);
        p.iter_mut().for_each(|p| *p /= total);
    }
    probabilities
}

/// Returns the experts of the `count` largest probabilities of each token, the largest first. If
/// probabilities are equal, the first expert is taken; NaN is smaller than any number.
pub fn choose(probabilities: &[f32], experts: usize, count: usize) -> Vec<usize> {
    let mut chosen = Vec::with_capacity(probabilities.len() / experts * count);
    for row in probabilities.chunks_exact(experts) {
        let start = chosen.len();
        for _ in 0..count {
            let left = (0..experts).filter(|expert| !chosen[start..].contains(expert));
            let best = left.reduce(|best, expert| {
                let is_larger = row[expert] > row[best] || row[best].is_nan() && !row[expert].is_nan();
                if is_larger { expert } else { best }
            });
            chosen.push(best.expect("no more experts are chosen than there are"));
        }
    }
    chosen
}

/// Returns the weights of the chosen experts: their probabilities, divided by their sum if `normalised`.
pub fn weights(
    probabilities: &[f32],
    chosen: &[usize],
    experts: usize,
    count: usize,
    normalised: bool,
) -> Vec<f32> {
    let rows = probabilities.chunks_exact(experts).zip(chosen.chunks_exact(count));
    let mut weights = Vec::with_capacity(chosen.len());
    for (p, chosen) in rows {
        let divisor = if normalised { total(p, chosen) } else { 1.0 };
        weights.extend(chosen.iter().map(|&expert| p[expert] / divisor));
    }
    weights
}

fn total(probabilities: &[f32], chosen: &[usize]) -> f32 {
    chosen.iter().map(|&expert| probabilities[expert]).sum()
}

/// Returns the gradient of the logits from the gradient of the weights.
///
/// With `s` the sum of a token's chosen probabilities if they are normalised, otherwise 1, the gradient of a
/// chosen probability is `(g - sum(g w)) / s`, or `g`. The softmax turns a gradient `d` of the probabilities
/// into `p (d - sum(d p))`.
pub fn backward(
    probabilities: &[f32],
    chosen: &[usize],
    gradient: &[f32],
    experts: usize,
    normalised: bool,
) -> Vec<f32> {
    let count = chosen.len() / (probabilities.len() / experts).max(1);
    let mut d_logits = vec![0.0; probabilities.len()];
    let mut d_chosen = vec![0.0; count];
    let rows = probabilities.chunks_exact(experts).zip(d_logits.chunks_exact_mut(experts));
    for ((p, d_logits), (chosen, g)) in rows.zip(chosen.chunks_exact(count).zip(gradient.chunks_exact(count)))
    {
        d_chosen.copy_from_slice(g);
        if normalised {
            let s = total(p, chosen);
            let mean: f32 = g.iter().zip(chosen).map(|(g, &expert)| g * p[expert] / s).sum();
            d_chosen.iter_mut().for_each(|d| *d = (*d - mean) / s);
        }
        let along: f32 = d_chosen.iter().zip(chosen).map(|(d, &expert)| d * p[expert]).sum();
        for (d, p) in d_logits.iter_mut().zip(p) {
            *d = -p * along;
        }
        for (d, &expert) in d_chosen.iter().zip(chosen) {
            d_logits[expert] += p[expert] * d;
        }
    }
    d_logits
}

/// Returns the fraction of tokens that chose each expert, times the number of experts: `E f`.
pub fn loads(chosen: &[usize], experts: usize, tokens: usize) -> Vec<f32> {
    let mut counts = vec![0usize; experts];
    chosen.iter().for_each(|&expert| counts[expert] += 1);
    counts.into_iter().map(|count| (experts * count) as f32 / tokens as f32).collect()
}

/// Returns the balance loss `E sum(f P)`, where `P` is the mean probability of an expert. Sums are in f64:
/// the result is one number per layer and microbatch.
pub fn balance(probabilities: &[f32], loads: &[f32]) -> f32 {
    let experts = loads.len();
    let mut sums = vec![0f64; experts];
    for row in probabilities.chunks_exact(experts) {
        sums.iter_mut().zip(row).for_each(|(sum, p)| *sum += f64::from(*p));
    }
    let tokens = (probabilities.len() / experts) as f64;
    (sums.iter().zip(loads).map(|(sum, load)| sum * f64::from(*load)).sum::<f64>() / tokens) as f32
}

/// Returns the gradient of the logits from the gradient of [`balance`]. The loads have no gradient.
#[multiversion(targets = "simd")]
pub fn balance_backward(probabilities: &[f32], loads: &[f32], gradient: f32) -> Vec<f32> {
    let experts = loads.len();
    let share = gradient / (probabilities.len() / experts) as f32;
    let mut d_logits = vec![0.0; probabilities.len()];
    for (d, p) in d_logits.chunks_exact_mut(experts).zip(probabilities.chunks_exact(experts)) {
        let along = sum(experts, |i| p[i] * loads[i]);
        for ((d, p), load) in d.iter_mut().zip(p).zip(loads) {
            *d = share * p * (load - along);
        }
    }
    d_logits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_are_chosen_and_ties_go_to_the_first() {
        let check = |row: &[f32], expected: &[usize]| {
            assert_eq!(choose(row, row.len(), expected.len()), expected, "{row:?}");
        };
        check(&[0.1, 0.5, 0.4], &[1, 2]);
        check(&[0.25, 0.25, 0.25, 0.25], &[0, 1]);
        check(&[f32::NAN, 0.5, 0.1], &[1, 2, 0]);
        check(&[f32::NAN, f32::NAN], &[0]);
    }

    #[test]
    fn a_perfect_balance_is_the_number_of_choices() {
        let probabilities = [0.25; 16];
        let loads = loads(&[0, 1, 2, 3, 0, 1, 2, 3], 4, 4);
        assert_eq!(loads, [2.0; 4]);
        assert_eq!(balance(&probabilities, &loads), 2.0);
    }
}
