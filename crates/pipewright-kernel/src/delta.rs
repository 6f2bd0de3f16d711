//! The gated delta rule (Yang et al., 2024, <https://arxiv.org/abs/2412.06464>): linear attention whose state forgets,
//! and removes its value for a key before it adds a value.
//!
//! A head of values has a state `S` `[key_dim, value_dim]`, zero at the beginning of a sequence and of a document. `q`
//! and `k` are divided by `sqrt(sum of squares + 1e-6)`, and `q` also by `sqrt(key_dim)`:
//!
//! ```text
//! D_t = exp(g_t) S_(t-1)     e_t = v_t - D_tᵀ k_t     S_t = D_t + β_t k_t e_tᵀ     y_t = S_tᵀ q_t
//! ```
//!
//! Neighbouring heads of values share the queries and keys of a head. The recurrence runs token by token: a step reads
//! the state twice, and the projections around it read larger matrices.

use std::ops::Range;

use multiversion::multiversion;

use super::pointwise::exp;
use super::simd::sum;

/// Added to the sum of the squares of a query or a key.
const EPSILON: f32 = 1e-6;
/// The tokens whose states the backward pass computes again at once.
const CHUNK: usize = 16;

/// Sizes of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Tokens of a sequence.
    pub sequence: usize,
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, a multiple of the others.
    pub value_heads: usize,
    /// Channels of a query or a key.
    pub key_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
}

impl Dims {
    /// Returns the channels of all queries, all keys and all values.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_width()
    }

    /// Returns the channels of all values.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Returns the elements of a state.
    fn state(&self) -> usize {
        self.key_dim * self.value_dim
    }
}

/// The inputs of a scan, of whole sequences.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Sizes.
    pub dims: Dims,
    /// Rows of all queries, all keys and all values.
    pub u: &'a [f32],
    /// The logarithms of the decays, not above 0, `[rows, value_heads]`.
    pub log_decays: &'a [f32],
    /// `[rows, value_heads]`.
    pub strengths: &'a [f32],
    /// The document of each row; rows of one document follow each other.
    pub documents: Option<&'a [u32]>,
}

/// A head of a sequence.
#[derive(Clone, Copy)]
struct Head {
    /// The first row of the sequence.
    first: usize,
    index: usize,
    /// The places of its query, its key and its value in a row.
    places: [usize; 3],
}

/// A token of a head. Query and key are normalised.
#[derive(Clone, Copy)]
struct Token<'a> {
    query: &'a [f32],
    key: &'a [f32],
    value: &'a [f32],
    decay: f32,
    strength: f32,
}

/// A normalised vector, and the factor that made it.
#[derive(Default)]
struct Normalised {
    vector: Vec<f32>,
    scale: f32,
}

impl Normalised {
    /// Normalises `x` to the length `length`.
    fn fill(&mut self, x: &[f32], length: f32) {
        self.scale = length / (sum(x.len(), |i| x[i] * x[i]) + EPSILON).sqrt();
        self.vector.clear();
        self.vector.extend(x.iter().map(|x| x * self.scale));
    }

    /// Adds the gradient of the vector before the normalisation, from the gradient after it.
    fn backward(&self, gradient: &[f32], length: f32, d_x: &mut [f32]) {
        let vector = &self.vector;
        let along = sum(vector.len(), |i| vector[i] * gradient[i]) / (length * length);
        for ((d, g), v) in d_x.iter_mut().zip(gradient).zip(vector) {
            *d += self.scale * (g - v * along);
        }
    }
}

impl<'a> Inputs<'a> {
    fn rows(&self) -> usize {
        self.u.len() / self.dims.channels()
    }

    fn heads(&self) -> impl Iterator<Item = Head> + use<> {
        let Dims { sequence, key_heads, value_heads, key_dim, value_dim } = self.dims;
        let (shared, keys) = (value_heads / key_heads, key_heads * key_dim);
        (0..self.rows()).step_by(sequence).flat_map(move |first| {
            (0..value_heads).map(move |index| {
                let key = index / shared * key_dim;
                Head { first, index, places: [key, keys + key, 2 * keys + index * value_dim] }
            })
        })
    }

