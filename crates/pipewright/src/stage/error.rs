//! The errors of a stage.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use pipewright_schedule::Action;
use pipewright_schedule::error_text::panic_message;

use super::first_value::FirstValue;
use crate::tensor::BoundaryError;

/// Why a stage cannot be prepared or cannot run an action.
#[derive(Clone, PartialEq, thiserror::Error)]
pub enum StageError {
    /// The tensors that arrived do not fit the stage's input type.
    #[error("the stage cannot take its input: {0}")]
    Input(#[source] BoundaryError),
    /// The targets do not fit the type that the loss takes.
    #[error("the loss cannot take its targets: {0}")]
    Target(#[source] BoundaryError),
    /// The model's outputs do not fit the type that the loss takes.
    #[error("the loss cannot take the model's outputs: {0}")]
    Output(#[source] BoundaryError),
    /// A layer of a graph received tensors that it does not take.
    #[error("the layer `{layer}` cannot take its inputs: {source}")]
    Layer {
        /// The layer's node.
        layer: Arc<str>,
        /// The error of the boundary.
        source: BoundaryError,
    },
    /// A number inside the stage is infinite or not a number
    /// ([`StageContext::not_finite`](super::StageContext::not_finite)). The parameters are those before the
    /// step.
    #[error(
        "{what} is not finite; the parameters are still those before this step: lower the learning rate, clip gradients, \
         or look at the data of this step"
    )]
    NotFinite {
        /// The number and its layer.
        what: String,
    },
    /// In a step that is computed again for this purpose, the first value that is not finite was found.
    #[error("{value}")]
    FirstNotFinite {
        /// The value.
        value: FirstValue,
    },
    /// A parameter is cut, but the optimizer's update of an element depends on other elements.
    #[error(
        "the optimizer's update of an element of `{parameter}` depends on other elements, and parameters are sharded or cut \
         into shards: use one that works element by element, such as `AdamW`, or keep parameters replicated and whole"
    )]
    MixesRows {
        /// A parameter with such an update.
        parameter: Arc<str>,
    },
    /// The second run of a forward had other results than the first.
    #[error(
        "a forward has other results when it is computed again: `forward` must depend only on the module, its input and its \
         context; random numbers come from `StageContext::random`, as in `nn::Dropout`"
    )]
    RecomputedResult,
    /// A layer draws from the generator of its device in a stage whose ranks wait for each other: tensor
    /// ranks, or replicas that hold experts together.
    #[error(
        "`{layer}`, or a layer that ran at the same time, draws from the generator of its device, and other ranks \
         wait for this one inside the stage (tensor ranks, or replicas that hold experts together): use `nn::Dropout` \
         instead of Burn's, or the random numbers of `StageContext::random`"
    )]
    DrawsTogether {
        /// The layer.
        layer: Arc<str>,
    },
    /// A block failed that a function of the user's ran ([`ActionHook`](crate::hook::ActionHook)).
    #[error("block {block} of {action}: {source}")]
    InBlock {
        /// The action.
        action: Action,
        /// The block.
        block: usize,
        /// Why it failed.
        source: Box<StageError>,
    },
    /// A mistake in a module, in the settings, in a batch or in a function of the user's, in a sentence.
    #[error("{0}")]
    Mistake(String),
}

pipewright_schedule::message_as_debug!(StageError);

impl StageError {
    /// Returns the first value that is not finite, if the error names it.
    pub(crate) fn first_not_finite(&self) -> Option<&FirstValue> {
        match self {
            Self::FirstNotFinite { value } => Some(value),
            Self::InBlock { source, .. } => source.first_not_finite(),
            _ => None,
        }
    }

    /// Makes the error of a function of the caller's that runs an action
    /// ([`ActionHook`](crate::hook::ActionHook)).
    pub fn function(message: impl std::fmt::Display) -> Self {
        Self::Mistake(format!("the function failed: {message}"))
    }
}

/// Runs a layer. If it panics, the panic continues with the layer's name in its message.
pub(crate) fn in_layer<T>(layer: &str, run: impl FnOnce() -> T) -> T {
    in_part(|| format!("the layer `{layer}`"), run)
}

/// Runs a part of a stage. If it panics, the panic continues with the name of the part in its message.
pub(crate) fn in_part<T>(part: impl FnOnce() -> String, run: impl FnOnce() -> T) -> T {
    // The panic continues, so nothing sees a state that it has left half changed.
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(result) => result,
        Err(payload) if payload.is::<&str>() || payload.is::<String>() => {
            resume_unwind(Box::new(format!("{}: {}", part(), panic_message(&*payload))))
        }
        Err(payload) => resume_unwind(payload),
    }
}
