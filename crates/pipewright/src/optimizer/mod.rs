//! From gradients to parameters: hooks, groups of parameters with optimizers of their own, an AdamW with
//! fewer passes over memory than Burn's, optimizers with small states, and a correction for delayed
//! parameters. Burn's own optimizers work too.

mod adafactor;
mod adamw;
mod adamw8bit;
mod carry;
mod error_feedback;
mod gradient_hook;
mod group;
mod lion;
mod muon;
mod parts;
mod restored_state;

pub use adafactor::{Adafactor, AdafactorMoments};
pub use adamw::{AdamW, AdamWMoments};
pub use adamw8bit::{AdamW8bit, AdamW8bitState};
pub(crate) use carry::{with_state_of, without_last_updates};
pub use error_feedback::{ErrorFeedback, ErrorFeedbackState};
pub use gradient_hook::{GradientHook, ParameterGradient};
pub use group::{ClipGroup, OptimizerGroup};
pub(crate) use group::{Factors, group_of};
pub use lion::{Lion, LionMomentum};
pub use muon::{Muon, MuonMomentum};
pub(crate) use parts::{ParameterCut, mixes_parts};
pub use pipewright_kernel::adamw8bit::blocks_of_row;
pub use restored_state::RestoredState;
