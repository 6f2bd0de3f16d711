//! Threads for loops over the elements of many or long slices, which do little for each element, so that one
//! thread takes a fraction of the bandwidth of memory.
//!
//! Such a loop uses the caller's thread and the others of its pool. A caller may lend it those of another pool
//! instead ([`with_pool`]); what `f` does besides stays on the caller's thread.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

use rayon::{Scope, ThreadPool};

/// The elements that a thread takes at once. A few lists of them fit into the second-level cache, and take
/// longer than waking a thread.
pub(crate) const CHUNK: usize = 1 << 15;

thread_local! {
    static LENT: RefCell<Option<Arc<ThreadPool>>> = const { RefCell::new(None) };
}

/// Calls `f`. Meanwhile, loops of this thread over long slices use it and the threads
/// of `pool`.
pub fn with_pool<R>(pool: &Arc<ThreadPool>, f: impl FnOnce() -> R) -> R {
    let _lent = Lent(LENT.replace(Some(pool.clone())));
    f()
}

/// The pool that was lent before, which is lent again when this is dropped, also by a panic.
struct Lent(Option<Arc<ThreadPool>>);

impl Drop for Lent {
    fn drop(&mut self) {
        LENT.set(self.0.take());
    }
}

/// Calls `work` for each item: on this thread alone if they have few `elements` together, and otherwise also
/// on the other threads. Each thread takes the next item when it has done one.
pub(crate) fn for_each<T: Send>(
    items: impl Iterator<Item = T> + Send,
    elements: usize,
    work: impl Fn(T) + Sync,
) {
    let lent = LENT.with_borrow(Clone::clone);
    let others = match &lent {
        _ if elements <= CHUNK => 0,
        Some(pool) => pool.current_num_threads(),
        None => rayon::current_num_threads() - 1,
    };
    if others == 0 {
        return items.for_each(work);
    }
    let items = Mutex::new(items);
    // The lock is free while `work` runs, so nothing panics under it except an iterator.
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work_on = || {
        while let Some(item) = next() {
            work(item);
        }
    };
    match lent {
        Some(pool) => pool.in_place_scope(|scope| on_all(scope, others, &work_on)),
        None => rayon::in_place_scope(|scope| on_all(scope, others, &work_on)),
    }
}

/// Calls `work` on this thread, and on `others` threads of the scope.
fn on_all<'a>(scope: &Scope<'a>, others: usize, work: &'a (impl Fn() + Sync)) {
    (0..others).for_each(|_| scope.spawn(|_| work()));
    work();
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::thread::ThreadId;
    use std::time::Duration;

    use rayon::ThreadPoolBuilder;

    use super::*;

    fn pool(threads: usize) -> Arc<ThreadPool> {
        Arc::new(ThreadPoolBuilder::new().num_threads(threads).build().expect("threads"))
    }

    /// Returns the threads that take part in a loop over so many elements.
    fn threads(elements: usize) -> usize {
        let found = Mutex::new(HashSet::<ThreadId>::new());
        for_each(0..100, elements, |_| {
            found.lock().expect("no panic").insert(std::thread::current().id());
            // Every thread takes one before they are all done.
            std::thread::sleep(Duration::from_millis(2));
        });
        found.into_inner().expect("no panic").len()
    }

    #[test]
    fn a_loop_uses_the_threads_that_are_lent() {
        pool(1).install(|| {
            assert_eq!(threads(CHUNK + 1), 1, "this pool has one thread");
            let lent = with_pool(&pool(2), || [threads(CHUNK + 1), threads(CHUNK)]);
            assert_eq!(lent, [3, 1], "few elements stay on this thread");
            assert_eq!(threads(CHUNK + 1), 1, "the threads are no longer lent");
        });
        assert_eq!(pool(2).install(|| threads(CHUNK + 1)), 2, "the pool of the caller");
    }

    #[test]
    fn each_item_is_taken_once() {
        let taken = Mutex::new(Vec::new());
        let take = |item| taken.lock().expect("no panic").push(item);
        with_pool(&pool(2), || for_each(0..1000, CHUNK + 1, take));
        let mut taken = taken.into_inner().expect("no panic");
        taken.sort_unstable();
        assert!(taken.into_iter().eq(0..1000));
    }

    #[test]
    fn a_panic_gives_the_threads_back() {
        let panics = || with_pool(&pool(2), || for_each(0..9, CHUNK + 1, |_| panic!("out of cheese")));
        assert!(std::panic::catch_unwind(panics).is_err());
        assert!(LENT.with_borrow(Option::is_none));
    }
}
