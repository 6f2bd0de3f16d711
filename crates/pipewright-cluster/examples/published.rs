//! Prints predictions next to published runs: `cargo run --example published -- FILE.toml`.

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;

use pipewright_cluster::{comparison, published};

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("give a file of published runs")?;
    let comparison = comparison::compare(&published::read(&std::fs::read_to_string(path)?)?)?;
    print!("{}", comparison.to_markdown());
    Ok(())
}
