//! How each tensor of a batch is split into microbatches, and how outputs are joined.
//!
//! Without a specification, tensors are split into runs of rows and joined again ([`split`](super::split)). A
//! specification says otherwise for each tensor; it has the nesting of the boundary: a tuple of specs for a tuple of
//! tensors.
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use pipewright::tensor::{pack, unpack};
//! use pipewright::batch::{SplitSpec, Merge, merge_by, split_by};
//!
//! let device = Device::flex();
//! // Time first: the batch is dimension 1. The table is the same for every microbatch.
//! let batch = (Tensor::<3>::ones([16, 8, 4], &device), Tensor::<2>::ones([4, 4], &device));
//! let parts = split_by(&pack(batch), (SplitSpec::Along(1), SplitSpec::Replicate), 4)?;
//! let (first, table): (Tensor<3>, Tensor<2>) = unpack(parts[0].clone())?;
//! assert_eq!((first.dims(), table.dims()), ([16, 2, 4], [4, 4]));
//!
//! let merged = merge_by(parts, (Merge::Along(1), Merge::Mean))?;
//! let (whole, mean): (Tensor<3>, Tensor<2>) = unpack(merged.into_iter().flatten().collect())?;
//! assert_eq!((whole.dims(), mean.dims()), ([16, 8, 4], [4, 4]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use burn::tensor::Tensor;

use burn::backend::Dispatch;
use burn::backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};

use super::error::SplitError;
use crate::tensor::{Value, ValueKind, Values};

/// How a tensor of a batch is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitSpec {
    /// Split along a dimension.
    Along(usize),
    /// Not split: every microbatch gets the whole tensor.
    Replicate,
}

/// How an output's microbatches are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merge {
    /// Joined along a dimension.
    Along(usize),
    /// The mean of float tensors of one shape; each microbatch has the same weight.
    Mean,
    /// Not joined: a list in microbatch order.
    List,
}

/// Specs in the nesting of a boundary: one spec, or a tuple or vector of nested specs.
pub trait Nested<S> {
    /// Appends the specs, first to last.
    fn flatten(self, into: &mut Vec<S>);
}

impl Nested<Self> for SplitSpec {
    fn flatten(self, into: &mut Vec<Self>) {
        into.push(self);
    }
}

impl Nested<Self> for Merge {
    fn flatten(self, into: &mut Vec<Self>) {
        into.push(self);
    }
}

impl<S> Nested<S> for () {
    fn flatten(self, _into: &mut Vec<S>) {}
}

impl<S, N: Nested<S>> Nested<S> for Vec<N> {
    fn flatten(self, into: &mut Vec<S>) {
        self.into_iter().for_each(|spec| spec.flatten(into));
    }
}

macro_rules! nested_tuple {
    ($($name:ident),+) => {
        impl<S, $($name: Nested<S>),+> Nested<S> for ($($name,)+) {
            fn flatten(self, into: &mut Vec<S>) {
                #[expect(non_snake_case, reason = "the type parameters name the tuple's fields")]
                let ($($name,)+) = self;
                $($name.flatten(into);)+
            }
        }
    };
}

nested_tuple!(A);
nested_tuple!(A, B);
nested_tuple!(A, B, C);
nested_tuple!(A, B, C, D);
nested_tuple!(A, B, C, D, E);
nested_tuple!(A, B, C, D, E, F);

/// Returns the specs that split tensors along dimension 0.
pub(super) fn by_rows(tensors: &[Value]) -> Vec<SplitSpec> {
    vec![SplitSpec::Along(0); tensors.len()]
}

/// Returns the specs of this number of tensors, first to last.
pub(super) fn flat<S>(specs: impl Nested<S>, tensors: usize) -> Result<Vec<S>, SplitError> {
    let mut flat = Vec::new();
    specs.flatten(&mut flat);
    if flat.len() == tensors { Ok(flat) } else { Err(SplitError::Specs { specs: flat.len(), tensors }) }
}