    /// Returns whether a row begins a document in its sequence. The beginning of the sequence does not count.
    fn begins(&self, head: Head, row: usize) -> bool {
        row > head.first && self.documents.is_some_and(|documents| documents[row] != documents[row - 1])
    }

    fn length(&self) -> f32 {
        1.0 / (self.dims.key_dim as f32).sqrt()
    }

    /// Returns the token of a row, and writes its query and key.
    fn token<'t>(&self, head: Head, row: usize, [query, key]: [&'t mut Normalised; 2]) -> Token<'t>
    where
        'a: 't,
    {
        let u = &self.u[row * self.dims.channels()..];
        let [q, k, v] = head.places;
        query.fill(&u[q..][..self.dims.key_dim], self.length());
        key.fill(&u[k..][..self.dims.key_dim], 1.0);
        let gate = row * self.dims.value_heads + head.index;
        Token {
            query: &query.vector,
            key: &key.vector,
            value: &u[v..][..self.dims.value_dim],
            decay: exp(self.log_decays[gate]),
            strength: self.strengths[gate],
        }
    }
}

impl Inputs<'_> {
    /// Turns the state before some rows into the one after them, and shows `D` and the error of each row.
    fn replay(
        &self,
        head: Head,
        rows: Range<usize>,
        state: &mut [f32],
        mut show: impl FnMut(usize, &[f32], &[f32]),
    ) {
        let [mut error, mut y] = [(); 2].map(|()| vec![0f32; self.dims.value_dim]);
        let [mut query, mut key] = <[Normalised; 2]>::default();
        for row in rows {
            if self.begins(head, row) {
                state.fill(0.0);
            }
            let token = self.token(head, row, [&mut query, &mut key]);
            decay(state, token, &mut error);
            show(row, state, &error);
            update(state, token, &error, &mut y);
        }
    }
}

/// Returns the result, rows of all heads of values. `states` has the states before the sequences, or nothing if they
/// are zero, and gets the states after them: `[sequences, value_heads, key_dim, value_dim]`.
pub fn forward(inputs: Inputs<'_>, states: &mut Vec<f32>) -> Vec<f32> {
    let (dims, rows) = (inputs.dims, inputs.rows());
    let mut y = vec![0f32; rows * dims.value_width()];
    states.resize(rows / dims.sequence * dims.value_heads * dims.state(), 0.0);
    let (mut error, [mut query, mut key]) = (vec![0f32; dims.value_dim], <[Normalised; 2]>::default());
    for (head, state) in inputs.heads().zip(states.chunks_exact_mut(dims.state())) {
        for row in head.first..head.first + dims.sequence {
            if inputs.begins(head, row) {
                state.fill(0.0);
            }
            let token = inputs.token(head, row, [&mut query, &mut key]);
            decay(state, token, &mut error);
            let y = &mut y[row * dims.value_width() + head.index * dims.value_dim..][..dims.value_dim];
            update(state, token, &error, y);
        }
    }
    y
}

/// Turns a state into `D`, and computes the error.
#[multiversion(targets = "simd")]
fn decay(state: &mut [f32], token: Token<'_>, error: &mut [f32]) {
    error.copy_from_slice(token.value);
    for (state, k) in state.chunks_exact_mut(error.len()).zip(token.key) {
        for (s, e) in state.iter_mut().zip(error.iter_mut()) {
            *s *= token.decay;
            *e -= *s * k;
        }
    }
}

/// Turns `D` into the state after the token, and reads it.
#[multiversion(targets = "simd")]
fn update(state: &mut [f32], token: Token<'_>, error: &[f32], y: &mut [f32]) {
    y.fill(0.0);
    for ((state, k), q) in state.chunks_exact_mut(error.len()).zip(token.key).zip(token.query) {
        let k = token.strength * k;
        for ((s, e), y) in state.iter_mut().zip(error).zip(y.iter_mut()) {
            *s += k * e;
            *y += *s * q;
        }
    }
}

