//! The example `processes` under `mpirun`, which this program starts itself: threads have the same losses.

#[path = "../../examples/processes.rs"]
#[expect(dead_code, reason = "the example has a `main`, which this program does not call")]
mod example;
#[path = "../mpirun/mod.rs"]
mod mpirun;

use std::process::ExitCode;

fn main() -> ExitCode {
    let of_threads = mpirun::task().unwrap_or_else(|| losses(&printed()));
    mpirun::run(&[(2, &of_threads)], compare)
}

/// Compares the losses of processes with the losses of threads, which are the task.
fn compare(of_threads: &str) {
    let text = printed();
    let [stage] = *text.lines().filter(|line| line.starts_with("process ")).collect::<Vec<_>>() else {
        panic!("a process has one rank with one stage: {text}");
    };
    if stage.contains(" has rank 0 ") {
        assert_eq!(losses(&text), of_threads, "{text}");
        mpirun::report("the example with processes");
    } else {
        assert_eq!(losses(&text), "", "only one process prints losses");
    }
}

fn printed() -> String {
    let mut out = Vec::new();
    example::run(&mut out).expect("it runs to its end");
    String::from_utf8(out).expect("text")
}

/// Returns the lines with a loss.
fn losses(text: &str) -> String {
    text.lines().filter(|line| line.contains("  loss ")).collect::<Vec<_>>().join("\n")
}
