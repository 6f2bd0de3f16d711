//! `pipewright man`: the manual pages, one for the program and one for each command.

use std::fs;
use std::path::PathBuf;

use clap::{Args, Command};
use clap_mangen::Man;
use pipewright_planning::failure::Failure;
use pipewright_planning::output;
use pipewright_planning::screen::say;

/// The arguments of `pipewright man`.
#[derive(Debug, Args)]
pub(crate) struct ManArguments {
    /// The folder to write all pages to; by default, the page of the program is written to standard output
    #[arg(value_name = "DIR")]
    folder: Option<PathBuf>,
}

/// Runs the command; `program` describes the whole command line.
pub(crate) fn run(arguments: &ManArguments, mut program: Command) -> Result<(), Failure> {
    // Gives each command its full name, such as `pipewright-train`.
    program.build();
    let Some(folder) = &arguments.folder else { return output::write(None, &page(program).1) };
    let commands = program.get_subcommands().filter(|command| command.get_name() != "help");
    let mut pages: Vec<(String, String)> = commands.cloned().map(page).collect();
    pages.push(page(program));
    fs::create_dir_all(folder).map_err(|error| {
        Failure::input(format!("{}: cannot be created: {error}; choose another folder", folder.display()))
    })?;
    pages.iter().try_for_each(|(name, text)| output::write_file(&folder.join(name), text))?;
    say(&format!("wrote {} pages to {}", pages.len(), folder.display()));
    Ok(())
}

/// Returns the file name and the content of a command's page.
fn page(command: Command) -> (String, String) {
    let name = format!("{}.1", command.get_display_name().unwrap_or(command.get_name()));
    let mut text = Vec::new();
    Man::new(command).render(&mut text).expect("a vector takes all bytes");
    (name, String::from_utf8_lossy(&text).into_owned())
}