/// The gradients of the inputs.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// The gradient of [`Inputs::u`].
    pub u: Vec<f32>,
    /// The gradient of [`Inputs::log_decays`].
    pub log_decays: Vec<f32>,
    /// The gradient of [`Inputs::strengths`].
    pub strengths: Vec<f32>,
}

/// Returns the gradients from the gradient of the result. The states before the sequences are zero.
pub fn backward(inputs: Inputs<'_>, gradient: &[f32]) -> Gradients {
    let dims = inputs.dims;
    let (size, width) = (dims.state(), dims.value_dim);
    let mut found = Gradients {
        u: vec![0f32; inputs.u.len()],
        log_decays: vec![0f32; inputs.log_decays.len()],
        strengths: vec![0f32; inputs.strengths.len()],
    };
    // The states before each chunk, and `D` and the errors of a chunk's tokens.
    let mut before = vec![0f32; dims.sequence.div_ceil(CHUNK) * size];
    let (mut decayed, mut errors) = (vec![0f32; CHUNK * size], vec![0f32; CHUNK * width]);
    let [mut state, mut d_state] = [(); 2].map(|()| vec![0f32; size]);
    let [mut query, mut key] = <[Normalised; 2]>::default();
    let ([mut d_query, mut d_key], mut scratch) =
        ([(); 2].map(|()| vec![0f32; dims.key_dim]), vec![0f32; width]);
    for head in inputs.heads() {
        state.fill(0.0);
        d_state.fill(0.0);
        let rows = |from: usize| head.first + from..head.first + (from + CHUNK).min(dims.sequence);
        for (from, before) in (0..dims.sequence).step_by(CHUNK).zip(before.chunks_exact_mut(size)) {
            before.copy_from_slice(&state);
            inputs.replay(head, rows(from), &mut state, |_, _, _| ());
        }
        for chunk in (0..dims.sequence.div_ceil(CHUNK)).rev() {
            let from = chunk * CHUNK;
            state.copy_from_slice(&before[chunk * size..][..size]);
            inputs.replay(head, rows(from), &mut state, |row, state, error| {
                let index = row - head.first - from;
                decayed[index * size..][..size].copy_from_slice(state);
                errors[index * width..][..width].copy_from_slice(error);
            });
            for row in rows(from).rev() {
                let index = row - head.first - from;
                let token = inputs.token(head, row, [&mut query, &mut key]);
                let kept = (&decayed[index * size..][..size], &errors[index * width..][..width]);
                let dy = &gradient[row * dims.value_width() + head.index * width..][..width];
                let d = [&mut d_query[..], &mut d_key[..], &mut scratch[..]];
                let (d_decay, d_strength) = step_backward(token, kept, dy, &mut d_state, d);
                let gate = row * dims.value_heads + head.index;
                (found.log_decays[gate], found.strengths[gate]) = (d_decay, d_strength);
                let d_u = &mut found.u[row * dims.channels()..];
                let [q, k, v] = head.places;
                query.backward(&d_query, inputs.length(), &mut d_u[q..][..dims.key_dim]);
                key.backward(&d_key, 1.0, &mut d_u[k..][..dims.key_dim]);
                d_u[v..][..width].copy_from_slice(&scratch);
                if inputs.begins(head, row) {
                    d_state.fill(0.0);
                }
            }
        }
    }
    found
}

