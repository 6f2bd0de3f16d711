//! Requests to `plan --cluster` that are refused, with the options that the user knows.

use std::fs;

use crate::cluster_plans::{LLAMA, planned, with_model};
use crate::{cases, refuse, run, text, write};

/// Checks that the arguments in each case of a table are refused with a message that starts with the words below.
/// `+` stands for a plan for two nodes, and `h100` for a model and a machine without sizes.
fn check(table: &str) {
    let folder = with_model();
    for (line, message) in cases(table) {
        let (first, more) = line.split_once(' ').unwrap_or((line, ""));
        let usual = match first {
            "+" => planned(&[]),
            "h100" => vec!["plan", "config.json", "--cluster", "h100"],
            _ => vec![first],
        };
        let arguments: Vec<&str> = usual.into_iter().chain(more.split_whitespace()).collect();
        refuse(&folder, &arguments, 2, &format!("error: {message}"));
    }
}

/// One error has all missing options and a command that works.
#[test]
fn missing_options_are_named_together() {
    check(
        r"
plan config.json
    config.json: this is a model and not a configuration; name the cluster to plan it for, such as `pipewright plan
    config.json --cluster h100 --nodes 16 --global-batch 1024 --seq-len 8192`
plan --cluster h100
    --cluster needs a model; name a config.json
h100
    --nodes, --global-batch, --seq-len are missing; give them, such as `pipewright plan config.json --cluster h100
    --nodes 16 --global-batch 1024 --seq-len 8192`
h100 --ranks 16 --batch-tokens 4M
    --seq-len is missing; give it, such as `pipewright plan config.json --cluster h100 --ranks 16 --batch-tokens
    4000000 --seq-len 8192`
plan --cluster h100 --set data.seq_len=64 --set model.from='.'
    --nodes is missing; give it, such as `pipewright plan --set data.seq_len=64 --set 'model.from='\''.'\''' --cluster
    h100 --nodes 16`
",
    );
}

#[test]
fn tokens_of_a_step_are_whole_rows_that_can_be_counted() {
    check(
        "
h100 --nodes 1 --batch-tokens 100000 --seq-len 8192
    --batch-tokens 100000 is not a whole number of rows of 8192 tokens; use --batch-tokens 98304
h100 --nodes 1 --batch-tokens 1 --seq-len 8192
    --batch-tokens 1 is not a whole number of rows of 8192 tokens; use --batch-tokens 8192
h100 --nodes 1 --batch-tokens 1e18 --seq-len 8
    --batch-tokens 1000000000000000000 is more than 4294967295 rows of 8 tokens; use at most 34359738360
",
    );
}

/// A key that no table knows may change the model's parameters or its computation.
#[test]
fn keys_of_models_that_nobody_knows_are_refused_with_their_line() {
    let folder = with_model();
    write(&folder, "config.json", LLAMA.replace('{', "{\n\"altup_num_inputs\": 4, "));
    let message =
        "error: config.json: line 2: the key `altup_num_inputs` is not known, and may change the parameters";
    refuse(&folder, &planned(&[]), 2, message);
}

/// Errors of the mesh name the options that were given, and advise a number of these.
#[test]
fn meshes_that_do_not_divide_are_refused_with_their_options() {
    check(
        "
+ --tensor-parallel 32
    16 GPUs cannot be divided into a mesh of 32 (--tensor-parallel 32); use --nodes 4, or use another mesh
+ --data-parallel 5 --tensor-parallel 2
    16 GPUs cannot be divided into a mesh of 10 (--tensor-parallel 2, --data-parallel 5); use --nodes 5, or
h100 --batch 64 --seq-len 8192 --ranks 1 --data-parallel 3
    1 GPU cannot be divided into a mesh of 3 (--data-parallel 3); use --ranks 3, or use another mesh
+ --pipeline-parallel 16 --stages-per-rank 5
    80 stages (--pipeline-parallel 16, --stages-per-rank 5) are more than the 32 blocks of the model, its
+ --expert-parallel 2
    --expert-parallel 2: the model has no experts; leave it out
h100 --nodes 5000 --batch 64 --seq-len 8192 --data-parallel 32
    no mesh with --data-parallel 32 divides 40000 GPUs such that its replicas divide 64 rows of a step, it has at
    most 32 stages and its tensor groups
",
    );
}

