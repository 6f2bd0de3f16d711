//! The memory of a rank: its count, and tensors that move from one rank's count to another's.

use std::sync::Arc;

use super::blocks;
use super::count::{Count, Counted, RankPosition, of_this_thread};
use crate::tensor::Value;

/// One rank's count. All clones add to the same count.
#[derive(Clone, Debug, Default)]
pub(crate) struct RankMemory {
    count: Arc<Count>,
}

impl RankMemory {
    /// Makes an empty count.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Counts the calling thread's allocations until the guard is dropped.
    pub(crate) fn count_this_thread(&self) -> Counted {
        Counted::new(self.count.clone())
    }

    /// Sets the function that returns the rank's position when memory runs out. It must not allocate.
    pub(crate) fn locate_by(&self, locate: impl Fn() -> RankPosition + Send + Sync + 'static) {
        self.count.locate_by(locate);
    }

    /// Removes storage that moves to another thread from this rank's count, unless this rank still uses it.
    pub(crate) fn give_away<'a>(&self, tensors: impl IntoIterator<Item = &'a Value>) {
        if blocks::is_in_use() {
            let moved = tensors.into_iter().filter_map(Value::storage).filter(|storage| !storage.is_shared);
            moved.for_each(|storage| blocks::give_away(storage.address));
        }
    }

    /// Like [`RankMemory::give_away`], but for all elements of a list.
    pub(crate) fn give_away_list<T>(&self, list: &[T]) {
        blocks::give_away(list.as_ptr().addr());
    }

    /// Adds storage that came from another thread to this rank's count, unless it is on another rank's.
    pub(crate) fn take_over<'a>(&self, tensors: impl IntoIterator<Item = &'a Value>) {
        if blocks::is_in_use() {
            let arrived = tensors.into_iter().filter_map(Value::storage);
            arrived.for_each(|storage| blocks::take_over(storage.address, &self.count));
        }
    }

    /// Resets the peak to the current count.
    pub(crate) fn restart_peak(&self) {
        self.count.restart_peak();
    }

    /// Returns the highest count since [`RankMemory::restart_peak`]; 0 if blocks are not counted.
    pub(crate) fn peak(&self) -> u64 {
        self.count.peak()
    }
}

/// Moves the storage of a tensor from another rank's count to the count of this thread's rank.
pub(super) fn move_to_this_thread(tensor: &Value) {
    let count = of_this_thread().filter(|_| blocks::is_in_use());
    if let (Some(count), Some(storage)) = (count, tensor.storage()) {
        blocks::give_away(storage.address);
        blocks::take_over(storage.address, &count);
    }
}

/// Like [`move_to_this_thread`], for the elements of lists at these addresses.
pub(super) fn move_lists_to_this_thread(addresses: Vec<usize>) {
    if let Some(count) = of_this_thread().filter(|_| blocks::is_in_use()) {
        for address in addresses {
            blocks::give_away(address);
            blocks::take_over(address, &count);
        }
    }
}

/// Returns the bytes that the rank of this thread holds, and the most that it held since [`restart_peak`];
/// `None` on a thread of no rank, and if blocks are not counted.
pub(crate) fn held_and_peak() -> Option<(u64, u64)> {
    let count = of_this_thread().filter(|_| blocks::is_in_use())?;
    Some((count.held(), count.peak()))
}

/// Resets the peak of this thread's rank to its current count.
pub(crate) fn restart_peak() {
    if let Some(count) = of_this_thread() {
        count.restart_peak();
    }
}
