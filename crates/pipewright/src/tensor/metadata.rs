//! Shapes and element types of the tensors that cross a boundary, checked on both sides.
//!
//! Messages describe their own tensors, so the runtime does not need metadata to receive them. The runtime compares the
//! tensors at a boundary with the metadata. If they differ, the error names both stages. Without the check, a layer
//! would fail.
//!
//! [`Metadata::Static`] is given in advance. [`Metadata::Dynamic`] is taken from the first microbatch that crosses the
//! boundary; there is no probe run, so no gradient, buffer or random state changes.
//!
//! ```
//! use burn::tensor::DType;
//! use pipewright::tensor::{Dim, Metadata, TensorSpec};
//!
//! // Stage 1 takes hidden rows [rows, 16, 64] and ids [rows, any length].
//! let hidden = TensorSpec::of_rows(DType::F32, [16, 64]);
//! let ids = TensorSpec { dtype: DType::I64, shape: vec![Dim::Any, Dim::Any] };
//! assert_eq!(ids.to_string(), "I64 [_, _]");
//! let metadata = Metadata::Static { stages: vec![vec![hidden, ids]] };
//! assert!(metadata.fingerprint().starts_with("static "));
//! ```

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use burn::tensor::DType;
use pipewright_schedule::{Microbatch, StageIndex};

use super::value::Value;
use crate::ids::WorldRank;

/// How the shapes at the boundaries are known. All ranks of a pipeline must use the same metadata.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Metadata {
    /// Taken from the first microbatch.
    Dynamic {
        /// Dimensions whose size may differ between microbatches.
        free: Vec<usize>,
    },
    /// Given in advance.
    Static {
        /// The inputs of stages 1, 2, ..: the tensors from the previous stage, then those of direct skip connections.
        stages: Vec<Vec<TensorSpec>>,
    },
}

impl Default for Metadata {
    /// Dynamic; the number of rows may differ.
    fn default() -> Self {
        Self::Dynamic { free: vec![0] }
    }
}

impl Metadata {
    /// Returns a text that is equal for equal metadata in every process of one build. Ranks compare it before they
    /// start.
    pub fn fingerprint(&self) -> String {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        let name = match self {
            Self::Dynamic { .. } => "dynamic",
            Self::Static { .. } => "static",
        };
        format!("{name} {:016x}", hasher.finish())
    }

    /// Returns the dimensions whose size may differ between microbatches.
    fn free(&self) -> &[usize] {
        match self {
            Self::Dynamic { free } => free,
            Self::Static { .. } => &[],
        }
    }

    /// Returns the inputs of `stage` if they were given.
    fn of_stage(&self, stage: StageIndex) -> Option<Vec<TensorSpec>> {
        match self {
            Self::Dynamic { .. } => None,
            Self::Static { stages } => stages.get(stage.index().checked_sub(1)?).cloned(),
        }
    }
}

/// When boundaries are checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CheckMetadata {
    /// In the first step.
    #[default]
    FirstStep,
    /// In every step.
    Always,
}

/// The size of a dimension, or any size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dim {
    /// This size.
    Fixed(usize),
    /// Any size; it may differ between microbatches.
    Any,
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(size) => size.fmt(f),
            Self::Any => f.write_str("_"),
        }
    }
}

/// Shape and element type of one tensor of a boundary.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorSpec {
    /// Element type.
    pub dtype: DType,
    /// Every dimension, the rows first.
    pub shape: Vec<Dim>,
}

impl TensorSpec {
    /// Describes a tensor with any number of rows; `row` is the shape of one row.
    pub fn of_rows(dtype: DType, row: impl IntoIterator<Item = usize>) -> Self {
        let row = row.into_iter().map(Dim::Fixed);
        Self { dtype, shape: std::iter::once(Dim::Any).chain(row).collect() }
    }

    fn of(value: &Value, free: &[usize]) -> Self {
        let dim = |(place, &size): (usize, &usize)| match free.contains(&place) {
            true => Dim::Any,
            false => Dim::Fixed(size),
        };
        Self { dtype: value.dtype(), shape: value.shape().iter().enumerate().map(dim).collect() }
    }

    fn fits(&self, value: &Value) -> bool {
        let shape = value.shape();
        let fits = |(dim, &size): (&Dim, &usize)| matches!(dim, Dim::Any) || *dim == Dim::Fixed(size);
        // Back ends store booleans in different types.
        (self.dtype == value.dtype() || self.dtype.is_bool() && value.dtype().is_bool())
            && self.shape.len() == shape.num_dims()
            && self.shape.iter().zip(shape.iter()).all(fits)
    }
}

impl fmt::Display for TensorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shape: Vec<String> = self.shape.iter().map(Dim::to_string).collect();
        write!(f, "{:?} [{}]", self.dtype, shape.join(", "))
    }
}

