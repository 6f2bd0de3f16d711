//! Causal attention with grouped queries and, as an option, rotary positions.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::{DispatchTensor, Flex};
use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright_kernel::attention::{Dims, Inputs, Rotary};

use super::attention_blocks::{BlockAttention, BlockSizes, FurtherInput};
use super::attention_form::AttentionForm;
use super::attention_passes::AttentionInputs;
use super::operation::{CpuTensor, Operation, ReadElement, Tape, cpu_tensor, elements, on_cpu, row_major};
use super::token_scope::TokenScope;

/// An attention over sequences of one length, with its tables of positions.
#[derive(Debug, Clone)]
pub struct CausalAttention {
    sequence: usize,
    form: AttentionForm,
    /// `[sequence, pairs]` each, or `[tokens, pairs]` if rows have positions of their own.
    cos: Tensor<2>,
    sin: Tensor<2>,
    /// The place in its row of the first token that each token sees, if rows have documents.
    starts: Option<Arc<[u32]>>,
    /// The sink of each head, `[heads]`.
    sinks: Option<Tensor<1>>,
}

impl CausalAttention {
    /// Returns an attention without positions: the order of the earlier tokens does not matter.
    ///
    /// # Panics
    /// When `sequence` is 0 or `head_dim` is odd or 0.
    pub fn new(sequence: usize, head_dim: usize, device: &Device) -> Self {
        Self::of(sequence, AttentionForm::without_positions(head_dim), device)
    }

    /// Returns an attention with rotary positions of the base `theta` ([`AttentionForm::rotary`]).
    ///
    /// # Panics
    /// When `sequence` is 0 or `head_dim` is odd or 0.
    pub fn rotary(sequence: usize, head_dim: usize, theta: f64, device: &Device) -> Self {
        Self::of(sequence, AttentionForm::rotary(head_dim, theta), device)
    }

    /// Returns an attention of a form. Angles are single precision, because the checkpoints were trained with
    /// such angles.
    ///
    /// # Panics
    /// When `sequence` is 0, a head has an odd number of elements or none, the frequencies are none or more
    /// than half of its elements, or the window has no token.
    pub fn of(sequence: usize, form: AttentionForm, device: &Device) -> Self {
        let (pairs, head_dim) = (form.positions.frequencies.len(), form.head_dim);
        assert!(sequence > 0, "an attention has positions");
        assert!(form.window != Some(0), "a token sees itself, so a window has at least 1 token");
        assert!(
            pairs > 0 && 2 * pairs <= head_dim && head_dim.is_multiple_of(2),
            "heads of {head_dim} with {pairs} pairs: a head has pairs of elements"
        );
        // Constants: on the device without autodiff they are not recorded on the tape.
        let device = device.clone().inner();
        let table = |function: fn(f32) -> f32| {
            let angles = (0..sequence).flat_map(|position| {
                form.positions.frequencies.iter().map(move |frequency| position as f32 * frequency)
            });
            let values: Vec<f32> = angles.map(|angle| form.positions.factor * function(angle)).collect();
            Tensor::from_data(TensorData::new(values, [sequence, pairs]), &device)
        };
        let (cos, sin) = (table(libm::cosf), table(libm::sinf));
        Self { sequence, form, cos, sin, starts: None, sinks: None }
    }

    /// Returns the same attention over the tokens of some rows: each token sees only its own document, at the
    /// positions of `scope`.
    ///
    /// # Panics
    /// When the rows have another length, or a position is not below it.
    pub fn with_scope(&self, scope: &TokenScope) -> Self {
        assert_eq!(scope.sequence, self.sequence, "rows have the length of the attention's");
        let too_large = scope.positions.iter().find(|&&position| position as usize >= self.sequence);
        assert!(too_large.is_none(), "position {too_large:?} in rows of {}", self.sequence);
        let is_whole =
            scope.positions.chunks(self.sequence).all(|row| row.iter().copied().eq(0..row.len() as u32));
        let starts = Some(scope.starts(self.form.window).into());
        if is_whole {
            return Self { starts, ..self.clone() };
        }
        let positions: Vec<i32> = scope.positions.iter().map(|&position| position as i32).collect();
        let positions =
            Tensor::<1, Int>::from_data(TensorData::from(positions.as_slice()), &self.cos.device());
        let [cos, sin] = [&self.cos, &self.sin].map(|table| table.clone().select(0, positions.clone()));
        Self { cos, sin, starts, ..self.clone() }
    }

    /// Returns the same attention with a sink for each head, `[heads]`: a further score of every query, whose
    /// value is zero. So the weights of the values add up to less than one (Xiao et al., 2023,
    /// <https://arxiv.org/abs/2309.17453>). `None` removes them.
    #[must_use]
    pub fn with_sinks(&self, sinks: Option<Tensor<1>>) -> Self {
        Self { sinks, ..self.clone() }
    }

