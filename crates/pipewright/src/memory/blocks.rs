//! The table of large blocks of memory, with the rank that holds each.
//!
//! A block may be allocated on one rank's thread and freed on another's, and its storage may move from one
//! rank to another. So each large block has an entry here, by address, with the count that includes it. The
//! thread that frees the block subtracts it from that count. Small blocks have no entry: they often move
//! between threads, and are small in total compared with tensors.
//!
//! There is one table per process, like the allocator. The table's own allocations are not counted.

use std::cell::Cell;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::count::Count;

/// Bytes of the smallest block that is counted.
pub(super) const SMALLEST: usize = 1024;

/// The number of parts of the table. Each part has its own lock.
const PARTS: usize = 64;

/// A block that is in use.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) bytes: usize,
    /// The count that includes the block; `None` if it belongs to no rank.
    pub(super) owner: Option<Arc<Count>>,
}

type Blocks = HashMap<usize, Block, BuildHasherDefault<AddressHasher>>;

/// A part of the table. It does not share cache lines with other parts.
#[repr(align(128))]
struct Part(Mutex<Blocks>);

static TABLE: [Part; PARTS] =
    [const { Part(Mutex::new(HashMap::with_hasher(BuildHasherDefault::new()))) }; PARTS];

/// The bytes of all blocks in the table.
static TOTAL: AtomicU64 = AtomicU64::new(0);
/// The bytes that all blocks may have together.
static LIMIT: AtomicU64 = AtomicU64::new(u64::MAX);

/// Whether any block was ever added. Without the allocator the table is empty, and lookups are skipped.
static IN_USE: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Whether this thread is changing the table.
    static CHANGING: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether a block of this size has an entry if this thread allocates or frees it now.
pub(super) fn counts(bytes: usize) -> bool {
    bytes >= SMALLEST && !CHANGING.get()
}

/// Limits the bytes of all blocks of this process together: an allocation beyond `bytes` fails. Systems that
/// promise more memory than they have would otherwise end the process without a report.
pub fn limit_memory(bytes: u64) {
    LIMIT.store(bytes, Ordering::Relaxed);
}

/// Returns whether a block may grow from `earlier` to `bytes`, or a new one from 0.
pub(super) fn may_grow(earlier: usize, bytes: usize) -> bool {
    let more = bytes.saturating_sub(earlier) as u64;
    // Small blocks are not in the total.
    !counts(bytes) || TOTAL.load(Ordering::Relaxed).saturating_add(more) <= LIMIT.load(Ordering::Relaxed)
}

/// Adds a block. If there is no memory for its entry, the block is not counted.
pub(super) fn add(address: usize, block: Block) {
    if !IN_USE.load(Ordering::Relaxed) {
        IN_USE.store(true, Ordering::Relaxed);
    }
    change(address, |blocks| {
        if blocks.try_reserve(1).is_ok() {
            if let Some(owner) = &block.owner {
                owner.add(block.bytes as i64);
            }
            TOTAL.fetch_add(block.bytes as u64, Ordering::Relaxed);
            blocks.insert(address, block);
        }
    });
}

/// Removes a block and subtracts it from its count.
pub(super) fn remove(address: usize) -> Option<Block> {
    let block = change(address, |blocks| blocks.remove(&address))?;
    TOTAL.fetch_sub(block.bytes as u64, Ordering::Relaxed);
    if let Some(owner) = &block.owner {
        owner.add(-(block.bytes as i64));
    }
    Some(block)
}

/// Removes a block from its count. An address that is not in the table has no effect.
pub(super) fn give_away(address: usize) {
    let given = change(address, |blocks| {
        let block = blocks.get_mut(&address)?;
        Some((block.bytes as i64, block.owner.take()?))
    });
    if let Some((bytes, owner)) = given {
        owner.add(-bytes);
    }
}

/// Adds a block that is on no count to this one. An address that is not in the table has no effect.
pub(super) fn take_over(address: usize, by: &Arc<Count>) {
    let taken = change(address, |blocks| {
        let block = blocks.get_mut(&address).filter(|block| block.owner.is_none())?;
        block.owner = Some(by.clone());
        Some(block.bytes as i64)
    });
    if let Some(bytes) = taken {
        by.add(bytes);
    }
}

/// Returns whether blocks are counted in this process.
pub(super) fn is_in_use() -> bool {
    IN_USE.load(Ordering::Relaxed)
}

fn change<T>(address: usize, change: impl FnOnce(&mut Blocks) -> T) -> T {
    CHANGING.set(true);
    let part = &TABLE[mixed(address) as usize % PARTS].0;
    // Nothing panics under the lock, so it is never poisoned.
    let changed = change(&mut part.lock().unwrap_or_else(PoisonError::into_inner));
    CHANGING.set(false);
    changed
}

/// Spreads addresses over all bits, because their low bits are equal.
fn mixed(address: usize) -> u64 {
    let product = (address as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ (product >> 32)
}

/// Hashes an address.
#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.0 = mixed(self.0 as usize ^ usize::from(byte)));
    }

    fn write_usize(&mut self, address: usize) {
        // The table's part is chosen by the low bits already.
        self.0 = mixed(address).rotate_right(6);
    }
}
