//! A scratch folder with a configuration and a text to train on.

use std::fs;

use tempfile::TempDir;

/// `small.toml` with this content, and `text.txt`.
pub(crate) fn folder(config: &str) -> TempDir {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let text = "the quick brown fox jumps over the lazy dog and runs away from it ".repeat(4);
    for (name, content) in [("small.toml", config), ("text.txt", &text)] {
        fs::write(folder.path().join(name), content).expect("the scratch folder takes files");
    }
    folder
}
