//! Attention in which a token sees only some of the earlier tokens: the tokens of its document, of a window,
//! or the ones that were chosen from a longer row. A bias may depend on relations between tokens.

use std::sync::Arc;

use burn::tensor::{Device, Tensor, TensorData};
use pipewright_kernel::attention::{Bias, Dims, Inputs, Rotary};

use super::attention_blocks::{BlockAttention, BlockSizes, FurtherInput};
use super::attention_passes::AttentionInputs;
use super::operation::{CpuTensor, Operation, ReadElement, cpu_tensor, elements, on_cpu};
use super::relations::Relations;
use super::token_scope::TokenScope;

/// An attention with grouped queries over the tokens of a [`TokenScope`].
#[derive(Clone, Debug, PartialEq)]
pub struct ScopedAttention {
    /// Elements of a head, an even number.
    pub head_dim: usize,
    /// The base of rotary positions (Su et al., 2021) in Hugging Face's layout; `None` for an attention
    /// without positions.
    pub rope_theta: Option<f64>,
    /// How many positions back a token sees, itself included; `None` for all.
    pub window: Option<usize>,
}

impl ScopedAttention {
    /// Returns `softmax(q kᵀ / sqrt(head_dim) + bias) v` for each head over the tokens that a token sees. The
    /// bias is the sum of a head's entries of `table` `[relations, heads]` over the relations that hold.
    ///
    /// Shapes as of [`CausalAttention::forward`](super::CausalAttention::forward).
    ///
    /// # Panics
    /// When the shapes do not match, rows have no tokens, or `head_dim` is odd or 0.
    pub fn forward(
        &self,
        [q, k, v]: [Tensor<2>; 3],
        scope: &TokenScope,
        relations: Option<(&Relations, Tensor<2>)>,
    ) -> Tensor<2> {
        let dims = self.dims([&q, &k, &v], scope);
        let shape = q.dims();
        let (relations, table) = match relations {
            Some((relations, table)) => {
                assert_eq!(
                    table.dims(),
                    [relations.count, dims.heads],
                    "an entry for each relation and head"
                );
                let size = dims.batch * relations.count * dims.sequence * dims.sequence;
                assert_eq!(relations.mask.len(), size, "a flag for each relation and pair of tokens");
                (Some(relations.clone()), Some(table))
            }
            None => (None, None),
        };
        let places = Places::new(self, scope, dims);
        // A constant is not on the tape.
        let kernel_table = table.clone().unwrap_or_else(|| Tensor::zeros([1, dims.heads], &Device::flex()));
        let inputs = [&q, &k, &v, &kernel_table].map(|tensor| tensor.clone().into_dispatch());
        let Some(([q, k, v, table], tape)) = on_cpu(inputs) else {
            return places.blocks(dims, relations, &q.device()).forward([q, k, v], table);
        };
        let saved = Saved { dims, q, k, v, table, relations, places };
        let (out, normalisers) = saved.forward(shape);
        let out = tape.rounded(out);
        tape.record_tensor(out, |out| ScopedBackward { saved, out: out.clone(), normalisers })
    }

    fn dims(&self, [q, k, v]: [&Tensor<2>; 3], scope: &TokenScope) -> Dims {
        let (head_dim, sequence) = (self.head_dim, scope.sequence);
        let ([rows, wide], [_, narrow]) = (q.dims(), k.dims());
        let is_possible = sequence > 0 && head_dim > 0 && head_dim.is_multiple_of(2);
        let fits = is_possible
            && rows.is_multiple_of(sequence)
            && scope.documents.len() == rows
            && scope.positions.len() == rows
            && wide.is_multiple_of(head_dim)
            && narrow.is_multiple_of(head_dim)
            && narrow > 0
            && wide.is_multiple_of(narrow)
            && k.dims() == [rows, narrow]
            && v.dims() == k.dims();
        assert!(
            fits,
            "queries {:?}, keys {:?} and values {:?} do not fit {} tokens in rows of {sequence} and heads of {head_dim}",
            q.dims(),
            k.dims(),
            v.dims(),
            scope.documents.len(),
        );
        let (heads, kv_heads) = (wide / head_dim, narrow / head_dim);
        Dims { batch: rows / sequence, sequence, earlier: 0, heads, kv_heads, head_dim, value_dim: head_dim }
    }
}

