//! Tests of `plan --cluster --check` and of the fixed stages of a plan, through the binary.

use serde_json::Value;

use crate::cluster_plans::{planned, with_model};
use crate::{refuse, run, succeed, text, write};

/// The arguments of a check of Llama 3 8B on two nodes, and more.
fn checked<'a>(file: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["plan", "config.json", "--cluster", "h100", "--nodes", "2", "--check", file], more].concat()
}

const SCRIPT: &str = "\
TP=${TP:-4}
ARGS=(
  --num-layers 32 --hidden-size 4096 --seq-length 8192
  --tensor-model-parallel-size $TP --sequence-parallel --pipeline-model-parallel-size 2
  --micro-batch-size 1 --global-batch-size 64
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
  --bf16 --lr 1e-4
)
torchrun pretrain_gpt.py \"${ARGS[@]}\"
";

#[test]
fn a_script_is_judged_next_to_the_best_plan() {
    let folder = with_model();
    write(&folder, "train.sh", SCRIPT);
    let output = succeed(&folder, &checked("train.sh", &["--format", "json"]));
    let judged: Value = serde_json::from_str(&output).expect("JSON");
    let (plan, best) = (&judged["plan"], &judged["best"]);
    assert_eq!(
        (&judged["system"], &judged["fits"], &judged["missing_bytes"]),
        (&"megatron".into(), &true.into(), &0.into())
    );
    assert_eq!(
        (&plan["tensor_parallel"], &plan["ranks"], &plan["data_parallel"]),
        (&4.into(), &2.into(), &2.into())
    );
    assert_eq!((&plan["recompute"], &plan["sequence_parallel"]), (&"full".into(), &true.into()));
    let seconds = |plan: &Value| plan["predicted_step_s"].as_f64().expect("a time");
    let gain = judged["gain"].as_f64().expect("a share");
    assert!((seconds(plan) / seconds(best) - 1.0 - gain).abs() < 1e-9 && gain > 0.1, "{gain}");
    let mut changes = judged["changes"].as_array().expect("a list").iter();
    let change = changes.find(|change| change["option"] == "--recompute-granularity").expect("a change");
    assert_eq!((&change["from"], &change["to"]), (&"full".into(), &best["recompute"]));
    assert_eq!(judged["unused"], serde_json::json!(["--lr"]));

    let printed = succeed(&folder, &checked("train.sh", &[]));
    for words in [
        "train.sh: Megatron: tensor 4 x pipeline 2 x data 2, sequence parallel; 1f1b with 1 stage per rank; 32 microbatches of 1 row",
        "\nfits: the largest rank needs ",
        "\na better layout: ",
        "      --recompute-granularity  full -> ",
        "\nnot used: --lr\n",
    ] {
        assert!(printed.contains(words), "{words}: {printed}");
    }
}

#[test]
fn a_run_that_does_not_fit_is_a_check_that_says_no() {
    let folder = with_model();
    write(&folder, "train.sh", SCRIPT);
    let arguments = checked("train.sh", &["--memory", "8GiB"]);
    let output = run(&folder, &arguments);
    let (said, printed) = (text(&output.stderr), text(&output.stdout));
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.starts_with("error: train.sh: does not fit: rank 1 needs "), "{said}");
    assert!(
        printed.contains("\ndoes not fit: the largest rank needs ") && printed.contains(" of 8.0 GiB, "),
        "{printed}"
    );
}

#[test]
fn each_form_of_file_is_read() {
    let folder = with_model();
    let files = [
        (
            "b.yaml",
            "model:\n  tensor_model_parallel_size: 2\n  seq_length: 8192\ntrain: {micro_batch_size: 1, global_batch_size: 64}\n",
        ),
        (
            "t.toml",
            "[training]\nseq_len = 8192\nlocal_batch_size = 1\n[parallelism]\ntensor_parallel_degree = 2\n",
        ),
        (
            "t.args",
            "--parallelism.tensor_parallel_degree 2\n--training.num_tokens_per_microbatch_per_dp_rank 8192\n--training.max_context_length 8192\n",
        ),
        (
            "d.json",
            "{\"train_micro_batch_size_per_gpu\": 1, \"bf16\": {\"enabled\": true}, \"zero_optimization\": {\"stage\": 3}}",
        ),
    ];
    for (name, content) in files {
        write(&folder, name, content);
        let length: &[&str] = if name == "d.json" { &["--seq-len", "8192"] } else { &[] };
        let output = run(&folder, &checked(name, &[&["--format", "json"], length].concat()));
        assert!(matches!(output.status.code(), Some(0 | 3)), "{name}: {}", text(&output.stderr));
        let judged: Value = serde_json::from_str(&text(&output.stdout)).expect("JSON");
        let tensor = if name == "d.json" { 1 } else { 2 };
        assert_eq!(judged["plan"]["tensor_parallel"], tensor, "{name}");
    }
}

