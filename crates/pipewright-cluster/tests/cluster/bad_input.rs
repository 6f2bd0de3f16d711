//! Errors of cluster files, layouts and files of runs.

use pipewright_cluster::catalogue::{by_name, from_toml, machines};
use pipewright_cluster::cluster_file::to_toml;
use pipewright_cluster::layout::{Recompute, ShardedState};
use pipewright_cluster::machine::{Constants, Machine, Switch};
use pipewright_cluster::measured_times::MeasuredTimes;
use pipewright_cluster::published::{Published, read};
use pipewright_document::GIB;
use pipewright_schedule::error_text::with_causes;

use crate::comparison::compare;
use crate::data::{RUNS, cases, published};
use crate::measured::MEASURED;

/// Checks that the runs fail with the messages of a table, whose cases are lines, ` -> `, and lines that replace
/// them. `|` separates lines.
fn check_runs(table: &str) {
    for (change, message) in cases(table) {
        let (old, new) = change.split_once(" -> ").expect("an old and a new text");
        let [old, new] = [old, new].map(|lines| format!("{}\n", lines.replace(" | ", "\n")));
        assert!(RUNS.contains(&old), "{old}");
        let error = match read(&RUNS.replacen(&old, &new, 1)) {
            Ok(published) => compare(&published).map(drop).expect_err("an error"),
            Err(error) => with_causes(&error),
        };
        assert!(error.contains(&message), "{error}");
    }
}

fn check_cluster(text: &str, message: &str) {
    let error = with_causes(&from_toml(text).expect_err("an error"));
    assert!(error.contains(message), "{error}");
}

#[test]
fn known_machines_are_complete_and_have_sources() {
    let machines = machines();
    let names: Vec<&str> =
        machines.iter().flat_map(|machine| machine.aliases.first()).map(String::as_str).collect();
    let expected = [
        "a100",
        "h100",
        "h100-500w",
        "h200",
        "b200",
        "gb200",
        "gb300",
        "b300",
        "h800",
        "mi300x",
        "mi355x",
        "l40s",
        "4090",
    ];
    assert_eq!(names, expected);
    assert!(machines.iter().all(|machine| machine.source.len() > 20));
    let of_sources = |source: &str| {
        let is_of = |machine: &&Machine| machine.source_of("constants").starts_with(source);
        machines.iter().filter(is_of).count()
    };
    assert_eq!(
        (of_sources("fitted to"), of_sources("assumed: "), of_sources("those of the H100")),
        (7, 4, 2)
    );
    assert!(machines.iter().all(|machine| machine.source_of("node_latency_us").starts_with("assumed: 5 us")));
}

#[test]
fn unknown_machines_suggest_near_ones() {
    let error = by_name("h10").expect_err("an error").to_string();
    assert!(
        error.starts_with("there is no machine `h10`; the nearest name is `h100`; known are a100"),
        "{error}"
    );
}

#[test]
fn a_name_with_more_words_suggests_the_machine_that_it_means() {
    let check = |name: &str, expected: &str| {
        let error = by_name(name).expect_err("an error").to_string();
        assert!(error.contains(&format!("; the nearest name is `{expected}`;")), "{error}");
    };
    check("A100-80GB", "a100");
    check("H200 SXM", "h200");
    check("gb-200", "gb200");
}

#[test]
fn a_cluster_file_has_the_figures_of_the_machine_that_its_name_means() {
    let check = |name: &str, meant: &str| {
        let machine = from_toml(&format!("name = \"{name}\"")).expect("a machine");
        let known = by_name(meant).expect("a machine");
        assert_eq!((machine.board_power, machine.memory), (known.board_power, known.memory), "{name}");
        assert_eq!(machine.based_on, Some(known.name), "{name}");
    };
    check("H100-500W of our group", "h100-500w");
    check("our H100, 500W", "h100-500w");
    check("our H100", "h100");
    check("GB200 and more GB200", "gb200");
    check_cluster(
        "\nname = \"B200 and H100 mix\"",
        "line 2, column 8: `name` is `B200 and H100 mix`, which means `H100 80 GB SXM` and `B200 180 GB`; use",
    );
    assert_eq!(by_name("h100").expect("a machine").based_on, None);
}

