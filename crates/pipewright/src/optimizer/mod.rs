//! Optimizers with fewer passes over memory than Burn's. Any of Burn's works too.

mod adamw;
mod elementwise;

pub use adamw::AdamW;
pub(crate) use elementwise::acts_element_by_element;
