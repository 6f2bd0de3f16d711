//! A whole batch to microbatches and back, along dimension 0.

use burn::backend::Dispatch;
use burn::backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};

use crate::chunk_spec::{Chunk, Merge, common_size, merge_by, split_by};
use crate::value::{Value, ValueKind, Values};

/// Why a batch cannot be split, or outputs cannot be joined.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SplitError {
    /// There is nothing to split.
    #[error("the batch holds no tensor")]
    Empty,
    /// Tensors of one batch disagree about its rows.
    #[error(
        "tensor {tensor} has {rows} rows, tensor 0 has {expected}: all tensors of a batch have the same rows"
    )]
    RowsDiffer {
        /// Its place in the batch.
        tensor: usize,
        /// Its rows.
        rows: usize,
        /// Rows of tensor 0.
        expected: usize,
    },
    /// The rows do not make equal microbatches.
    #[error(
        "{rows} rows do not divide into {microbatches} microbatches: give a multiple of {microbatches} rows, or \
         another number of microbatches"
    )]
    NotDivisible {
        /// Rows of the batch.
        rows: usize,
        /// Microbatches asked for.
        microbatches: u32,
    },
    /// Runs of equal size, the last one short, would be fewer than the microbatches.
    #[error(
        "{rows} rows make runs of {size}, and with them fewer than {microbatches} microbatches: give more rows or fewer \
         microbatches"
    )]
    TooFewRows {
        /// Rows of the batch.
        rows: usize,
        /// Microbatches asked for.
        microbatches: u32,
        /// Rows of a microbatch.
        size: usize,
    },
    /// Another number of specs than of tensors.
    #[error("{specs} spec(s) for {tensors} tensor(s): give one for each, in the nesting of the tensors")]
    Specs {
        /// Specs given.
        specs: usize,
        /// Tensors there are.
        tensors: usize,
    },
    /// A spec names a dimension that its tensor has not.
    #[error("tensor {tensor} of shape {shape:?} has no dimension {dimension} to split or join along")]
    NoDimension {
        /// The tensor's place.
        tensor: usize,
        /// The dimension.
        dimension: usize,
        /// The tensor's shape.
        shape: Vec<usize>,
    },
    /// A mean of tensors that are not floats.
    #[error(
        "output {tensor} is {kind}: only floats have a mean; keep the list of microbatches, or join them"
    )]
    NoMean {
        /// Place of the output.
        tensor: usize,
        /// Its kind.
        kind: ValueKind,
    },
    /// Microbatches with different numbers of tensors.
    #[error("microbatch {microbatch} holds {found} tensors, microbatch 0 holds {expected}")]
    TensorsDiffer {
        /// Its place.
        microbatch: usize,
        /// Its tensors.
        found: usize,
        /// Tensors of microbatch 0.
        expected: usize,
    },
    /// Tensors that join must agree in rank, in element type and in all but the dimension along which they join.
    #[error(
        "output {tensor} of microbatch {microbatch} is {found:?}, that of microbatch 0 is {expected:?}: they differ in \
         more than the dimension along which they join"
    )]
    Unjoinable {
        /// Place of the output.
        tensor: usize,
        /// Place of the microbatch.
        microbatch: usize,
        /// Its shape.
        found: Vec<usize>,
        /// Shape in microbatch 0.
        expected: Vec<usize>,
    },
}

/// Splits every tensor of a batch into equal runs of rows: microbatch `k` of `m` holds rows `k * n / m` up to
/// `(k + 1) * n / m`. The storage is shared, not copied.
///
/// # Errors
/// When the batch is empty, its tensors disagree about its rows, or the rows do not divide.
pub fn split(batch: &[Value], microbatches: u32) -> Result<Vec<Values>, SplitError> {
    let specs = by_rows(batch);
    let rows = common_size(batch, &specs)?.ok_or(SplitError::Empty)?;
    match rows > 0 && rows.checked_rem(microbatches as usize) == Some(0) {
        true => split_by(batch, specs, microbatches),
        false => Err(SplitError::NotDivisible { rows, microbatches }),
    }
}

