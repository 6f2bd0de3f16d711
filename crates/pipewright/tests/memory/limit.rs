//! A process allocates no more than its limit.

use pipewright::memory::limit_memory;

/// More than the other tests of this program need together, and less than most machines promise.
const LIMIT: usize = 4 << 30;

#[test]
fn an_allocation_beyond_the_limit_fails() {
    let reserve = |bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok();
    assert!(reserve(LIMIT), "the machine promises as much");
    limit_memory(LIMIT as u64);
    assert!(!reserve(LIMIT), "other tests hold memory");
    assert!(reserve(LIMIT / 2));
    let mut grown = Vec::<u8>::with_capacity(LIMIT / 2);
    assert!(grown.try_reserve_exact(LIMIT).is_err() && grown.capacity() == LIMIT / 2);
    limit_memory(u64::MAX);
    assert!(reserve(LIMIT));
}
