//! Models without a reference run: how they are cut, their directories, and rows of several documents.

mod head_parts;
mod stages;
mod config_keys;
mod hf;
mod packed;
mod real_files;