/// The place of a mistake, what is written there, and what is expected.
#[test]
fn mistakes_in_cluster_files_have_a_place() {
    let table = r#"
name = "my own" | memory_gb = 80 => `memory_gb_per_s` is missing, and no known machine
memory_gb = 80 => `name` is missing in the cluster file
name = 3 => line 1, column 8: `name` is a whole number, where a text is expected
name = "h100 => line 1, column 13: not valid TOML
"#;
    let of_h100 = r#"
memory_gb = "80 GB/s" => `memory_gb` is "80 GB/s", which measures bytes per second
network_gb_per_s = "50 GB" => which measures bytes, such as `80 GB`; write bytes per second
bf16_tflops = "989 TB/s" => ; write operations per second
gpus_per_node = "8 GB" => write a whole number, such as 8
bf16_tflops = -312 => line 2, column 15: `bf16_tflops` is -312, where a number from 0.00001
memory_gb = "-80 GB" => `memory_gb` is "-80 GB", where a number from 0.1
memory_gb = 1e12 => `memory_gb` is 1e12, where a number from 0.1 to 100000
gpus_per_node = 0 => `gpus_per_node` is 0, where a number from 1
gpus_per_node = 7.5 => `gpus_per_node` is 7.5, where a whole number
memory_gb = true => line 2, column 13: `memory_gb` is true, where a number
memory = 80 => line 2, column 1: unknown key `memory` in the cluster file; did you mean `memory_gb`?
[constants] | links = 1 => line 3, column 1: unknown key `links`
[sources] | links = "" => unknown key `links`
[measured] | overlap = 2 => line 3, column 11: `overlap` is 2, where a number from 0 to 1
[[measured.kernel]] | kind = "norms" | forward_gb_per_s = 1 => did you mean `norm`?
[[measured.link]] | use = "message" | between = "node" | gb_per_s = 1 => `latency_us` is missing in [[link]]
[[measured.layer]] | block = 0 => line 2, column 12: unknown key `layer`
node_switch = "yes" => `node_switch` is "yes", where none, mesh, forwards, reduces is expected
aliases = [3] => line 2, column 11: `aliases` is a list, where a list of names
"#;
    for (start, table) in [("", table), ("name = \"h100\"\n", of_h100)] {
        for (lines, message) in cases(table) {
            check_cluster(&format!("{start}{}", lines.replace(" | ", "\n")), &message);
        }
    }
}

#[test]
fn a_machine_survives_its_file() {
    for machine in machines() {
        assert_eq!(&from_toml(to_toml(machine).as_str()).expect("a machine"), machine);
    }
}

#[test]
fn measurements_survive_a_cluster_file() {
    let machine = from_toml(MEASURED).expect("a machine");
    let MeasuredTimes { products, scores, kernels, links, .. } = &machine.measured;
    assert_eq!([products.len(), scores.len(), kernels.len(), links.len()], [1, 1, 1, 2]);
    assert_eq!(from_toml(&to_toml(&machine)).expect("a machine"), machine);
}

#[test]
fn figures_of_a_file_have_its_source() {
    let machine = from_toml("name = \"h100\"\nmemory_gb = 40\nsource = \"a friend\"").expect("a machine");
    let sources = ["memory_gb", "bf16_tflops", "gpus_per_node"].map(|key| machine.source_of(key));
    assert_eq!(sources, ["a friend", "NVIDIA H100 SXM data sheet", "NVIDIA H100 SXM data sheet"]);
    let own = from_toml("name = \"h100\"\nmemory_gb = 40").expect("a machine");
    assert_eq!(own.source_of("memory_gb"), "the cluster file");
}