/// As [`split`], for rows that do not divide: every microbatch but the last has `rows / microbatches` rows, rounded up.
///
/// # Errors
/// When the batch is empty, its tensors disagree about its rows, or too few rows are left for the last microbatches.
pub fn split_uneven(batch: &[Value], microbatches: u32) -> Result<Vec<Values>, SplitError> {
    match batch.is_empty() {
        true => Err(SplitError::Empty),
        false => split_by(batch, by_rows(batch), microbatches),
    }
}

fn by_rows(batch: &[Value]) -> Vec<Chunk> {
    vec![Chunk::Along(0); batch.len()]
}

/// Joins the outputs of all microbatches along dimension 0: the way back from [`split`].
///
/// # Errors
/// When the microbatches' tensors differ in more than their rows.
pub fn merge(microbatches: Vec<Values>) -> Result<Values, SplitError> {
    let specs = vec![Merge::Along(0); microbatches.first().map_or(0, Vec::len)];
    Ok(merge_by(microbatches, specs)?.concat())
}

/// Tensors that agree in all but one dimension, joined along it.
pub(crate) fn concatenate(mut values: Values, dimension: usize) -> Value {
    if values.len() == 1 {
        return values.swap_remove(0);
    }
    let kind = values[0].kind();
    let tensors = values.into_iter().map(Value::into_dispatch).collect();
    Value::from_dispatch(match kind {
        ValueKind::Float => Dispatch::float_cat(tensors, dimension),
        ValueKind::Int => Dispatch::int_cat(tensors, dimension),
        ValueKind::Bool => Dispatch::bool_cat(tensors, dimension),
    })
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Bool, Device, Int, Tensor};

    use super::*;
    use crate::boundary::{pack, unpack};

    fn batch(rows: usize) -> (Tensor<2>, Tensor<1, Int>, Tensor<3, Bool>) {
        let device = Device::flex();
        let floats = Tensor::<1, Int>::arange(0..(rows * 3) as i64, &device).float().reshape([rows, 3]);
        let ints = Tensor::arange(0..rows as i64, &device);
        let bools =
            Tensor::<1, Int>::arange(0..(rows * 4) as i64, &device).greater_elem(3).reshape([rows, 2, 2]);
        (floats, ints, bools)
    }

    fn check(rows: usize, microbatches: u32, expected: Result<(), SplitError>) {
        let whole = pack(batch(rows));
        let found = split(&whole, microbatches).and_then(|parts| {
            assert_eq!(parts.len(), microbatches as usize);
            merge(parts)
        });
        match (found, expected) {
            (Ok(merged), Ok(())) => {
                type Batch = (Tensor<2>, Tensor<1, Int>, Tensor<3, Bool>);
                let (a, b): (Batch, Batch) = (unpack(whole).unwrap(), unpack(merged).unwrap());
                assert_eq!(a.0.into_data(), b.0.into_data());
                assert_eq!(a.1.into_data(), b.1.into_data());
                assert_eq!(a.2.into_data(), b.2.into_data());
            }
            (found, expected) => assert_eq!(found.err(), expected.err()),
        }
    }

    #[test]
    fn what_is_split_joins_again() {
        check(8, 1, Ok(()));
        check(8, 2, Ok(()));
        check(8, 8, Ok(()));
    }

    #[test]
    fn rows_must_divide() {
        check(8, 3, Err(SplitError::NotDivisible { rows: 8, microbatches: 3 }));
        check(8, 0, Err(SplitError::NotDivisible { rows: 8, microbatches: 0 }));
        check(4, 8, Err(SplitError::NotDivisible { rows: 4, microbatches: 8 }));
    }

    #[test]
    fn rows_must_agree() {
        let device = Device::flex();
        let pair = pack((Tensor::<2>::zeros([4, 1], &device), Tensor::<2>::zeros([2, 1], &device)));
        let error = split(&pair, 2).expect_err("four rows and two");
        assert_eq!(error, SplitError::RowsDiffer { tensor: 1, rows: 2, expected: 4 });
        assert_eq!(split(&[], 2).expect_err("nothing"), SplitError::Empty);
    }

    #[test]
    fn outputs_that_differ_do_not_join() {
        let device = Device::flex();
        let parts =
            vec![pack(Tensor::<2>::zeros([2, 3], &device)), pack(Tensor::<2>::zeros([2, 4], &device))];
        assert!(matches!(merge(parts), Err(SplitError::Unjoinable { tensor: 0, microbatch: 1, .. })));
    }
}
