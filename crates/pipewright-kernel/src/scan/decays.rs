//! How much of a state is left between the tokens of a chunk, for the heads of a group.

use multiversion::multiversion;

use super::chunks::{CHUNK, Chunk, Heads, Inputs};
use crate::pointwise::exp;

/// The decays of a chunk. Arrays over heads and tokens are `[heads of the group, CHUNK]`.
pub(super) struct Decays {
    /// The running sum of `δ A` as the sum of two numbers: differences of large sums then stay exact.
    high: Vec<f32>,
    low: Vec<f32>,
    /// From before the chunk to each token; 0 if the token's document begins in the chunk.
    pub enter: Vec<f32>,
    /// From each token to the chunk's end; 0 if the token's document ends before.
    pub leave: Vec<f32>,
    /// From before the chunk to its end, a number for each head.
    pub pass: Vec<f32>,
    /// `leave` times `δ`: the weight of each token in the state at the chunk's end.
    pub give: Vec<f32>,
    steps: Vec<f32>,
    /// The index in the chunk of the first token that each token sees.
    open: [usize; CHUNK],
}

impl Decays {
    pub(super) fn new(heads: usize) -> Self {
        let zeros = || vec![0f32; heads * CHUNK];
        Self {
            high: zeros(),
            low: zeros(),
            enter: zeros(),
            leave: zeros(),
            pass: vec![0f32; heads],
            give: zeros(),
            steps: zeros(),
            open: [0; CHUNK],
        }
    }

    /// Computes the decays of `chunk` for the heads of `group`.
    pub(super) fn fill(&mut self, inputs: &Inputs<'_>, group: usize, chunk: Chunk) {
        let (rows, heads) = (inputs.dims.rows(), inputs.dims.group_heads());
        let continues = self.open_documents(inputs.documents, chunk);
        let end = chunk.len - 1;
        for index in 0..heads {
            let head = group * heads + index;
            let steps = &inputs.steps[head * rows + chunk.first..][..chunk.len];
            let at = index * CHUNK..index * CHUNK + chunk.len;
            self.steps[at.clone()].copy_from_slice(steps);
            let mut sum = 0f64;
            for ((step, high), low) in
                steps.iter().zip(&mut self.high[at.clone()]).zip(&mut self.low[at.clone()])
            {
                sum += f64::from(*step) * f64::from(inputs.rates[head]);
                *high = sum as f32;
                *low = (sum - f64::from(*high)) as f32;
            }
            for (t, step) in steps.iter().enumerate() {
                let here = index * CHUNK + t;
                let enters = continues && self.open[t] == 0;
                self.enter[here] = if enters { exp(self.high[here]) } else { 0.0 };
                let stays = t >= self.open[end];
                self.leave[here] = if stays { exp(self.between(index, end, t)) } else { 0.0 };
                self.give[here] = self.leave[here] * step;
            }
            self.pass[index] = self.enter[index * CHUNK + end];
        }
    }

    /// Finds the first token that each token sees, and returns whether the first one continues a document.
    fn open_documents(&mut self, documents: Option<&[u32]>, chunk: Chunk) -> bool {
        self.open.fill(0);
        let Some(documents) = documents else { return chunk.index > 0 };
        let here = &documents[chunk.first..][..chunk.len];
        for t in 1..chunk.len {
            self.open[t] = if here[t] == here[t - 1] { self.open[t - 1] } else { t };
        }
        chunk.index > 0 && documents[chunk.first - 1] == here[0]
    }

    #[inline(always)]
    fn between(&self, index: usize, later: usize, earlier: usize) -> f32 {
        let (later, earlier) = (index * CHUNK + later, index * CHUNK + earlier);
        (self.high[later] - self.high[earlier]) + (self.low[later] - self.low[earlier])
    }
}

