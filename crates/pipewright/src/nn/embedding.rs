//! Rows of a table by id, with a table gradient that can be deferred.

use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Int, Tensor};

use super::composed;
use super::deferred::{Deferred, RowIds, WeightTask, recorded_on};
use super::operation::{CpuTensor, Operation, cpu_tensor, elements, from_cpu, indices, on_cpu};
use super::parallel::TensorParallel;
use super::table_rows::{RowChoice, add_rows, replace_rows, rows_of};
use crate::device::computes_behind;

/// Burn's embedding, with the same parameter and record path. Convert one that Burn initialised.
#[derive(Module, Debug)]
pub struct Embedding {
    /// Shape `[ids, width]`.
    pub weight: Param<Tensor<2>>,
}

impl From<burn::nn::Embedding> for Embedding {
    fn from(embedding: burn::nn::Embedding) -> Self {
        Self { weight: embedding.weight }
    }
}

impl Embedding {
    /// Returns the row of each id. Shapes: ids `[batch, sequence]`, result `[batch, sequence, width]`.
    ///
    /// # Panics
    /// When an id is outside the table. Only the CPU back end checks this: on another device the check would
    /// have to wait for the ids.
    pub fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let [batch, sequence] = ids.dims();
        let weight = self.weight.val();
        let width = weight.dims()[1];
        let ids = ids.reshape([batch * sequence]);
        select(weight, ids, self.weight.id).reshape([batch, sequence, width])
    }

    /// Like [`Embedding::forward`], but for a table of `ids_in_all` rows that is split over the ranks of
    /// `tensor`. The result is equal on all ranks.
    ///
    /// # Panics
    /// As [`Embedding::forward`], and when a rank of the group fails.
    pub fn forward_split(
        &self,
        ids: Tensor<2, Int>,
        ids_in_all: usize,
        tensor: &TensorParallel,
    ) -> Tensor<3> {
        if tensor.ranks() == 1 {
            return self.forward(ids);
        }
        // A rank without the row of an id adds zeros, and its table gets a gradient of zeros.
        Self::leave(self.forward_part(ids, ids_in_all, tensor.range(ids_in_all)), tensor)
    }

    /// Returns the sum of the rows of all ranks, or the rank's share of it.
    pub(super) fn leave(rows: Tensor<3>, tensor: &TensorParallel) -> Tensor<3> {
        let [batch, sequence, width] = rows.dims();
        let own = tensor.region(batch).leave(rows.reshape([batch * sequence, width]));
        let sequence = own.dims()[0].checked_div(batch).unwrap_or(sequence);
        own.reshape([batch, sequence, width])
    }

    /// Returns the row of each id in `range`, and zeros for the other ids, if the table has the rows of these
    /// ids alone, out of `ids_in_all`. On the processor, the backward keeps the gradients for the ids in
    /// `range` only, or one row of zeros if there are none.
    ///
    /// # Panics
    /// As [`Embedding::forward`], for an id outside the whole table.
    pub fn forward_part(&self, ids: Tensor<2, Int>, ids_in_all: usize, range: Range<usize>) -> Tensor<3> {
        let [batch, sequence] = ids.dims();
        let weight = self.weight.val();
        let (width, precision) = (weight.dims()[1], weight.dtype());
        let ids = ids.reshape([batch * sequence]);
        if let Some(rows) = select_own(&weight, &ids, ids_in_all, &range, self.weight.id) {
            return rows.reshape([batch, sequence, width]);
        }
        let (ids, is_here) = local_ids(ids, ids_in_all, range);
        let is_here = is_here.float().cast(precision).unsqueeze_dim(1);
        let rows = select(weight, ids, self.weight.id);
        (rows * is_here).reshape([batch, sequence, width])
    }

    /// Like [`Embedding::forward_part`], but the other ids have the rows of `earlier`, which other parts of the
    /// table have returned. After all parts, in any order, the rows have the bits of [`Embedding::forward`] for
    /// the whole table. `earlier` has the element type of the table.
    ///
    /// # Panics
    /// As [`Embedding::forward_part`].
    pub fn forward_part_onto(
        &self,
        earlier: Tensor<3>,
        ids: Tensor<2, Int>,
        ids_in_all: usize,
        range: Range<usize>,
    ) -> Tensor<3> {
        let shape @ [batch, sequence, width] = earlier.dims();
        let (earlier, ids) = (earlier.reshape([batch * sequence, width]), ids.reshape([batch * sequence]));
        replace(earlier, self.weight.val(), ids, (ids_in_all, range), self.weight.id).reshape(shape)
    }
}