/// Splits each tensor of a batch as its spec says. All tensors have the same size along the dimension in which they are
/// split; every microbatch but the last has that size divided by `microbatches`, rounded up. Storage is shared, not
/// copied.
///
/// # Errors
/// When the number of specs is not that of the tensors, a tensor lacks the dimension, sizes differ, or too few rows are
/// left for the last microbatches.
pub fn split_by(
    batch: &[Value],
    specs: impl Nested<SplitSpec>,
    microbatches: u32,
) -> Result<Vec<Values>, SplitError> {
    let specs = flat(specs, batch.len())?;
    let Some(rows) = common_size(batch, &specs)? else { return Ok(copies(batch, microbatches)) };
    let size = rows.div_ceil(microbatches.max(1) as usize).max(1);
    if rows.div_ceil(size) != microbatches as usize {
        return Err(SplitError::TooFewRows { rows, microbatches, size });
    }
    let end = |microbatch: usize| (microbatch * size).min(rows);
    let sizes: Vec<usize> = (0..microbatches as usize).map(|place| end(place + 1) - end(place)).collect();
    Ok(cut(batch, &specs, &sizes))
}

/// As [`split_by`], with the sizes of PyTorch's `tensor_split`: the sizes of two microbatches differ by at most one row, and
/// larger ones come first. So 5 rows in 4 microbatches are 2, 1, 1 and 1.
///
/// # Errors
/// As [`split_by`], and when there are fewer rows than microbatches.
pub fn tensor_split(
    batch: &[Value],
    specs: impl Nested<SplitSpec>,
    microbatches: u32,
) -> Result<Vec<Values>, SplitError> {
    let specs = flat(specs, batch.len())?;
    let Some(rows) = common_size(batch, &specs)? else { return Ok(copies(batch, microbatches)) };
    let parts = microbatches as usize;
    if rows < parts || parts == 0 {
        return Err(SplitError::TooFewRows { rows, microbatches, size: 1 });
    }
    let sizes: Vec<usize> =
        (0..parts).map(|place| rows / parts + usize::from(place < rows % parts)).collect();
    Ok(cut(batch, &specs, &sizes))
}

/// Cuts tensors into runs of these sizes, which add up to the size of the tensors.
pub(super) fn cut(batch: &[Value], specs: &[SplitSpec], sizes: &[usize]) -> Vec<Values> {
    let mut start = 0;
    let part = |&size: &usize| {
        let range = start..start + size;
        start = range.end;
        let cut = |(value, spec): (&Value, &SplitSpec)| match *spec {
            SplitSpec::Along(dimension) => value.narrow(dimension, range.start, range.end),
            SplitSpec::Replicate => value.clone(),
        };
        batch.iter().zip(specs).map(cut).collect()
    };
    sizes.iter().map(part).collect()
}

/// Returns the whole tensors for each microbatch.
fn copies(batch: &[Value], microbatches: u32) -> Vec<Values> {
    vec![batch.to_vec(); microbatches as usize]
}

/// Returns the size that all tensors have along the dimension in which they are split; `None` if none is split.
pub(crate) fn common_size(batch: &[Value], specs: &[SplitSpec]) -> Result<Option<usize>, SplitError> {
    let mut expected = None;
    for (tensor, (value, spec)) in batch.iter().zip(specs).enumerate() {
        let SplitSpec::Along(dimension) = *spec else { continue };
        let shape = value.shape().to_vec();
        let no_dimension = || SplitError::NoDimension { tensor, dimension, shape: shape.clone() };
        let rows = *shape.get(dimension).ok_or_else(no_dimension)?;
        let expected = *expected.get_or_insert(rows);
        if rows != expected {
            return Err(SplitError::RowsDiffer { tensor, rows, expected });
        }
    }
    Ok(expected)
}

/// Joins the microbatches' outputs as the specs say. Each output becomes one tensor, or one per microbatch with
/// [`Merge::List`].
///
/// # Errors
/// When the number of specs is not that of the outputs, or tensors that are joined do not match.
pub fn merge_by(microbatches: Vec<Values>, specs: impl Nested<Merge>) -> Result<Vec<Values>, SplitError> {
    let tensors = microbatches.first().map_or(0, Vec::len);
    let specs = flat(specs, tensors)?;
    let mut columns: Vec<Values> = vec![Values::new(); tensors];
    for (microbatch, values) in microbatches.into_iter().enumerate() {
        if values.len() != tensors {
            let (found, expected) = (values.len(), tensors);
            return Err(SplitError::TensorsDiffer { microbatch, found, expected });
        }
        columns.iter_mut().zip(values).for_each(|(column, value)| column.push(value));
    }
    let joined = columns.into_iter().zip(specs).enumerate();
    joined.map(|(tensor, (column, spec))| merge_one(tensor, column, spec)).collect()
}

