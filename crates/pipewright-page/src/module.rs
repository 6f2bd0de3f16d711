//! The functions that the WebAssembly module exports. The README has the protocol.
//!
//! The module has one buffer, which holds a request and then its answer. The script of the page may write and read it
//! between calls, because nothing else runs in the module.

use std::cell::RefCell;

use crate::request::answer as answer_of;

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Makes a buffer of `length` bytes for a request, and returns its address.
// SAFETY: no other function of the module has this name.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn buffer(length: usize) -> *mut u8 {
    BUFFER.with_borrow_mut(|buffer| {
        *buffer = vec![0; length];
        buffer.as_mut_ptr()
    })
}

/// Answers the request in the buffer, which then holds the answer. Returns the length of the answer.
// SAFETY: no other function of the module has this name.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn answer() -> usize {
    BUFFER.with_borrow_mut(|buffer| {
        *buffer = answer_of(&String::from_utf8_lossy(buffer)).into_bytes();
        buffer.len()
    })
}

/// Returns the address of the buffer.
// SAFETY: no other function of the module has this name.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn buffer_address() -> *const u8 {
    BUFFER.with_borrow(Vec::as_ptr)
}
