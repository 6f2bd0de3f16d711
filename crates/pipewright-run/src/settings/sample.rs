//! The built-in sample: a small model that learns the documents of this project. Both are part of the binary, so
//! that `train` works in any folder.

/// The configuration of the sample.
pub(super) const CONFIG: &str = include_str!("sample.toml");

/// The name of the configuration in messages.
pub(super) const NAME: &str = "the built-in sample";

/// The documents of this project, gathered by the build script.
pub const TEXT: &str = include_str!(concat!(env!("OUT_DIR"), "/sample.txt"));

/// The word that selects [`TEXT`] instead of patterns of files.
pub(super) const BUILT_IN: &str = "built-in";
