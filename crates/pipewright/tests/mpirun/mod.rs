//! A test program that starts itself under `mpirun`, once for each of its tasks: processes join MPI once.
//!
//! Such a program has no test harness: a task that panics ends its process, and with it the whole run.

use std::process::{Command, ExitCode};

/// The environment variable with the task of a process that `mpirun` starts.
const TASK: &str = "PIPEWRIGHT_TEST_TASK";

/// The start of a task whose messages all wait for their receives.
pub(crate) const SYNCHRONOUS: &str = "synchronous";

/// The environment variable that asks the transport for it.
const SYNCHRONOUS_SENDS: &str = "PIPEWRIGHT_TEST_SYNCHRONOUS_SENDS";

/// Returns the task of this process, if `mpirun` has started it.
pub(crate) fn task() -> Option<String> {
    std::env::var(TASK).ok()
}

/// Runs each task with its number of processes; every process calls `work` with the task.
pub(crate) fn run(tasks: &[(u32, &str)], work: fn(&str)) -> ExitCode {
    if let Some(task) = task() {
        work(&task);
        return ExitCode::SUCCESS;
    }
    // A test runner that asks for the list of tests gets an empty one.
    if std::env::args().any(|argument| argument == "--list") {
        return ExitCode::SUCCESS;
    }
    let program = std::env::current_exe().expect("this program has a path");
    for (processes, task) in tasks {
        let synchronous = task.starts_with(SYNCHRONOUS).then_some((SYNCHRONOUS_SENDS, "1"));
        let status = Command::new("mpirun")
            .args(["-n", &processes.to_string()])
            .arg(&program)
            .env(TASK, task)
            .envs(synchronous)
            // In a container the only user is root, and there are fewer cores than processes.
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

/// Prints a line, as a test harness does, when a task or a part of one is done.
pub(crate) fn report(done: &str) {
    #[expect(clippy::print_stdout, reason = "there is no harness to say it")]
    {
        println!("{done}: ok");
    }
}