/// Returns `earlier` with the rows of the ids in `range`, which are all rows of `table`, in their places.
fn replace(
    earlier: Tensor<2>,
    table: Tensor<2>,
    ids: Tensor<1, Int>,
    (vocabulary, range): (usize, Range<usize>),
    id: ParamId,
) -> Tensor<2> {
    if let Some(rows) = replace_own(&earlier, &table, &ids, vocabulary, &range, id) {
        return rows;
    }
    let (ids, is_here) = local_ids(ids, vocabulary, range);
    let is_here = is_here.equal_elem(1).unsqueeze_dim::<2>(1).expand(earlier.dims());
    earlier.mask_where(is_here, select(table, ids, id))
}

/// Returns the columns of `ids` in the part `range` of a vocabulary, and 0 or 1 for whether the part has
/// them. The column of an id that it does not have is arbitrary.
///
/// # Panics
/// When an id is outside the vocabulary. Only the CPU back end checks this.
pub(super) fn local_ids(
    ids: Tensor<1, Int>,
    vocabulary: usize,
    range: Range<usize>,
) -> (Tensor<1, Int>, Tensor<1, Int>) {
    if !computes_behind(&ids.device()) {
        check_ids(&indices(ids.clone()), vocabulary);
    }
    let Range { start, end } = range;
    let last = (end - start).saturating_sub(1);
    let is_here = ids.clone().greater_equal_elem(start as i64).bool_and(ids.clone().lower_elem(end as i64));
    let columns = (ids - start as i64).clamp(0i64, last as i64);
    (columns, is_here.int())
}

/// Panics when an id is outside the vocabulary.
pub(super) fn check_ids(ids: &[usize], vocabulary: usize) {
    let outside = ids.iter().find(|&&id| id >= vocabulary);
    assert!(
        outside.is_none(),
        "an id lies outside the vocabulary of {vocabulary}: got {}",
        shown_id(outside)
    );
}

/// Returns the rows of the ids in `range`, which are all rows of `table`, and zeros for the other ids; `None`
/// if the CPU back end does not compute it.
///
/// # Panics
/// When an id is outside the vocabulary.
fn select_own(
    table: &Tensor<2>,
    ids: &Tensor<1, Int>,
    vocabulary: usize,
    range: &Range<usize>,
    id: ParamId,
) -> Option<Tensor<2>> {
    let ([weight], tape) = on_cpu([table.clone().into_dispatch()])?;
    let deferred = Deferred::current(table, id);
    let ([count, width], OwnIds { indices, own, all }) = (table.dims(), own_ids(ids, vocabulary, range));
    let rows = rows_of(&weight, &RowChoice { ids: &own, indices: Some(&indices), count: all }, width);
    let tape = recorded_on(tape, 0, deferred.as_ref());
    Some(tape.record_tensor(rows, |_| OwnRowsBackward {
        indices,
        select: SelectBackward { ids: own, count, width, id, deferred },
    }))
}

