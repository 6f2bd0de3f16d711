//! The data of a step, split into microbatches.
//!
//! A [`Batch`] has the inputs and targets of each microbatch, the side inputs that every stage may read, and
//! how losses are reduced. [`Batch::split`] splits whole tensors as a [`SplitRule`] says; [`merge_by`] joins
//! the outputs again.

mod split;
mod merge;
mod reduction;
mod slices;
mod agreement;
mod input_gradients;
mod side_inputs;
mod step_batch;
mod with_side_inputs;
#[cfg(test)]
mod tests;

pub use agreement::BatchDisagreement;
pub(crate) use agreement::{AgreedBatch, Purpose, StepForm, StepForms};
pub(crate) use input_gradients::{InputGradients, ReplicaGradients, SideGradients, SideSums, add_side};
pub use merge::{Merge, MergeFunction, merge, merge_by};
pub(crate) use reduction::{LossFactors, ReductionUnit};
pub use side_inputs::SideInputError;
pub(crate) use side_inputs::SideInputs;
pub(crate) use slices::joined_slices;
pub use split::{Nested, SplitError, SplitRule, SplitSpec, split};
pub use step_batch::{Batch, TARGETS};
pub(crate) use step_batch::{BatchTensors, KeptOutputs, UnsplitPart};
