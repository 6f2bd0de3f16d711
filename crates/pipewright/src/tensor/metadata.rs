//! Shapes and element types of the tensors that cross a boundary, checked on both sides.
//!
//! Messages describe their own tensors, so the runtime does not need metadata to receive them. The runtime
//! compares the tensors at a boundary with the metadata. If they differ, the error names both stages. Without
//! the check, a layer would fail.
//!
//! [`Metadata::Static`] is given in advance. [`Metadata::Dynamic`] is taken from the first microbatch that crosses the
//! boundary; no probe run changes gradients, buffers or random states. [`Metadata::Partial`] is given for
//! some boundaries. Gradients have the metadata of the tensors that they belong to. Tensors of which ranks have parts
//! have the metadata of the whole tensors.
//!
//! If ranks are processes, each may know other boundaries. Before they start, they vote: a boundary is static
//! on all ranks if any process knows it, and two processes that know it differently do not start.
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

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use burn::tensor::DType;
use pipewright_schedule::StageIndex;
use serde::{Deserialize, Serialize};

use super::value::Value;

/// How the shapes at the boundaries are known.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Metadata {
    /// Taken from the first microbatch.
    Dynamic {
        /// Dimensions whose size may differ between microbatches.
        free: Vec<usize>,
    },
    /// Given in advance.
    Static {
        /// The inputs of stages 1, 2, ..: the tensors from the previous stage, then the tensors of direct
        /// skip connections.
        stages: Vec<Vec<TensorSpec>>,
    },
    /// Given for the inputs of some stages, and taken from the first microbatch for the others.
    Partial {
        /// The inputs of each stage that is known, as in [`Metadata::Static`].
        stages: BTreeMap<StageIndex, Vec<TensorSpec>>,
        /// As in [`Metadata::Dynamic`].
        free: Vec<usize>,
    },
}

/// The metadata that a process has before the start, by the name of the entry.
pub(crate) type Votes = BTreeMap<String, Vote>;

/// An entry of [`Votes`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Vote {
    Inputs { stage: StageIndex, specs: Vec<TensorSpec> },
    Free(Vec<usize>),
}

impl fmt::Display for Vote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inputs { specs, .. } => {
                let specs: Vec<String> = specs.iter().map(TensorSpec::to_string).collect();
                f.write_str(&specs.join(", "))
            }
            Self::Free(dimensions) => write!(f, "{dimensions:?}"),
        }
    }
}

impl Default for Metadata {
    /// Dynamic; the number of rows may differ.
    fn default() -> Self {
        Self::Dynamic { free: vec![0] }
    }
}

impl Metadata {
    /// Returns a text that is equal for equal metadata in every process of one build.
    pub fn fingerprint(&self) -> String {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        let name = match self {
            Self::Dynamic { .. } => "dynamic",
            Self::Static { .. } => "static",
            Self::Partial { .. } => "partial",
        };
        format!("{name} {:016x}", hasher.finish())
    }

    /// Returns the dimensions whose size may differ between microbatches.
    pub(super) fn free(&self) -> &[usize] {
        match self {
            Self::Dynamic { free } | Self::Partial { free, .. } => free,
            Self::Static { .. } => &[],
        }
    }

    /// Returns the inputs of `stage` if they were given.
    pub(super) fn of_stage(&self, stage: StageIndex) -> Option<Vec<TensorSpec>> {
        match self {
            Self::Dynamic { .. } => None,
            Self::Static { stages } => stages.get(stage.index().checked_sub(1)?).cloned(),
            Self::Partial { stages, .. } => stages.get(&stage).cloned(),
        }
    }

    /// Returns what this process knows.
    pub(crate) fn votes(&self) -> Votes {
        let inputs = |(stage, specs): (StageIndex, &Vec<TensorSpec>)| {
            (format!("the inputs of stage {stage}"), Vote::Inputs { stage, specs: specs.clone() })
        };
        let mut votes: Votes = match self {
            Self::Dynamic { .. } => Votes::new(),
            Self::Static { stages } => (1..).map(StageIndex::new).zip(stages).map(inputs).collect(),
            Self::Partial { stages, .. } => {
                stages.iter().map(|(stage, specs)| (*stage, specs)).map(inputs).collect()
            }
        };
        if !matches!(self, Self::Static { .. }) {
            votes.insert("the dimensions that may differ".to_owned(), Vote::Free(self.free().to_vec()));
        }
        votes
    }

    /// Returns the metadata of all ranks from what all processes know.
    pub(crate) fn voted(votes: Votes) -> Self {
        let (mut known, mut dimensions) = (BTreeMap::new(), Vec::new());
        for vote in votes.into_values() {
            match vote {
                Vote::Inputs { stage, specs } => drop(known.insert(stage, specs)),
                Vote::Free(free) => dimensions = free,
            }
        }
        Self::Partial { stages: known, free: dimensions }
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

/// The effect of tensors at a boundary that differ from its metadata.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnMismatch {
    /// The step fails.
    #[default]
    Fail,
    /// A warning with both sides is logged, once for each side of a boundary, and the step continues. It
    /// still fails if a stage cannot take the tensors.
    Warn,
}

/// The size of a dimension, or any size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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

    pub(super) fn of(value: &Value, free: &[usize]) -> Self {
        let dim =
            |(index, &size): (usize, &usize)| if free.contains(&index) { Dim::Any } else { Dim::Fixed(size) };
        Self { dtype: value.dtype(), shape: value.whole_shape().iter().enumerate().map(dim).collect() }
    }

    pub(super) fn fits(&self, value: &Value) -> bool {
        let shape = value.whole_shape();
        let fits = |(dim, &size): (&Dim, &usize)| matches!(dim, Dim::Any) || *dim == Dim::Fixed(size);
        // Back ends store booleans in different types.
        (self.dtype == value.dtype() || self.dtype.is_bool() && value.dtype().is_bool())
            && self.shape.len() == shape.len()
            && self.shape.iter().zip(shape.iter()).all(fits)
    }
}

impl fmt::Display for TensorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shape: Vec<String> = self.shape.iter().map(Dim::to_string).collect();
        write!(f, "{:?} [{}]", self.dtype, shape.join(", "))
    }
}