/// Another number of nodes does not help.
#[test]
fn parts_that_do_not_divide_the_model_are_refused_first() {
    check(
        "
+ --tensor-parallel 7
    32 heads cannot be divided among the ranks of --tensor-parallel 7; use a number that divides 32
+ --tensor-parallel 3 --data-parallel 5
    32 heads cannot be divided among the ranks of --tensor-parallel 3; use a number that divides 32
+ --tensor-parallel 5 --pipeline-parallel 1 --context-parallel 1 --data-parallel 8
    32 heads cannot be divided among the ranks of --tensor-parallel 5; use a number that divides 32
+ --pipeline-parallel 35
    35 stages (--pipeline-parallel 35) are more than the 32 blocks of the model, its embedding and its head; use
+ --context-parallel 3
    8192 tokens cannot be divided among the ranks of --context-parallel 3; use a number that divides 8192
",
    );
}

/// The advice is a number of GPUs that the mesh has.
#[test]
fn a_complete_mesh_has_all_gpus() {
    check(
        "
+ --tensor-parallel 1 --pipeline-parallel 1 --context-parallel 1 --data-parallel 8
    the given mesh (--tensor-parallel 1, --pipeline-parallel 1, --data-parallel 8, --context-parallel 1) has 8 GPUs,
    not 16; use --nodes 1, or leave a part of the mesh out
+ --tensor-parallel 1 --pipeline-parallel 1 --context-parallel 1 --data-parallel 4
    the given mesh (--tensor-parallel 1, --pipeline-parallel 1, --data-parallel 4, --context-parallel 1) has 4 GPUs,
    not 16; use --ranks 4 instead of --nodes, or leave a part of the mesh out
",
    );
}

/// Rows are divided among replicas and microbatches, a schedule has its numbers of stages, and one without a
/// formula has a limit.
#[test]
fn batches_and_schedules_that_do_not_fit_are_refused_with_their_options() {
    check(
        "
+ --microbatch-size 7 --data-parallel 4
    64 rows of a step cannot be divided into microbatches of 7 rows on each of 4 replicas; use --global-batch 84, or
    use another mesh
+ --microbatch-size 128
    64 rows of a step cannot be divided into microbatches of 128 rows; use --global-batch 128, or use another
    microbatch size
+ --schedule dualpipev --stages-per-rank 3
    no mesh with --stages-per-rank 3 that divides the GPUs and the batch has a plan with --schedule dualpipev, whose
    ranks have 2 stages of at least one block; leave --schedule out, or change the batch, or a given part of the plan
h100 --ranks 2 --pipeline-parallel 2 --batch 65536 --seq-len 8 --microbatch-size 1 --schedule v-half
    no plan can be simulated: a pipeline with the schedule v-half has 524288 forwards and backwards, which are too
    many; use fewer microbatches or stages, or leave --schedule out
",
    );
}

#[test]
fn sizes_of_0_are_refused() {
    for flag in
        ["--nodes", "--batch", "--seq-len", "--tensor-parallel", "--data-parallel", "--microbatch-size"]
    {
        let mut arguments = planned(&[]);
        match arguments.iter().position(|&given| given == flag) {
            Some(index) => arguments[index + 1] = "0",
            None => arguments.extend([flag, "0"]),
        }
        let name = if flag == "--batch" { "--global-batch" } else { flag };
        refuse(&with_model(), &arguments, 2, &format!("error: {name} is 0; use at least 1"));
    }
}

#[test]
fn options_without_effect_are_refused() {
    check(
        "
+ --time-limit 5s
    --time-limit has no effect on a plan for a cluster; leave it out, because the search has a fixed amount of work
+ --profile p.toml
    --profile has no effect on a plan for a cluster; give measurements with --measured
+ --microbatches 4
    --microbatches has no effect on a plan for a cluster; use --global-batch and --microbatch-size
+ --head-parts 2
    --head-parts has no effect on a plan for a cluster; leave it out
+ -o plan.toml
    --output has no effect on a plan for a cluster; keep the plans with `--format json > FILE`
",
    );
}

