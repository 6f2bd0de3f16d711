//! The selective scan of Mamba-2 (Dao and Gu, 2024), in chunks, as matrix products.
//!
//! A head has a state `S` `[head_dim, state]`, zero at the beginning of a sequence and of a document:
//!
//! ```text
//! S_t = exp(δ_t A) S_(t-1) + δ_t x_t b_tᵀ        y_t = S_t c_t + D x_t
//! ```
//!
//! Neighbouring heads form a group, which shares `b` and `c`. With the running sum `s_t` of `δ A` in a chunk,
//!
//! ```text
//! y_t    = sum_(r <= t) exp(s_t - s_r) (c_t b_r) δ_r x_r + exp(s_t) S_in c_t + D x_t
//! S_out  = exp(s_end) S_in + sum_r exp(s_end - s_r) δ_r x_r b_rᵀ
//! ```
//!
//! so only the states at the edges of chunks are computed one after the other. States are stored as
//! `[state, heads of the group * head_dim]`: one product serves all heads of a group.

mod chunks;
mod decays;
mod steps;
mod forward;
mod backward;
mod step;

#[cfg(test)]
mod tests;

pub(crate) use backward::{Gradients, backward};
pub use chunks::{CHUNK, Dims, Inputs};
pub(crate) use forward::forward;
pub use forward::forward_with_state;
pub use step::step;
pub use steps::{Steps, steps};
pub(crate) use steps::{steps_backward, steps_in};
