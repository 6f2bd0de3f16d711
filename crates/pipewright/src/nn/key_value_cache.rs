//! The keys and values of the tokens so far, so that generation does not compute them again for each token.

use burn::tensor::{Tensor, TensorData};

use super::attention::CausalAttention;
use super::attention_form::AttentionForm;
use pipewright_kernel::cached_attention::{Heads, attend};

/// The keys and values of one attention over one sequence that grows. They are in the processor's memory.
#[derive(Clone, Debug)]
pub struct KeyValueCache {
    form: AttentionForm,
    tokens: usize,
    /// The position of each token in the sequence, ascending, without the first tokens if they are outside the
    /// window.
    positions: Vec<u32>,
    /// A row for each of these positions. Keys are rotated by them.
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl KeyValueCache {
    /// Returns the cache of an attention of this form, without tokens.
    pub fn new(form: AttentionForm) -> Self {
        Self { form, tokens: 0, positions: Vec::new(), keys: Vec::new(), values: Vec::new() }
    }

    /// Returns the number of tokens so far.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Appends the keys and values of the next tokens of the sequence, and returns the attention of their
    /// queries: each token sees itself and the tokens before it, as far as the form says. Gradients are not
    /// computed.
    ///
    /// Shapes: `q [tokens, heads * head_dim]`; `k [tokens, kv_heads * head_dim]`; `v [tokens, kv_heads *
    /// value_dim]`; the result `[tokens, heads * value_dim]`. The results differ from
    /// [`CausalAttention::forward`]'s in rounding only.
    ///
    /// # Panics
    /// When the shapes do not match.
    pub fn attend(&mut self, q: Tensor<2>, k: Tensor<2>, v: Tensor<2>) -> Tensor<2> {
        self.attend_with(q, k, v, None)
    }

    /// Like [`KeyValueCache::attend`], for tokens at these positions of the sequence. The positions between
    /// them have no keys and values. The positions ascend, from the last one so far on.
    ///
    /// # Panics
    /// As [`KeyValueCache::attend`], when the number of positions is not the number of tokens, and when the
    /// positions do not ascend.
    pub fn attend_at(&mut self, q: Tensor<2>, k: Tensor<2>, v: Tensor<2>, positions: &[u32]) -> Tensor<2> {
        self.attend_in(q, [k, v], positions, None)
    }

    /// Like [`KeyValueCache::attend`], with the sink of each head ([`CausalAttention::with_sinks`]).
    ///
    /// # Panics
    /// As [`KeyValueCache::attend`].
    pub fn attend_with(
        &mut self,
        q: Tensor<2>,
        k: Tensor<2>,
        v: Tensor<2>,
        sinks: Option<Tensor<1>>,
    ) -> Tensor<2> {
        let positions = self.next_positions(q.dims()[0]);
        self.attend_in(q, [k, v], &positions, sinks)
    }

    /// Returns the positions of the next `count` tokens of a sequence all of whose tokens the cache has got.
    fn next_positions(&self, count: usize) -> Vec<u32> {
        (self.tokens as u32..).take(count).collect()
    }

    fn attend_in(
        &mut self,
        q: Tensor<2>,
        [k, v]: [Tensor<2>; 2],
        positions: &[u32],
        sinks: Option<Tensor<1>>,
    ) -> Tensor<2> {
        let [[count, wide], [rows, narrow], [of_values, value_width]] = [q.dims(), k.dims(), v.dims()];
        let head_dim = self.form.head_dim;
        let fits = rows == count && of_values == count && narrow.is_multiple_of(head_dim);
        assert_eq!(positions.len(), count, "each token has a position");
        assert!(fits && narrow > 0 && wide.is_multiple_of(narrow), "queries, keys and values fit each other");
        let kv_heads = narrow / head_dim;
        let has_values = value_width > 0 && value_width.is_multiple_of(kv_heads);
        assert!(has_values, "values of {value_width} elements have {kv_heads} heads");
        let heads = Heads {
            heads: wide / head_dim,
            kv_heads,
            head_dim,
            value_dim: value_width / kv_heads,
            scale: self.form.scale as f32,
            cap: self.form.cap.map(|cap| cap as f32),
        };
        let (is_whole, device) = (self.tokens == 0 && (0..).zip(positions).all(|(a, &b)| a == b), q.device());
        self.keep(&k, &v, positions);
        let attended = if is_whole {
            // All tokens at once are computed as in training, in blocks.
            CausalAttention::of(count, self.form.clone(), &device).with_sinks(sinks).forward(q, k, v)
        } else {
            let mut queries = floats(&q);
            self.rotate(&mut queries, wide, positions);
            let sinks = sinks.map(|sinks| sinks.to_data().iter::<f32>().collect::<Vec<_>>());
            let attended = self.attend_rows(&queries, positions, heads, sinks.as_deref());
            let shape = [count, heads.heads * heads.value_dim];
            Tensor::from_data(TensorData::new(attended, shape), &device)
        };
        self.forget(narrow, value_width);
        attended
    }

    /// Appends the keys and values of the next tokens of the sequence, whose attention is computed elsewhere.
    ///
    /// Shapes: `k [tokens, kv_heads * head_dim]`; `v [tokens, kv_heads * value_dim]`.
    ///
    /// # Panics
    /// When the shapes do not match.
    pub fn append(&mut self, k: &Tensor<2>, v: &Tensor<2>) {
        self.append_at(k, v, &self.next_positions(k.dims()[0]));
    }

    /// Like [`KeyValueCache::append`], for tokens at these positions of the sequence; see
    /// [`KeyValueCache::attend_at`].
    ///
    /// # Panics
    /// As [`KeyValueCache::append`], when the number of positions is not the number of tokens, and when the
    /// positions do not ascend.
    pub fn append_at(&mut self, k: &Tensor<2>, v: &Tensor<2>, positions: &[u32]) {
        let [[count, narrow], [of_values, value_width]] = [k.dims(), v.dims()];
        let fits = of_values == count && narrow > 0 && narrow.is_multiple_of(self.form.head_dim);
        assert!(fits, "keys and values fit each other");
        assert_eq!(positions.len(), count, "each token has a position");
        self.keep(k, v, positions);
        self.forget(narrow, value_width);
    }

    /// Returns whether [`KeyValueCache::shorten`] is possible for every number of tokens: no window makes the
    /// cache forget tokens.
    pub fn can_be_shortened(&self) -> bool {
        self.form.window.is_none()
    }

    /// Removes the tokens of the sequence from the position `length` on.
    ///
    /// # Panics
    /// When the cache has a window.
    pub fn shorten(&mut self, length: usize) {
        assert!(self.can_be_shortened(), "tokens outside of a window are not kept");
        let (held, kept) =
            (self.positions.len(), self.positions.partition_point(|&at| (at as usize) < length));
        if let [Some(narrow), Some(value_width)] =
            [&self.keys, &self.values].map(|rows| rows.len().checked_div(held))
        {
            self.keys.truncate(kept * narrow);
            self.values.truncate(kept * value_width);
        }
        self.positions.truncate(kept);
        self.tokens = kept;
    }

    /// Adds keys, which are rotated by their positions, and values.
    fn keep(&mut self, k: &Tensor<2>, v: &Tensor<2>, positions: &[u32]) {
        assert!(self.positions.last().into_iter().chain(positions).is_sorted(), "positions ascend");
        let ([count, width], mut keys) = (k.dims(), floats(k));
        self.rotate(&mut keys, width, positions);
        self.keys.append(&mut keys);
        self.values.append(&mut floats(v));
        self.positions.extend(positions);
        self.tokens += count;
    }

    /// Returns the attention of the last tokens, which have these rotated queries at these positions.
    fn attend_rows(
        &self,
        queries: &[f32],
        positions: &[u32],
        heads: Heads,
        sinks: Option<&[f32]>,
    ) -> Vec<f32> {
        let [wide, narrow] = [heads.heads, heads.kv_heads].map(|count| count * heads.head_dim);
        let value_width = heads.kv_heads * heads.value_dim;
        let first = self.positions.len() - positions.len();
        let rows = (first..).zip(positions).zip(queries.chunks_exact(wide));
        let attended = rows.flat_map(|((row, &position), query)| {
            let (start, end) = (self.first_seen(position as usize), row + 1);
            let keys = &self.keys[start * narrow..end * narrow];
            attend(query, keys, &self.values[start * value_width..end * value_width], heads, sinks)
        });
        attended.collect()
    }

    /// Drops the tokens that the next token does not see, if they are more than half of the cache.
    fn forget(&mut self, narrow: usize, value_width: usize) {
        let Some(&last) = self.positions.last() else { return };
        let unseen = self.first_seen(last as usize + 1);
        if 2 * unseen > self.positions.len() {
            self.positions.drain(..unseen);
            self.keys.drain(..unseen * narrow);
            self.values.drain(..unseen * value_width);
        }
    }

    /// Returns the first row that a token at a position sees.
    fn first_seen(&self, position: usize) -> usize {
        let first = self.form.first_seen(position);
        self.positions.partition_point(|&at| (at as usize) < first)
    }

    /// Rotates the heads in each row of `width` elements by the row's position.
    fn rotate(&self, elements: &mut [f32], width: usize, positions: &[u32]) {
        let (frequencies, factor) = (&self.form.positions.frequencies, self.form.positions.factor);
        let pairs = frequencies.len();
        let mut turns = Vec::with_capacity(pairs);
        for (&position, row) in positions.iter().zip(elements.chunks_exact_mut(width)) {
            turns.clear();
            turns.extend(frequencies.iter().map(|frequency| libm::sincosf(position as f32 * frequency)));
            for head in row.chunks_exact_mut(self.form.head_dim) {
                let (low, high) = head[..2 * pairs].split_at_mut(pairs);
                for ((a, b), &(sin, cos)) in low.iter_mut().zip(high).zip(&turns) {
                    let (sin, cos) = (factor * sin, factor * cos);
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

    use super::super::attention_form::RotaryPositions;
    use super::super::check::numbers;
    use super::super::scoped_attention::ScopedAttention;
    use super::super::token_scope::TokenScope;
    use super::*;

    fn check(form: &AttentionForm) {
        check_values(form, form.head_dim);
    }

    /// Checks an attention with values of this width.
    fn check_values(form: &AttentionForm, value_dim: usize) {
        check_sinks(form, value_dim, None);
    }

    /// Like [`check_values`], with sinks of 6 heads.
    fn check_sinks(form: &AttentionForm, value_dim: usize, sinks: Option<&Tensor<1>>) {
        let (tokens, heads, kv_heads, head_dim) = (9, 6, 2, form.head_dim);
        let tensor = |width: usize, size| numbers([tokens * width], size).reshape([tokens, width]);
        let (q, k, v) = (
            tensor(heads * head_dim, 2.0),
            tensor(kv_heads * head_dim, 2.0),
            tensor(kv_heads * value_dim, 1.0),
        );
        let whole = CausalAttention::of(tokens, form.clone(), &Device::flex()).with_sinks(sinks.cloned());
        let expected = whole.forward(q.clone(), k.clone(), v.clone()).into_data();
        let mut cache = KeyValueCache::new(form.clone());
        let parts = [0..4, 4..5, 5..7, 7..9].map(|part| {
            let rows = |x: &Tensor<2>| x.clone().slice(part.clone());
            cache.attend_with(rows(&q), rows(&k), rows(&v), sinks.cloned())
        });
        let found = Tensor::cat(parts.into(), 0).into_data();
        found.assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-5, 1e-6));
        assert_eq!(cache.tokens(), tokens);
        let most = form.window.map_or(tokens, |window| 2 * window);
        assert!(cache.keys.len() <= most * kv_heads * head_dim, "{} elements", cache.keys.len());
    }

    /// Tokens of a longer sequence, whose other tokens the cache does not get, attend like the tokens of
    /// [`ScopedAttention`].
    #[test]
    fn tokens_between_which_others_are_missing_keep_their_positions() {
        let (head_dim, theta, heads, kv_heads) = (4, 100.0, 4, 2);
        let positions = [0, 1, 4, 5, 9, 20, 21, 22, 30];
        let tensor =
            |width: usize, size| numbers([positions.len() * width], size).reshape([positions.len(), width]);
        let qkv = [
            tensor(heads * head_dim, 2.0),
            tensor(kv_heads * head_dim, 2.0),
            tensor(kv_heads * head_dim, 1.0),
        ];
        for window in [None, Some(1), Some(5), Some(12)] {
            let scope = TokenScope { positions: positions.into(), ..TokenScope::whole(1, positions.len()) };
            let whole = ScopedAttention { head_dim, rope_theta: Some(theta), window };
            let expected = whole.forward(qkv.clone(), &scope, None).into_data();
            let mut cache =
                KeyValueCache::new(AttentionForm { window, ..AttentionForm::rotary(head_dim, theta) });
            let parts = [0..4, 4..5, 5..9].map(|part| {
                let [q, k, v] = qkv.each_ref().map(|x| x.clone().slice(part.clone()));
                cache.attend_at(q, k, v, &positions[part])
            });
            let found = Tensor::cat(parts.into(), 0).into_data();
            found.assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-5, 1e-6));
        }
    }

    #[test]
    #[should_panic(expected = "positions ascend")]
    fn positions_before_the_last_one_are_refused() {
        let mut cache = KeyValueCache::new(AttentionForm::rotary(4, 100.0));
        let rows = || numbers([2, 4], 1.0);
        cache.append_at(&rows(), &rows(), &[3, 7]);
        cache.append_at(&rows(), &rows(), &[6, 8]);
    }

    #[test]
    fn a_shortened_cache_continues_with_other_tokens() {
        let form = AttentionForm::rotary(4, 100.0);
        let inputs = |count: usize, size| {
            [8, 4, 4].map(|width| numbers([count * width], size).reshape([count, width]))
        };
        let ([first, other], mut cache) =
            ([inputs(6, 1.0), inputs(3, 2.0)], KeyValueCache::new(form.clone()));
        let [q, k, v] = first.clone();
        cache.attend(q, k, v);
        cache.shorten(9);
        assert_eq!(cache.tokens(), 6);
        cache.shorten(4);
        let [q, k, v] = other.clone();
        let found = cache.attend(q, k, v).into_data();
        let whole = std::array::from_fn(|index| {
            let kept: Tensor<2> = first[index].clone();
            Tensor::cat(vec![kept.narrow(0, 0, 4), other[index].clone()], 0)
        });
        let [q, k, v]: [Tensor<2>; 3] = whole;
        let expected = KeyValueCache::new(form).attend(q, k, v).narrow(0, 4, 3).into_data();
        found.assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-5, 1e-6));
        cache.shorten(0);
        assert_eq!((cache.tokens(), cache.keys.len()), (0, 0));
    }

    #[test]
    fn tokens_one_by_one_attend_as_all_at_once() {
        let plain = AttentionForm::rotary(4, 100.0);
        check(&plain);
        check_values(&AttentionForm { window: Some(2), ..plain.clone() }, 3);
        check_values(&plain, 7);
        for window in [1, 2, 5, 20] {
            check(&AttentionForm { window: Some(window), ..plain.clone() });
        }
        let sinks = numbers([6], 2.0);
        check_sinks(&plain, 4, Some(&sinks));
        check_sinks(&AttentionForm { window: Some(2), ..plain.clone() }, 4, Some(&sinks));
        check(&AttentionForm { scale: 0.3, cap: Some(1.5), ..plain });
        let positions = RotaryPositions { frequencies: [1.0, 0.2].into(), factor: 1.25 };
        check(&AttentionForm { positions, ..AttentionForm::without_positions(6) });
    }
}