/// The known machine has the other constants.
#[test]
fn a_file_with_one_constant_does_not_give_all() {
    let text = |constants: &str| {
        let known = to_toml(&by_name("h100").expect("a machine"));
        let figures = known.split("\n# Shares").next().expect("figures").to_owned();
        format!("{figures}\n[constants]\n{constants}")
    };
    let known = by_name("h100").expect("a machine");
    let of_known = known.source_of("constants");
    let machine = from_toml(&text("memory = 0.8\nlink = 0.7")).expect("a machine");
    let own = &machine.source;
    assert_eq!(machine.source_of("constants"), format!("{of_known}; `memory`, `link` from {own}"));
    assert_eq!(machine.based_on.as_ref(), Some(&known.name));
    let all = "product = 0.7\nproduct_fp8 = 0.5\nproduct_nvfp4 = 0.5\nattention = 0.5\nmemory = 0.8\nlink = 0.8\nhidden = 0\nlaunch = 0";
    let machine = from_toml(&text(all)).expect("a machine");
    assert_eq!((machine.source_of("constants"), &machine.based_on), (machine.source.as_str(), &None));
}

#[test]
fn a_cluster_file_changes_a_known_machine() {
    let machine = from_toml(
        "name = \"H100 with less memory\"\nmemory_gb = \"40 GiB\"\nnetwork_gb_per_s = \"200 Gbit/s\"",
    );
    let machine = machine.expect("a machine");
    let known = by_name("h100").expect("a machine");
    assert_eq!((machine.memory, machine.network_bandwidth), (40.0 * GIB, 25e9));
    assert_eq!((machine.bf16, machine.constants), (known.bf16, known.constants));
}

/// No other machine's peak is used for a machine that is not known.
#[test]
fn a_machine_of_its_own_needs_a_peak() {
    let sizes = "name = \"my own\"\nmemory_gb = 96\nmemory_gb_per_s = 4000\nnode_gb_per_s = 900\nnetwork_gb_per_s = 100\ngpus_per_node = 4";
    check_cluster(
        sizes,
        "line 1, column 1: `bf16_tflops` is missing, and so are `fp8_tflops` and `f32_tflops`; add one of them",
    );
    let machine = from_toml(&format!("{sizes}\nfp8_tflops = 1000")).expect("a machine");
    assert_eq!((machine.bf16, machine.half_peak()), (Some(5e14), 5e14));
    assert_eq!(machine.source_of("bf16_tflops"), "assumed: half of the peak in FP8");
    let machine = from_toml(&format!("{sizes}\nf32_tflops = 1")).expect("a machine");
    assert_eq!((machine.half_peak(), machine.source_of("bf16_tflops")), (1e12, "assumed: the peak in f32"));
}

#[test]
fn a_machine_of_its_own_has_the_expected_constants() {
    let sizes = "memory_gb = 96\nmemory_gb_per_s = 4000\nnode_gb_per_s = 900\nnetwork_gb_per_s = 100\ngpus_per_node = 4";
    let machine = from_toml(&format!("name = \"my own\"\nbf16_tflops = 1000\n{sizes}")).expect("a machine");
    assert_eq!(machine.constants, Constants::EXPECTED);
    assert_eq!((machine.bf16, machine.gpus_per_node), (Some(1e15), 4));
    let constants = "[constants]\nproduct = 1.2\nproduct_fp8 = 0.5\nattention = 0.5\nmemory = 0.8\nlink = 0.8\nhidden = 0\nlaunch = 0";
    check_cluster(
        &format!("name = \"my own\"\n{sizes}\n{constants}"),
        "line 8, column 11: `product` is 1.2, where a number from 0.01 to 1",
    );
}

