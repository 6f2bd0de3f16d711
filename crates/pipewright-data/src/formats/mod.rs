//! The formats of data files, and their readers.

pub(crate) mod lines;
pub(crate) mod list;
pub(crate) mod format;
pub(crate) mod parquet_rows;
pub(crate) mod token_files;
