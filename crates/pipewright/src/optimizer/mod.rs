//! From gradients to parameters: hooks, groups of parameters with optimizers of their own, and an AdamW with
//! fewer passes over memory than Burn's. Burn's own optimizers work too.

mod adamw;
mod carry;
mod gradient_hook;
mod group;
mod rows;

pub use adamw::{AdamW, AdamWMoments};
pub(crate) use carry::with_state_of;
pub use gradient_hook::{GradientHook, ParameterGradient};
pub use group::{ClipGroup, OptimizerGroup};
pub(crate) use group::{Factors, group_of};
pub(crate) use rows::mixes_rows;
