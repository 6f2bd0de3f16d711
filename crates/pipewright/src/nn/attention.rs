//! Causal attention with grouped queries and, as an option, rotary positions.

use std::sync::Arc;

use burn::backend::Flex;
use burn::tensor::{Bool, Device, Int, Tensor, TensorData, activation};
use pipewright_kernel::attention::{Dims, Inputs, Rotary, backward, forward};

use super::composed::at_least_single;
use super::operation::{CpuTensor, Operation, cpu_tensor, elements, on_cpu, row_major};
use super::token_scope::TokenScope;

/// An attention over sequences of one length, with its tables of positions.
#[derive(Debug, Clone)]
pub struct CausalAttention {
    sequence: usize,
    head_dim: usize,
    /// `[sequence, head_dim / 2]` each, or `[tokens, head_dim / 2]` if rows have positions of their own.
    cos: Tensor<2>,
    sin: Tensor<2>,
    /// The place in its row of the first token that each token sees; `None` if each sees all earlier ones.
    starts: Option<Arc<[u32]>>,
}

impl CausalAttention {
    /// Returns an attention without positions: the order of the earlier tokens does not matter.
    ///
    /// # Panics
    /// When `sequence` is 0 or `head_dim` is odd or 0.
    pub fn new(sequence: usize, head_dim: usize, device: &Device) -> Self {
        Self::with_angles(sequence, head_dim, device, |_, _| 0.0)
    }

    /// Returns an attention with rotary positions (Su et al., 2021) in Hugging Face's layout: at position `p`, element
    /// `j` of a head is rotated together with element `j + head_dim / 2`, by the angle `p / theta^(2 j / head_dim)`.
    ///
    /// Angles are single precision, because the checkpoints were trained with such angles.
    ///
    /// # Panics
    /// When `sequence` is 0 or `head_dim` is odd or 0.
    pub fn rotary(sequence: usize, head_dim: usize, theta: f64, device: &Device) -> Self {
        Self::rotary_with(sequence, &rotary_frequencies(head_dim, theta), device)
    }

    /// As [`CausalAttention::rotary`], with `frequencies[j]` in place of `1 / theta^(2 j / head_dim)`. A head has twice
    /// as many elements as there are frequencies.
    ///
    /// # Panics
    /// When `sequence` is 0 or there are no frequencies.
    pub fn rotary_with(sequence: usize, frequencies: &[f32], device: &Device) -> Self {
        let angle = |position, j: usize| position as f32 * frequencies[j];
        Self::with_angles(sequence, 2 * frequencies.len(), device, angle)
    }

    fn with_angles(
        sequence: usize,
        head_dim: usize,
        device: &Device,
        angle: impl Fn(usize, usize) -> f32,
    ) -> Self {
        assert!(sequence > 0, "an attention has positions");
        assert!(
            head_dim > 0 && head_dim.is_multiple_of(2),
            "heads of {head_dim}: a head has pairs of elements"
        );
        let half = head_dim / 2;
        // Constants: on the device without autodiff they are not recorded on the tape.
        let device = device.clone().inner();
        let table = |function: fn(f32) -> f32| {
            let places = (0..sequence).flat_map(|position| (0..half).map(move |j| (position, j)));
            let values: Vec<f32> = places.map(|(position, j)| function(angle(position, j))).collect();
            Tensor::from_data(TensorData::new(values, [sequence, half]), &device)
        };
        Self { sequence, head_dim, cos: table(f32::cos), sin: table(f32::sin), starts: None }
    }

