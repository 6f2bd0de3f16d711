//! Which rank holds each large block of memory.
//!
//! A block may be allocated on one rank's thread and freed on another's, and its storage may go from one rank to
//! another. So each large block has an entry here, by address, with the count that it is on; whoever frees it takes it
//! off that count. Small blocks have none: they are bookkeeping, which goes between threads all the time and amounts to
//! little beside tensors.
//!
//! The table is the process's, as its allocator is. What it allocates itself goes past it.

use std::cell::Cell;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::count::Count;

/// Bytes of the smallest block that is counted.
pub(super) const SMALLEST: usize = 1024;

/// Parts of the table, each with a lock of its own.
const PARTS: usize = 64;

/// A block that is in use.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) bytes: usize,
    /// The count that it is on; none for what belongs to no rank.
    pub(super) owner: Option<Arc<Count>>,
}

type Blocks = HashMap<usize, Block, BuildHasherDefault<AddressHasher>>;

/// A part of the table, on cache lines of its own.
#[repr(align(128))]
struct Part(Mutex<Blocks>);

static TABLE: [Part; PARTS] =
    [const { Part(Mutex::new(HashMap::with_hasher(BuildHasherDefault::new()))) }; PARTS];

/// Whether any block was ever added: without the allocator there is nothing to look for.
static IN_USE: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Whether this thread is changing the table.
    static CHANGING: Cell<bool> = const { Cell::new(false) };
}

/// Whether a block of so many bytes has an entry, if it is allocated or freed by this thread at this moment.
pub(super) fn counts(bytes: usize) -> bool {
    bytes >= SMALLEST && !CHANGING.get()
}

/// Adds a block. Where there is no memory for its entry, it is not counted.
pub(super) fn add(address: usize, block: Block) {
    if !IN_USE.load(Ordering::Relaxed) {
        IN_USE.store(true, Ordering::Relaxed);
    }
    change(address, |blocks| {
        if blocks.try_reserve(1).is_ok() {
            if let Some(owner) = &block.owner {
                owner.add(block.bytes as i64);
            }
            blocks.insert(address, block);
        }
    });
}

/// Removes a block and takes it off its count.
pub(super) fn remove(address: usize) -> Option<Block> {
    let block = change(address, |blocks| blocks.remove(&address))?;
    if let Some(owner) = &block.owner {
        owner.add(-(block.bytes as i64));
    }
    Some(block)
}

/// Puts a block on another count, or on none. What is not in the table is no storage that anybody counts.
pub(super) fn hand_over(address: usize, to: Option<&Arc<Count>>) {
    let new = to.cloned();
    let handed = change(address, |blocks| {
        let block = blocks.get_mut(&address)?;
        Some((block.bytes as i64, std::mem::replace(&mut block.owner, new)))
    });
    let Some((bytes, old)) = handed else { return };
    // In this order, so that a block that stays where it is raises no peak.
    old.iter().for_each(|owner| owner.add(-bytes));
    to.iter().for_each(|owner| owner.add(bytes));
}

/// Whether blocks are counted in this process.
pub(super) fn is_in_use() -> bool {
    IN_USE.load(Ordering::Relaxed)
}

fn change<T>(address: usize, change: impl FnOnce(&mut Blocks) -> T) -> T {
    CHANGING.set(true);
    let part = &TABLE[mixed(address) as usize % PARTS].0;
    // Nothing panics under the lock, so that it is never poisoned.
    let changed = change(&mut part.lock().unwrap_or_else(PoisonError::into_inner));
    CHANGING.set(false);
    changed
}

/// Spreads addresses, whose low bits are alike.
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