/// The positions of tokens and the first token that each sees, in the form that both passes need.
#[derive(Clone, Debug)]
struct Places {
    starts: Arc<[u32]>,
    /// Of each token, or of the tokens of one row if all rows have the same positions:
    /// `[tokens, head_dim / 2]`.
    cos: Arc<[f32]>,
    sin: Arc<[f32]>,
}

impl Places {
    fn new(attention: &ScopedAttention, scope: &TokenScope, dims: Dims) -> Self {
        let half = dims.head_dim / 2;
        let first = &scope.positions[..scope.sequence.min(scope.positions.len())];
        let is_same = scope.positions.chunks(scope.sequence).all(|row| row == first);
        let positions = if is_same { first } else { &scope.positions[..] };
        let (cos, sin) = match attention.rope_theta {
            None => (vec![1.0; positions.len() * half], vec![0.0; positions.len() * half]),
            Some(theta) => {
                let frequencies: Vec<f64> =
                    (0..half).map(|j| libm::pow(theta, -((2 * j) as f64) / dims.head_dim as f64)).collect();
                let angles =
                    positions.iter().flat_map(|&at| frequencies.iter().map(move |f| f64::from(at) * f));
                angles.map(|angle| (libm::cos(angle) as f32, libm::sin(angle) as f32)).unzip()
            }
        };
        Self { starts: scope.starts(attention.window).into(), cos: cos.into(), sin: sin.into() }
    }

    /// Returns the attention for a device without a kernel for it.
    fn blocks(&self, dims: Dims, relations: Option<Relations>, device: &Device) -> BlockAttention {
        let pairs = dims.head_dim / 2;
        let shape = [self.cos.len() / pairs / dims.sequence, 1, dims.sequence, pairs];
        // Constants are not on the tape.
        let device = device.clone().inner();
        let table = |table: &[f32]| Tensor::<4>::from_data(TensorData::new(table.to_vec(), shape), &device);
        let sizes = BlockSizes::new(dims, relations.as_ref().map_or(0, |relations| relations.count));
        BlockAttention {
            dims,
            tables: [table(&self.cos), table(&self.sin)],
            scale: 1.0 / (dims.head_dim as f64).sqrt(),
            cap: None,
            starts: Some(self.starts.clone()),
            further: relations.map_or(FurtherInput::Unused, FurtherInput::Biases),
            sizes,
        }
    }
}

/// The inputs of both passes.
#[derive(Clone, Debug)]
struct Saved {
    dims: Dims,
    q: CpuTensor,
    k: CpuTensor,
    v: CpuTensor,
    table: CpuTensor,
    relations: Option<Relations>,
    places: Places,
}

impl AttentionInputs for Saved {
    fn operands(&self) -> impl Iterator<Item = &CpuTensor> {
        [&self.q, &self.k, &self.v].into_iter()
    }

    fn with_inputs<T: ReadElement, R>(&self, pass: impl FnOnce(Inputs<'_, T>) -> R) -> R {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(T::read);
        let table = elements(&self.table);
        let pairs = self.dims.head_dim / 2;
        let turn_k = Rotary { pairs, cos: &self.places.cos, sin: &self.places.sin, scale: 1.0 };
        // The scale of the scores is part of the queries' rotation, so it costs nothing.
        let turn_q = Rotary { scale: 1.0 / (self.dims.head_dim as f32).sqrt(), ..turn_k };
        let bias = self.relations.as_ref().map(|relations| Bias {
            relations: relations.count,
            mask: &relations.mask,
            table: &table,
        });
        pass(Inputs {
            dims: self.dims,
            q: &q,
            k: &k,
            v: &v,
            turn_q,
            turn_k,
            starts: Some(&self.places.starts),
            cap: None,
            bias,
            sinks: None,
        })
    }
}

#[derive(Clone, Debug)]
struct ScopedBackward {
    saved: Saved,
    out: CpuTensor,
    normalisers: Vec<f32>,
}

impl Operation<4> for ScopedBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 4]) -> [Option<CpuTensor>; 4] {
        let Self { saved, out, normalisers } = &self;
        let shape = |tensor: &CpuTensor| tensor.layout().shape().clone();
        let shapes = [&saved.q, &saved.k, &saved.v].map(shape);
        let ([q, k, v], table, _) = saved.backward((out, normalisers), &gradient, shapes);
        let table = (!table.is_empty()).then(|| cpu_tensor(table, shape(&saved.table)));
        [Some(q), Some(k), Some(v), table]
    }
}