    /// Returns the same attention over the tokens of some rows: each token sees only its own document, at the positions of
    /// `scope`.
    ///
    /// # Panics
    /// When the rows have another length, or a position is not below it.
    pub fn with_scope(&self, scope: &TokenScope) -> Self {
        assert_eq!(scope.sequence, self.sequence, "rows have the length of the attention's");
        let too_large = scope.positions.iter().find(|&&position| position as usize >= self.sequence);
        assert!(too_large.is_none(), "position {too_large:?} in rows of {}", self.sequence);
        let is_whole =
            scope.positions.chunks(self.sequence).all(|row| row.iter().copied().eq(0..row.len() as u32));
        let starts = Some(scope.starts(None).into());
        if is_whole {
            return Self { starts, ..self.clone() };
        }
        let positions: Vec<i32> = scope.positions.iter().map(|&position| position as i32).collect();
        let positions =
            Tensor::<1, Int>::from_data(TensorData::from(positions.as_slice()), &self.cos.device());
        let [cos, sin] = [&self.cos, &self.sin].map(|table| table.clone().select(0, positions.clone()));
        Self { cos, sin, starts, ..self.clone() }
    }

    /// Returns the length of the sequences.
    pub fn sequence(&self) -> usize {
        self.sequence
    }

    /// Returns `softmax(q kᵀ / sqrt(head_dim)) v` for each head; each position attends to itself and earlier positions.
    ///
    /// Shapes: `q [batch * sequence, heads * head_dim]`; `k` and `v` `[batch * sequence, kv_heads * head_dim]`; each
    /// key head serves `heads / kv_heads` neighbouring query heads; the result has the shape of `q`.
    ///
    /// # Panics
    /// When the shapes do not match.
    pub fn forward(&self, q: Tensor<2>, k: Tensor<2>, v: Tensor<2>) -> Tensor<2> {
        let dims = self.dims(&q, &k, &v);
        let shape = q.dims();
        let inputs = [&q, &k, &v].map(|tensor| tensor.clone().into_dispatch());
        let Some(tables) = self.cpu_tables() else { return self.composed(q, k, v, dims) };
        let Some(([q, k, v], tape)) = on_cpu(inputs) else { return self.composed(q, k, v, dims) };
        let saved = Saved { dims, q, k, v, tables, starts: self.starts.clone() };
        let (out, normalisers) = saved.with_inputs(forward);
        tape.record(out, shape, |out| AttentionBackward { saved, out: out.clone(), normalisers })
    }

    fn dims(&self, q: &Tensor<2>, k: &Tensor<2>, v: &Tensor<2>) -> Dims {
        let &Self { sequence, head_dim, .. } = self;
        let ([rows, wide], [_, narrow]) = (q.dims(), k.dims());
        let fits = rows % sequence == 0
            && wide % head_dim == 0
            && narrow % head_dim == 0
            && narrow > 0
            && wide % narrow == 0
            && k.dims() == [rows, narrow]
            && v.dims() == k.dims()
            && self.starts.as_ref().is_none_or(|starts| starts.len() == rows);
        assert!(
            fits,
            "queries {:?}, keys {:?} and values {:?} do not fit sequences of {sequence} and heads of {head_dim}",
            q.dims(),
            k.dims(),
            v.dims(),
        );
        Dims {
            batch: rows / sequence,
            sequence,
            heads: wide / head_dim,
            kv_heads: narrow / head_dim,
            head_dim,
        }
    }

    fn cpu_tables(&self) -> Option<[CpuTensor; 2]> {
        let table = |table: &Tensor<2>| Some(row_major(table.clone().try_into_primitive::<Flex>().ok()?));
        Some([table(&self.cos)?, table(&self.sin)?])
    }