#[test]
fn given_parts_that_a_system_does_not_run_are_refused_with_the_reason() {
    let given =
        ["--data-parallel", "8", "--pipeline-parallel", "2", "--sharding", "gradients", "--emit", "megatron"];
    let arguments = planned(&given);
    let message = "Megatron cannot run the best plan: Megatron does not shard gradients in a pipeline; it can shard the \
                   optimizer's state, or nothing\nerror: Megatron runs no plan with the given parts: Megatron does not shard gradients \
                   in a pipeline; it can shard the optimizer's state, or nothing; change a given part of the layout, or use another \
                   system\n";
    refuse(&with_model(), &arguments, 2, message);
    let one_rank = ["--pipeline-parallel", "1", "--stages-per-rank", "2", "--emit", "megatron"];
    let message = "Megatron cannot run the best plan: Megatron has several stages per rank only in pipelines of several ranks, \
                   and this plan has one rank\nerror: Megatron runs no plan with the given parts: Megatron has several";
    refuse(&with_model(), &planned(&one_rank), 2, message);
    let blanks = "error: --emit-dir a b: options are separated by blanks; name a folder without them\n";
    refuse(&with_model(), &planned(&["--emit", "torchtitan", "--emit-dir", "a b"]), 2, blanks);
}

/// A configuration is read as `train` reads it.
#[test]
fn mistakes_in_a_configuration_have_a_place() {
    let folder = with_model();
    let cluster = ["--cluster", "h100", "--nodes", "1"];
    let check = |keys: &str, message: &str| {
        write(&folder, "run.toml", format!("[model]\nfrom = \".\"\n{keys}\n"));
        let message = format!("error: run.toml:{message}");
        refuse(&folder, &[&["plan", "run.toml"], &cluster[..]].concat(), 2, &message);
    };
    check("[data]\nseq_len = \"8192\"", "4:11: ");
    check("[data]\nseq_lem = 8192", "4:1: unknown key `seq_lem` in [data]");
    check("[pipeline]\nmicrobatches = -32", "4:16: ");
    check("[pipeline", "3:");
    refuse(
        &folder,
        &[&["plan", "config.json", "--set", "data.seq_len=8"], &cluster[..]].concat(),
        2,
        "error: --set data.seq_len=8: config.json is a model, and has no keys of a configuration; leave --set out",
    );
}

#[test]
fn models_machines_and_schedules_that_are_not_known_are_refused() {
    let folder = with_model();
    let check =
        |arguments: &[&str], message: &str| refuse(&folder, arguments, 2, &format!("error: {message}"));
    check(&planned(&["--schedule", "1f2b"]), "unknown schedule `1f2b`; did you mean `1f1b`?");
    let of = |cluster| {
        ["plan", "config.json", "--cluster", cluster, "--nodes", "1", "--seq-len", "8", "--batch", "8"]
    };
    check(&of("h10"), "there is no machine `h10`; the nearest name is `h100`");
    check(
        &[&of("a100")[..], &["--precision", "fp8"]].concat(),
        "--precision fp8: A100 80 GB SXM (Selene) has no rate",
    );
    check(&["plan", "none.json", "--cluster", "h100"], "none.json: cannot read the model");
    fs::create_dir(folder.path().join("none.toml")).expect("a folder");
    check(
        &of("none.toml"),
        "none.toml: cannot read the cluster file: Is a directory (os error 21); name a file",
    );
    write(&folder, "run.toml", "[model]\nfrom = \"none\"\n");
    let missing = run(&folder, &["plan", "run.toml", "--cluster", "h100", "--nodes", "1"]);
    let stderr = text(&missing.stderr);
    assert!(stderr.ends_with("No such file or directory (os error 2); correct model.from\n"), "{stderr}");
    write(&folder, "bad.json", LLAMA.replace("\"num_key_value_heads\": 8", "\"num_key_value_heads\": 7"));
    check(
        &["plan", "bad.json", "--cluster", "h100"],
        "bad.json: `num_key_value_heads` is 7; use a number that",
    );
}

/// The error names the missing bytes and the rank.
#[test]
fn a_model_that_does_not_fit_is_refused_with_what_is_short() {
    let folder = with_model();
    let output = run(
        &folder,
        &["plan", "config.json", "--cluster", "4090", "--ranks", "1", "--seq-len", "8192", "--batch", "1"],
    );
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    let smallest =
        "error: no plan fits into 22.3 GiB per GPU: the smallest (one GPU; 1 microbatch of 1 row; recompute";
    assert!(stderr.starts_with(smallest), "{stderr}");
    for words in [" GiB on rank 0 of its pipeline, ", " GiB too much (parameters ", "; use more GPUs, "] {
        assert!(stderr.contains(words), "{words}: {stderr}");
    }
    let small = "error: no plan fits into 1.0 KiB per GPU: ";
    refuse(&folder, &planned(&["--memory", "1KiB"]), 3, small);
}
