//! How a batch is split into microbatches: the dimension of each tensor, and the sizes of the parts.
//!
//! A [`SplitRule`] is usually a number of microbatches, which have equally many rows (dimension 0).
//! Specifications say otherwise for each tensor; they have the nesting of the boundary: a tuple of
//! specifications for a tuple of tensors.
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use pipewright::tensor::{pack, unpack};
//! use pipewright::batch::{Merge, SplitRule, SplitSpec, merge_by, split};
//!
//! let device = Device::flex();
//! // Time first: the batch is dimension 1. The table is the same for every microbatch.
//! let batch = (Tensor::<3>::ones([16, 8, 4], &device), Tensor::<2>::ones([4, 4], &device));
//! let rule = SplitRule::equal(4).inputs((SplitSpec::Along(1), SplitSpec::Replicate));
//! let parts = split(&pack(batch), rule)?;
//! let (first, table): (Tensor<3>, Tensor<2>) = unpack(parts[0].clone())?;
//! assert_eq!((first.dims(), table.dims()), ([16, 2, 4], [4, 4]));
//!
//! let merged = merge_by(parts, (Merge::Along(1), Merge::Mean))?;
//! let (whole, mean): (Tensor<3>, Tensor<2>) = unpack(merged.into_iter().flatten().collect())?;
//! assert_eq!((whole.dims(), mean.dims()), ([16, 8, 4], [4, 4]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use pipewright_schedule::mesh::{least_rows_of_shares, rows_of_shares};
use pipewright_schedule::words::counted;

use crate::tensor::{Value, Values};

/// Why a batch cannot be split, or outputs cannot be joined.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SplitError(pub(super) String);

pipewright_schedule::message_as_debug!(SplitError);

/// How a tensor of a batch is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitSpec {
    /// Split along a dimension.
    Along(usize),
    /// Not split: every microbatch gets the whole tensor.
    Replicate,
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

/// How a batch is split into microbatches. A number converts to [`SplitRule::equal`].
///
/// A size is the size of the dimension in which a tensor is split. All tensors of a batch have the same
/// sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplitRule {
    microbatches: u32,
    sizes: Sizes,
    inputs: Option<Vec<SplitSpec>>,
    targets: Option<Vec<SplitSpec>>,
}

/// The sizes of the microbatches of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Sizes {
    Equal,
    LastSmaller,
    Balanced,
    /// As many runs of equally many microbatches as there are shares; the sizes have the ratio of the shares.
    Shares(Vec<u32>),
}

impl SplitRule {
    /// Returns the rule for microbatches of equal size. A batch that does not divide evenly is an error.
    pub const fn equal(microbatches: u32) -> Self {
        Self::new(microbatches, Sizes::Equal)
    }

    /// Returns the rule for batches that do not divide evenly: every microbatch but the last has the size of
    /// the batch divided by `microbatches`, rounded up.
    pub const fn uneven(microbatches: u32) -> Self {
        Self::new(microbatches, Sizes::LastSmaller)
    }

    /// Returns the rule with the sizes of PyTorch's `tensor_split`: the sizes of two microbatches differ by
    /// at most one, and larger ones come first. So 5 rows in 4 microbatches are 2, 1, 1 and 1.
    pub const fn balanced(microbatches: u32) -> Self {
        Self::new(microbatches, Sizes::Balanced)
    }

    /// Returns the rule for replicas of unequal speed: the microbatches of replica `r` have a part of the batch in
    /// proportion to `shares[r]`, divided equally among them. So 16 rows in 4 microbatches with the shares 3 and 1
    /// are 6, 6, 2 and 2. A batch that does not divide so is an error. Without shares, it is [`SplitRule::equal`].
    pub fn shared(microbatches: u32, shares: &[u32]) -> Self {
        if shares.is_empty() {
            return Self::equal(microbatches);
        }
        Self::new(microbatches, Sizes::Shares(shares.to_vec()))
    }

    const fn new(microbatches: u32, sizes: Sizes) -> Self {
        Self { microbatches, sizes, inputs: None, targets: None }
    }