    /// Returns the length of the sequences.
    pub fn sequence(&self) -> usize {
        self.sequence
    }

    /// Returns `softmax(scale q kᵀ) v` for each head; each position attends to itself and earlier
    /// positions, as far as the form says.
    ///
    /// Shapes: `q [batch * sequence, heads * head_dim]`; `k [batch * sequence, kv_heads * head_dim]`;
    /// `v [batch * sequence, kv_heads * value_dim]`; each key head serves `heads / kv_heads` neighbouring
    /// query heads; the result `[batch * sequence, heads * value_dim]`. In most models `value_dim` is
    /// `head_dim`.
    ///
    /// # Panics
    /// When the shapes do not match.
    pub fn forward(&self, q: Tensor<2>, k: Tensor<2>, v: Tensor<2>) -> Tensor<2> {
        let dims = self.dims(&q, &k, &v);
        let shape = [q.dims()[0], dims.heads * dims.value_dim];
        let inputs = [&q, &k, &v].map(|tensor| tensor.clone().into_dispatch());
        let Some(([q, k, v, sinks], tables, tape)) = self.kernel_inputs(inputs, dims) else {
            let (attention, sinks) = self.blocks(dims);
            return attention.forward([q, k, v], sinks);
        };
        let saved = self.saved(dims, [q, k, v, sinks], tables);
        let results = saved.forward(shape);
        saved.record(tape, results)
    }

    /// Like [`CausalAttention::forward`], but for the queries of a slice of each sequence. `keys` and
    /// `values` have a tensor for every slice up to this one, in order. The backward keeps these tensors, not
    /// a copy of all of them together.
    ///
    /// Shapes: `q [batch, length, heads * head_dim]`, where `length` is the length of the slice; each tensor
    /// of `keys` `[batch, length of its slice, kv_heads * head_dim]`, and of `values` with `value_dim`
    /// instead; the result `[batch, length, heads * value_dim]`.
    ///
    /// # Panics
    /// When the shapes do not match, the slices are longer than the sequences, or the tokens have documents
    /// ([`CausalAttention::with_scope`]).
    pub fn forward_slice(&self, q: Tensor<3>, keys: Vec<Tensor<3>>, values: Vec<Tensor<3>>) -> Tensor<3> {
        let dims = self.slice_dims(&q, &keys, &values);
        let shape = [dims.batch, dims.sequence, dims.heads * dims.value_dim];
        let on_their_own = [&keys, &values].map(|slices| each_on_cpu(slices));
        let [k, v] = [&keys, &values].map(|slices| Tensor::cat(slices.clone(), 1));
        let inputs = [&q, &k, &v].map(|tensor| tensor.clone().into_dispatch());
        let (Some(([q, k, v, sinks], tables, tape)), [Some(keys), Some(values)]) =
            (self.kernel_inputs(inputs, dims), on_their_own)
        else {
            let inputs = [q, k, v].map(|x| {
                let [batch, length, width] = x.dims();
                x.reshape([batch * length, width])
            });
            let (attention, sinks) = self.blocks(dims);
            return attention.forward_slices(inputs, sinks, [keys, values]).reshape(shape);
        };
        let saved = self.saved(dims, [q, k, v, sinks], tables);
        let results = saved.forward(shape);
        Saved { k: keys, v: values, ..saved }.record(tape, results)
    }

    fn slice_dims(&self, q: &Tensor<3>, keys: &[Tensor<3>], values: &[Tensor<3>]) -> Dims {
        let shapes = |slices: &[Tensor<3>]| slices.iter().map(Tensor::dims).collect::<Vec<_>>();
        let ([batch, length, wide], head_dim) = (q.dims(), self.form.head_dim);
        let (key_shapes, value_shapes) = (shapes(keys), shapes(values));
        let [narrow, value_width] =
            [&key_shapes, &value_shapes].map(|shapes| shapes.last().map_or(0, |shape| shape[2]));
        let are_alike = |(key, value): (&[usize; 3], &[usize; 3])| {
            key[..2] == value[..2] && key[0] == batch && key[2] == narrow && value[2] == value_width
        };
        let fits = key_shapes.last().is_some_and(|shape| shape[1] == length)
            && key_shapes.len() == value_shapes.len()
            && key_shapes.iter().zip(&value_shapes).all(are_alike)
            && narrow > 0
            && narrow.is_multiple_of(head_dim)
            && wide.is_multiple_of(narrow)
            && value_width > 0
            && value_width.is_multiple_of(narrow / head_dim);
        let all: usize = key_shapes.iter().map(|shape| shape[1]).sum();
        let is_plain = self.starts.is_none() && self.cos.dims()[0] == self.sequence;
        assert!(
            fits && is_plain && all <= self.sequence,
            "queries {:?}, keys {key_shapes:?} and values {value_shapes:?} are not slices of sequences of {} with heads of \
             {head_dim}, or tokens have documents",
            q.dims(),
            self.sequence,
        );
        let (heads, kv_heads) = (wide / head_dim, narrow / head_dim);
        let value_dim = value_width / kv_heads;
        Dims { batch, sequence: length, earlier: all - length, heads, kv_heads, head_dim, value_dim }
    }

