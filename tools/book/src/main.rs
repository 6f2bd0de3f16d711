//! Writes the generated pages of the book, or checks the links of the built book; see the library.

use std::error::Error;
use std::fs;
use std::io::{Write, stderr};
use std::path::Path;
use std::process::ExitCode;

use pipewright_book::{html, root, schedules};

const USAGE: &str = "usage: pipewright-book [check FOLDER]";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        [] => write_pages(),
        ["check", folder] => check(Path::new(folder)),
        _ => Err(USAGE.into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nothing can be done if standard error is closed.
            let _ = writeln!(stderr(), "{error}");
            ExitCode::FAILURE
        }
    }
}

/// Writes the chapter of the schedules and its pictures to `docs/`.
fn write_pages() -> Result<(), Box<dyn Error>> {
    for file in schedules::files()? {
        let path = root().join("docs").join(&file.path);
        fs::create_dir_all(path.parent().unwrap_or(&path))?;
        fs::write(path, file.content)?;
    }
    Ok(())
}

/// Checks the links of the book that mdBook has built in `folder`.
fn check(folder: &Path) -> Result<(), Box<dyn Error>> {
    let broken = html::broken_links(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    if broken.is_empty() { Ok(()) } else { Err(broken.join("\n").into()) }
}
