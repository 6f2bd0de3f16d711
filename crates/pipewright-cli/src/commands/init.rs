//! `pipewright init`: writes a commented configuration.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use pipewright_planning::failure::Failure;
use pipewright_planning::output;
use pipewright_planning::screen::say;
use pipewright_run::settings::template;

/// The arguments of `pipewright init`.
#[derive(Debug, Args)]
pub(crate) struct InitArguments {
    /// The file to write, which must not exist, or - for standard output
    #[arg(default_value = "pipewright.toml")]
    file: PathBuf,
}

/// Runs the command.
pub(crate) fn run(arguments: &InitArguments) -> Result<(), Failure> {
    if arguments.file == Path::new("-") {
        return output::write(None, &template());
    }
    let name = arguments.file.display();
    let written = File::create_new(&arguments.file).and_then(|mut file| {
        file.write_all(template().as_bytes()).inspect_err(|_| {
            // Best effort: a part of the file must not be taken for a configuration.
            let _ = fs::remove_file(&arguments.file);
        })
    });
    match written {
        Ok(()) => {
            say(&format!(
                "wrote {name}; to train on your own text, set `path` in its section [data]; train with: pipewright train {name}"
            ));
            Ok(())
        }
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            Err(Failure::input(format!("{name}: it exists already and is left as it is; name another file")))
        }
        Err(error) => Err(Failure::unwritten(&arguments.file, &error, "name another file")),
    }
}
