//! `pipewright audit`: computes one stage of one step of a run again, and compares it with the recorded fingerprint.

use std::path::PathBuf;

use clap::Args;
use pipewright_planning::failure::{Exit, Failure};
use pipewright_planning::output;
use pipewright_run::audit::audit;
use pipewright_schedule::words::counted;

/// The arguments of `pipewright audit`.
#[derive(Debug, Args)]
pub(crate) struct AuditArguments {
    /// The folder of the run
    #[arg(value_name = "RUN_DIR")]
    run: PathBuf,
    /// The step, from 1
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u64).range(1..))]
    step: u64,
    /// The stage, from 0
    #[arg(long, value_name = "S")]
    stage: u32,
}

/// Runs the command.
pub(crate) fn run(arguments: &AuditArguments) -> Result<(), Failure> {
    let AuditArguments { run, step, stage } = arguments;
    let found = audit(run, *step, *stage)?;
    if found.findings.is_empty() {
        let parameters = counted(found.parameters, "parameter");
        let mut text = format!("step {step}, stage {stage}: {parameters} as recorded");
        if !found.uncompared.is_empty() {
            text += &format!("; not compared: {}", found.uncompared.join(", "));
        }
        return output::show(&(text + "\n"));
    }
    let findings: Vec<String> = found.findings.iter().map(ToString::to_string).collect();
    Err(Failure::new(Exit::CheckFailed, findings.join("; ")))
}
