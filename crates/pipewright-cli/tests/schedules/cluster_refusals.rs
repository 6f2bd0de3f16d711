//! Requests to `plan --cluster` that are refused, with the options that the user knows.

use std::fs;

use crate::cluster_plans::{LLAMA, planned, with_model};
use crate::{refuse, run, text, write};

fn check(arguments: &[&str], message: &str) {
    refuse(&with_model(), arguments, 2, &format!("error: {message}"));
}

/// One error has all missing options and a command that works.
#[test]
fn missing_options_are_named_together() {
    check(
        &["plan", "config.json"],
        "config.json: this is a model and not a configuration; name the cluster to plan it for, such as `pipewright plan \
         config.json --cluster h100 --nodes 16 --global-batch 1024 --seq-len 8192`",
    );
    check(&["plan", "--cluster", "h100"], "--cluster needs a model; name a config.json");
    let model = ["plan", "config.json", "--cluster", "h100"];
    check(
        &model,
        "--nodes, --global-batch, --seq-len are missing; give them, such as `pipewright plan config.json --cluster h100 \
         --nodes 16 --global-batch 1024 --seq-len 8192`",
    );
    check(
        &[&model[..], &["--ranks", "16", "--batch-tokens", "4M"]].concat(),
        "--seq-len is missing; give it, such as `pipewright plan config.json --cluster h100 --ranks 16 --batch-tokens \
         4000000 --seq-len 8192`",
    );
    let set = ["--set", "data.seq_len=64", "--set", "model.from='.'"];
    check(
        &[&["plan", "--cluster", "h100"], &set[..]].concat(),
        "--nodes is missing; give it, such as `pipewright plan --set data.seq_len=64 --set 'model.from='\\''.'\\''' --cluster \
         h100 --nodes 16`",
    );
}

#[test]
fn tokens_of_a_step_are_whole_rows_that_can_be_counted() {
    let tokens = |tokens: &str, sequence: &str, message: &str| {
        let sizes = ["--nodes", "1", "--batch-tokens", tokens, "--seq-len", sequence];
        check(&[&["plan", "config.json", "--cluster", "h100"], &sizes[..]].concat(), message);
    };
    let whole = "is not a whole number of rows of 8192 tokens; use --batch-tokens";
    tokens("100000", "8192", &format!("--batch-tokens 100000 {whole} 98304"));
    tokens("1", "8192", &format!("--batch-tokens 1 {whole} 8192"));
    tokens(
        "1e18",
        "8",
        "--batch-tokens 1000000000000000000 is more than 4294967295 rows of 8 tokens; use at most 34359738360",
    );
}

/// Errors of the mesh name the options that were given, and advise a number of these.
#[test]
fn meshes_that_do_not_divide_are_refused_with_their_options() {
    check(
        &planned(&["--tensor-parallel", "32"]),
        "16 GPUs cannot be divided into a mesh of 32 (--tensor-parallel 32); use --nodes 4, or use another mesh",
    );
    check(
        &planned(&["--data-parallel", "5", "--tensor-parallel", "2"]),
        "16 GPUs cannot be divided into a mesh of 10 (--tensor-parallel 2, --data-parallel 5); use --nodes 5, or",
    );
    let one = ["plan", "config.json", "--cluster", "h100", "--batch", "64", "--seq-len", "8192"];
    check(
        &[&one[..], &["--ranks", "1", "--data-parallel", "3"]].concat(),
        "1 GPU cannot be divided into a mesh of 3 (--data-parallel 3); use --ranks 3, or use another mesh",
    );
    check(
        &planned(&["--pipeline-parallel", "16", "--stages-per-rank", "5"]),
        "80 stages (--pipeline-parallel 16, --stages-per-rank 5) are more than the 32 blocks of the model, its",
    );
    check(
        &planned(&["--expert-parallel", "2"]),
        "--expert-parallel 2: the model has no experts; leave it out",
    );
    let nodes = ["--nodes", "5000", "--batch", "64", "--seq-len", "8192", "--data-parallel", "32"];
    check(
        &[&["plan", "config.json", "--cluster", "h100"], &nodes[..]].concat(),
        "no mesh with --data-parallel 32 divides 40000 GPUs such that its replicas divide 64 rows of a step, it has at \
         most 32 stages and its tensor groups",
    );
}

/// Another number of nodes does not help.
#[test]
fn parts_that_do_not_divide_the_model_are_refused_first() {
    let heads = |ranks: &str| {
        format!(
            "32 heads cannot be divided among the ranks of --tensor-parallel {ranks}; use a number that divides 32"
        )
    };
    check(&planned(&["--tensor-parallel", "7"]), &heads("7"));
    check(&planned(&["--tensor-parallel", "3", "--data-parallel", "5"]), &heads("3"));
    let mesh = ["--pipeline-parallel", "1", "--context-parallel", "1", "--data-parallel", "8"];
    check(&planned(&[&["--tensor-parallel", "5"], &mesh[..]].concat()), &heads("5"));
    check(
        &planned(&["--pipeline-parallel", "35"]),
        "35 stages (--pipeline-parallel 35) are more than the 32 blocks of the model, its embedding and its head; use",
    );
    check(
        &planned(&["--context-parallel", "3"]),
        "8192 tokens cannot be divided among the ranks of --context-parallel 3; use a number that divides 8192",
    );
}