/// Returns `earlier` with the rows of the ids in `range`, which are all rows of `table`, in their places;
/// `None` if the CPU back end does not compute it.
///
/// # Panics
/// When an id is outside the vocabulary.
fn replace_own(
    earlier: &Tensor<2>,
    table: &Tensor<2>,
    ids: &Tensor<1, Int>,
    vocabulary: usize,
    range: &Range<usize>,
    id: ParamId,
) -> Option<Tensor<2>> {
    let ([weight, mut rows], tape) = on_cpu([table.clone(), earlier.clone()].map(Tensor::into_dispatch))?;
    if weight.dtype() != rows.dtype() {
        return None;
    }
    let deferred = Deferred::current(table, id);
    let ([count, width], OwnIds { indices, own, .. }) = (table.dims(), own_ids(ids, vocabulary, range));
    replace_rows(&mut rows, &indices, Some((&weight, &own)), width);
    let tape = recorded_on(tape, 0, deferred.as_ref());
    Some(tape.record_tensor(rows, |_| {
        let select = SelectBackward { ids: own, count, width, id, deferred };
        ReplacedRowsBackward(OwnRowsBackward { indices, select })
    }))
}

/// The ids that a part of a table has.
struct OwnIds {
    /// Their indices among all ids.
    indices: Arc<[usize]>,
    /// The row of the part that each of them has.
    own: Arc<[usize]>,
    /// The number of all ids.
    all: usize,
}

/// Returns the ids in `range`.
///
/// # Panics
/// When an id is outside the vocabulary.
fn own_ids(ids: &Tensor<1, Int>, vocabulary: usize, range: &Range<usize>) -> OwnIds {
    let ids = indices(ids.clone());
    check_ids(&ids, vocabulary);
    let own = ids.iter().enumerate().filter(|(_, id)| range.contains(id));
    let (indices, own): (Vec<usize>, Vec<usize>) = own.map(|(index, id)| (index, id - range.start)).unzip();
    OwnIds { indices: indices.into(), own: own.into(), all: ids.len() }
}

/// Returns rows `ids` of `table`; shapes `[ids, width]`, `[rows]`, result `[rows, width]`.
fn select(table: Tensor<2>, ids: Tensor<1, Int>, id: ParamId) -> Tensor<2> {
    let [count, width] = table.dims();
    let deferred = Deferred::current(&table, id);
    let Some(([weight], tape)) = on_cpu([table.clone().into_dispatch()]) else {
        return composed::select(table, ids, id, deferred);
    };
    let ids: Arc<[usize]> = indices(ids).into();
    let outside = ids.iter().find(|&&id| id >= count);
    assert!(outside.is_none(), "an id lies outside the table of {count}: got {}", shown_id(outside));
    let rows = rows_of(&weight, &RowChoice::all(&ids), width);
    let tape = recorded_on(tape, 0, deferred.as_ref());
    tape.record_tensor(rows, |_| SelectBackward { ids, count, width, id, deferred })
}

/// Returns an id as text. Negative ids are read as the largest one.
fn shown_id(id: Option<&usize>) -> String {
    match id {
        Some(&usize::MAX) => "a negative one".to_owned(),
        id => id.map(usize::to_string).unwrap_or_default(),
    }
}

#[derive(Clone, Debug)]
struct SelectBackward {
    ids: Arc<[usize]>,
    count: usize,
    width: usize,
    id: ParamId,
    deferred: Option<Deferred>,
}

impl Operation<1> for SelectBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 1]) -> [Option<CpuTensor>; 1] {
        let Self { ids, count, width, id, deferred } = self;
        if let Some(deferred) = deferred {
            let (ids, gradient) = (RowIds::Host(ids), from_cpu(gradient));
            deferred.push(WeightTask::Rows { weight: id, ids, gradient });
            return [None];
        }
        let mut table = vec![0f32; count * width];
        add_rows(&mut table, &ids, &elements(&gradient));
        [Some(cpu_tensor(table, [count, width]))]
    }
}

/// The backward of a part of a table, which has the rows of some of the ids.
#[derive(Clone, Debug)]
struct OwnRowsBackward {
    /// The indices of these ids among all ids.
    indices: Arc<[usize]>,
    select: SelectBackward,
}

