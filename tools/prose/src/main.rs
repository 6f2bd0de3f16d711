//! Prints the unidiomatic constructions of Rust and Markdown files, and their rate per 10,000 words; see the
//! library.

use std::io::{self, Write, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

use pipewright_prose::{Use, of_markdown, of_rust, rate, uses};

const USAGE: &str = "usage: pipewright-prose FILE... (.rs or .md)";

fn main() -> ExitCode {
    let files: Vec<PathBuf> = env::args_os().skip(1).map(PathBuf::from).collect();
    let result = if files.is_empty() { Err(io::Error::other(USAGE)) } else { report(&files) };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nothing can be done if standard error is closed.
            let _ = writeln!(io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    }
}

fn report(files: &[PathBuf]) -> io::Result<()> {
    let (mut count, mut words) = (0, 0);
    for file in files {
        let text = fs::read_to_string(file).map_err(|error| named(file, &error))?;
        let read = if file.extension().is_some_and(|ending| ending == "rs") { of_rust } else { of_markdown };
        for passage in read(&text) {
            words += passage.words();
            for Use { line, excerpt, instead } in uses(&passage) {
                count += 1;
                writeln!(stdout(), "{}:{line}: {excerpt}\n    instead: {instead}", file.display())?;
            }
        }
    }
    writeln!(stdout(), "{count} uses in {words} words, {:.1} per 10,000", rate(count, words))
}

fn named(file: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", file.display()))
}