    fn dims(&self, q: &Tensor<2>, k: &Tensor<2>, v: &Tensor<2>) -> Dims {
        let (sequence, head_dim) = (self.sequence, self.form.head_dim);
        let ([rows, wide], [_, narrow], [_, of_value]) = (q.dims(), k.dims(), v.dims());
        let fits = rows % sequence == 0
            && wide % head_dim == 0
            && narrow % head_dim == 0
            && narrow > 0
            && wide % narrow == 0
            && k.dims() == [rows, narrow]
            && v.dims()[0] == rows
            && of_value > 0
            && of_value.is_multiple_of(narrow / head_dim)
            && self.starts.as_ref().is_none_or(|starts| starts.len() == rows);
        assert!(
            fits,
            "CausalAttention takes sequences of {sequence} and heads of {head_dim}, got queries {:?}, keys {:?} and values {:?}",
            q.dims(),
            k.dims(),
            v.dims(),
        );
        Dims {
            batch: rows / sequence,
            sequence,
            earlier: 0,
            heads: wide / head_dim,
            kv_heads: narrow / head_dim,
            head_dim,
            value_dim: of_value / (narrow / head_dim),
        }
    }

    /// Returns the place of the first token that each query sees; `None` if each sees all earlier ones.
    fn starts(&self, dims: Dims) -> Option<Arc<[u32]>> {
        let queries = dims.earlier..dims.earlier + dims.sequence;
        let hides = self.form.first_seen(queries.end - 1) > 0;
        self.starts.clone().or_else(|| {
            let starts = || queries.clone().map(|query| self.form.first_seen(query) as u32);
            hides.then(|| (0..dims.batch).flat_map(|_| starts()).collect())
        })
    }

    /// Returns the sinks, `[heads]`, if heads have some.
    fn sinks(&self, dims: Dims) -> Option<Tensor<1>> {
        let sinks = self.sinks.clone()?;
        assert_eq!(sinks.dims(), [dims.heads], "each head has a sink");
        Some(sinks)
    }

    /// Returns the inputs of the kernel (queries, keys, values and sinks) with the tables and the tape; `None` if
    /// no kernel takes them. Heads without sinks get zeros as sinks, which are not on the tape.
    fn kernel_inputs(
        &self,
        [q, k, v]: [DispatchTensor; 3],
        dims: Dims,
    ) -> Option<([CpuTensor; 4], [CpuTensor; 2], Tape<4>)> {
        let tables = self.cpu_tables()?;
        let sinks = self.sinks(dims).unwrap_or_else(|| Tensor::zeros([dims.heads], &self.cos.device()));
        let (inputs, tape) = on_cpu([q, k, v, sinks.into_dispatch()])?;
        Some((inputs, tables, tape))
    }

    fn saved(&self, dims: Dims, [q, k, v, sinks]: [CpuTensor; 4], tables: [CpuTensor; 2]) -> Saved {
        let has_own_tables = self.cos.dims()[0] != self.sequence;
        let (form, starts) = (self.form.clone(), self.starts(dims));
        let sinks = self.sinks.as_ref().map(|_| sinks);
        Saved { dims, q, k: vec![k], v: vec![v], sinks, tables, has_own_tables, form, starts }
    }

    fn cpu_tables(&self) -> Option<[CpuTensor; 2]> {
        let table = |table: &Tensor<2>| Some(row_major(table.clone().try_into_primitive::<Flex>().ok()?));
        Some([table(&self.cos)?, table(&self.sin)?])
    }

    /// Returns the attention for a device without a kernel for it, and its sinks, `[1, heads]`.
    fn blocks(&self, dims: Dims) -> (BlockAttention, Option<Tensor<2>>) {
        let [tokens, pairs] = self.cos.dims();
        let table =
            |table: &Tensor<2>| table.clone().reshape([tokens / self.sequence, 1, self.sequence, pairs]);
        let sinks = self.sinks(dims).map(Tensor::unsqueeze);
        let attention = BlockAttention {
            dims,
            tables: [table(&self.cos), table(&self.sin)],
            scale: self.form.scale,
            cap: self.form.cap,
            starts: self.starts(dims),
            further: if sinks.is_some() { FurtherInput::Sinks } else { FurtherInput::Unused },
            sizes: BlockSizes::new(dims, 0),
        };
        (attention, sinks)
    }
}

