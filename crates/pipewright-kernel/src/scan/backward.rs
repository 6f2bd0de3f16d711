//! The gradients of a scan: the states first, from the first chunk to the last, and then the chunks from the
//! last to the first with the gradient `R` of the state after each of them.

use multiversion::multiversion;

use super::chunks::{CHUNK, Chunk, Inputs};
use super::decays::{Decays, Pairs, scale_heads, scale_state, weigh_backward};
use super::forward::advance;
use crate::product::{Matrix, add_product, product_into};
use crate::simd::sum;

/// The gradients of a scan's inputs, in their layouts.
pub(crate) struct Gradients {
    pub u: Vec<f32>,
    pub steps: Vec<f32>,
    pub rates: Vec<f32>,
    pub skip: Vec<f32>,
}

/// Returns the gradients of a scan from the gradient of its result.
pub(crate) fn backward(inputs: Inputs<'_>, gradient: &[f32]) -> Gradients {
    let dims = inputs.dims;
    let mut found = Gradients {
        u: vec![0f32; inputs.u.len()],
        steps: vec![0f32; inputs.steps.len()],
        rates: vec![0f32; dims.heads],
        skip: vec![0f32; dims.heads],
    };
    let mut scratch = Scratch::new(&inputs);
    for (batch, group) in dims.parts() {
        scratch.compute_states(&inputs, batch, group);
        for chunk in dims.chunks(batch).rev() {
            scratch.chunk_backward(&inputs, group, chunk, gradient, &mut found);
        }
    }
    found
}

/// Memory of the computation. Rows of heads are `[CHUNK, heads of the group * head_dim]`.
struct Scratch {
    decays: Decays,
    /// The state before each chunk of a sequence.
    states: Vec<f32>,
    /// The gradient of the state after a chunk.
    d_state: Vec<f32>,
    scores: Vec<f32>,
    d_scores: Vec<f32>,
    weights: Vec<f32>,
    /// `enter` times the gradient of the result, and `give` times `x`.
    entered: Vec<f32>,
    given: Vec<f32>,
    /// `S_in c` and `R b`.
    read: Vec<f32>,
    wanted: Vec<f32>,
    /// The gradients of the running sums and of the steps, `[heads of the group, CHUNK]`.
    d_sums: Vec<f64>,
    d_steps: Vec<f32>,
}

impl Scratch {
    fn new(inputs: &Inputs<'_>) -> Self {
        let dims = inputs.dims;
        let (heads, wide) = (dims.group_heads(), dims.group_width());
        let rows = || vec![0f32; CHUNK * wide];
        let square = || vec![0f32; CHUNK * CHUNK];
        Self {
            decays: Decays::new(heads),
            states: vec![0f32; dims.sequence.div_ceil(CHUNK) * dims.state * wide],
            d_state: vec![0f32; dims.state * wide],
            scores: square(),
            d_scores: square(),
            weights: square(),
            entered: rows(),
            given: rows(),
            read: rows(),
            wanted: rows(),
            d_sums: vec![0f64; heads * CHUNK],
            d_steps: vec![0f32; heads * CHUNK],
        }
    }

    /// Computes the state before each chunk, and forgets the gradient of the last one.
    fn compute_states(&mut self, inputs: &Inputs<'_>, batch: usize, group: usize) {
        let size = self.d_state.len();
        for chunk in inputs.dims.chunks(batch).filter(|chunk| !chunk.is_last) {
            self.decays.fill(inputs, group, chunk);
            let (before, after) = self.states[chunk.index * size..].split_at_mut(size);
            let after = &mut after[..size];
            after.copy_from_slice(before);
            advance(inputs, group, chunk, &self.decays, after, &mut self.given);
        }
        self.d_state.fill(0.0);
    }

