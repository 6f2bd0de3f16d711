//! A model from its `config.json` alone.
//!
//! Families differ in the names of keys, less in their shapes, so a key is looked up under all names that are
//! in use. [`family`](crate::family) has the properties that families do not state in their files. A key
//! that changes parameters or computation is read, or the file is refused.

mod keys;
mod mixer;
mod feed_forward;
mod blocks;
mod hybrid;
mod read;

pub use read::{Described, MAX_FILE, read};