/// Returns tensors in row-major order on the CPU back end; `None` if one is elsewhere.
fn each_on_cpu(tensors: &[Tensor<3>]) -> Option<Vec<CpuTensor>> {
    let alone = |tensor: &Tensor<3>| on_cpu([tensor.clone().into_dispatch()]).map(|([tensor], _)| tensor);
    tensors.iter().map(alone).collect()
}

/// Returns the elements of slices `[batch, length, width]` of the same sequences, joined along the sequences.
fn joined<T: ReadElement>(slices: &[CpuTensor], batch: usize) -> Cow<'_, [T]> {
    let parts: Vec<_> = slices.iter().map(T::read).collect();
    if let [_] = parts[..] {
        return parts.into_iter().next().expect("there is one");
    }
    let mut all = Vec::with_capacity(parts.iter().map(|part| part.len()).sum());
    for sequence in 0..batch {
        for part in &parts {
            let size = part.len() / batch;
            all.extend_from_slice(&part[sequence * size..][..size]);
        }
    }
    Cow::Owned(all)
}

/// The inputs of both passes.
#[derive(Clone, Debug)]
struct Saved {
    dims: Dims,
    q: CpuTensor,
    /// Of each slice of the sequences; one if they are whole.
    k: Vec<CpuTensor>,
    v: Vec<CpuTensor>,
    /// The sink of each head, if heads have some.
    sinks: Option<CpuTensor>,
    tables: [CpuTensor; 2],
    /// Whether each token has a row of the tables, instead of each position.
    has_own_tables: bool,
    form: AttentionForm,
    starts: Option<Arc<[u32]>>,
}

impl AttentionInputs for Saved {
    fn operands(&self) -> impl Iterator<Item = &CpuTensor> {
        [&self.q].into_iter().chain(&self.k).chain(&self.v)
    }

    fn with_inputs<T: ReadElement, R>(&self, pass: impl FnOnce(Inputs<'_, T>) -> R) -> R {
        let [cos, sin] = self.tables.each_ref().map(elements);
        let (q, [k, v]) =
            (T::read(&self.q), [&self.k, &self.v].map(|slices| joined::<T>(slices, self.dims.batch)));
        let Dims { sequence, earlier, .. } = self.dims;
        let pairs = self.form.positions.frequencies.len();
        // The sequences of slices may be shorter than the tables.
        let keys = if self.has_own_tables { cos.len() } else { (earlier + sequence) * pairs };
        let (key_range, query_range) = (0..keys, earlier * pairs..keys);
        // The scale of the scores is part of the queries' rotation, so it costs nothing.
        let turn =
            |part: Range<usize>, scale| Rotary { pairs, cos: &cos[part.clone()], sin: &sin[part], scale };
        let (turn_k, turn_q) = (turn(key_range, 1.0), turn(query_range, self.form.scale as f32));
        let (starts, cap) = (self.starts.as_deref(), self.form.cap.map(|cap| cap as f32));
        let sinks = self.sinks.as_ref().map(elements);
        let (dims, sinks) = (self.dims, sinks.as_deref());
        pass(Inputs { dims, q: &q, k: &k, v: &v, turn_q, turn_k, starts, cap, bias: None, sinks })
    }
}

impl Saved {
    /// Records the pass that computed these results.
    fn record<const D: usize>(self, tape: Tape<4>, (out, normalisers): (CpuTensor, Vec<f32>)) -> Tensor<D> {
        let out = tape.rounded(out);
        tape.record_tensor(out, |out| AttentionBackward { saved: self, out: out.clone(), normalisers })
    }
}

#[derive(Clone, Debug)]
struct AttentionBackward {
    saved: Saved,
    out: CpuTensor,
    normalisers: Vec<f32>,
}

impl Operation<4> for AttentionBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 4]) -> [Option<CpuTensor>; 4] {
        let Self { saved, out, normalisers } = &self;
        let query_shape = saved.q.layout().shape().clone();
        let [key_shape, value_shape] = [&saved.k, &saved.v].map(|slices| {
            let mut shape = slices[0].layout().shape().clone();
            // Slices have a dimension for the batch.
            if let [_, keys, _] = &mut shape[..] {
                *keys = saved.dims.earlier + saved.dims.sequence;
            }
            shape
        });
        let shapes = [query_shape, key_shape, value_shape];
        let ([q, k, v], _, sinks) = saved.backward((out, normalisers), &gradient, shapes);
        let sinks = saved.sinks.as_ref().map(|_| cpu_tensor(sinks, [saved.dims.heads]));
        [Some(q), Some(k), Some(v), sinks]
    }
}

#[cfg(test)]
mod tests;
