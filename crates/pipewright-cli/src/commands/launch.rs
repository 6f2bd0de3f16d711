//! `pipewright launch`: starts the processes of a run, watches them, and starts them again after a fault.

use std::path::PathBuf;

use clap::Args;

use crate::failure::Failure;
use crate::launch::{Launch, Places, Starter, Target, answer, supervise};

/// The restarts of a run whose configuration states no number.
const RESTARTS: u64 = 3;

/// The arguments of `pipewright launch`.
#[derive(Debug, Args)]
pub(crate) struct LaunchArguments {
    /// Start N processes on this machine (`pipeline.ranks` follows from N); by default, the ranks of the configuration
    #[arg(long, value_name = "N", conflicts_with = "hosts")]
    ranks: Option<u32>,
    /// Start the processes on the hosts of this file, one a line with `slots=N`; hosts that are not needed are spare
    #[arg(long, value_name = "FILE")]
    hosts: Option<PathBuf>,
    /// The most restarts; by default `run.restarts`, or 3 if that is 0
    #[arg(long, value_name = "N")]
    restarts: Option<u64>,
    /// Print the answer of this host to another one
    #[arg(long, value_name = "FILE", hide = true)]
    answer: Option<PathBuf>,
    /// End the processes of earlier starts on this host before it answers
    #[arg(long, value_name = "START", hide = true, requires = "answer")]
    end_before: Option<String>,
    /// The command of the processes: train or resume, with its arguments
    #[arg(last = true, value_name = "COMMAND", required_unless_present = "answer")]
    command: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(arguments: &LaunchArguments) -> Result<(), Failure> {
    if let Some(token) = &arguments.answer {
        return answer(token, arguments.end_before.as_deref());
    }
    let places = Places::find(arguments.hosts.as_deref(), arguments.ranks.is_some())?;
    let starter = Starter::find(&places)?;
    let mut set = vec!["pipeline.transport=mpi".to_owned()];
    if let Some(ranks) = arguments.ranks {
        set.push(format!("pipeline.ranks={}", pipeline_ranks(arguments, ranks, &set)?));
    }
    let target = Target::read(&arguments.command, &set)?;
    let configured = Some(target.settings.run.restarts).filter(|restarts| *restarts > 0);
    let restarts = arguments.restarts.or(configured).unwrap_or(RESTARTS);
    supervise(Launch { target, places, starter, restarts })
}

/// Returns the ranks of a pipeline for this many processes.
fn pipeline_ranks(arguments: &LaunchArguments, processes: u32, set: &[String]) -> Result<u32, Failure> {
    let mesh = Target::read(&arguments.command, set)?.settings.mesh;
    let shares = mesh.ranks(1);
    if processes == 0 || !processes.is_multiple_of(shares) {
        return Err(Failure::input(format!(
            "--ranks {processes}: {} replicas of {} tensor ranks need a multiple of {shares} processes",
            mesh.data_parallel, mesh.tensor_parallel
        )));
    }
    Ok(processes / shares)
}
