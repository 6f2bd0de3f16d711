//! `pipewright launch`: starts the processes of a run, watches them, and starts them again after a fault
//! ([`pipewright_run::launch`]).

mod target;

use std::io;
use std::path::PathBuf;

use clap::Args;
use pipewright_planning::failure::Failure;
use pipewright_planning::output;
use pipewright_run::interrupt::Interrupt;
use pipewright_run::launch::{Launch, Replanner, Starter, answer};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use crate::planning::replan::{is_replanned, replan};
use crate::terminal::Terminal;

/// The restarts of a run whose configuration states no number.
const RESTARTS: u64 = 3;

/// The planner of runs that continue on fewer processes.
const REPLANNER: Option<Replanner> = Some(Replanner { is_replanned, replan });

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
        let line = answer(token, arguments.end_before.as_deref())?;
        return output::write(None, &format!("{line}\n"));
    }
    let (starter, hosts) = Starter::find(arguments.hosts.as_deref(), arguments.ranks.is_some())?;
    let mut set = vec!["pipeline.transport=mpi".to_owned()];
    if let Some(ranks) = arguments.ranks {
        set.push(format!("pipeline.ranks={}", pipeline_ranks(arguments, ranks, &set)?));
    }
    let target = target::read(&arguments.command, &set)?;
    let configured = Some(target.settings.run.restarts).filter(|restarts| *restarts > 0);
    let restarts = arguments.restarts.or(configured).unwrap_or(RESTARTS);
    let interrupt = Interrupt::default();
    watch(&interrupt).map_err(|error| Failure::input(format!("cannot watch for signals: {error}")))?;
    Launch { target, hosts, starter, restarts, replanner: REPLANNER, observer: Terminal::shared(), interrupt }
        .run()
}

/// Watches for the signals that end a run.
fn watch(interrupt: &Interrupt) -> io::Result<()> {
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // A second signal ends this process, and the processes end by themselves.
        flag::register_conditional_shutdown(signal, 128 + signal, interrupt.flag())?;
        flag::register(signal, interrupt.flag())?;
    }
    Ok(())
}

/// Returns the ranks of a pipeline for this many processes.
fn pipeline_ranks(arguments: &LaunchArguments, processes: u32, set: &[String]) -> Result<u32, Failure> {
    let mesh = target::read(&arguments.command, set)?.settings.mesh;
    let shares = mesh.ranks(1);
    if processes == 0 || !processes.is_multiple_of(shares) {
        return Err(Failure::input(format!(
            "--ranks {processes}: {} replicas of {} tensor ranks need a multiple of {shares} processes",
            mesh.data_parallel, mesh.tensor_parallel
        )));
    }
    Ok(processes / shares)
}

#[cfg(test)]
mod tests;