/// Computes the gradients of a token from `D`, the error and the gradient of its result: the gradients of the query, the key and the value, and returns the gradients of the logarithm of the decay and of the strength. Turns the gradient of the state
/// after the token into the gradient of the state before it.
#[multiversion(targets = "simd")]
fn step_backward(
    token: Token<'_>,
    (decayed, error): (&[f32], &[f32]),
    dy: &[f32],
    d_state: &mut [f32],
    [d_query, d_key, d_value]: [&mut [f32]; 3],
) -> (f32, f32) {
    let Token { query, key, decay, strength, .. } = token;
    let width = error.len();
    // So that the compiler leaves out the checks of indices.
    let (dy, d_value) = (&dy[..width], &mut d_value[..width]);
    // `S q = D q + β k (e q)`, and the gradient of `β e` is the gradient of the state, times the key.
    let read = strength * sum(width, |j| error[j] * dy[j]);
    d_value.fill(0.0);
    for (i, (d_state, decayed)) in
        d_state.chunks_exact_mut(width).zip(decayed.chunks_exact(width)).enumerate()
    {
        let (q, k) = (query[i], key[i]);
        for ((d_state, dy), d_value) in d_state.iter_mut().zip(dy).zip(d_value.iter_mut()) {
            *d_state += q * dy;
            *d_value += *d_state * k;
        }
        d_query[i] = sum(width, |j| decayed[j] * dy[j]) + k * read;
        d_key[i] = strength * sum(width, |j| d_state[j] * error[j]);
    }
    let d_strength = sum(width, |j| d_value[j] * error[j]);
    d_value.iter_mut().for_each(|d| *d *= strength);
    let mut d_decay = 0.0;
    for (i, (d_state, decayed)) in
        d_state.chunks_exact_mut(width).zip(decayed.chunks_exact(width)).enumerate()
    {
        // The error is the value less `D k`.
        d_key[i] -= sum(width, |j| decayed[j] * d_value[j]);
        for (d_state, d_value) in d_state.iter_mut().zip(d_value.iter()) {
            *d_state -= key[i] * d_value;
        }
        d_decay += sum(width, |j| d_state[j] * decayed[j]);
        d_state.iter_mut().for_each(|d| *d *= decay);
    }
    (d_decay, d_strength)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIMS: Dims = Dims { sequence: 37, key_heads: 2, value_heads: 4, key_dim: 3, value_dim: 5 };
    const ROWS: usize = 2 * DIMS.sequence;

    /// Numbers between -1 and 1.
    fn numbers(count: usize, seed: usize) -> Vec<f64> {
        (0..count).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f64 / 1001.5 - 1.0).collect()
    }

    /// The inputs in double precision: `u`, the logarithms of the decays, and the strengths.
    fn inputs() -> [Vec<f64>; 3] {
        let gates = ROWS * DIMS.value_heads;
        let decays = numbers(gates, 2).iter().map(|x| -0.3 * (x + 1.0)).collect();
        [
            numbers(ROWS * DIMS.channels(), 1),
            decays,
            numbers(gates, 3).iter().map(|x| (x + 1.1) / 2.2).collect(),
        ]
    }

    /// The formulas of the module, with matrices as lists of rows.
    fn reference([u, log_decays, strengths]: &[Vec<f64>; 3], documents: &[u32]) -> Vec<f64> {
        let Dims { sequence, key_heads, value_heads, key_dim, value_dim } = DIMS;
        let mut y = vec![0.0; ROWS * DIMS.value_width()];
        let normalised = |x: &[f64]| {
            let root = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
            x.iter().map(|x| x / root).collect::<Vec<_>>()
        };
        for head in 0..value_heads {
            let mut state = vec![vec![0.0; value_dim]; key_dim];
            for row in 0..ROWS {
                if row % sequence == 0 || documents[row] != documents[row - 1] {
                    state = vec![vec![0.0; value_dim]; key_dim];
                }
                let u = &u[row * DIMS.channels()..];
                let key = head / (value_heads / key_heads) * key_dim;
                let q = normalised(&u[key..key + key_dim]);
                let k = normalised(&u[key_heads * key_dim + key..][..key_dim]);
                let v = &u[2 * key_heads * key_dim + head * value_dim..][..value_dim];
                let gate = row * value_heads + head;
                state.iter_mut().flatten().for_each(|s| *s *= log_decays[gate].exp());
                let error: Vec<f64> = (0..value_dim)
                    .map(|j| v[j] - (0..key_dim).map(|i| state[i][j] * k[i]).sum::<f64>())
                    .collect();
                for i in 0..key_dim {
                    for j in 0..value_dim {
                        state[i][j] += strengths[gate] * k[i] * error[j];
                        y[row * DIMS.value_width() + head * value_dim + j] +=
                            state[i][j] * q[i] / (key_dim as f64).sqrt();
                    }
                }
            }
        }
        y
    }

    fn single(numbers: &[f64]) -> Vec<f32> {
        numbers.iter().map(|&x| x as f32).collect()
    }

    fn with_inputs<R>(documents: Option<&[u32]>, f: impl FnOnce(Inputs<'_>) -> R) -> R {
        let [u, log_decays, strengths] = inputs().map(|numbers| single(&numbers));
        f(Inputs { dims: DIMS, u: &u, log_decays: &log_decays, strengths: &strengths, documents })
    }

    fn assert_close(found: &[f32], expected: &[f64], tolerance: f64) {
        assert_eq!(found.len(), expected.len());
        for (index, (&found, &expected)) in found.iter().zip(expected).enumerate() {
            let error = (f64::from(found) - expected).abs() / expected.abs().max(1.0);
            assert!(error <= tolerance, "{index}: {found}, not {expected}");
        }
    }

    /// Two rows; the second has three documents; the first one ends within a chunk.
    fn documents() -> Vec<u32> {
        (0..ROWS)
            .map(|row| if row < 37 { 0 } else { 1 + u32::from(row > 47) + u32::from(row > 48) })
            .collect()
    }

    #[test]
    fn results_are_those_of_the_formulas() {
        for documents in [vec![0; ROWS], documents()] {
            let expected = reference(&inputs(), &documents);
            let y = with_inputs(Some(&documents), |inputs| forward(inputs, &mut Vec::new()));
            assert_close(&y, &expected, 2e-6);
        }
        let whole = with_inputs(None, |inputs| forward(inputs, &mut Vec::new()));
        assert_close(&whole, &reference(&inputs(), &[0; ROWS]), 2e-6);
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes minutes under Miri")]
    fn gradients_are_differences_of_the_formulas() {
        for documents in [vec![0; ROWS], documents()] {
            let weights = numbers(ROWS * DIMS.value_width(), 4);
            let found = with_inputs(Some(&documents), |inputs| backward(inputs, &single(&weights)));
            let loss = |inputs: &[Vec<f64>; 3]| {
                reference(inputs, &documents).iter().zip(&weights).map(|(y, w)| y * w).sum::<f64>()
            };
            let parts = [&found.u, &found.log_decays, &found.strengths];
            for (part, found) in parts.into_iter().enumerate() {
                // Every 13th number, so that all heads and channels have some.
                for index in (part..found.len()).step_by(13) {
                    let moved = |by: f64| {
                        let mut inputs = inputs();
                        inputs[part][index] += by;
                        loss(&inputs)
                    };
                    let expected = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                    assert_close(&found[index..=index], &[expected], 2e-5);
                }
            }
        }
    }

    #[test]
    fn a_state_continues_a_sequence() {
        let [u, log_decays, strengths] = inputs().map(|numbers| single(&numbers));
        let mut whole_states = Vec::new();
        let part = |range: Range<usize>, states: &mut Vec<f32>| {
            let of = |all: &[f32], width: usize| all[range.start * width..range.end * width].to_vec();
            let (u, log_decays, strengths) = (of(&u, DIMS.channels()), of(&log_decays, 4), of(&strengths, 4));
            let dims = Dims { sequence: range.len(), ..DIMS };
            let inputs =
                Inputs { dims, u: &u, log_decays: &log_decays, strengths: &strengths, documents: None };
            forward(inputs, states)
        };
        let expected = part(0..37, &mut whole_states);
        for first in [1, 20, 36] {
            let mut states = Vec::new();
            let found = [part(0..first, &mut states), part(first..37, &mut states)].concat();
            assert!(found == expected && states == whole_states, "{first}");
        }
    }
}
