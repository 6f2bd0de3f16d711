//! The data of a step, split into microbatches.
//!
//! A [`Batch`] has the inputs and targets of each microbatch and the side inputs that every stage may read. Whole
//! batches are split along dimension 0, or as a [`SplitSpec`] for each tensor says; [`merge_by`] joins the outputs
//! again.

mod error;
mod split_spec;
mod microbatch;
mod side_inputs;
mod step_batch;

pub use error::SplitError;
pub use microbatch::*;
pub use side_inputs::SideInputError;
pub(crate) use side_inputs::SideInputs;
pub use split_spec::*;
pub use step_batch::Batch;
