//! Threads for loops over the elements of many or long slices, which do little for each element, so that one
//! thread takes a fraction of the bandwidth of memory.
//!
//! Such a loop uses the caller's thread and the others of its pool. A caller may lend it further threads instead
//! ([`with_threads`]); everything else stays on the caller's thread.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rayon::{Scope, ThreadPool, ThreadPoolBuilder};

/// The elements that a thread takes at once. A few lists of them fit into the second-level cache, and take
/// longer than waking a thread.
pub(crate) const CHUNK: usize = 1 << 15;

/// Threads that a caller lends to its loops. They start when a loop over long slices first needs them.
#[derive(Debug)]
pub struct LentThreads {
    count: usize,
    /// `None` if the system has no more threads.
    pool: OnceLock<Option<ThreadPool>>,
}

impl LentThreads {
    /// Describes `count` threads.
    pub fn new(count: usize) -> Self {
        Self { count, pool: OnceLock::new() }
    }

    /// Returns the number of threads.
    pub fn count(&self) -> usize {
        self.count
    }

    fn pool(&self) -> Option<&ThreadPool> {
        let builder = || ThreadPoolBuilder::new().num_threads(self.count);
        let start = || builder().thread_name(|index| format!("lent-{index}")).build().ok();
        if self.count > 0 { self.pool.get_or_init(start).as_ref() } else { None }
    }
}

thread_local! {
    static LENT: RefCell<Option<Arc<LentThreads>>> = const { RefCell::new(None) };
}

/// Calls `f`. Meanwhile, loops of this thread over long slices use this thread and `threads`.
pub fn with_threads<R>(threads: &Arc<LentThreads>, f: impl FnOnce() -> R) -> R {
    let _before = Before(LENT.replace(Some(threads.clone())));
    f()
}

/// The threads that were lent before, which are lent again when this is dropped, also by a panic.
struct Before(Option<Arc<LentThreads>>);

impl Drop for Before {
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
    if elements <= CHUNK {
        return items.for_each(work);
    }
    let lent = LENT.with_borrow(Clone::clone);
    let pool = lent.as_ref().and_then(|lent| lent.pool());
    let others = match pool {
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
    match pool {
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

    use super::*;

    fn pool(threads: usize) -> ThreadPool {
        ThreadPoolBuilder::new().num_threads(threads).build().expect("threads")
    }

    fn lent(threads: usize) -> Arc<LentThreads> {
        Arc::new(LentThreads::new(threads))
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
            let found = with_threads(&lent(2), || [threads(CHUNK + 1), threads(CHUNK)]);
            assert_eq!(found, [3, 1], "few elements stay on this thread");
            assert_eq!(threads(CHUNK + 1), 1, "the threads are no longer lent");
        });
        assert_eq!(pool(2).install(|| threads(CHUNK + 1)), 2, "the pool of the caller");
    }

    #[test]
    fn threads_start_when_a_loop_needs_them() {
        let lent = lent(1);
        with_threads(&lent, || for_each(0..9, CHUNK, |_| ()));
        assert!(lent.pool.get().is_none(), "few elements need no thread");
        with_threads(&lent, || for_each(0..9, CHUNK + 1, |_| ()));
        assert!(lent.pool.get().is_some());
    }

    #[test]
    fn each_item_is_taken_once() {
        let taken = Mutex::new(Vec::new());
        let take = |item| taken.lock().expect("no panic").push(item);
        with_threads(&lent(2), || for_each(0..1000, CHUNK + 1, take));
        let mut taken = taken.into_inner().expect("no panic");
        taken.sort_unstable();
        assert!(taken.into_iter().eq(0..1000));
    }

    #[test]
    fn a_panic_gives_the_threads_back() {
        let panics = || with_threads(&lent(2), || for_each(0..9, CHUNK + 1, |_| panic!("out of cheese")));
        assert!(std::panic::catch_unwind(panics).is_err());
        assert!(LENT.with_borrow(Option::is_none));
    }
}
