//! Models without a reference run: how they are cut, their directories, and rows of several documents.

mod stages;
mod hf;
mod packed;
