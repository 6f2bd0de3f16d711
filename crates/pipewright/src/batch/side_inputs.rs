//! Side inputs: tensors and values that every stage may read beside its input, looked up by name.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Device;
use pipewright_schedule::Microbatch;

use crate::tensor::{Boundary, BoundaryError, Value, Values, unpack};

/// What every stage may look at beside its input, by name. It is looked up with the microbatch's own index, so that
/// running a forward again finds the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct SideInputs(pub(super) BTreeMap<Arc<str>, Side>);

#[derive(Clone, Debug)]
pub(super) enum Side {
    Split(Vec<Values>),
    Replicated(Values),
    Value(Arc<dyn Any + Send + Sync>),
}

/// Why a side input cannot be had.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SideInputError {
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

impl SideInputs {
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
    ) -> Result<T, SideInputError> {
        let values = match self.find(name)? {
            Side::Replicated(values) => values,
            Side::Split(parts) => {
                let none = || SideInputError::NoPart { name: name.to_owned(), microbatch };
                parts.get(microbatch.index()).ok_or_else(none)?
            }
            Side::Value(_) => return Err(wrong_type::<T>(name)),
        };
        let values = values.iter().cloned().map(|value: Value| value.to_device(device)).collect();
        unpack(values).map_err(|source| SideInputError::Tensors { name: name.to_owned(), source })
    }

    pub(crate) fn value<T: Any>(&self, name: &str) -> Result<&T, SideInputError> {
        match self.find(name)? {
            Side::Value(value) => value.downcast_ref().ok_or_else(|| wrong_type::<T>(name)),
            _ => Err(wrong_type::<T>(name)),
        }
    }

    fn find(&self, name: &str) -> Result<&Side, SideInputError> {
        self.0.get(name).ok_or_else(|| SideInputError::Missing {
            name: name.to_owned(),
            known: self.0.keys().map(ToString::to_string).collect(),
        })
    }
}

fn wrong_type<T>(name: &str) -> SideInputError {
    SideInputError::WrongType { name: name.to_owned(), expected: std::any::type_name::<T>() }
}