#[cfg(test)]
mod tests {
    use super::super::attention_composition::composed;
    use super::super::check::{check as compare, numbers};
    use super::*;

    const ROPE: ScopedAttention = ScopedAttention { head_dim: 4, rope_theta: Some(100.0), window: None };

    fn check(
        attention: &ScopedAttention,
        scope: &TokenScope,
        [heads, kv_heads]: [usize; 2],
        relations: usize,
    ) {
        let rows = scope.documents.len();
        let (wide, narrow) = (heads * attention.head_dim, kv_heads * attention.head_dim);
        let flags = rows * relations * scope.sequence;
        let mask = (0..flags).map(|i| u8::from(i * 7919 % 13 < 4)).collect();
        let relations = Relations { count: relations.max(1), mask };
        let has_bias = flags > 0;
        let split = |[q, k, v, table]: [Tensor<1>; 4]| {
            let inputs = [q.reshape([rows, wide]), k.reshape([rows, narrow]), v.reshape([rows, narrow])];
            (inputs, table.reshape([relations.count, heads]))
        };
        compare(
            [
                numbers([rows * wide], 2.0),
                numbers([rows * narrow], 2.0),
                numbers([rows * narrow], 1.0),
                numbers([relations.count * heads], 1.0),
            ],
            |inputs| {
                let (inputs, table) = split(inputs);
                // An unused table has the gradient zero.
                let unused = table.clone().sum().reshape([1, 1]) * 0.0;
                attention.forward(inputs, scope, has_bias.then_some((&relations, table))) + unused
            },
            |inputs| {
                let (inputs, table) = split(inputs);
                let dims = attention.dims([&inputs[0], &inputs[1], &inputs[2]], scope);
                let relations = has_bias.then(|| relations.clone());
                let blocks = Places::new(attention, scope, dims).blocks(dims, relations, &Device::flex());
                let unused = table.clone().sum().reshape([1, 1]) * 0.0;
                let [q, k, v] = inputs;
                composed(&blocks, [q, k, v, table]) + unused
            },
        );
    }

    /// Returns two rows with documents of several lengths.
    fn documents(sequence: usize) -> TokenScope {
        let document = |token: usize| (token % sequence / 5 * (1 + token / sequence)) as u32;
        TokenScope { documents: (0..2 * sequence).map(document).collect(), ..TokenScope::whole(2, sequence) }
    }

    #[test]
    fn equals_its_composition() {
        check(&ROPE, &TokenScope::whole(2, 7), [4, 2], 0);
        check(&ROPE, &documents(17), [2, 1], 0);
        check(&ScopedAttention { window: Some(3), ..ROPE }, &documents(17), [2, 2], 0);
        check(&ScopedAttention { rope_theta: None, window: Some(1), ..ROPE }, &documents(6), [2, 2], 0);
        // More than one block of rows; the first keys are not computed.
        check(&ScopedAttention { window: Some(70), ..ROPE }, &TokenScope::whole(1, 150), [2, 1], 0);
    }

    #[test]
    #[should_panic(expected = "do not fit 6 tokens in rows of 3 and heads of 3")]
    fn an_odd_head_is_refused() {
        let inputs = [(); 3].map(|()| numbers([6, 3], 1.0));
        ScopedAttention { head_dim: 3, ..ROPE }.forward(inputs, &TokenScope::whole(2, 3), None);
    }

    #[test]
    fn relations_equal_their_composition() {
        check(&ROPE, &documents(9), [4, 2], 3);
        check(&ScopedAttention { window: Some(20), ..ROPE }, &TokenScope::whole(1, 100), [2, 1], 1);
    }

    #[test]
    fn chosen_tokens_keep_their_positions() {
        let positions: Vec<u32> = [0, 2, 3, 9, 11, 1, 2, 3, 4, 15].into();
        let documents = vec![0, 0, 1, 1, 1, 0, 0, 0, 0, 7];
        let scope = TokenScope { sequence: 5, documents: documents.into(), positions: positions.into() };
        check(&ROPE, &scope, [2, 2], 1);
        check(&ScopedAttention { window: Some(4), ..ROPE }, &scope, [2, 2], 0);
        assert_eq!(scope.starts(Some(4)), [0, 0, 2, 3, 3, 0, 0, 0, 0, 4]);
        assert_eq!(scope.starts(Some(3)), [0, 0, 2, 3, 3, 0, 0, 0, 1, 4]);
    }
}
