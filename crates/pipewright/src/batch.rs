//! What a step works on: the data of each microbatch, the targets of the loss, and what every stage may look at beside.
//!
//! ```
//! use burn::tensor::{Device, Int, Tensor};
//! use pipewright::batch::Batch;
//!
//! let device = Device::flex();
//! let tokens = Tensor::<2, Int>::zeros([8, 16], &device);
//! let documents = Tensor::<2, Int>::zeros([8, 16], &device);
//! let batch = Batch::split(tokens.clone(), tokens, 4)?
//!     .with_split("documents", documents)?
//!     .with_value("temperature", 0.7f32);
//! assert_eq!(batch.microbatches(), 4);
//! # Ok::<(), pipewright::microbatch::SplitError>(())
//! ```

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Device;
use pipewright_schedule::Microbatch;

use crate::boundary::{Boundary, BoundaryError, pack, unpack};
use crate::microbatch::{SplitError, split, split_uneven};
use crate::value::{Value, Values};

/// The data of one step, microbatch by microbatch.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    pub(crate) inputs: Vec<Values>,
    pub(crate) targets: Vec<Values>,
    pub(crate) sides: Sides,
}

impl Batch {
    /// Microbatches that are split already; they may differ in rows. `targets` may be empty for an evaluation.
    pub fn new(inputs: Vec<Values>, targets: Vec<Values>) -> Self {
        Self { inputs, targets, sides: Sides::default() }
    }

    /// Splits a whole batch along dimension 0 into equal microbatches.
    ///
    /// # Errors
    /// As [`split`].
    pub fn split(
        inputs: impl Boundary,
        targets: impl Boundary,
        microbatches: u32,
    ) -> Result<Self, SplitError> {
        Ok(Self::new(split(&pack(inputs), microbatches)?, split(&pack(targets), microbatches)?))
    }

    /// As [`Batch::split`], for rows that do not divide: the last microbatch is short. Each row counts the same for the
    /// loss and the gradients of the step.
    ///
    /// # Errors
    /// As [`split_uneven`].
    pub fn split_uneven(
        inputs: impl Boundary,
        targets: impl Boundary,
        microbatches: u32,
    ) -> Result<Self, SplitError> {
        Ok(Self::new(split_uneven(&pack(inputs), microbatches)?, split_uneven(&pack(targets), microbatches)?))
    }

    /// Adds tensors that every stage may read, split as the inputs are.
    ///
    /// # Errors
    /// As [`split_uneven`], and when a part has other rows than the inputs.
    pub fn with_split(mut self, name: &str, tensors: impl Boundary) -> Result<Self, SplitError> {
        let parts = split_uneven(&pack(tensors), self.inputs.len() as u32)?;
        for (part, inputs) in parts.iter().zip(&self.inputs) {
            let (rows, expected) = (rows_of(part), rows_of(inputs));
            if rows != expected {
                return Err(SplitError::RowsDiffer { tensor: 0, rows, expected });
            }
        }
        self.sides.0.insert(name.into(), Side::Split(parts));
        Ok(self)
    }

    /// Adds tensors that every stage may read, the same for every microbatch.
    pub fn with_replicated(mut self, name: &str, tensors: impl Boundary) -> Self {
        self.sides.0.insert(name.into(), Side::Replicated(pack(tensors)));
        self
    }

    /// Adds a value that is no tensor, for every stage to read.
    pub fn with_value<T: Any + Send + Sync>(mut self, name: &str, value: T) -> Self {
        self.sides.0.insert(name.into(), Side::Value(Arc::new(value)));
        self
    }

    /// Microbatches of the inputs.
    pub fn microbatches(&self) -> usize {
        self.inputs.len()
    }

    /// What a microbatch counts for, times the number of microbatches: its rows over the mean of all.
    pub(crate) fn shares(&self) -> Vec<f64> {
        let rows: Vec<f64> = self.inputs.iter().map(|values| rows_of(values) as f64).collect();
        let mean = rows.iter().sum::<f64>() / rows.len().max(1) as f64;
        rows.iter().map(|rows| if *rows == mean { 1.0 } else { rows / mean }).collect()
    }
}

/// Rows of a microbatch; one of a scalar or of none.
fn rows_of(microbatch: &Values) -> usize {
    microbatch.first().and_then(|value| value.shape().first().copied()).unwrap_or(1)
}

/// What every stage may look at beside its input, by name. It is looked up with the microbatch's own index, so that
/// running a forward again finds the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sides(BTreeMap<Arc<str>, Side>);

#[derive(Clone, Debug)]
enum Side {
    Split(Vec<Values>),
    Replicated(Values),
    Value(Arc<dyn Any + Send + Sync>),
}

/// Why a side input cannot be had.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SideError {
    /// The step brought none of that name.
    #[error("the step brought no side input `{name}`; it brought {known:?}")]
    Missing {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: Vec<String>,
    },
    /// It is split into fewer microbatches than the step has.
    #[error("side input `{name}` has no part for microbatch {microbatch}")]
    NoPart {
        /// Its name.
        name: String,
        /// The microbatch.
        microbatch: Microbatch,
    },
    /// It is a tensor where a value was asked for, or the other way round, or of another type.
    #[error("side input `{name}` is not what was asked for: {expected}")]
    WrongType {
        /// Its name.
        name: String,
        /// The type asked for.
        expected: &'static str,
    },
    /// Its tensors are others than those asked for.
    #[error("side input `{name}`: {source}")]
    Tensors {
        /// Its name.
        name: String,
        /// What is wrong.
        source: BoundaryError,
    },
}

impl Sides {
    /// What a replica that has these microbatches may look at; they are counted from 0 there.
    pub(crate) fn part(&self, microbatches: Range<usize>) -> Self {
        let part = |side: &Side| match side {
            Side::Split(parts) => {
                let end = microbatches.end.min(parts.len());
                Side::Split(parts.get(microbatches.start..end).unwrap_or_default().to_vec())
            }
            whole => whole.clone(),
        };
        Self(self.0.iter().map(|(name, side)| (name.clone(), part(side))).collect())
    }

    pub(crate) fn tensors<T: Boundary>(
        &self,
        name: &str,
        microbatch: Microbatch,
        device: &Device,
    ) -> Result<T, SideError> {
        let values = match self.find(name)? {
            Side::Replicated(values) => values,
            Side::Split(parts) => {
                let none = || SideError::NoPart { name: name.to_owned(), microbatch };
                parts.get(microbatch.index()).ok_or_else(none)?
            }
            Side::Value(_) => return Err(wrong_type::<T>(name)),
        };
        let values = values.iter().cloned().map(|value: Value| value.to_device(device)).collect();
        unpack(values).map_err(|source| SideError::Tensors { name: name.to_owned(), source })
    }

    pub(crate) fn value<T: Any>(&self, name: &str) -> Result<&T, SideError> {
        match self.find(name)? {
            Side::Value(value) => value.downcast_ref().ok_or_else(|| wrong_type::<T>(name)),
            _ => Err(wrong_type::<T>(name)),
        }
    }

    fn find(&self, name: &str) -> Result<&Side, SideError> {
        self.0.get(name).ok_or_else(|| SideError::Missing {
            name: name.to_owned(),
            known: self.0.keys().map(ToString::to_string).collect(),
        })
    }
}

fn wrong_type<T>(name: &str) -> SideError {
    SideError::WrongType { name: name.to_owned(), expected: std::any::type_name::<T>() }
}