    /// Adds a chunk's part to the gradients, and turns the gradient of the state after it into the gradient
    /// of the state before.
    fn chunk_backward(
        &mut self,
        inputs: &Inputs<'_>,
        group: usize,
        chunk: Chunk,
        gradient: &[f32],
        found: &mut Gradients,
    ) {
        self.prepare(inputs, group, chunk, gradient);
        self.pairs_backward(inputs, group, chunk, gradient, &mut found.u);
        self.rows_backward(inputs, group, chunk, gradient, found);
        self.directions_backward(inputs, group, chunk, &mut found.u);
        self.sums_backward(inputs, group, chunk, found);
        scale_state(&mut self.d_state, &self.decays.pass, inputs.dims.head_dim);
        let wide = inputs.dims.group_width();
        let [_, c] = inputs.directions(group, chunk);
        add_product(&mut self.d_state, wide, c.transposed(), Matrix::new(&self.entered, chunk.len, wide));
    }

    fn state_before(&self, chunk: Chunk) -> &[f32] {
        let size = self.d_state.len();
        &self.states[chunk.index * size..][..size]
    }

    fn prepare(&mut self, inputs: &Inputs<'_>, group: usize, chunk: Chunk, gradient: &[f32]) {
        let dims = inputs.dims;
        let (width, wide, channels) = (dims.width(), dims.group_width(), dims.channels());
        let (len, heads) = (chunk.len, dims.heads_of(chunk));
        let x = &inputs.u[chunk.first * channels + dims.x(group)..];
        let g = &gradient[chunk.first * width + dims.x(group)..];
        let [b, c] = inputs.directions(group, chunk);
        self.decays.fill(inputs, group, chunk);
        self.d_sums.fill(0.0);
        self.d_steps.fill(0.0);
        self.d_scores.fill(0.0);
        product_into(&mut self.scores, len, c, b.transposed());
        scale_heads(heads, &self.decays.enter, (g, width), (&mut self.entered, wide));
        scale_heads(heads, &self.decays.give, (x, channels), (&mut self.given, wide));
        let size = self.d_state.len();
        let state = &self.states[chunk.index * size..][..size];
        product_into(&mut self.read, wide, c, Matrix::new(state, dims.state, wide));
        product_into(&mut self.wanted, wide, b, Matrix::new(&self.d_state, dims.state, wide));
    }

    /// Writes the gradients of `b` and `c`.
    fn directions_backward(&self, inputs: &Inputs<'_>, group: usize, chunk: Chunk, d_u: &mut [f32]) {
        let dims = inputs.dims;
        let (wide, channels, len) = (dims.group_width(), dims.channels(), chunk.len);
        let [b, c] = inputs.directions(group, chunk);
        let row = chunk.first * channels;
        let d_scores = Matrix::new(&self.d_scores, len, len);
        let rows = |rows| Matrix::new(rows, len, wide);
        let states = |state| Matrix::new(state, dims.state, wide).transposed();
        let d_c = &mut d_u[row + dims.c(group)..];
        product_into(d_c, channels, d_scores, b);
        add_product(d_c, channels, rows(&self.entered), states(self.state_before(chunk)));
        let d_b = &mut d_u[row + dims.b(group)..];
        product_into(d_b, channels, d_scores.transposed(), c);
        add_product(d_b, channels, rows(&self.given), states(&self.d_state));
    }

    /// Computes the part of the pairs of tokens in the chunk: writes the gradient of `x`, and adds to the
    /// gradients of scores, running sums and steps.
    fn pairs_backward(
        &mut self,
        inputs: &Inputs<'_>,
        group: usize,
        chunk: Chunk,
        gradient: &[f32],
        d_u: &mut [f32],
    ) {
        let dims = inputs.dims;
        let (width, channels, len) = (dims.width(), dims.channels(), chunk.len);
        for index in 0..dims.group_heads() {
            let column = dims.x(group) + index * dims.head_dim;
            let at_u = chunk.first * channels + column;
            let x = Matrix::strided(&inputs.u[at_u..], len, dims.head_dim, channels);
            let g = &gradient[chunk.first * width + column..];
            let g = Matrix::strided(g, len, dims.head_dim, width);
            let weights = &mut self.weights[..len * len];
            product_into(weights, len, g, x.transposed());
            let at = index * CHUNK..index * CHUNK + len;
            let pairs = Pairs {
                weights,
                d_scores: &mut self.d_scores[..len * len],
                d_sums: &mut self.d_sums[at.clone()],
                d_steps: &mut self.d_steps[at],
            };
            weigh_backward(&self.decays, index, len, &self.scores[..len * len], pairs);
            let weights = Matrix::new(&self.weights, len, len);
            product_into(&mut d_u[at_u..], channels, weights.transposed(), g);
        }
    }