#[test]
fn gpus_that_the_mesh_does_not_divide_are_refused() {
    check_runs(
        "
gpus = 64 | tp = 8 | pp = 8 -> gpus = 63 | tp = 8 | pp = 8
    => run 2 (`gpt3-175B`): 63 GPUs cannot be divided into a mesh of 64 (tp = 8, pp = 8, cp = 1)
tp = 4 | pp = 8 | vp = 6 | mbs = 1 | gbs = 256 -> tp = 4 | pp = 8 | vp = 6 | mbs = 1 | gbs = 255 => use gbs = 256
pp = 64 | vp = 1 -> pp = 64 | vp = 4 => 256 stages (pp = 64, vp = 4) are more than the 128 blocks
tp = 8 | pp = 1 | vp = 1 | mbs = 4 | gbs = 4 -> tp = 0 | pp = 1 | vp = 1 | mbs = 4 | gbs = 4 => `tp` is 0
",
    );
}

#[test]
fn sizes_of_models_are_bounded() {
    check_runs(
        "
inner = 24576 -> inner = 9223372036854775807
    => `inner` is 9223372036854775807, where a whole number from 1
key_value_heads = 64 -> key_value_heads = 0
    => `key_value_heads` is 0, where a whole number from 1 to 65536
hidden = 6144 -> hidden = 32 => 64 `heads` are more than its `hidden` of 32
",
    );
    let further = [
        ("window", 0, 1),
        ("head_size", 16_777_217, 1),
        ("experts", 16_777_217, 0),
        ("experts_per_token", 0, 1),
        ("expert_inner", 0, 1),
        ("shared_inner", 16_777_217, 0),
    ];
    for (key, value, least) in further {
        let message =
            format!("`{key}` is {value}, where a whole number from {least} to 16777216 is expected");
        check_runs(&format!("hidden = 6144 -> hidden = 6144 | {key} = {value} => {message}"));
    }
}

#[test]
fn sizes_of_models_that_contradict_each_other_are_refused() {
    check_runs(
        "
hidden = 6144 -> hidden = 6144 | experts = 8
    => the model has 8 `experts` and no `experts_per_token`; add the number that a token
hidden = 6144 -> hidden = 6144 | experts = 8 | experts_per_token = 9
    => `experts_per_token` is 9, where at most the 8 `experts`
hidden = 6144 -> hidden = 6144 | dense_layers = 49 => `dense_layers` is 49, where at most the 48 `layers`
key_value_heads = 64 -> key_value_heads = 48
    => `key_value_heads` is 48, where a number that divides the 64 heads of queries
",
    );
}

/// The first run with the largest sizes of a model.
fn largest(layers: u32) -> Published {
    let widths = "hidden = 16777216\ninner = 16777216\nhead_size = 16777216\nshared_inner = 16777216\n";
    let counts = "heads = 65536\nkey_value_heads = 65536\nexperts = 16777216\nexperts_per_token = 16777216\n";
    let old = "layers = 48\nhidden = 6144\ninner = 24576\nheads = 64\nkey_value_heads = 64\n";
    assert!(RUNS.contains(old));
    let text = RUNS.replacen(old, &format!("layers = {layers}\n{widths}{counts}"), 1);
    let mut published = read(&text).expect("runs");
    published.runs.truncate(1);
    published
}

#[test]
fn the_largest_model_has_a_prediction() {
    let row = compare(&largest(1)).expect("a prediction").rows.remove(0);
    assert!(row.predicted_step_s.is_finite() && row.predicted_memory_gib.is_finite(), "{row:?}");
}

#[test]
fn activations_that_are_too_many_to_count_are_refused() {
    let mut published = largest(10_000);
    published.runs[0].layout.recompute = Recompute::None;
    let error = compare(&published).expect_err("an error");
    assert!(error.contains("the activations of all microbatches have more than 2^64 bytes"), "{error}");
}

