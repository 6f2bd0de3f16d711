//! The source files of a crate, and their modules.

use std::path::Path;
use std::{fs, io};

/// A file of a crate.
#[derive(Debug, Clone)]
pub(crate) struct SourceFile {
    /// The path below the crate's folder, such as `src/lower/error.rs`.
    pub(crate) file: String,
    /// The path of the module without `crate::`, such as `lower::error`; empty for the crate's root.
    pub(crate) module: String,
    pub(crate) text: String,
}

impl SourceFile {
    pub(crate) fn new(file: &str, text: &str) -> Self {
        let path = file.trim_start_matches("src/").trim_end_matches(".rs");
        let module = match path {
            "lib" | "main" => String::new(),
            _ => path.trim_end_matches("/mod").replace('/', "::"),
        };
        Self { file: file.to_owned(), module, text: text.to_owned() }
    }
}

/// Reads every Rust file below `src`, sorted by path.
pub(crate) fn read_sources(crate_dir: &Path) -> io::Result<Vec<SourceFile>> {
    let mut sources = Vec::new();
    let mut folders = vec![crate_dir.join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                let file = path.strip_prefix(crate_dir).unwrap_or(&path).to_string_lossy().replace('\\', "/");
                sources.push(SourceFile::new(&file, &fs::read_to_string(&path)?));
            }
        }
    }
    sources.sort_by(|a, b| a.file.cmp(&b.file));
    Ok(sources)
}