    /// Computes the part of the states before and after the chunk, and of the skip.
    fn rows_backward(
        &mut self,
        inputs: &Inputs<'_>,
        group: usize,
        chunk: Chunk,
        gradient: &[f32],
        found: &mut Gradients,
    ) {
        let dims = inputs.dims;
        let (width, wide, channels) = (dims.width(), dims.group_width(), dims.channels());
        for index in 0..dims.group_heads() {
            let head = group * dims.group_heads() + index;
            let column = index * dims.head_dim;
            let mut at_end = 0f64;
            for t in 0..chunk.len {
                let here = index * CHUNK + t;
                let at_u = (chunk.first + t) * channels + dims.x(group) + column;
                let x = &inputs.u[at_u..][..dims.head_dim];
                let g = &gradient[(chunk.first + t) * width + dims.x(group) + column..][..dims.head_dim];
                let read = &self.read[t * wide + column..][..dims.head_dim];
                let wanted = &self.wanted[t * wide + column..][..dims.head_dim];
                let d_x = &mut found.u[at_u..][..dims.head_dim];
                let factors = (self.decays.give[here], inputs.skip[head]);
                let [along_read, along_wanted, along_x] = row_backward((x, g), (read, wanted), factors, d_x);
                found.skip[head] += along_x;
                let given = f64::from(along_wanted * self.decays.give[here]);
                self.d_sums[here] += f64::from(along_read * self.decays.enter[here]) - given;
                at_end += given;
                self.d_steps[here] += along_wanted * self.decays.leave[here];
            }
            self.d_sums[index * CHUNK + chunk.len - 1] += at_end;
        }
    }

    /// Computes the part of the state that passes through the chunk; then the gradients of the running sums
    /// become gradients of steps and rates.
    fn sums_backward(&mut self, inputs: &Inputs<'_>, group: usize, chunk: Chunk, found: &mut Gradients) {
        let dims = inputs.dims;
        for index in 0..dims.group_heads() {
            let head = group * dims.group_heads() + index;
            let state = self.state_before(chunk);
            let end = index * CHUNK + chunk.len - 1;
            let column = index * dims.head_dim..(index + 1) * dims.head_dim;
            let passed: f64 = (0..dims.state)
                .map(|row| row * dims.group_width())
                .map(|row| (&state[row..][column.clone()], &self.d_state[row..][column.clone()]))
                .map(|(state, d)| f64::from(dot(state, d)))
                .sum();
            self.d_sums[end] += passed * f64::from(self.decays.pass[index]);
            let steps = &inputs.steps[head * dims.rows() + chunk.first..][..chunk.len];
            let d_steps = &mut found.steps[head * dims.rows() + chunk.first..][..chunk.len];
            let (mut later, mut d_rate) = (0f64, 0f64);
            for t in (0..chunk.len).rev() {
                later += self.d_sums[index * CHUNK + t];
                d_rate += later * f64::from(steps[t]);
                d_steps[t] = self.d_steps[index * CHUNK + t] + (later * f64::from(inputs.rates[head])) as f32;
            }
            found.rates[head] += d_rate as f32;
        }
    }
}

/// Adds the parts of the state and of the skip to the gradient of a token's `x`. Returns the products of `g`
/// with `read`, of `x` with `wanted` and of `g` with `x`.
#[multiversion(targets = "simd")]
fn row_backward(
    (x, g): (&[f32], &[f32]),
    (read, wanted): (&[f32], &[f32]),
    (give, skip): (f32, f32),
    d_x: &mut [f32],
) -> [f32; 3] {
    for ((d_x, wanted), g) in d_x.iter_mut().zip(wanted).zip(g) {
        *d_x += give * wanted + skip * g;
    }
    let count = x.len();
    [sum(count, |i| g[i] * read[i]), sum(count, |i| x[i] * wanted[i]), sum(count, |i| g[i] * x[i])]
}

#[multiversion(targets = "simd")]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    sum(a.len(), |i| a[i] * b[i])
}
