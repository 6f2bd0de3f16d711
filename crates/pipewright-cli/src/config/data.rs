//! The `[data]` section: the training data and the length of a row.

use std::path::PathBuf;

use serde::Serialize;

use crate::config::document::Document;
use crate::config::paths::Surroundings;
use crate::config::section::Section;

/// The training data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct DataSettings {
    /// Absolute patterns of files, as [`pipewright::train::data::DataConfig::path`] takes them, or [`BUILT_IN`] alone.
    pub(crate) path: Vec<String>,
    /// `bytes`, or the absolute path of a `tokenizer.json`.
    pub(crate) tokenizer: String,
    /// The number of tokens per row that the model receives.
    pub(crate) seq_len: u32,
    /// Whether rows come in a seeded random order.
    pub(crate) shuffle: bool,
    /// A file with side inputs for each row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) side: Option<PathBuf>,
}

/// The name of the tokenizer whose tokens are bytes.
pub(crate) const BYTES: &str = "bytes";

/// The word that selects the text in the binary, [`crate::config::sample::TEXT`], instead of patterns of files.
pub(crate) const BUILT_IN: &str = "built-in";

impl DataSettings {
    /// Returns whether the data is the text in the binary.
    pub(crate) fn is_built_in(&self) -> bool {
        matches!(self.path.as_slice(), [only] if only == BUILT_IN)
    }
}

/// Reads the section.
pub(super) fn read(document: &mut Document, surroundings: &Surroundings) -> DataSettings {
    let mut section = Section::new(document, surroundings, "data");
    let path = match section.is_written("path") {
        true => section.patterns("path").unwrap_or_default(),
        false => vec![BUILT_IN.to_owned()],
    };
    let tokenizer = match section.text("tokenizer") {
        None => BYTES.to_owned(),
        Some(name) if name == BYTES => name,
        Some(_) => {
            section.path("tokenizer").map_or_else(String::new, |path| path.to_string_lossy().into_owned())
        }
    };
    let seq_len = section.count("seq_len", 256);
    let (shuffle, side) = (section.flag("shuffle", true), section.path("side"));
    DataSettings { path, tokenizer, seq_len, shuffle, side }
}
