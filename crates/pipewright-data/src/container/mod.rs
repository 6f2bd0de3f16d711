//! Data files, which may be compressed, as streams.

pub(crate) mod zstd_frames;
pub(crate) mod data_file;