#[test]
fn pipelines_that_are_too_large_to_simulate_are_refused() {
    check_runs(
        "
mbs = 1 | gbs = 64 -> mbs = 1 | gbs = 4000000000 | schedule = \"interleaved1f1b\"
    => computations are too many to simulate; use fewer microbatches or stages, or leave `schedule` out
",
    );
    let without = RUNS.replacen("mbs = 1\ngbs = 64\n", "mbs = 1\ngbs = 4000000000\n", 1);
    assert!(compare(&read(&without).expect("runs")).is_ok());
}

#[test]
fn advice_for_layouts_fits_into_its_type() {
    let run = &published().runs[0];
    let mut layout = run.layout.clone();
    layout.gpus = u32::MAX;
    let mesh = layout.check(&run.model).expect_err("a mesh that does not fit").to_string();
    assert!(mesh.ends_with("; use another mesh"), "{mesh}");
    (layout.gpus, layout.batch, layout.microbatch) = (16, u32::MAX, 2);
    let batch = layout.check(&run.model).expect_err("a batch that does not fit").to_string();
    assert!(batch.ends_with("; use another mesh"), "{batch}");
    (layout.gpus, layout.microbatch) = (16, u32::MAX);
    assert_eq!((layout.data(), layout.microbatches()), (2, 1));
}

#[test]
fn remarks_are_accepted_and_listed() {
    let machine = "[[machine]]\nname = \"h100\"\nurl = \"https://example.com\"\n";
    let run = "[[run]]\nnotes = \"\"\"\nof two lines\"\"\"\ndate = 2024-07-01\nsource_url = \"https://example.com\"\n";
    let text =
        RUNS.replacen("[[run]]\n", run, 1).replacen("[[model]]\n", "[[model]]\nsource = \"a paper\"\n", 1);
    let text = text.replacen("[[model]]\n", &format!("{machine}[[model]]\n"), 1);
    let published = read(&text).expect("runs");
    let expected = [
        "`url` of machine 5",
        "`source` of model 1",
        "`notes` of run 1",
        "`date` of run 1",
        "`source_url` of run 1",
    ];
    assert_eq!(published.remarks, expected);
    let table = compare(&published).expect("predictions").to_markdown();
    assert!(table.ends_with(&format!("Not used: {}.\n", expected.join(", "))), "{table}");
    let line = |text: &str| text.lines().position(|line| line == "vq = 1").expect("a line") + 1;
    let wrong = text.replacen("vp = 1\n", "vq = 1\n", 1);
    let error = with_causes(&read(&wrong).expect_err("an error"));
    assert!(error.contains(&format!("line {}", line(&wrong))), "{error}");
    check_runs("[[run]] -> [[run]] | notes = { vq = 1 } => `notes` is a table, where a remark is expected");
}

/// Replicas with and without the ranks of a sequence.
#[test]
fn both_counts_of_replicas_are_accepted() {
    for replicas in [1, 2] {
        let keys = format!("tp = 4\npp = 1\nvp = 1\ncp = 2\ndp = {replicas}\n");
        read(&RUNS.replacen("tp = 8\npp = 1\nvp = 1\n", &keys, 1)).expect("runs");
    }
}

/// 48 blocks, the embedding and the head.
#[test]
fn the_embedding_and_the_head_may_have_stages() {
    let mut run = published().runs[0].clone();
    (run.layout.gpus, run.layout.tensor, run.layout.pipeline) = (50, 1, 50);
    run.layout.sequence_parallel = false;
    let prediction = crate::data::predicted(&run);
    assert_eq!((prediction.blocks[0], prediction.blocks[1], prediction.blocks[49]), (0, 1, 0));
    (run.layout.gpus, run.layout.pipeline) = (51, 51);
    let error = run.layout.check(&run.model).expect_err("an error").to_string();
    assert!(error.starts_with("51 stages (pp = 51, vp = 1) are more than the 48 blocks"), "{error}");
}

