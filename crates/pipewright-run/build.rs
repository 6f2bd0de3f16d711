//! Gathers the text of the built-in sample: the documents of the workspace, in the order of their paths. A crate
//! that was packaged alone gathers its own sources.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() -> Result<(), Box<dyn Error>> {
    let manifest = env::var("CARGO_MANIFEST_DIR")?;
    let root = Path::new(&manifest).join("../..");
    let starts = ["README.md", "ARCHITECTURE.md", "docs"].map(|start| root.join(start));
    let mut files = Vec::new();
    if starts.iter().all(|start| start.exists()) {
        starts.iter().try_for_each(|start| gather(start, &mut files))?;
    } else {
        gather(&Path::new(&manifest).join("src"), &mut files)?;
    }
    files.sort();
    let mut text = String::new();
    for file in &files {
        text.push_str(&fs::read_to_string(file)?);
    }
    fs::write(Path::new(&env::var("OUT_DIR")?).join("sample.txt"), text)?;
    Ok(())
}

/// Adds the documents and sources at `path`, except tests.
fn gather(path: &Path, files: &mut Vec<PathBuf>) -> Result<(), Box<dyn Error>> {
    if !path.is_dir() {
        if path.extension().is_some_and(|ending| ending == "md" || ending == "rs") {
            println!("cargo::rerun-if-changed={}", path.display());
            files.push(path.to_owned());
        }
        return Ok(());
    }
    // A folder's modification time changes when a file in it is added or removed.
    println!("cargo::rerun-if-changed={}", path.display());
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_name() != "tests" {
            gather(&entry.path(), files)?;
        }
    }
    Ok(())
}