fn merge_one(tensor: usize, column: Values, spec: Merge) -> Result<Values, SplitError> {
    let dimension = match spec {
        Merge::List => return Ok(column),
        Merge::Along(dimension) => Some(dimension),
        Merge::Mean => None,
    };
    check_alike(tensor, &column, dimension)?;
    match dimension {
        Some(dimension) => Ok(vec![concatenate(column, dimension)]),
        None if column[0].kind() != ValueKind::Float => {
            Err(SplitError::NoMean { tensor, kind: column[0].kind() })
        }
        None => Ok(vec![mean(column)]),
    }
}

/// Checks that tensors agree in element type and in every dimension but the one along which they are joined.
pub(super) fn check_alike(
    tensor: usize,
    column: &[Value],
    dimension: Option<usize>,
) -> Result<(), SplitError> {
    let without = |value: &Value| {
        let mut shape = value.shape().to_vec();
        if let Some(size) = dimension.and_then(|dimension| shape.get_mut(dimension)) {
            *size = 0;
        }
        (shape, value.dtype())
    };
    let expected = column[0].shape().to_vec();
    if let Some(dimension) = dimension.filter(|&dimension| dimension >= expected.len()) {
        return Err(SplitError::NoDimension { tensor, dimension, shape: expected });
    }
    match column.iter().position(|value| without(value) != without(&column[0])) {
        Some(microbatch) => {
            let found = column[microbatch].shape().to_vec();
            Err(SplitError::Unjoinable { tensor, microbatch, found, expected })
        }
        None => Ok(()),
    }
}

/// Adds in microbatch order, so that the same outputs have the same mean to the bit.
fn mean(column: Values) -> Value {
    let count = column.len() as f64;
    // The number of dimensions does not matter here; 1 is arbitrary.
    let tensors = column.into_iter().map(|value| Tensor::<1>::from_dispatch(value.into_dispatch()));
    let sum = tensors.reduce(|sum, tensor| sum + tensor).expect("a column has a tensor a microbatch");
    Value::of(sum / count)
}