/// The keys that the description of the files names, in one row.
#[test]
fn documented_keys_are_accepted() {
    let keys = "tp = 8\npp = 1\nvp = 1\ncp = 1\nep = 1\ndp = 1\nmemory_gib = 60.0\nmodel_tflops_per_gpu = 140\ntokens_per_s_per_gpu = 700.0\n";
    let published = read(&RUNS.replacen("tp = 8\npp = 1\nvp = 1\n", keys, 1)).expect("runs");
    assert_eq!(
        (published.runs[0].memory.map(|memory| memory.gib), published.remarks),
        (Some(60.0), Vec::<String>::new())
    );
}

/// The names of the command line, and the further names that files may have.
#[test]
fn shardings_are_read_by_their_names() {
    let check = |name: &str, sharding: ShardedState| {
        let text = RUNS.replacen("vp = 1\n", &format!("vp = 1\ndata_parallel = \"{name}\"\n"), 1);
        assert_eq!(read(&text).expect("runs").runs[0].layout.sharding, sharding, "{name}");
    };
    for sharding in
        [ShardedState::Nothing, ShardedState::Optimizer, ShardedState::Gradients, ShardedState::Parameters]
    {
        check(sharding.name(), sharding);
    }
    check("replicated", ShardedState::Nothing);
    check("sharded", ShardedState::Parameters);
}

#[test]
fn unknown_keys_and_names_are_named() {
    check_runs(
        r#"
vp = 1 -> vq = 1 => unknown key `vq` in [[run]]
model = "megatron-22B" -> model = "megatron-22" => the nearest name is `megatron-22B`
machine = "H100 80 GB SXM" -> machine = "H100 80GB SXM" => the nearest name is `H100 80 GB SXM`
machine = "H100 80 GB SXM" -> machine = "h10" => the nearest name is `h100`
step_s = 1.42 -> notes = "no time" => neither `step_s` nor `tokens_per_s_per_gpu`
schedule = "1f1b" -> schedule = "1f2b" => 1f2b
precision = "f16" -> precision = "f61" => f61
tp = 8 -> tp = 8 | dp = 3 => the mesh make 1 replicas
"#,
    );
}

/// The tables of published runs say that GPUs are linked pairwise in a key of its own.
#[test]
fn links_between_all_pairs_have_two_names_that_may_not_contradict() {
    let machine =
        |keys: &str| from_toml(&format!("name = \"mine h100\"\n{keys}")).expect("a machine").node_switch;
    assert_eq!(machine("mesh = true"), Switch::Mesh);
    assert_eq!(machine("mesh = true\nnode_switch = \"mesh\""), Switch::Mesh);
    assert_eq!(machine("mesh = false\nnode_switch = \"none\""), Switch::None);
    check_cluster(
        "name = \"mine h100\"\nmesh = true\nnode_switch = \"reduces\"\n",
        "`mesh` is true, and `node_switch` is \"reduces\"",
    );
}

#[test]
fn settings_that_contradict_each_other_are_refused() {
    check_runs(
        "gpus = 8 -> gpus = 8 | task = \"lora\" => `task` and `adapter_rank` contradict each other
gpus = 8 -> gpus = 8 | adapter_targets = [\"qkv\"] => there are `adapter_targets` and no `adapter_rank`
recompute = \"full\" -> recompute = \"none\" | recompute_layers = 2 => `recompute_layers` is given, and `recompute` is \"none\"
gpus = 8 -> gpus = 8 | pass_rows = 3 => `pass_rows` is 3",
    );
}

/// A missing key is the only complaint.
#[test]
fn keys_behind_a_missing_one_are_known() {
    let without = RUNS.replacen("precision = \"f16\"\n", "", 1).replacen("hidden = 6144\n", "", 1);
    let error = with_causes(&read(&without).expect_err("an error"));
    assert!(error.contains("`precision` is missing") && error.contains("`hidden` is missing"), "{error}");
    assert!(!error.contains("unknown key"), "{error}");
}