    /// Sets the [`SplitSpec`] of each input, in the nesting of the inputs. Default: along dimension 0.
    pub fn inputs(self, specs: impl Nested<SplitSpec>) -> Self {
        Self { inputs: Some(flat(specs)), ..self }
    }

    /// Sets the [`SplitSpec`] of each tensor of the targets, in the nesting of the targets. Default: along
    /// dimension 0.
    pub fn targets(self, specs: impl Nested<SplitSpec>) -> Self {
        Self { targets: Some(flat(specs)), ..self }
    }

    /// Splits inputs, and returns how each of them is split.
    pub(super) fn split_inputs(
        &self,
        tensors: &[Value],
    ) -> Result<(Vec<Values>, Vec<SplitSpec>), SplitError> {
        self.split_by(self.inputs.as_deref(), tensors)
    }

    /// Splits targets, and returns how each of their tensors is split.
    pub(super) fn split_targets(
        &self,
        tensors: &[Value],
    ) -> Result<(Vec<Values>, Vec<SplitSpec>), SplitError> {
        self.split_by(self.targets.as_deref(), tensors)
    }

    /// Splits tensors. If none is split, every microbatch gets all of them.
    fn split_by(
        &self,
        specs: Option<&[SplitSpec]>,
        tensors: &[Value],
    ) -> Result<(Vec<Values>, Vec<SplitSpec>), SplitError> {
        let specs = specs.map_or_else(|| by_rows(tensors), <[_]>::to_vec);
        check_count(&specs, tensors.len())?;
        let parts = match common_size(tensors, &specs)? {
            Some(rows) => cut(tensors, &specs, &self.microbatch_sizes(rows)?),
            None => vec![tensors.to_vec(); self.microbatches as usize],
        };
        Ok((parts, specs))
    }

    /// Returns the size of each microbatch of a batch of this size.
    fn microbatch_sizes(&self, rows: usize) -> Result<Vec<usize>, SplitError> {
        let (microbatches, count) = (self.microbatches, self.microbatches as usize);
        let too_few = |size: usize| {
            let (rows, wanted) = (counted(rows, "row"), counted(microbatches, "microbatch"));
            SplitError(format!(
                "{rows} make runs of {size}, and with them fewer than {wanted}: give more rows or fewer microbatches"
            ))
        };
        match &self.sizes {
            Sizes::Equal if rows == 0 || rows.checked_rem(count) != Some(0) => {
                let (rows, wanted) = (counted(rows, "row"), counted(microbatches, "microbatch"));
                Err(SplitError(format!(
                    "{rows} do not divide into {wanted}: give a multiple of {microbatches} rows, or another number of \
                     microbatches"
                )))
            }
            Sizes::Equal => Ok(vec![rows / count; count]),
            Sizes::Shares(shares) => sizes_by_share(rows, count, shares),
            Sizes::LastSmaller => {
                let size = rows.div_ceil(count.max(1)).max(1);
                if rows.div_ceil(size) != count {
                    return Err(too_few(size));
                }
                Ok((0..count).map(|index| size.min(rows - index * size)).collect())
            }
            Sizes::Balanced if rows < count || count == 0 => Err(too_few(1)),
            Sizes::Balanced => {
                Ok((0..count).map(|index| rows / count + usize::from(index < rows % count)).collect())
            }
        }
    }
}

impl From<u32> for SplitRule {
    fn from(microbatches: u32) -> Self {
        Self::equal(microbatches)
    }
}

/// Splits the tensors of a batch as a rule splits inputs. The storage is shared, not copied.
///
/// # Errors
/// When the batch is empty, there are more or fewer specifications than tensors, a tensor lacks the dimension
/// along which it is split, sizes differ, or the rule does not accept the size of the batch.
pub fn split(batch: &[Value], rule: impl Into<SplitRule>) -> Result<Vec<Values>, SplitError> {
    if batch.is_empty() {
        return Err(no_tensor());
    }
    Ok(rule.into().split_inputs(batch)?.0)
}

