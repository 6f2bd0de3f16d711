//! Optimizers with fewer passes over memory than Burn's. Burn's own optimizers work too.

mod adamw;
mod rows;

pub use adamw::{AdamW, AdamWMoments};
pub(crate) use rows::mixes_rows;