impl Operation<1> for OwnRowsBackward {
    fn backward(self, gradient: CpuTensor, wanted: [bool; 1]) -> [Option<CpuTensor>; 1] {
        let Self { indices, mut select } = self;
        let width = select.width;
        if indices.is_empty() {
            // A table without such an id has a gradient of zeros.
            select.ids = [0].into();
            return select.backward(cpu_tensor(vec![0.0; width], [1, width]), wanted);
        }
        select.backward(rows_of(&gradient, &RowChoice::all(&indices), width), wanted)
    }
}

/// The backward of a part of a table whose rows take the places of rows of the second input.
#[derive(Clone, Debug)]
struct ReplacedRowsBackward(OwnRowsBackward);

impl Operation<2> for ReplacedRowsBackward {
    fn backward(
        self,
        mut gradient: CpuTensor,
        [wants_table, wants_earlier]: [bool; 2],
    ) -> [Option<CpuTensor>; 2] {
        let (indices, width) = (self.0.indices.clone(), self.0.select.width);
        let [table] = if wants_table { self.0.backward(gradient.clone(), [true]) } else { [None] };
        let earlier = wants_earlier.then(|| {
            replace_rows(&mut gradient, &indices, None, width);
            gradient
        });
        [table, earlier]
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device};

    use super::super::check::{check, numbers};
    use super::*;

    #[test]
    fn equals_a_selection() {
        let ids = || Tensor::from_data([3, 0, 3, 1], &Device::flex());
        check(
            [numbers([20], 1.0)],
            |[table]| select(table.reshape([4, 5]), ids(), ParamId::new()),
            |[table]| table.reshape([4, 5]).select(0, ids()),
        );
    }

    #[test]
    fn the_parts_of_a_table_add_up_to_it() {
        let ids = || Tensor::<2, Int>::from_data([[3, 0, 6], [1, 4, 3]], &Device::flex());
        let embedding = |rows: Tensor<2>| Embedding { weight: Param::from_tensor(rows) };
        let table = numbers([7, 5], 1.0);
        let parts = [0..3, 3..6, 6..7].map(|range: Range<usize>| {
            let rows = table.clone().narrow(0, range.start, range.len());
            embedding(rows).forward_part(ids(), 7, range)
        });
        let sum = parts.into_iter().reduce(|sum, part| sum + part).expect("there are parts");
        assert_eq!(sum.into_data(), embedding(table).forward(ids()).into_data());
    }

    /// Returns the rows of `table` that its parts put together.
    fn rows_of_parts(
        parts: &[(Embedding, Range<usize>)],
        ids: &Tensor<2, Int>,
        vocabulary: usize,
    ) -> Tensor<3> {
        let (first, range) = &parts[0];
        let rows = first.forward_part(ids.clone(), vocabulary, range.clone());
        parts[1..].iter().fold(rows, |rows, (part, range)| {
            part.forward_part_onto(rows, ids.clone(), vocabulary, range.clone())
        })
    }

