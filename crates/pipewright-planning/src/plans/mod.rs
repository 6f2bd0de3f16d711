//! Plans for the commands: predictions for a profile, how plans are shown, and the files that they become.

pub mod config;
pub(crate) mod prediction;
pub mod print;
pub(crate) mod delayed;
pub(crate) mod emitted;
pub(crate) mod plan_json;
pub(crate) mod given_file;
pub(crate) mod checked;
