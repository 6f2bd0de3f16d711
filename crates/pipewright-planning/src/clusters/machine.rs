//! A machine that the user names, or describes in a cluster file; and how such files are read.

use std::io::{Error, ErrorKind};
use std::path::Path;

use pipewright_cluster::catalogue::{MAX_FILE, by_name, from_toml};
use pipewright_cluster::machine::Machine;
use pipewright_document::{Problems, Source};
use pipewright_system::bounded_file::read_text;

use crate::failure::Failure;

/// The machines that `--cluster` names: one, or several kinds with their nodes, such as `h100:4,a100:2`.
#[derive(Debug, Clone)]
pub(crate) struct NamedMachines<'a> {
    /// The argument.
    pub(crate) argument: &'a str,
    /// The name of the first machine, or the path of its file.
    pub(crate) first: &'a str,
    /// The nodes of the first machine; `None` if other options give them.
    pub(crate) nodes: Option<u32>,
    /// The names or paths of the other machines, with their nodes.
    pub(crate) further: Vec<(&'a str, u32)>,
}

impl<'a> NamedMachines<'a> {
    /// Reads the argument.
    ///
    /// # Errors
    /// When one of several machines has no number of nodes, or 0.
    pub(crate) fn parse(argument: &'a str) -> Result<Self, Failure> {
        let with_nodes = |part: &'a str| {
            let (name, nodes) = part.rsplit_once(':')?;
            Some((name, nodes.parse::<u32>().ok()?)).filter(|_| !name.is_empty())
        };
        let parts: Vec<&str> = argument.split(',').collect();
        let is_path = argument.contains(['/', '\\']) || argument.ends_with(".toml");
        // The path of one file may have commas.
        let is_list = parts.iter().any(|part| with_nodes(part).is_some()) || (parts.len() > 1 && !is_path);
        if !is_list {
            return Ok(Self { argument, first: argument, nodes: None, further: Vec::new() });
        }
        let kind = |part: &&'a str| match with_nodes(part) {
            Some(kind @ (_, 1..)) => Ok(kind),
            Some((name, 0)) => Err(format!("`{name}` has 0 nodes; use at least 1")),
            None => Err(format!(
                "`{part}` has no number of nodes; write one for each machine, such as `h100:4,a100:2`"
            )),
        };
        let kinds: Result<Vec<(&str, u32)>, String> = parts.iter().map(kind).collect();
        let mut further = kinds.map_err(|error| Failure::input(format!("--cluster {argument}: {error}")))?;
        let (first, nodes) = further.remove(0);
        Ok(Self { argument, first, nodes: Some(nodes), further })
    }
}

/// Returns the machine that an argument means: a name, or the path of a cluster file.
///
/// # Errors
/// When the name is unknown, or the file cannot be read or has a mistake.
pub(crate) fn machine(argument: &str) -> Result<Machine, Failure> {
    let is_path = argument.contains(['/', '\\']) || argument.ends_with(".toml");
    if is_path {
        let advice = format!("`pipewright clusters h100 -o {argument}` writes one");
        return read_toml(Path::new(argument), "the cluster file", &advice, from_toml);
    }
    by_name(argument)
        .map_err(|error| Failure::input(format!("{error}; the path of a cluster file ends in .toml")))
}

/// Reads a file. `what` is its name in errors, and `advice` is for a file that does not exist.
///
/// # Errors
/// When the file cannot be read, or has mistakes, each with the file, the line and the column.
pub(super) fn read_toml<T>(
    path: &Path,
    what: &str,
    advice: &str,
    parse: impl FnOnce(Source) -> Result<T, Problems>,
) -> Result<T, Failure> {
    let text = read_text(path, MAX_FILE as u64).map_err(|error| unreadable(path, what, &error, advice))?;
    parse(Source { name: path.display().to_string(), text }).map_err(Failure::from)
}

/// Returns the failure of a file that cannot be read. `advice` is for a file that does not exist.
pub(super) fn unreadable(path: &Path, what: &str, error: &Error, advice: &str) -> Failure {
    let advice = match error.kind() {
        ErrorKind::NotFound => format!("; {advice}"),
        ErrorKind::IsADirectory => "; name a file".to_owned(),
        _ => String::new(),
    };
    Failure::input(format!("{}: cannot read {what}: {error}{advice}", path.display()))
}