/// The advice is a number of GPUs that the mesh has.
#[test]
fn a_complete_mesh_has_all_gpus() {
    let mesh = |data: &str, advice: &str| {
        let sizes = ["--tensor-parallel", "1", "--pipeline-parallel", "1", "--context-parallel", "1"];
        let message = format!(
            "the given mesh (--tensor-parallel 1, --pipeline-parallel 1, --data-parallel {data}, --context-parallel 1) \
             has {data} GPUs, not 16; {advice}, or leave a part of the mesh out"
        );
        check(&planned(&[&sizes[..], &["--data-parallel", data]].concat()), &message);
    };
    mesh("8", "use --nodes 1");
    mesh("4", "use --ranks 4 instead of --nodes");
}

/// A schedule without a formula has a limit.
#[test]
fn schedules_that_are_too_large_to_simulate_are_refused() {
    let sizes = ["--ranks", "2", "--pipeline-parallel", "2", "--batch", "65536", "--seq-len", "8"];
    let parts = ["--microbatch-size", "1", "--schedule", "v-half"];
    check(
        &[&["plan", "config.json", "--cluster", "h100"], &sizes[..], &parts].concat(),
        "no plan can be simulated: a pipeline with the schedule v-half has 524288 forwards and backwards, which are too \
         many; use fewer microbatches or stages, or leave --schedule out",
    );
}

/// Rows are divided among replicas and microbatches, and a schedule has its numbers of stages.
#[test]
fn batches_and_schedules_that_do_not_fit_are_refused_with_their_options() {
    check(
        &planned(&["--microbatch-size", "7", "--data-parallel", "4"]),
        "64 rows of a step cannot be divided into microbatches of 7 rows on each of 4 replicas; use --global-batch 84, or \
         use another mesh",
    );
    check(
        &planned(&["--microbatch-size", "128"]),
        "64 rows of a step cannot be divided into microbatches of 128 rows; use --global-batch 128, or use another \
         microbatch size",
    );
    check(
        &planned(&["--schedule", "dualpipev", "--stages-per-rank", "3"]),
        "no mesh with --stages-per-rank 3 that divides the GPUs and the batch has a plan with --schedule dualpipev, whose \
         ranks have 2 stages of at least one block; leave --schedule out, or change the batch, or a given part of the plan",
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
        check(&arguments, &format!("{name} is 0; use at least 1"));
    }
}

#[test]
fn options_without_effect_are_refused() {
    let idle = |flag, value, advice: &str| {
        let name = if flag == "-o" { "--output" } else { flag };
        check(&planned(&[flag, value]), &format!("{name} has no effect on a plan for a cluster; {advice}"));
    };
    idle("--time-limit", "5s", "leave it out, because the search has a fixed amount of work");
    idle("--profile", "p.toml", "give measurements with --measured");
    idle("--microbatches", "4", "use --global-batch and --microbatch-size");
    idle("--head-parts", "2", "leave it out");
    idle("-o", "plan.toml", "keep the plans with `--format json > FILE`");
    idle(
        "--check",
        "plan.yaml",
        "leave --cluster out and check the file against a profile, such as `pipewright plan",
    );
}

#[test]
fn given_parts_that_a_system_does_not_run_are_refused_with_the_reason() {
    let given =
        ["--data-parallel", "8", "--pipeline-parallel", "2", "--sharding", "gradients", "--emit", "megatron"];
    let arguments = planned(&given);
    let message = "Megatron cannot run the best plan: Megatron does not run this schedule; it runs 1F1B with one stage per rank, \
                   and interleaved 1F1B with several\nerror: Megatron runs no plan with the given parts: Megatron does not shard gradients \
                   in a pipeline; it can shard the optimizer's state, or nothing; change a given part of the layout, or use another \
                   system\n";
    refuse(&with_model(), &arguments, 2, message);
    let one_rank = ["--pipeline-parallel", "1", "--stages-per-rank", "2", "--emit", "megatron"];
    let message = "Megatron cannot run the best plan: Megatron has several stages per rank only in pipelines of several ranks, \
                   and this plan has one rank\nerror: Megatron runs no plan with the given parts: Megatron has several";
    refuse(&with_model(), &planned(&one_rank), 2, message);
    check(
        &planned(&["--emit", "torchtitan", "--emit-dir", "a b"]),
        "--emit-dir a b: options are separated by blanks; name a folder without them\n",
    );
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