    /// Also with a row of negative zeros, in all precisions, and for Burn's own operations.
    #[test]
    fn rows_of_parts_have_the_bits_of_the_table() {
        let ids = Tensor::<2, Int>::from_data([[3, 0, 6], [1, 4, 3]], &Device::flex());
        let table = Tensor::cat(vec![numbers([6, 5], 1.0), Tensor::full([1, 5], -0.0, &Device::flex())], 0);
        let bits = |rows: Tensor<3>| {
            rows.cast(DType::F32).into_data().iter::<f32>().map(f32::to_bits).collect::<Vec<_>>()
        };
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            let table = table.clone().cast(dtype);
            let part = |range: Range<usize>| {
                let rows = table.clone().narrow(0, range.start, range.len());
                (Embedding { weight: Param::from_tensor(rows) }, range)
            };
            let found = rows_of_parts(&[0..3, 3..6, 6..7].map(part), &ids, 7);
            let expected = Embedding { weight: Param::from_tensor(table.clone()) }.forward(ids.clone());
            assert_eq!(bits(found), bits(expected), "{dtype:?}");
        }
    }

    #[test]
    fn replaced_rows_have_no_gradient() {
        let ids = || Tensor::from_data([3, 0, 3, 1], &Device::flex());
        check(
            [numbers([20], 1.0), numbers([10], 2.0)],
            |[earlier, table]| {
                let (earlier, table) = (earlier.reshape([4, 5]), table.reshape([2, 5]));
                replace(earlier, table, ids(), (4, 2..4), ParamId::new())
            },
            |[earlier, table]| {
                let (earlier, table) = (earlier.reshape([4, 5]), table.reshape([2, 5]));
                let row = |index| table.clone().narrow(0, index, 1);
                let old = |index| earlier.clone().narrow(0, index, 1);
                Tensor::cat(vec![row(1), old(1), row(1), old(3)], 0)
            },
        );
    }

    /// Also for a part without any of the ids.
    #[test]
    fn the_gradients_of_the_parts_are_those_of_the_table() {
        let ids = || Tensor::<2, Int>::from_data([[3, 0, 3], [1, 4, 3]], &Device::flex());
        let scale = numbers([6, 5], 2.0).reshape([2, 3, 5]).autodiff();
        let tracked =
            |rows: Tensor<2>| Embedding { weight: Param::from_tensor(rows.autodiff().require_grad()) };
        let gradient = |embedding: &Embedding, rows: Tensor<3>| {
            let gradients = (rows * scale.clone()).sum().backward();
            embedding.weight.val().grad(&gradients).expect("it is tracked").into_data()
        };
        let table = numbers([7, 5], 1.0);
        let whole = tracked(table.clone());
        let expected = gradient(&whole, whole.forward(ids()));
        let mut found = Vec::new();
        let parts = [0..3, 3..6, 6..7]
            .map(|range: Range<usize>| (tracked(table.clone().narrow(0, range.start, range.len())), range));
        for (part, range) in &parts {
            found.extend(gradient(part, part.forward_part(ids(), 7, range.clone())).iter::<f32>());
        }
        let expected: Vec<f32> = expected.iter().collect();
        assert_eq!(found, expected);
        let gradients = (rows_of_parts(&parts, &ids(), 7) * scale.clone()).sum().backward();
        let found = parts.iter().flat_map(|(part, _)| {
            part.weight
                .val()
                .grad(&gradients)
                .expect("it is tracked")
                .into_data()
                .iter::<f32>()
                .collect::<Vec<_>>()
        });
        assert_eq!(found.collect::<Vec<_>>(), expected);
    }

    /// All parts together keep a gradient for each token.
    #[test]
    fn the_deferred_tasks_of_the_parts_have_each_token_once() {
        let ids = Tensor::<2, Int>::from_data([[3, 0, 3], [1, 4, 3]], &Device::flex());
        let mut rows = 0;
        for range in [0..3, 3..6] {
            let table = numbers([3, 5], 1.0).autodiff().require_grad();
            let part = Embedding { weight: Param::from_tensor(table) };
            let deferred = Deferred::new(Arc::new([part.weight.id].into()));
            let sum = deferred.collect(|| part.forward_part(ids.clone(), 7, range).sum());
            drop(sum.backward());
            let task = deferred.take().pop().expect("the gradient is deferred");
            let WeightTask::Rows { gradient, .. } = task else { panic!("{task:?}") };
            rows += gradient.dims()[0];
        }
        assert_eq!(rows, 6);
    }

    #[test]
    #[should_panic(expected = "outside the table of 4")]
    fn an_id_beyond_the_table_is_refused() {
        select(numbers([4, 5], 1.0), Tensor::from_data([4], &Device::flex()), ParamId::new());
    }
}
