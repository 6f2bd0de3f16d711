//! Side inputs: tensors and values that every stage may read in addition to its input, looked up by name.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use pipewright_schedule::Microbatch;

use super::input_gradients::SideGradients;
use super::split::{SplitError, SplitSpec};
use crate::tensor::{Boundary, BoundaryError, Value, Values, unpack};

/// The side inputs of a step, by name. A stage looks them up with the index of its microbatch, so a forward
/// that is computed again finds the same tensors.
#[derive(Clone, Debug, Default)]
pub(crate) struct SideInputs(BTreeMap<Arc<str>, Side>);

#[derive(Clone, Debug)]
pub(super) enum Side {
    /// The tensors of each microbatch, and how each was split; no specs if the caller has split them.
    Split(Vec<Values>, Vec<SplitSpec>),
    Replicated(Values),
    Value(Arc<dyn Any + Send + Sync>),
}

/// Why a side input is not available.
#[derive(Clone, PartialEq, thiserror::Error)]
pub enum SideInputError {
    /// The step has no side input of that name.
    #[error("the step has no side input `{name}`; it has {known:?}")]
    Missing {
        /// The requested name.
        name: String,
        /// The names that the step has.
        known: Vec<String>,
    },
    /// The side input is split into fewer microbatches than the step has.
    #[error("side input `{name}` has no part for microbatch {microbatch}")]
    NoPart {
        /// Its name.
        name: String,
        /// The microbatch.
        microbatch: Microbatch,
    },
    /// The side input has another type: a tensor instead of a value, a value instead of a tensor, or a value
    /// of another type.
    #[error("side input `{name}` does not have the requested type {expected}")]
    WrongType {
        /// Its name.
        name: String,
        /// The requested type.
        expected: &'static str,
    },
    /// The tensors do not match the requested type.
    #[error("side input `{name}`: {source}")]
    Tensors {
        /// Its name.
        name: String,
        /// The reason.
        source: BoundaryError,
    },
}

pipewright_schedule::message_as_debug!(SideInputError);

impl SideInputs {
    /// Adds a side input, or replaces the one with this name.
    pub(super) fn insert(&mut self, name: &str, side: Side) {
        self.0.insert(name.into(), side);
    }

    /// Returns the name of a side input that has tensors, if there is one.
    pub(super) fn any_tensors(&self) -> Option<&str> {
        let is_tensor = |side: &Side| !matches!(side, Side::Value(_));
        self.0.iter().find(|(_, side)| is_tensor(side)).map(|(name, _)| &**name)
    }

    /// Returns whether a tensor of a microbatch requires a gradient.
    pub(crate) fn is_tracked(&self, microbatch: Microbatch) -> bool {
        let values = self.0.values().flat_map(|side| match side {
            Side::Split(parts, _) => parts.get(microbatch.index()).map_or(&[][..], Vec::as_slice),
            Side::Replicated(values) => values,
            Side::Value(_) => &[],
        });
        values.into_iter().any(Value::is_tracked)
    }

    /// Returns the side inputs of a replica that has these microbatches, which it counts from 0.
    pub(crate) fn part(&self, microbatches: Range<usize>) -> Self {
        let part = |side: &Side| match side {
            Side::Split(parts, specs) => {
                let end = microbatches.end.min(parts.len());
                let parts = parts.get(microbatches.start..end).unwrap_or_default().to_vec();
                Side::Split(parts, specs.clone())
            }
            whole => whole.clone(),
        };
        Self(self.0.iter().map(|(name, side)| (name.clone(), part(side))).collect())
    }

    /// Returns how the gradients of the side inputs with tensors that require one are joined.
    ///
    /// # Errors
    /// When the parts of a tensor cannot be joined.
    pub(super) fn gradients(&self) -> Result<SideGradients, SplitError> {
        let mut joined = SideGradients::default();
        for (name, side) in &self.0 {
            let (parts, specs) = match side {
                Side::Split(parts, specs) => (parts.clone(), specs.clone()),
                Side::Replicated(values) => (vec![values.clone()], vec![SplitSpec::Replicate; values.len()]),
                Side::Value(_) => continue,
            };
            joined.insert(name, &parts, &specs)?;
        }
        Ok(joined)
    }

    /// Returns the tensors of a side input for a microbatch, each as `enter` returns it from its index and the
    /// tensor.
    pub(crate) fn tensors<T: Boundary>(
        &self,
        name: &str,
        microbatch: Microbatch,
        enter: impl Fn(usize, Value) -> Value,
    ) -> Result<T, SideInputError> {
        let values = match self.find(name)? {
            Side::Replicated(values) => values,
            Side::Split(parts, _) => {
                let none = || SideInputError::NoPart { name: name.to_owned(), microbatch };
                parts.get(microbatch.index()).ok_or_else(none)?
            }
            Side::Value(_) => return Err(wrong_type::<T>(name)),
        };
        let values = values.iter().cloned().enumerate();
        let values = values.map(|(index, value): (usize, Value)| enter(index, value)).collect();
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