#[test]
fn mistakes_have_their_file_and_line() {
    let folder = with_model();
    let check = |change: [&str; 2], words: &str| {
        write(&folder, "train.sh", SCRIPT.replace(change[0], change[1]));
        refuse(&folder, &checked("train.sh", &[]), 2, &format!("error: train.sh: {words}"));
    };
    check(
        ["TP=${TP:-4}", "TP=$(nvidia-smi -L | wc -l)"],
        "line 4: `--tensor-model-parallel-size` is not known: `$(nvidia-smi -L | wc -l)` of line 1 is not run",
    );
    check(
        ["--bf16", "--tensor-parallel-size 2"],
        "line 8: the prediction does not know `--tensor-parallel-size` of Megatron",
    );
    check(
        ["--num-layers 32", "--num-layers 40"],
        "line 3: `--num-layers` is `40`, and expected 32, as the model has",
    );
    check(
        ["granularity full", "granularity some"],
        "line 7: `--recompute-granularity` is `some`, and expected full or selective",
    );
    check(
        ["--global-batch-size 64", "--global-batch-size 63"],
        "line 5: 63 rows of a step cannot be divided into microbatches of 1 row on each of 2 replicas; use --global-batch-size 64",
    );
    check(["--bf16", "--num-experts 8"], "line 8: `--num-experts` is `8`, and expected no experts");
    refuse(&folder, &checked("none.sh", &[]), 2, "error: none.sh: cannot be read");
    write(&folder, "train.sh", SCRIPT);
    refuse(
        &folder,
        &checked("train.sh", &["--seq-len", "4096"]),
        2,
        "error: train.sh: line 3: `--seq-length` is `8192`, and expected 4096, as --seq-len says",
    );
}

#[test]
fn stages_are_given_in_letters() {
    let folder = with_model();
    let given = ["--pipeline-parallel", "2", "--layout", "E t*7|(t*9|)*2 t*7 L", "--format", "json"];
    let output = succeed(&folder, &planned(&given));
    let report: Value = serde_json::from_str(&output).expect("JSON");
    for plan in report["plans"].as_array().expect("plans") {
        assert_eq!(
            (&plan["boundaries"], &plan["stages_per_rank"]),
            (&serde_json::json!([7, 16, 25]), &2.into())
        );
        assert_eq!(plan["schedule"], "interleaved1f1b");
    }
    let refused = |more: &[&str], words: &str| refuse(&folder, &planned(more), 2, words);
    refused(&["--layout", "EtL"], "error: the following required arguments were not provided");
    refused(
        &["--pipeline-parallel", "2", "--layout", "Et|t|tL"],
        "error: --layout has 3 stages, which 2 ranks do not divide evenly",
    );
    refused(&["--pipeline-parallel", "2", "--layout", "Et|tL"], "error: the cut has 2 stages with 2 blocks");
    let off = ["--tensor-parallel", "4", "--sequence-parallel", "off", "--format", "json"];
    let report: Value = serde_json::from_str(&succeed(&folder, &planned(&off))).expect("JSON");
    assert!(report["plans"].as_array().expect("plans").iter().all(|plan| plan["sequence_parallel"] == false));
}

#[test]
fn options_without_effect_on_a_check_are_refused() {
    let folder = with_model();
    write(&folder, "train.sh", SCRIPT);
    let given = [
        "--stack torchtitan",
        "--batch-tokens 512Ki",
        "--pipeline-parallel 2",
        "--context-parallel 1",
        "--expert-parallel 1",
        "--stages-per-rank 1",
        "--layout Et*16|t*16L --pipeline-parallel 2",
        "--expert-tensor-parallel 1",
        "--sequence-parallel on",
        "--microbatch-size 1",
        "--schedule 1f1b",
        "--recompute none",
        "--sharding none",
        "--shards 1",
        "--expert-overlap on",
        "--goal tokens=1T",
        "--gpu-mtbf 50000h",
        "--node-mtbf 50000h",
        "--checkpoint-size 1TB",
        "--checkpoint-bandwidth 1TB/s",
        "--checkpoint-stall 1s",
        "--restart-time 1m",
        "--checkpoint-every 10",
        "--failure-seed 7",
    ];
    for option in given {
        let words: Vec<&str> = option.split(' ').collect();
        let output = run(&folder, &checked("train.sh", &words));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{option}: {said}");
        assert!(
            said.starts_with("error: the argument '--check <FILE>' cannot be used with"),
            "{option}: {said}"
        );
        assert!(
            words.iter().filter(|word| word.starts_with("--")).all(|flag| said.contains(*flag)),
            "{option}: {said}"
        );
    }
    refuse(
        &folder,
        &checked("train.sh", &["--precision", "fp8"]),
        2,
        "error: train.sh: the products are in bf16, and --precision says fp8; leave --precision out",
    );
    refuse(
        &folder,
        &checked("train.sh", &["--global-batch", "128"]),
        2,
        "error: train.sh: line 5: `--global-batch-size` is `64`, and expected 128, as --global-batch says",
    );
}
