//! Tests of a run in which one process cannot allocate memory: all processes end, and the first message is
//! its report.

use std::fs;

use super::{folder, mpirun, pipewright, words};

/// A model whose activations of all microbatches need more than a gigabyte in each process, and settings of
/// its runs. GPipe holds them all at the same time.
const SETTINGS: [&str; 11] = [
    "model.hidden_size=256",
    "model.intermediate_size=1024",
    "model.num_hidden_layers=8",
    "data.path=words.txt",
    "data.seq_len=64",
    "pipeline.schedule=gpipe",
    "pipeline.ranks=2",
    "pipeline.microbatches=128",
    "pipeline.microbatch_size=4",
    "pipeline.transport=mpi",
    "run.deadline_seconds=60",
];

/// The limit of each process's address space in kibibytes: enough for the start and for a part of the
/// microbatches.
const LIMIT: u32 = 1 << 20;

#[test]
fn memory_that_ends_in_one_process_ends_all_with_a_report() {
    let folder = folder();
    let text = "the quick brown fox jumps over the lazy dog and runs away from it ".repeat(600);
    fs::write(folder.path().join("words.txt"), text).expect("the scratch folder takes files");
    let script = format!("ulimit -v {LIMIT}; exec \"$0\" \"$@\"");
    let mut command = mpirun(folder.path());
    command.args(["-n", "2", "sh", "-c", &script]).arg(pipewright()).args(["train", "small.toml"]);
    command.args(SETTINGS.iter().flat_map(|setting| ["--set", setting]));
    let output = command.output().expect("mpirun is installed with MPI");
    let told = words(&output);
    assert_eq!(output.status.code(), Some(4), "{told}");
    let report = told.lines().find(|line| line.starts_with("error: ")).expect("a report");
    for part in ["error: step 1: rank ", ", stage ", ", microbatch ", ", action ", ": no memory is left: "] {
        assert!(report.contains(part), "{report}");
    }
    assert!(report.contains("make `pipeline.microbatch_size` or the model smaller"), "{report}");
}
