//! Optimizers with fewer passes over memory than Burn's. Any of Burn's works too.

mod adamw;
mod rows;

pub use adamw::AdamW;
pub(crate) use rows::mixes_rows;