/// One side of a boundary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side {
    /// The stage.
    pub stage: StageIndex,
    /// Its rank.
    pub rank: WorldRank,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stage {} on rank {}", self.stage, self.rank)
    }
}

/// The two sides of a boundary disagree.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "microbatch {microbatch}: {mismatch}: {from} sent {sent}, {to} expects {expected}; if a dimension may differ between \
     microbatches, name it in `PipelineConfig::metadata`"
)]
pub struct MetadataError {
    /// The microbatch that crosses it.
    pub microbatch: Microbatch,
    /// What differs.
    pub mismatch: Mismatch,
    /// The side that sent.
    pub from: Side,
    /// A description of the tensors that it sent.
    pub sent: String,
    /// The side that receives.
    pub to: Side,
    /// A description of the tensors that it expects.
    pub expected: String,
}

/// What differs between the sides of a boundary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// The number of tensors.
    Count,
    /// The tensor at this index.
    Tensor(usize),
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count => f.write_str("the numbers of tensors differ"),
            Self::Tensor(place) => write!(f, "tensor {place} differs"),
        }
    }
}

/// The metadata of a stage's two boundaries, as the stage sees it.
#[derive(Clone, Debug)]
pub(crate) struct Boundaries {
    metadata: Metadata,
    check: CheckMetadata,
    stage: StageIndex,
    /// Microbatches of a step.
    microbatches: usize,
    takes: Known,
    gives: Known,
}

/// One boundary, seen from one side.
#[derive(Clone, Debug, Default)]
struct Known {
    specs: Option<Vec<TensorSpec>>,
    /// Microbatches that were checked.
    seen: usize,
}

impl Boundaries {
    pub(crate) fn new(
        metadata: &Metadata,
        check: CheckMetadata,
        stage: StageIndex,
        microbatches: u32,
    ) -> Self {
        let of_next = metadata.of_stage(StageIndex::new(stage.get() + 1));
        let takes = Known { specs: metadata.of_stage(stage), seen: 0 };
        let gives = Known { specs: of_next, seen: 0 };
        let (metadata, microbatches) = (metadata.clone(), microbatches as usize);
        Self { metadata, check, stage, microbatches, takes, gives }
    }

    /// Forgets metadata that a failed step has provided.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(&self.metadata, self.check, self.stage, self.microbatches as u32);
    }

    /// Checks the inputs of the stage: all tensors of the boundary.
    pub(crate) fn check_inputs(&mut self, values: &[Value]) -> Result<(), TensorMismatch> {
        let Some(specs) = self.takes.specs_to_check(values, &self.metadata, self.check, self.microbatches)
        else {
            return Ok(());
        };
        if values.len() != specs.len() {
            let count = |count: usize| format!("{count} tensor(s)");
            let (sent, expected) = (count(values.len()), count(specs.len()));
            return Err(TensorMismatch { mismatch: Mismatch::Count, sent, expected });
        }
        compare(values, specs)
    }

    /// Checks the outputs for the next stage, without direct skip connections from other stages.
    pub(crate) fn check_outputs(&mut self, values: &[Value]) -> Result<(), TensorMismatch> {
        let specs = self.gives.specs_to_check(values, &self.metadata, self.check, self.microbatches);
        specs.map_or(Ok(()), |specs| compare(values, specs))
    }
}

impl Known {
    /// Returns the specification to compare a microbatch with, or `None` if the boundary needs no further checks.
    /// Without given metadata, the first microbatch provides it.
    fn specs_to_check(
        &mut self,
        values: &[Value],
        metadata: &Metadata,
        check: CheckMetadata,
        microbatches: usize,
    ) -> Option<&[TensorSpec]> {
        if check == CheckMetadata::FirstStep && self.seen == microbatches {
            return None;
        }
        self.seen = (self.seen + 1).min(microbatches);
        let free = metadata.free();
        let shown = || values.iter().map(|value| TensorSpec::of(value, free)).collect();
        Some(self.specs.get_or_insert_with(shown))
    }
}

/// A [`MetadataError`] without the microbatch and the two sides.
pub(crate) struct TensorMismatch {
    pub(crate) mismatch: Mismatch,
    pub(crate) sent: String,
    pub(crate) expected: String,
}

fn compare(values: &[Value], specs: &[TensorSpec]) -> Result<(), TensorMismatch> {
    match values.iter().zip(specs).position(|(value, spec)| !spec.fits(value)) {
        Some(place) => {
            let sent = TensorSpec::of(&values[place], &[]).to_string();
            let expected = specs[place].to_string();
            Err(TensorMismatch { mismatch: Mismatch::Tensor(place), sent, expected })
        }
        None => Ok(()),
    }
}