/// Returns the sizes of microbatches in the ratio of the shares of their replicas.
fn sizes_by_share(rows: usize, count: usize, shares: &[u32]) -> Result<Vec<usize>, SplitError> {
    let each = count / shares.len();
    let is_even = each > 0 && each * shares.len() == count;
    let of_one_each = if is_even { Some(rows / each).filter(|of_one| of_one * each == rows) } else { None };
    let Some(sizes) = of_one_each.and_then(|of_one| rows_of_shares(of_one as u64, shares)) else {
        return Err(not_shared(rows, count, shares, is_even.then_some(each)));
    };
    Ok(sizes.into_iter().flat_map(|size| std::iter::repeat_n(size as usize, each)).collect())
}

/// Returns the error of rows that shares do not divide. Each replica has `each` microbatches; `None` if the replicas cannot
/// have equally many.
fn not_shared(rows: usize, count: usize, shares: &[u32], each: Option<usize>) -> SplitError {
    let advice = match each {
        _ if shares.contains(&0) => "give each replica a share from 1".to_owned(),
        None => format!("use a multiple of {} microbatches, the number of replicas", shares.len()),
        Some(each) => {
            let step = least_rows_of_shares(shares).saturating_mul(each as u64);
            let next = (rows as u64).div_ceil(step).max(1).saturating_mul(step);
            format!("give a multiple of {step} rows, such as {next}, or other shares")
        }
    };
    let (rows, wanted) = (counted(rows, "row"), counted(count, "microbatch"));
    let shares = shares.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    SplitError(format!(
        "{rows} do not divide into {wanted} with the shares {shares} of their replicas: {advice}"
    ))
}

/// Returns the specifications that split tensors along dimension 0.
pub(super) fn by_rows(tensors: &[Value]) -> Vec<SplitSpec> {
    vec![SplitSpec::Along(0); tensors.len()]
}

/// Returns specifications, first to last.
pub(super) fn flat<S>(specs: impl Nested<S>) -> Vec<S> {
    let mut flat = Vec::new();
    specs.flatten(&mut flat);
    flat
}

/// Returns an error if there is another number of specifications than of tensors.
pub(super) fn check_count<S>(specs: &[S], tensors: usize) -> Result<(), SplitError> {
    if specs.len() == tensors {
        return Ok(());
    }
    let (specs, tensors) = (counted(specs.len(), "spec"), counted(tensors, "tensor"));
    Err(SplitError(format!("{specs} for {tensors}: give one for each, in the nesting of the tensors")))
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

/// Returns the size that all tensors have along the dimension in which they are split; `None` if none is
/// split.
fn common_size(batch: &[Value], specs: &[SplitSpec]) -> Result<Option<usize>, SplitError> {
    let mut expected = None;
    for (tensor, (value, spec)) in batch.iter().zip(specs).enumerate() {
        let SplitSpec::Along(dimension) = *spec else { continue };
        let rows = size_along(tensor, value, dimension)?;
        let expected = *expected.get_or_insert(rows);
        if rows != expected {
            let rows = counted(rows, "row");
            return Err(SplitError(format!(
                "tensor {tensor} has {rows}, tensor 0 has {expected}: all tensors of a batch have the same rows"
            )));
        }
    }
    Ok(expected)
}

/// Returns the error of a batch without tensors.
pub(super) fn no_tensor() -> SplitError {
    SplitError("the batch holds no tensor".to_owned())
}

/// Returns the size of a tensor along the dimension in which it is split or joined.
pub(super) fn size_along(tensor: usize, value: &Value, dimension: usize) -> Result<usize, SplitError> {
    let shape = value.shape();
    shape.as_slice().get(dimension).copied().ok_or_else(|| {
        SplitError(format!(
            "tensor {tensor} of shape {:?} has no dimension {dimension} to split or join along",
            shape.as_slice()
        ))
    })
}

/// Returns the size of each microbatch along the first dimension in which a tensor is split; 1 if none is
/// split.
pub(super) fn sizes_of(parts: &[Values], specs: &[SplitSpec]) -> Vec<usize> {
    let first = specs.iter().enumerate().find_map(|(tensor, spec)| match *spec {
        SplitSpec::Along(dimension) => Some((tensor, dimension)),
        SplitSpec::Replicate => None,
    });
    let size = |values: &Values| first.map_or(1, |(tensor, dimension)| values[tensor].shape()[dimension]);
    parts.iter().map(size).collect()
}
