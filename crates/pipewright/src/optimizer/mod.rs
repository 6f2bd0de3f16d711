//! Optimizers with fewer passes over memory than Burn's. Any of Burn's works too.

mod adamw;

pub use adamw::AdamW;
