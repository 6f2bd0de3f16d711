//! Plans for the commands: predictions for a profile, how plans are shown, and the files that they become.

pub mod config;
pub mod prediction;
pub mod print;
pub mod emitted;
pub mod plan_json;
pub mod given_file;
pub mod checked;
