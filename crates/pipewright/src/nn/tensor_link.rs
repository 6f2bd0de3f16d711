//! The exchange of tensors between the ranks of a group inside a layer, and the parts that the ranks have.

use std::fmt::Debug;
use std::ops::Range;

use crate::tensor::Values;

/// The exchange of tensors between the ranks of a group.
pub(crate) trait TensorLink: Debug + Send + Sync {
    /// Sends tensors to each rank of the group, this one included, and returns what each rank has sent to
    /// this one. Both lists are in the order of the ranks. All ranks of the group must call it.
    ///
    /// If a rank of the group fails, the call unwinds with the cause as its payload.
    fn exchange(&self, to_ranks: Vec<Values>) -> Vec<Values>;

    /// Records that this rank makes progress.
    fn keep_alive(&self);
}

/// Returns a part of `count` things, of `of` parts whose sizes differ by at most one.
pub(super) fn part(count: usize, index: usize, of: usize) -> Range<usize> {
    let (each, extra) = (count / of, count % of);
    let start = index * each + index.min(extra);
    start..start + each + usize::from(index < extra)
}
