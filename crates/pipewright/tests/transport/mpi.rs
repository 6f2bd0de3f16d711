//! The conformance suite over MPI: this program starts itself under `mpirun`, with 1 to 8 processes.
//!
//! It has no test harness of its own: a check that fails ends its process, and with it the whole run.

mod checks;

use std::process::{Command, ExitCode};
use std::time::Duration;

use pipewright::transport::World;

use checks::{CHECKS, STEPS, barrier};

/// Set in the processes that `mpirun` starts.
const CHILD: &str = "PIPEWRIGHT_TRANSPORT_CHILD";

fn main() -> ExitCode {
    if std::env::var_os(CHILD).is_some() {
        run_checks();
        return ExitCode::SUCCESS;
    }
    // A harness's list of tests is empty.
    if std::env::args().any(|argument| argument == "--list") {
        return ExitCode::SUCCESS;
    }
    let program = std::env::current_exe().expect("this program has a path");
    for ranks in 1..=8 {
        let status = Command::new("mpirun")
            .args(["-n", &ranks.to_string()])
            .arg(&program)
            .env(CHILD, "1")
            // A container's only user is root, and it has fewer cores than ranks here.
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
            .status()
            .expect("mpirun is installed with MPI");
        if !status.success() {
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn run_checks() {
    let world = World::mpi(Duration::from_secs(20)).expect("mpirun started this process");
    let mut end = world.into_endpoints().pop().expect("a process has a rank");
    for (number, (name, check)) in (0..).zip(CHECKS) {
        let first_step = 1 + number * STEPS;
        check(&mut end, first_step);
        if end.abort().first().is_none() {
            end.begin_step(first_step + STEPS - 1);
            barrier(&mut end, 0);
        }
        if end.rank().get() == 0 {
            #[expect(clippy::print_stdout, reason = "what a test harness would say")]
            {
                println!("{name}, {} processes: ok", end.ranks());
            }
        }
    }
    assert!(World::mpi(Duration::from_secs(1)).is_err(), "a process joins MPI once");
}
