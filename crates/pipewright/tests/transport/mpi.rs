//! The conformance suite over MPI: this program starts itself under `mpirun`, with 1 to 8 processes.

mod checks;
#[path = "../mpirun/mod.rs"]
mod mpirun;

use std::process::ExitCode;
use std::time::Duration;

use pipewright::transport::World;

use checks::{CHECKS, STEPS, barrier};

fn main() -> ExitCode {
    let tasks: Vec<_> = (1..=8).map(|processes| (processes, "")).collect();
    mpirun::run(&tasks, |_| run_checks())
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
            mpirun::report(&format!("{name}, {} processes", end.ranks()));
        }
    }
    assert!(World::mpi(Duration::from_secs(1)).is_err(), "a process joins MPI once");
}