    fn composed(&self, q: Tensor<2>, k: Tensor<2>, v: Tensor<2>, dims: Dims) -> Tensor<2> {
        let Dims { batch, sequence, heads, kv_heads, head_dim } = dims;
        let split =
            |x: Tensor<2>, heads: usize| x.reshape([batch, sequence, heads, head_dim]).swap_dims(1, 2);
        let share = |x: Tensor<4>| repeat_heads(x, heads / kv_heads);
        let q = self.turn(split(q, heads));
        let k = share(self.turn(split(k, kv_heads)));
        let v = share(split(v, kv_heads));
        let precision = q.dtype();
        let scores = at_least_single(q.matmul(k.transpose())) / (head_dim as f64).sqrt();
        let hidden = match &self.starts {
            Some(starts) => hidden_by_starts(starts, dims, &scores.device()),
            None => Tensor::<2>::ones([sequence, sequence], &scores.device()).triu(1).bool().unsqueeze(),
        };
        let weights = activation::softmax(scores.mask_fill(hidden, f32::NEG_INFINITY), 3);
        weights.cast(precision).matmul(v).swap_dims(1, 2).reshape([batch * sequence, heads * head_dim])
    }

    fn turn(&self, x: Tensor<4>) -> Tensor<4> {
        let (half, precision) = (self.head_dim / 2, x.dtype());
        let x = at_least_single(x);
        let (a, b) = (x.clone().narrow(3, 0, half), x.narrow(3, half, half));
        let rows = self.cos.dims()[0] / self.sequence;
        // Burn puts the tables on the tape of the other operand, whatever its kind.
        let [cos, sin] =
            [&self.cos, &self.sin].map(|table| table.clone().reshape([rows, 1, self.sequence, half]));
        let first = a.clone() * cos.clone() - b.clone() * sin.clone();
        Tensor::cat(vec![first, b * cos + a * sin], 3).cast(precision)
    }
}

/// Returns the frequencies `1 / theta^(2 j / head_dim)` of a head's pairs of elements, in single precision.
///
/// # Panics
/// When `head_dim` is odd.
pub fn rotary_frequencies(head_dim: usize, theta: f64) -> Vec<f32> {
    assert!(head_dim.is_multiple_of(2), "heads of {head_dim}: a head has pairs of elements");
    let frequency = |j: usize| 1.0 / (theta as f32).powf((2 * j) as f32 / head_dim as f32);
    (0..head_dim / 2).map(frequency).collect()
}

/// Returns which keys each query does not see, `[batch, 1, sequence, sequence]`: the same ones for every head.
pub(super) fn hidden_by_starts(starts: &[u32], dims: Dims, device: &Device) -> Tensor<4, Bool> {
    let Dims { batch, sequence, .. } = dims;
    let mut hidden = Vec::with_capacity(batch * sequence * sequence);
    for (token, &start) in starts.iter().enumerate() {
        hidden.extend((0..sequence).map(|key| key < start as usize || key > token % sequence));
    }
    Tensor::from_data(TensorData::new(hidden, [batch, 1, sequence, sequence]), device)
}

/// Repeats each head of `[batch, heads, sequence, head_dim]` `group` times.
pub(super) fn repeat_heads(x: Tensor<4>, group: usize) -> Tensor<4> {
    let [batch, heads, sequence, width] = x.dims();
    x.unsqueeze_dim::<5>(2).repeat_dim(2, group).reshape([batch, heads * group, sequence, width])
}

/// The inputs of both passes.
#[derive(Clone, Debug)]
struct Saved {
    dims: Dims,
    q: CpuTensor,
    k: CpuTensor,
    v: CpuTensor,
    tables: [CpuTensor; 2],
    starts: Option<Arc<[u32]>>,
}

