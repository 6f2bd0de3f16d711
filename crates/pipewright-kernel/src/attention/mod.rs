//! Causal attention with grouped queries and rotary positions, head by head, in memory that stays in cache.
//!
//! ```text
//! q, k      rotated by their positions (Su et al., 2021: element j pairs with element j + head_dim / 2), q scaled
//! S = q kᵀ  in blocks of rows, each against the keys up to the block's end; bounded if there is a cap
//! P = softmax(S)    out = P v
//! ```
//!
//! A head may have a sink: a further score of each row, whose value is zero, so that the weights of a row add
//! up to less than one (Xiao et al., 2023, <https://arxiv.org/abs/2309.17453>). The gradient of the sink is
//! `-p D`, summed over the rows, where `p` is the weight that it takes.
//!
//! A query may see only some of the earlier keys: a run that ends at the query. The start of the run does not
//! decrease from one query to the next (documents, windows). Scores of keys before the run of a block's first
//! query are not computed.
//!
//! The heads of values may be wider or narrower than the heads of queries and keys (multi-head latent
//! attention; DeepSeek-AI, 2024).
//!
//! The queries may belong to the last part of each sequence, whose keys and values are given from its
//! beginning on.
//!
//! Scores are not kept: the backward pass computes them again from `q`, `k` and each row's normaliser (Dao et
//! al., 2022). With `D = sum(g out)` by row: `dP = g vᵀ`, `dS = P (dP - D)`, `dv = Pᵀ g`, `dq = dS k`,
//! `dk = dSᵀ q`.

mod inputs;
mod bias;
mod softmax;
mod forward;
mod backward;

pub use super::rotary::Rotary;
pub use backward::{Gradients, backward, backward_bf16};
pub use forward::{forward, forward_bf16};
pub use inputs::{Bias, Dims, Inputs};
