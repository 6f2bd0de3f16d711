//! A test program that starts itself under `mpirun`, once for each of its tasks: processes join MPI once.
//!
//! Such a program has no test harness: a task that panics ends its process, and with it the whole run.

use std::process::{Command, ExitCode};

/// Tells the processes that `mpirun` starts their task.
const TASK: &str = "PIPEWRIGHT_TEST_TASK";

/// Does each task in so many processes: `work` is called with it in every one of them.
pub(crate) fn run(tasks: &[(u32, &str)], work: fn(&str)) -> ExitCode {
    if let Ok(task) = std::env::var(TASK) {
        work(&task);
        return ExitCode::SUCCESS;
    }
    // A harness's list of tests is empty.
    if std::env::args().any(|argument| argument == "--list") {
        return ExitCode::SUCCESS;
    }
    let program = std::env::current_exe().expect("this program has a path");
    for (processes, task) in tasks {
        let status = Command::new("mpirun")
            .args(["-n", &processes.to_string()])
            .arg(&program)
            .env(TASK, task)
            // A container's only user is root, and it has fewer cores than there are processes here.
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

/// Says what a test harness would: that a task, or a part of one, is done.
pub(crate) fn report(done: &str) {
    #[expect(clippy::print_stdout, reason = "there is no harness to say it")]
    {
        println!("{done}: ok");
    }
}
