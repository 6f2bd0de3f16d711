//! Rows of a table in the memory of the processor, by id: they are copied, replaced, and added to, in each
//! element type. The operations that record them on a tape are elsewhere ([`Embedding`](super::Embedding)).

use burn::tensor::{DType, bf16, f16};

use super::operation::{CpuTensor, range_of, tensor_of};

/// Rows of a table, and where they are among the rows of a result.
pub(super) struct RowChoice<'a> {
    /// The rows of the table.
    pub(super) ids: &'a [usize],
    /// The index of each of them in the result, whose other rows are zeros; `None` if the result has exactly
    /// these rows, in their order.
    pub(super) indices: Option<&'a [usize]>,
    /// The number of rows of the result.
    pub(super) count: usize,
}

impl<'a> RowChoice<'a> {
    /// Returns the choice whose result has exactly the rows `ids`.
    pub(super) fn all(ids: &'a [usize]) -> Self {
        Self { ids, indices: None, count: ids.len() }
    }
}

/// Returns rows of a table. A whole table is too large to be converted for a few of its rows.
pub(super) fn rows_of(table: &CpuTensor, choice: &RowChoice<'_>, width: usize) -> CpuTensor {
    let (range, shape) = (range_of(table), [choice.count, width]);
    match table.dtype() {
        DType::BF16 => tensor_of(chosen::<bf16>(&table.storage()[range], choice, width), shape),
        DType::F16 => tensor_of(chosen::<f16>(&table.storage()[range], choice, width), shape),
        _ => tensor_of(chosen::<f32>(&table.storage()[range], choice, width), shape),
    }
}

fn chosen<E: Copy + Default>(table: &[E], choice: &RowChoice<'_>, width: usize) -> Vec<E> {
    let Some(indices) = choice.indices else {
        let mut all = Vec::with_capacity(choice.count * width);
        choice.ids.iter().for_each(|id| all.extend_from_slice(&table[id * width..][..width]));
        return all;
    };
    let mut all = vec![E::default(); choice.count * width];
    put_rows(&mut all, indices, Some((table, choice.ids)), width);
    all
}

/// Replaces the rows of `all` at `indices` by rows of a table with the same element type, given with their
/// numbers, or by zeros.
pub(super) fn replace_rows(
    all: &mut CpuTensor,
    indices: &[usize],
    rows: Option<(&CpuTensor, &[usize])>,
    width: usize,
) {
    let (range, of_table) = (range_of(all), rows.map(|(table, _)| range_of(table)).unwrap_or_default());
    match all.dtype() {
        DType::BF16 => {
            let rows = rows.map(|(table, ids)| (&table.storage::<bf16>()[of_table], ids));
            put_rows(&mut all.storage_mut::<bf16>()[range], indices, rows, width);
        }
        DType::F16 => {
            let rows = rows.map(|(table, ids)| (&table.storage::<f16>()[of_table], ids));
            put_rows(&mut all.storage_mut::<f16>()[range], indices, rows, width);
        }
        _ => {
            let rows = rows.map(|(table, ids)| (&table.storage::<f32>()[of_table], ids));
            put_rows(&mut all.storage_mut::<f32>()[range], indices, rows, width);
        }
    }
}

/// Replaces the rows of `all` at `indices` by rows of a table, or by zeros.
fn put_rows<E: Copy + Default>(
    all: &mut [E],
    indices: &[usize],
    rows: Option<(&[E], &[usize])>,
    width: usize,
) {
    let Some((table, ids)) = rows else {
        indices.iter().for_each(|index| all[index * width..][..width].fill(E::default()));
        return;
    };
    for (index, id) in indices.iter().zip(ids) {
        all[index * width..][..width].copy_from_slice(&table[id * width..][..width]);
    }
}

/// Adds row `i` of `gradient` to row `ids[i]` of `table`.
pub(crate) fn add_rows(table: &mut [f32], ids: &[usize], gradient: &[f32]) {
    let width = gradient.len() / ids.len().max(1);
    for (&id, gradient) in ids.iter().zip(gradient.chunks_exact(width.max(1))) {
        for (sum, gradient) in table[id * width..][..width].iter_mut().zip(gradient) {
            *sum += gradient;
        }
    }
}
