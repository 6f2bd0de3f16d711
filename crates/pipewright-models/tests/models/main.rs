//! Models without a reference run: how they are cut, their directories, and rows of several documents.

mod head_parts;
mod stages;
mod hf;
mod packed;
