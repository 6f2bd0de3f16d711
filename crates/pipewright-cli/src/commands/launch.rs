//! `pipewright launch`: starts the processes of a run, watches them, and starts them again after a fault
//! ([`pipewright_run::launch`]).

mod target;

use std::io;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use pipewright_planning::failure::Failure;
use pipewright_planning::output;
use pipewright_run::Observer;
use pipewright_run::interrupt::Interrupt;
use pipewright_run::launch::{HostSource, Launch, Replanner, Starter, answer, meet};
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
    /// Start the processes on these hosts: names with commas, such as `a,b:2`, where this machine is the first one and has
    /// the files; or a file with one per line and `slots=N`. Hosts that are not needed are spare
    #[arg(long, value_name = "HOSTS|FILE", value_parser = HostSource::read)]
    hosts: Option<HostSource>,
    /// Whether all hosts have the program and the files under the same paths, in folders that they share; by default yes for
    /// a file of hosts, and no for names
    #[arg(long, value_name = "yes|no", num_args = 0..=1, default_missing_value = "yes", requires = "hosts", value_enum)]
    shared: Option<Shared>,
    /// The most restarts; by default `run.restarts`, or 3 if that is 0
    #[arg(long, value_name = "N")]
    restarts: Option<u64>,
    /// Print the answer of this host to another one
    #[arg(long, value_name = "FILE", hide = true)]
    answer: Option<PathBuf>,
    /// Meet the other processes of a trial
    #[arg(long, hide = true, conflicts_with_all = ["answer", "ranks"])]
    meet: bool,
    /// End the processes of earlier starts on this host before it answers
    #[arg(long, value_name = "START", hide = true, requires = "answer")]
    end_before: Option<String>,
    /// The command of the processes: train or resume, with its arguments
    #[arg(last = true, value_name = "COMMAND", required_unless_present_any = ["answer", "meet"])]
    command: Vec<String>,
}

/// Whether hosts share folders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Shared {
    Yes,
    No,
}

/// Runs the command.
pub(crate) fn run(arguments: &LaunchArguments) -> Result<(), Failure> {
    if let Some(token) = &arguments.answer {
        let line = answer(token, arguments.end_before.as_deref())?;
        return output::write(None, &format!("{line}\n"));
    }
    if arguments.meet {
        return output::write(None, &meet()?);
    }
    let (mut starter, hosts) = Starter::find(arguments.hosts.as_ref(), arguments.ranks.is_some())?;
    let mut set = vec!["pipeline.transport=mpi".to_owned()];
    if let Some(ranks) = arguments.ranks {
        set.push(format!("pipeline.ranks={}", pipeline_ranks(arguments, ranks, &set)?));
    }
    let target = target::read(&arguments.command, &set)?;
    let configured = Some(target.settings.run.restarts).filter(|restarts| *restarts > 0);
    let restarts = arguments.restarts.or(configured).unwrap_or(RESTARTS);
    let is_shared = match (arguments.shared, &arguments.hosts) {
        (Some(shared), _) => shared == Shared::Yes,
        (None, hosts) => !matches!(hosts, Some(HostSource::List(_))),
    };
    if !is_shared {
        starter.bring_binary(&hosts, |sentence| Terminal::shared().note(sentence))?;
    }
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
