//! The `[data]` section: the training data, and the length of a row.

use std::path::Path;

use serde::Serialize;

use crate::config::document::Document;
use crate::config::paths::Surroundings;
use crate::config::problem::ProblemKind;
use crate::config::section::Section;

/// The training data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct DataSettings {
    /// Absolute patterns of files, as [`pipewright::data::DataConfig::path`] takes them.
    pub(crate) path: Vec<String>,
    /// `bytes`, or the absolute path of a `tokenizer.json`.
    pub(crate) tokenizer: String,
    /// Tokens per row that the model receives.
    pub(crate) seq_len: u32,
    /// Whether rows come in a seeded random order.
    pub(crate) shuffle: bool,
}

/// The name of the tokenizer whose tokens are bytes.
pub(crate) const BYTES: &str = "bytes";

/// Reads the section.
pub(super) fn read(document: &mut Document, surroundings: &Surroundings) -> DataSettings {
    let mut section = Section::new(document, surroundings, "data");
    let path = match section.patterns("path") {
        Some(patterns) => patterns,
        None if section.is_written("path") => Vec::new(),
        None => sample(&surroundings.working_folder).unwrap_or_else(|| {
            section.report("path", ProblemKind::NoData);
            Vec::new()
        }),
    };
    let tokenizer = match section.text("tokenizer") {
        None => BYTES.to_owned(),
        Some(name) if name == BYTES => name,
        Some(_) => {
            section.path("tokenizer").map_or_else(String::new, |path| path.to_string_lossy().into_owned())
        }
    };
    let seq_len = section.count("seq_len", 256);
    DataSettings { path, tokenizer, seq_len, shuffle: section.flag("shuffle", true) }
}

/// The built-in sample: the documents and sources of the checkout of this project that holds `folder`.
fn sample(folder: &Path) -> Option<Vec<String>> {
    let is_checkout = |folder: &&Path| {
        let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap_or_default();
        manifest.lines().any(|line| line.trim() == "[workspace]")
            && folder.join("crates/pipewright/Cargo.toml").is_file()
    };
    let root = folder.ancestors().find(is_checkout)?;
    let root = globset::escape(&root.to_string_lossy());
    Some(vec![format!("{root}/**/*.md"), format!("{root}/**/*.rs")])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sample_is_the_checkout_around_the_folder() {
        let patterns = sample(Path::new(env!("CARGO_MANIFEST_DIR"))).expect("tests run in a checkout");
        assert!(patterns[0].ends_with("/**/*.md") && !patterns[0].contains("crates"), "{patterns:?}");
        let elsewhere = tempfile::tempdir().expect("a scratch folder");
        assert_eq!(sample(elsewhere.path()), None);
    }
}