/// Writes the weight of token `r` in the result at `t`, `exp(s_t - s_r) (c_t b_r) δ_r`, for the head at
/// `index`. `scores` are the products `c_t b_r`.
#[multiversion(targets = "simd")]
pub(super) fn weigh(decays: &Decays, index: usize, len: usize, scores: &[f32], weights: &mut [f32]) {
    let at = index * CHUNK..index * CHUNK + len;
    let (high, low) = (&decays.high[at.clone()], &decays.low[at.clone()]);
    let steps = &decays.steps[at];
    let rows = scores.chunks_exact(len).zip(weights.chunks_exact_mut(len));
    for (t, (scores, weights)) in rows.enumerate() {
        weights.fill(0.0);
        let seen = decays.open[t]..t + 1;
        let tokens = weights[seen.clone()].iter_mut().zip(&scores[seen.clone()]);
        let sums = high[seen.clone()].iter().zip(&low[seen.clone()]).zip(&steps[seen]);
        for ((weight, score), ((h, l), step)) in tokens.zip(sums) {
            *weight = score * exp((high[t] - h) + (low[t] - l)) * step;
        }
    }
}

/// The gradients that come from the pairs of tokens of a chunk.
pub(super) struct Pairs<'a> {
    /// The gradient of the weights, `[len, len]`; becomes the weights themselves.
    pub weights: &'a mut [f32],
    /// The gradient of the scores is added here, `[len, len]`.
    pub d_scores: &'a mut [f32],
    /// The gradients of the running sum and of the steps are added here.
    pub d_sums: &'a mut [f64],
    pub d_steps: &'a mut [f32],
}

/// Runs the backward of [`weigh`]. It computes the weights again, over their gradient.
#[multiversion(targets = "simd")]
pub(super) fn weigh_backward(decays: &Decays, index: usize, len: usize, scores: &[f32], pairs: Pairs<'_>) {
    let at = index * CHUNK..index * CHUNK + len;
    let (high, low) = (&decays.high[at.clone()], &decays.low[at.clone()]);
    let steps = &decays.steps[at];
    let Pairs { weights, d_scores, d_sums, d_steps } = pairs;
    let mut later = [0f32; CHUNK];
    let mut terms = [0f32; CHUNK];
    let rows =
        scores.chunks_exact(len).zip(weights.chunks_exact_mut(len)).zip(d_scores.chunks_exact_mut(len));
    for (t, ((scores, weights), d_scores)) in rows.enumerate() {
        let seen = decays.open[t]..t + 1;
        weights[..seen.start].fill(0.0);
        weights[seen.end..].fill(0.0);
        let count = seen.len();
        let tokens =
            weights[seen.clone()].iter_mut().zip(&scores[seen.clone()]).zip(&mut d_scores[seen.clone()]);
        let sums = high[seen.clone()].iter().zip(&low[seen.clone()]).zip(&steps[seen.clone()]);
        let found = terms[..count].iter_mut().zip(&mut later[seen]);
        for ((((weight, score), d_score), ((h, l), step)), (term, later)) in tokens.zip(sums).zip(found) {
            let decay = exp((high[t] - h) + (low[t] - l));
            let of_step = *weight * score * decay;
            *d_score += *weight * decay * step;
            *weight = score * decay * step;
            *later += of_step;
            *term = of_step * step;
        }
        d_sums[t] += f64::from(crate::simd::sum(count, |i| terms[i]));
    }
    for (((d_sum, d_step), later), step) in d_sums.iter_mut().zip(d_steps).zip(&later[..len]).zip(steps) {
        *d_sum -= f64::from(later * step);
        *d_step += later;
    }
}

/// `out[t][head] = factors[head][t] x[t][head]`; a row of `x` begins every `stride` elements, and one of
/// `out` every `out_stride`.
#[multiversion(targets = "simd")]
pub(super) fn scale_heads(
    of: Heads,
    factors: &[f32],
    (x, stride): (&[f32], usize),
    (out, out_stride): (&mut [f32], usize),
) {
    for t in 0..of.len {
        for head in 0..of.heads {
            let factor = factors[head * CHUNK + t];
            let x = &x[t * stride + head * of.head_dim..][..of.head_dim];
            let out = &mut out[t * out_stride + head * of.head_dim..][..of.head_dim];
            for (out, x) in out.iter_mut().zip(x) {
                *out = x * factor;
            }
        }
    }
}

/// Multiplies each head's columns of a state by the head's factor.
#[multiversion(targets = "simd")]
pub(super) fn scale_state(state: &mut [f32], factors: &[f32], head_dim: usize) {
    for row in state.chunks_exact_mut(factors.len() * head_dim) {
        for (row, factor) in row.chunks_exact_mut(head_dim).zip(factors) {
            for element in row {
                *element *= factor;
            }
        }
    }
}
