//! Tests that a run that cannot allocate memory reports where that happened, and ends with the exit code of a
//! failed rank, and that schedules which do not fit are refused before memory ends.

use std::fs;

use crate::run::{Run, finished};

/// A model whose activations of all microbatches need a few gigabytes. GPipe holds them all at the same time.
const LARGE: &str = "\
[model]
vocab_size = 128
hidden_size = 256
intermediate_size = 1024
num_hidden_layers = 8
num_attention_heads = 2
[data]
path = \"text.txt\"
seq_len = 64
[pipeline]
schedule = \"gpipe\"
microbatches = 128
microbatch_size = 4
[run]
steps = 3
out = \"out\"
";

/// A profile of a model with many layers.
const PROFILE: &str = "\
rows = 1
[link]
latency_s = 5e-6
bytes_per_s = 1e10
[[layers]]
kind = \"block\"
count = 64
forward_s = 1e-3
input_backward_s = 1e-3
weight_backward_s = 1e-3
output_bytes = 4096
parameter_bytes = 4096
activation_bytes = 4096
";

/// The limit of the address space in kibibytes: enough for the start and for a part of the microbatches.
const LIMIT: u32 = 1 << 20;

/// A model whose parameters need 134 MB, and as much for their gradients and each of two moments.
const WIDE: &str = "\
[model]
vocab_size = 16384
hidden_size = 1024
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
[data]
path = \"text.txt\"
seq_len = 16
[pipeline]
microbatches = 2
[run]
steps = 3
out = \"out\"
";

fn folder(config: &str) -> Run {
    let folder = Run::of(config);
    folder
        .write("text.txt", "the quick brown fox jumps over the lazy dog and runs away from it ".repeat(600));
    folder
}

#[test]
fn memory_may_end_before_the_first_action_and_after_the_last() {
    let places = [
        (400_000, "step 0: rank ", ", while its stages are made: "),
        (1_000_000, "step 1: rank ", ": in the update or in a copy"),
    ];
    for (kibibytes, step, place) in places {
        let (code, told) = within(kibibytes, &folder(WIDE), "train small.toml");
        assert_eq!(code, Some(4), "{told}");
        let report = told.lines().find(|line| line.starts_with("error: ")).expect("a report");
        assert!(report.contains(step) && report.contains(place) && !report.contains(", action"), "{report}");
    }
}

#[test]
fn a_run_out_of_memory_says_where_and_how_much() {
    let folder = folder(LARGE);
    let (code, told) = within(LIMIT, &folder, "train small.toml");
    assert_eq!(code, Some(4), "{told}");
    let report = told.lines().find(|line| line.starts_with("error: ")).expect("a report");
    let places = ["step 1: rank ", ", stage ", ", microbatch ", ", action "];
    assert!(places.iter().all(|place| report.contains(place)), "{report}");
    let (_, asked) = report.split_once("no memory is left: ").expect("the bytes that were requested");
    let numbers: Vec<u64> = asked.split(' ').filter_map(|word| word.parse().ok()).collect();
    let [bytes, held] = numbers[..] else { panic!("bytes asked for and held: {report}") };
    assert!(bytes > 0 && held > 64 << 20 && held < u64::from(LIMIT) << 10, "{report}");
    assert!(report.contains("`pipeline.microbatch_size`"), "{report}");
}

/// Runs a command under a limit of the address space in kibibytes. Returns its exit code and standard error.
fn within(kibibytes: u32, folder: &Run, command: &str) -> (Option<i32>, String) {
    let (code, _, said) =
        finished(&mut folder.shell(&format!("ulimit -v {kibibytes}; exec \"$0\" {command}")));
    (code, said)
}

#[test]
fn schedules_that_do_not_fit_are_refused_with_both_numbers() {
    let folder = folder(LARGE);
    let rows = |rank: u32| -> String {
        (0..400_000).map(|microbatch| format!("{rank}F{microbatch},{rank}B{microbatch},")).collect()
    };
    let table = format!("{}\n{}\n", rows(0).trim_end_matches(','), rows(1).trim_end_matches(','));
    let layout = vec!["t"; 64].join("|");
    let megatron = format!(
        "--pipeline-model-parallel-size 64 --pipeline-model-parallel-layout E{layout}L --micro-batch-size 1 \
         --global-batch-size 16384"
    );
    let torchtitan =
        "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule_csv t.csv";
    let files = [("p.toml", PROFILE), ("t.csv", &table), ("m.args", &megatron), ("t.args", torchtitan)];
    for (name, content) in files {
        fs::write(folder.path(name), content).expect("the scratch folder takes files");
    }
    let large = "--ranks 5000 --microbatches 16000";
    for (kibibytes, command) in [
        (3 << 20, format!("simulate gpipe {large}")),
        (3 << 20, format!("schedule 1f1b {large} -o s.csv")),
        (1 << 20, format!("schedule zb-h1 {large} --level comms -o s.csv")),
        (1 << 20, "simulate interleaved1f1b --ranks 64 --microbatches 16384".to_owned()),
        (3 << 20, format!("view gpipe {large} -o p.html")),
        (3 << 20, format!("compare 1f1b gpipe {large}")),
        (400_000, "simulate zbv --ranks 64 --microbatches 4096".to_owned()),
        (400_000, "simulate zb-h2 --ranks 64 --microbatches 4096 --logical".to_owned()),
        (300_000, "simulate 1f1b --ranks 20 --microbatches 3000 --format trace -o t.json".to_owned()),
        (300_000, "schedule 1f1b --ranks 20 --microbatches 3000 --format trace -o t.json".to_owned()),
        (1 << 20, "plan --profile p.toml --ranks 64 --microbatches 16384 --data-parallel 1".to_owned()),
        (1 << 20, "plan --profile p.toml --ranks 61 --microbatches 16384".to_owned()),
        (1 << 20, "plan --profile p.toml --check m.args".to_owned()),
        (1 << 20, "plan --profile p.toml --check t.args".to_owned()),
    ] {
        let (code, told) = within(kibibytes, &folder, &command);
        assert_eq!(code, Some(3), "{command}: {told}");
        let words = [
            "error: the schedule has up to ",
            " cells and needs up to ",
            "iB of memory, and ",
            "are free; use fewer",
        ];
        assert!(words.iter().all(|words| told.contains(words)), "{command}: {told}");
    }
    // A configuration says the same at the key.
    let (code, told) = within(3 << 20, &folder, "check small.toml --set pipeline.microbatches=20000000");
    assert_eq!(code, Some(3), "{told}");
    assert!(told.contains("--set pipeline.microbatches=20000000: the schedule has up to "), "{told}");
}

/// Whatever the estimate misses ends with a report, not with an abort.
#[test]
fn no_limit_aborts_a_schedule() {
    let folder = folder(LARGE);
    for kibibytes in [160_000, 200_000, 240_000, 300_000, 1_200_000] {
        for command in [
            "simulate gpipe --ranks 16 --microbatches 4096",
            "schedule hanayo --ranks 16 --microbatches 8192 --level full -o s.csv",
            "simulate zb-greedy --ranks 8 --microbatches 4096",
        ] {
            let (code, told) = within(kibibytes, &folder, command);
            let is_reported = match code {
                Some(0) => true,
                Some(3) => {
                    told.contains("error: the schedule has up to ") || told.contains("no memory is left: ")
                }
                _ => false,
            };
            assert!(is_reported, "{kibibytes} {command}: {code:?} {told}");
        }
    }
}
