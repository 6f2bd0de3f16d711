//! The data of a step, split into microbatches.
//!
//! A [`Batch`] has the inputs and targets of each microbatch, the side inputs that every stage may read, and how losses
//! are reduced. Whole batches are split along dimension 0, or as a [`SplitSpec`] for each tensor says; [`merge_by`] joins
//! the outputs again.

mod error;
mod split_spec;
mod microbatch;
mod side_inputs;
mod reduction;
mod step_batch;
mod slices;
mod agreement;
mod input_gradients;

pub use agreement::BatchDisagreement;
pub(crate) use agreement::{AgreedBatch, Purpose, StepForm, StepForms};
pub use error::SplitError;
pub use input_gradients::InputGradientError;
pub(crate) use input_gradients::{InputGradients, ReplicaGradients};
pub use microbatch::*;
pub(crate) use reduction::{LossFactors, Reduction};
pub use side_inputs::SideInputError;
pub(crate) use side_inputs::SideInputs;
pub(crate) use slices::joined_slices;
pub(crate) use split_spec::common_size;
pub use split_spec::{Merge, Nested, SplitSpec, merge_by, split_by, tensor_split};
pub use step_batch::{Batch, TARGETS};
