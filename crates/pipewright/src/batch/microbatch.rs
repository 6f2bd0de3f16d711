//! Splits a batch into microbatches along dimension 0, and joins microbatches.

use super::error::SplitError;
use super::split_spec::by_rows;
use crate::batch::{Merge, common_size, merge_by, split_by};
use crate::tensor::{Value, Values};

/// Splits every tensor of a batch into equal runs of rows: microbatch `k` of `m` holds rows `k * n / m` up to
/// `(k + 1) * n / m`. The storage is shared, not copied.
///
/// # Errors
/// When the batch is empty, its tensors have different numbers of rows, or the rows do not divide evenly.
pub fn split(batch: &[Value], microbatches: u32) -> Result<Vec<Values>, SplitError> {
    let specs = by_rows(batch);
    let rows = common_size(batch, &specs)?.ok_or(SplitError::Empty)?;
    if rows > 0 && rows.checked_rem(microbatches as usize) == Some(0) {
        split_by(batch, specs, microbatches)
    } else {
        Err(SplitError::NotDivisible { rows, microbatches })
    }
}

/// Splits a batch whose rows need not divide evenly: every microbatch but the last has `rows / microbatches` rows,
/// rounded up.
///
/// # Errors
/// When the batch is empty, its tensors have different numbers of rows, or too few rows are left for the last
/// microbatches.
pub fn split_uneven(batch: &[Value], microbatches: u32) -> Result<Vec<Values>, SplitError> {
    if batch.is_empty() { Err(SplitError::Empty) } else { split_by(batch, by_rows(batch), microbatches) }
}

/// Joins the outputs of all microbatches along dimension 0; the inverse of [`split`].
///
/// # Errors
/// When the tensors of the microbatches differ in more than their number of rows.
pub fn merge(microbatches: Vec<Values>) -> Result<Values, SplitError> {
    let specs = vec![Merge::Along(0); microbatches.first().map_or(0, Vec::len)];
    Ok(merge_by(microbatches, specs)?.concat())
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Bool, Device, Int, Tensor};

    use super::*;
    use crate::tensor::{pack, unpack};

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
    fn splitting_and_joining_are_inverse() {
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
