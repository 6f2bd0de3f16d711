//! The keys and values of the tokens so far, so that generation does not compute them again for each token.

use std::sync::Arc;

use burn::tensor::{Tensor, TensorData};

use super::attention::CausalAttention;
use pipewright_kernel::cached_attention::{Heads, attend};

/// The keys and values of one attention over one sequence that grows. They are in the processor's memory.
#[derive(Clone, Debug)]
pub struct KeyValueCache {
    /// The rotary frequency of each pair of a head's elements, in [`CausalAttention::rotary_with`]'s layout.
    frequencies: Arc<[f32]>,
    tokens: usize,
    /// A row for each token. Keys are rotated by their positions.
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl KeyValueCache {
    /// Returns the cache of an attention with these rotary frequencies, without tokens. A head has twice as
    /// many elements as there are frequencies.
    pub fn new(frequencies: Arc<[f32]>) -> Self {
        Self { frequencies, tokens: 0, keys: Vec::new(), values: Vec::new() }
    }

    /// Returns the number of tokens so far.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Appends the keys and values of the next tokens of the sequence, and returns the attention of their
    /// queries: each token sees itself and all before it. Gradients are not computed.
    ///
    /// Shapes: `q [tokens, heads * head_dim]`; `k` and `v` `[tokens, kv_heads * head_dim]`; the result has
    /// the shape of `q`. The results differ from [`CausalAttention::forward`]'s in rounding only.
    ///
    /// # Panics
    /// When the shapes do not match.
    pub fn attend(&mut self, q: Tensor<2>, k: Tensor<2>, v: Tensor<2>) -> Tensor<2> {
        let [[count, wide], [rows, narrow]] = [q.dims(), k.dims()];
        let head_dim = 2 * self.frequencies.len();
        let fits = rows == count && v.dims() == [rows, narrow] && narrow.is_multiple_of(head_dim);
        assert!(fits && narrow > 0 && wide.is_multiple_of(narrow), "queries, keys and values fit each other");
        let (first, device) = (self.tokens, q.device());
        self.tokens += count;
        let mut keys = floats(&k);
        self.rotate(&mut keys, narrow, first);
        self.keys.append(&mut keys);
        self.values.append(&mut floats(&v));
        if first == 0 {
            // All tokens at once are computed as in training, in blocks.
            return CausalAttention::rotary_with(count, &self.frequencies, &device).forward(q, k, v);
        }
        let mut queries = floats(&q);
        self.rotate(&mut queries, wide, first);
        let heads = Heads { heads: wide / head_dim, kv_heads: narrow / head_dim, head_dim };
        let rows = (first + 1..).zip(queries.chunks_exact(wide));
        let attended = rows.flat_map(|(seen, query)| {
            attend(query, &self.keys[..seen * narrow], &self.values[..seen * narrow], heads)
        });
        Tensor::from_data(TensorData::new(attended.collect::<Vec<f32>>(), [count, wide]), &device)
    }

    /// Rotates the heads in each row of `width` elements; the first row is at the position `first`.
    fn rotate(&self, elements: &mut [f32], width: usize, first: usize) {
        let half = self.frequencies.len();
        let mut turns = Vec::with_capacity(half);
        for (position, row) in (first..).zip(elements.chunks_exact_mut(width)) {
            turns.clear();
            turns.extend(self.frequencies.iter().map(|frequency| (position as f32 * frequency).sin_cos()));
            for head in row.chunks_exact_mut(2 * half) {
                let (low, high) = head.split_at_mut(half);
                for ((a, b), &(sin, cos)) in low.iter_mut().zip(high).zip(&turns) {
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
        }
    }
}

fn floats(tensor: &Tensor<2>) -> Vec<f32> {
    tensor.to_data().iter::<f32>().collect()
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tolerance};

    use super::super::attention::rotary_frequencies;
    use super::super::check::numbers;
    use super::*;

    #[test]
    fn tokens_one_by_one_attend_as_all_at_once() {
        let (tokens, heads, kv_heads, head_dim) = (9, 6, 2, 4);
        let frequencies: Arc<[f32]> = rotary_frequencies(head_dim, 100.0).into();
        let tensor = |width: usize, size| numbers([tokens * width], size).reshape([tokens, width]);
        let (q, k, v) = (
            tensor(heads * head_dim, 2.0),
            tensor(kv_heads * head_dim, 2.0),
            tensor(kv_heads * head_dim, 1.0),
        );
        let whole = CausalAttention::rotary_with(tokens, &frequencies, &Device::flex());
        let expected = whole.forward(q.clone(), k.clone(), v.clone()).into_data();
        let mut cache = KeyValueCache::new(frequencies);
        let parts = [0..4, 4..5, 5..7, 7..9].map(|part| {
            let rows = |x: &Tensor<2>| x.clone().slice(part.clone());
            cache.attend(rows(&q), rows(&k), rows(&v))
        });
        let found = Tensor::cat(parts.into(), 0).into_data();
        found.assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-5, 1e-6));
        assert_eq!(cache.tokens(), tokens);
    }
}
