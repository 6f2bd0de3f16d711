//! The keys of `config.json`: which of them a family computes with, which do not matter for training, and
//! which it refuses because it cannot compute what they ask for.
//!
//! Each family has one table. A key that no table lists is refused if it has the name of a part of a
//! computation, such as `attention_temperature`. Otherwise it is only reported ([`KeyTable::unknown_keys`]):
//! published files contain keys of many tools.

mod harmless;
mod names;
mod table;
mod dropout;

pub use dropout::is_dropout;
pub(crate) use harmless::is_off;
pub use harmless::{Harmless, Refused};
pub(crate) use table::is_ignored;
pub use table::{KeyTable, KeyUse, RefusedKey};