/// Concatenates tensors that agree in all other dimensions.
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
    use burn::tensor::{Device, Int};

    use super::*;
    use crate::tensor::{pack, unpack};

    type Nest = (Tensor<2>, (Tensor<3>, Tensor<1, Int>));

    fn batch(rows: usize) -> Values {
        let device = Device::flex();
        let numbers = |count: usize| Tensor::<1, Int>::arange(0..count as i64, &device);
        let nest: Nest = (
            numbers(rows * 2).float().reshape([rows, 2]),
            (numbers(3 * rows).float().reshape([3, rows, 1]), numbers(5)),
        );
        pack(nest)
    }

    const SPECS: (SplitSpec, (SplitSpec, SplitSpec)) =
        (SplitSpec::Along(0), (SplitSpec::Along(1), SplitSpec::Replicate));

    fn check(rows: usize, microbatches: u32) {
        let parts = split_by(&batch(rows), SPECS, microbatches).expect("it splits");
        assert_eq!(parts.len(), microbatches as usize);
        let merged = merge_by(parts, (Merge::Along(0), (Merge::Along(1), Merge::List))).expect("they join");
        let expected: Nest = unpack(batch(rows)).expect("the nest");
        let [a, b, c] = <[Values; 3]>::try_from(merged).expect("three outputs");
        let (a, b): (Tensor<2>, Tensor<3>) = (unpack(a).expect("one"), unpack(b).expect("one"));
        assert_eq!((a.into_data(), b.into_data()), (expected.0.into_data(), expected.1.0.into_data()));
        assert_eq!(c.len(), microbatches as usize);
        let each: Vec<Tensor<1, Int>> =
            c.into_iter().map(|value| unpack(vec![value]).expect("ids")).collect();
        assert!(each.into_iter().all(|ids| ids.into_data() == expected.1.1.clone().into_data()));
    }

    #[test]
    fn splitting_along_a_dimension_is_undone_by_joining() {
        check(8, 4);
        check(7, 4);
        check(8, 1);
    }

    fn check_tensor_split(rows: usize, microbatches: u32, expected: &[usize]) {
        let parts = tensor_split(&batch(rows), SPECS, microbatches).expect("it splits");
        let sizes: Vec<usize> = parts.iter().map(|part| part[0].shape()[0]).collect();
        assert_eq!(sizes, expected, "{rows} rows in {microbatches}");
        assert!(parts.iter().all(|part| part[1].shape()[1] == part[0].shape()[0] && part[2].shape()[0] == 5));
        let merged = merge_by(parts, (Merge::Along(0), (Merge::Along(1), Merge::List))).expect("they join");
        let [a, b, _] = <[Values; 3]>::try_from(merged).expect("three outputs");
        let (a, b): (Tensor<2>, Tensor<3>) = (unpack(a).expect("one"), unpack(b).expect("one"));
        let expected: Nest = unpack(batch(rows)).expect("the nest");
        assert_eq!((a.into_data(), b.into_data()), (expected.0.into_data(), expected.1.0.into_data()));
    }

    #[test]
    fn sizes_are_those_of_tensor_split() {
        // As `[len(part) for part in torch.tensor_split(torch.arange(rows), parts)]`.
        check_tensor_split(5, 4, &[2, 1, 1, 1]);
        check_tensor_split(9, 4, &[3, 2, 2, 2]);
        check_tensor_split(8, 4, &[2, 2, 2, 2]);
        check_tensor_split(11, 4, &[3, 3, 3, 2]);
        check_tensor_split(4, 4, &[1, 1, 1, 1]);
        let few = tensor_split(&batch(3), SPECS, 4).err();
        assert_eq!(few, Some(SplitError::TooFewRows { rows: 3, microbatches: 4, size: 1 }));
    }

    #[test]
    fn a_mean_is_taken_in_order() {
        let device = Device::flex();
        let part = |x: f32| pack(Tensor::<1>::from_floats([x, 1.0], &device));
        let merged = merge_by(vec![part(1.0), part(2.0), part(6.0)], Merge::Mean).expect("a mean");
        let mean: Tensor<1> = unpack(merged.concat()).expect("one tensor");
        assert_eq!(mean.into_data(), Tensor::<1>::from_floats([3.0, 1.0], &device).into_data());
    }

    #[test]
    fn specs_that_do_not_fit_are_named() {
        let split = |specs: Vec<SplitSpec>, microbatches| split_by(&batch(8), specs, microbatches).err();
        let one = vec![SplitSpec::Replicate];
        assert_eq!(split(one, 2), Some(SplitError::Specs { specs: 1, tensors: 3 }));
        let missing = vec![SplitSpec::Along(2), SplitSpec::Replicate, SplitSpec::Replicate];
        let expected = SplitError::NoDimension { tensor: 0, dimension: 2, shape: vec![8, 2] };
        assert_eq!(split(missing, 2), Some(expected));
        let unlike = vec![SplitSpec::Along(0), SplitSpec::Along(0), SplitSpec::Replicate];
        assert_eq!(split(unlike, 2), Some(SplitError::RowsDiffer { tensor: 1, rows: 3, expected: 8 }));
        let few = vec![SplitSpec::Along(0), SplitSpec::Along(1), SplitSpec::Replicate];
        assert_eq!(split(few, 5), Some(SplitError::TooFewRows { rows: 8, microbatches: 5, size: 2 }));
        let parts = split_by(&batch(8), SPECS, 2).expect("it splits");
        let error = merge_by(parts.clone(), (Merge::Along(0), (Merge::Along(0), Merge::Mean))).err();
        assert_eq!(error, Some(SplitError::NoMean { tensor: 2, kind: ValueKind::Int }));
        let error = merge_by(parts, (Merge::Mean, (Merge::Along(3), Merge::List))).err();
        let expected = SplitError::NoDimension { tensor: 1, dimension: 3, shape: vec![3, 4, 1] };
        assert_eq!(error, Some(expected));
    }
}
