//! Relations between tokens, on which the bias of an attention depends.

use std::sync::Arc;

/// Relations between the tokens of each row.
#[derive(Clone, Debug)]
pub struct Relations {
    /// The number of relations.
    pub count: usize,
    /// 1 where a relation holds, `[rows, count, sequence, sequence]`, queries before keys.
    pub mask: Arc<[u8]>,
}