impl Saved {
    fn with_inputs<R>(&self, pass: impl FnOnce(Inputs<'_>) -> R) -> R {
        let [cos, sin] = self.tables.each_ref().map(elements);
        let [q, k, v] = [&self.q, &self.k, &self.v].map(elements);
        let turn_k = Rotary { cos: &cos, sin: &sin, scale: 1.0 };
        // The scale of the scores is part of the queries' rotation, so it costs nothing.
        let turn_q = Rotary { scale: 1.0 / (self.dims.head_dim as f32).sqrt(), ..turn_k };
        let starts = self.starts.as_deref();
        pass(Inputs { dims: self.dims, q: &q, k: &k, v: &v, turn_q, turn_k, starts, bias: None })
    }
}

#[derive(Clone, Debug)]
struct AttentionBackward {
    saved: Saved,
    out: CpuTensor,
    normalisers: Vec<f32>,
}

impl Operation<3> for AttentionBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 3]) -> [Option<CpuTensor>; 3] {
        let Self { saved, out, normalisers } = &self;
        let (out, gradient) = (elements(out), elements(&gradient));
        let d = saved.with_inputs(|inputs| backward(inputs, &out, normalisers, &gradient));
        let like = |d: Vec<f32>, tensor: &CpuTensor| Some(cpu_tensor(d, tensor.layout().shape().clone()));
        [like(d.q, &saved.q), like(d.k, &saved.k), like(d.v, &saved.v)]
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{check as compare, numbers};
    use super::*;

    fn check(attention: &CausalAttention, batch: usize, heads: usize, kv_heads: usize) {
        let rows = batch * attention.sequence;
        let (wide, narrow) = (heads * attention.head_dim, kv_heads * attention.head_dim);
        let shaped = |[q, k, v]: [Tensor<1>; 3]| {
            (q.reshape([rows, wide]), k.reshape([rows, narrow]), v.reshape([rows, narrow]))
        };
        compare(
            [numbers([rows * wide], 2.0), numbers([rows * narrow], 2.0), numbers([rows * narrow], 1.0)],
            |inputs| {
                let (q, k, v) = shaped(inputs);
                attention.forward(q, k, v)
            },
            |inputs| {
                let (q, k, v) = shaped(inputs);
                let dims = attention.dims(&q, &k, &v);
                attention.composed(q, k, v, dims)
            },
        );
    }

    fn rotary(sequence: usize, head_dim: usize) -> CausalAttention {
        CausalAttention::rotary(sequence, head_dim, 100.0, &Device::flex())
    }

    #[test]
    fn equals_its_composition() {
        check(&rotary(5, 4), 1, 1, 1);
        check(&rotary(1, 2), 2, 2, 2);
        check(&rotary(7, 6), 2, 6, 2);
        // More than one block of rows; the last block is shorter.
        check(&rotary(150, 8), 1, 2, 1);
        check(&CausalAttention::new(9, 4, &Device::flex()), 2, 2, 1);
    }

    #[test]
    fn documents_equal_their_composition() {
        let documents: Arc<[u32]> = [0, 0, 1, 1, 1, 2, 2, 0, 0, 0, 0, 0, 1, 1].into();
        let scope = TokenScope { documents, ..TokenScope::whole(2, 7) };
        check(&rotary(7, 4).with_scope(&scope), 2, 4, 2);
        let positions: Arc<[u32]> = [0, 1, 0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 0, 1].into();
        check(&rotary(7, 4).with_scope(&TokenScope { positions, ..scope }), 2, 4, 2);
    }

    #[test]
    fn pairs_turn_by_the_position_times_their_frequency() {
        let attention = rotary(3, 4);
        let x = Tensor::<4>::from_data([[[[1.0, 2.0, 3.0, 4.0]; 3]]], &Device::flex());
        let turned: Vec<f32> = attention.turn(x).into_data().iter().collect();
        let angle = |j: i32| 2.0 / 10f32.powi(j);
        let expected = [
            angle(0).cos() - 3.0 * angle(0).sin(),
            2.0 * angle(1).cos() - 4.0 * angle(1).sin(),
            3.0 * angle(0).cos() + angle(0).sin(),
            4.0 * angle(1).cos() + 2.0 * angle(1).sin(),
        ];
        assert!(
            turned[8..].iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6),
            "{turned:?} {expected:?}"
        );
    }

    #[test]
    #[should_panic(expected = "do not fit sequences of 4 and heads of 2")]
    fn shapes_are_checked() {
        rotary(4, 2).forward(numbers([6, 4], 1.0), numbers([6, 4], 1.0), numbers([6, 4], 1.0));
    }
}
