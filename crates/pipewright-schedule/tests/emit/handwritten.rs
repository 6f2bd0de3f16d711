//! Files as people write them: scripts, defaults that are left out, and sizes that cannot be predicted.

use pipewright_schedule::emit::ReadPlan;
use pipewright_schedule::plan::predict;

use crate::{DEEPSPEED, MEGATRON, TORCHTITAN, predict_text, profile, read_text, refuse};

/// Counts the ends as layers, so that four stages share the twelve layers evenly.
const EVEN: &str = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split";

fn megatron(options: &str) -> String {
    format!("{MEGATRON}{EVEN}\n{options}")
}

fn torchtitan(options: &str) -> String {
    format!("{TORCHTITAN}{options}")
}

fn read(text: &str) -> ReadPlan {
    predict_text(text, None).unwrap_or_else(|error| panic!("{text}\n{error}"))
}

/// Checks that the only remark contains all of some words.
fn check_remark(text: &str, words: &[&str]) {
    let remarks = read(text).remarks;
    assert!(remarks.len() == 1 && words.iter().all(|word| remarks[0].contains(word)), "{text}\n{remarks:?}");
}

#[test]
fn scripts_are_read() {
    let arrays = "\
#!/bin/bash
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --account-for-embedding-in-pipeline-split
    --account-for-loss-in-pipeline-split
    --pipeline-model-parallel-size 4
)
DATA_ARGS=(
    --micro-batch-size 1
    --global-batch-size 8
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${MODEL_PARALLEL_ARGS[@]} \\
    ${DATA_ARGS[@]}
";
    let text = "\
ARGS=\"
    --pipeline-model-parallel-size 4 \\
    --account-for-embedding-in-pipeline-split \\
    --account-for-loss-in-pipeline-split \\
    --micro-batch-size 1
\"
BATCH=\"--global-batch-size 8 \\
    --bf16\"
python pretrain_gpt.py $ARGS $BATCH
";
    let direct = format!("torchrun x.py {EVEN} {} \\\n  ${{ARGS[@]}}\n", MEGATRON.replace('\n', " \\\n  "));
    for script in [arrays, text, &direct] {
        let plan = read(script);
        assert_eq!((&plan.choice.boundaries[..], plan.microbatches()), (&[3, 6, 9][..], 8), "{script}");
    }
    assert_eq!(read(&format!("\u{feff}{}", megatron(""))).ranks(), 4);
    let modules = "tok_embeddings,layers.0,layers.1\n  layers.2,layers.3,layers.4,layers.5,layers.6,layers.7,\
                   layers.8,layers.9,norm,lm_head";
    let plan = read(&torchtitan(&format!("--parallelism.module_fqns_per_model_part {modules}\n")));
    assert_eq!(plan.choice.boundaries, [3]);
}

#[test]
fn too_large_sizes_are_refused() {
    let stages = "--pipeline-model-parallel-size 1000000 --num-virtual-stages-per-pipeline-rank 1000000";
    refuse(&format!("{stages} --micro-batch-size 1"), "1000000000000 stages cannot share 10 layers");
    let replicas = "--parallelism.data_parallel_replicate_degree 1000000 \
                    --parallelism.data_parallel_shard_degree 5000";
    refuse(&torchtitan(replicas), "ranks over all replicas, or more, and a plan has fewer than 4294967295");
    let few = replicas.replace("5000", "1500");
    refuse(&torchtitan(&few), "the file has 6000000000 microbatches over all replicas");
    let one = DEEPSPEED.replace("PIPELINE", "{\"stages\": 1, \"partition\": \"uniform\"}");
    let steps = one.replace("\"train_batch_size\": 8", "\"gradient_accumulation_steps\": 2");
    let error = read_text(&steps, None, Some(u32::MAX - 1)).expect_err("too many microbatches");
    assert!(error.contains("the file has 8589934588 microbatches over all replicas"), "{error}");
    refuse(
        &megatron("").replace("batch-size 8", "batch-size 1000000"),
        "the schedule has up to 8000000 cells, and at most 4194304 are predicted",
    );
}

#[test]
fn torchtitan_accumulates_gradients() {
    let batch = |rows: &str| {
        torchtitan(&format!(
            "--parallelism.data_parallel_replicate_degree 2\n--training.global_batch_size {rows}"
        ))
    };
    for rows in ["-1", "8"] {
        assert_eq!(read(&batch(rows)).remarks, [""; 0], "{rows}");
    }
    check_remark(&batch("32"), &["a step accumulates the gradients of 4 runs of the pipeline"]);
    refuse(
        &batch("12"),
        "line 5: `--training.global_batch_size` is `12`, and expected -1, or a multiple of 8",
    );
}

#[test]
fn ranks_of_a_sequence_are_no_replicas() {
    let files = [
        megatron("--context-parallel-size 2"),
        torchtitan("--parallelism.context_parallel_degree 2 --parallelism.tensor_parallel_degree 2"),
    ];
    for text in files {
        let plan = read_text(&text, None, Some(16)).expect("a plan");
        assert_eq!((plan.choice.mesh.data, plan.ranks()), (2, 8), "{text}");
        check_remark(&text, &["2` is not predicted: the ranks that share a sequence count as one rank"]);
        assert!(read_text(&text, None, Some(12)).is_err(), "{text}");
    }
}

#[test]
fn torchtitan_divides_ranks_among_replicated_groups() {
    for shards in ["", "--parallelism.data_parallel_shard_degree -1"] {
        let text = torchtitan(&format!("--parallelism.data_parallel_replicate_degree 2\n{shards}"));
        let replicas = |ranks| read_text(&text, None, ranks).map(|plan| plan.choice.mesh.data);
        assert_eq!((replicas(Some(16)), replicas(Some(4)), replicas(None)), (Ok(8), Ok(2), Ok(2)), "{text}");
        let error = replicas(Some(6)).expect_err("3 replicas");
        assert!(error.contains("replicate_degree` is `2`, and expected a divisor of 3"), "{error}");
    }
    let stated = torchtitan("--parallelism.data_parallel_shard_degree 4");
    assert!(read_text(&stated, None, Some(16)).is_err());
}

#[test]
fn torchtitan_has_false_flags() {
    for flag in ["sequence-parallel", "fsdp-symm-mem"] {
        read(&torchtitan(&format!("--parallelism.no-enable-{flag}")));
    }
    refuse(&torchtitan("--parallelism.no-x"), "torchtitan has no key `--parallelism.no-x`");
    refuse(
        &format!("{MEGATRON}activation-checkpoint:full"),
        "`activation-checkpoint:full` is an option of torchtitan",
    );
    let error =
        predict_text(&format!("{MEGATRON}activation-checkpoint:full"), None).expect_err("two systems");
    assert!(!error.contains("--activation"), "{error}");
}

#[test]
fn megatron_may_fix_all_stages() {
    let two = |first: u32, last: u32, ranks: u32| {
        let options = format!("{MEGATRON}--decoder-first-pipeline-num-layers {first} ");
        format!("{options}--decoder-last-pipeline-num-layers {last}")
            .replace("size 4", &format!("size {ranks}"))
    };
    assert_eq!(read(&two(4, 6, 2)).choice.boundaries, [5]);
    refuse(&two(4, 5, 2), "Megatron divides 10 layers evenly");
    refuse(&two(4, 6, 1), "Megatron divides 10 layers evenly");
    refuse(&two(4, 6, 3), "Megatron divides 10 layers evenly");
}

#[test]
fn checkpoints_of_blocks_are_remarked() {
    let each = |layers: &str| format!("checkpoints of {layers} each are predicted as one checkpoint");
    let full =
        |options: &str| megatron(&format!("--recompute-granularity full --recompute-method {options}"));
    check_remark(&full("uniform"), &[&each("1 layer")]);
    check_remark(&full("uniform --recompute-num-layers 2"), &[&each("2 layers")]);
    check_remark(&full("block --recompute-num-layers 3"), &[&each("1 layer")]);
    assert_eq!(read(&full("uniform --recompute-num-layers 3")).remarks, [""; 0]);
    check_remark(&TORCHTITAN.replace(":none", ":full"), &[&each("1 layer")]);
    let pipeline =
        "{\"stages\": 4, \"partition\": \"uniform\", \"activation_checkpoint_interval\": INTERVAL}";
    let deepspeed = DEEPSPEED.replace("PIPELINE", pipeline);
    check_remark(&deepspeed.replace("INTERVAL", "2"), &[&each("2 layers")]);
    for wrong in ["\"2\"", "-1", "true", "1.5"] {
        let expected =
            format!("`pipeline.activation_checkpoint_interval` is `{wrong}`, and expected a whole");
        refuse(&deepspeed.replace("INTERVAL", wrong), &expected);
    }
    check_remark(&megatron("--recompute-activations"), &["selective recomputation is not predicted"]);
    assert!(read(&megatron("--recompute-activations")).choice.recompute.iter().all(Option::is_none));
}

#[test]
fn interleaving_needs_as_many_microbatches_as_ranks() {
    let text = format!("{MEGATRON}--pipeline-model-parallel-layout Et|(t|)*6tttL");
    refuse(
        &text.replace("batch-size 8", "batch-size 3"),
        "line 3: interleaved 1F1B needs at least 4 microbatches, and there are 3; increase `--global-batch-size`",
    );
}

#[test]
fn tensor_ranks_need_a_node() {
    let plan = read(&megatron("--tensor-model-parallel-size 2"));
    let error = predict(&profile(10), &plan.schedule, &plan.choice).expect_err("no node").to_string();
    assert!(error.contains("2 tensor-parallel ranks need the links inside a node"), "{error}");
    assert!(error.contains("the profile has no [node]"), "{error}");
}

#[test]
fn remarks_say_what_is_not_certain() {
    let script = |extra: &str, more: &str| {
        format!("{extra}\ntorchrun x.py {EVEN} {} {more}\n", MEGATRON.replace('\n', " "))
    };
    let branch = "if [ -f x ]; then O=(--use-tp-pp-dp-mapping); fi";
    check_remark(
        &script(branch, "${O[@]}"),
        &[
            "`--use-tp-pp-dp-mapping` of line 1 counts, although `O` depends on a condition or a loop of line 1",
        ],
    );
    check_remark(
        &script("", "\"$@\""),
        &["`$@` of line 2 has the arguments of the script; it counts as empty"],
    );
    check_remark(
        &format!("while x; do {}; done", script("", "")),
        &["the command of line 2 depends on a condition or a loop of line 1"],
    );
    assert_eq!(
        read(&script("echo --recompute-granularity full", "| tee --micro-batch-size 2")).remarks,
        [""; 0]
    );
    refuse(
        &script("if [ -f x ]; then O=(--micro-batch-size 2); fi", "${O[@]}"),
        "line 1: `--micro-batch-size` is not known: `O` depends on a condition or a loop of line 1",
    );
    refuse(
        &format!("{}{}", script("", ""), script("", "--micro-batch-size 2")),
        "the commands of lines 2 and 4 differ in it",
    );
    let table = "--parallelism.pipeline_parallel_schedule_csv $(pwd)/x.csv";
    refuse(
        &torchtitan(table),
        "`--parallelism.pipeline_parallel_schedule_csv` is not known: `$(pwd)` of line",
    );
}

#[test]
fn json_may_begin_with_a_mark_and_blank_lines() {
    let config = DEEPSPEED.replace("PIPELINE", "{\"stages\": 0}");
    let error = read_text(&format!("\u{feff}\n\n{config}"), None, None).expect_err("no stages");
    let plain = read_text(&config, None, None).expect_err("no stages");
    let line = |error: &str| {
        error.strip_prefix("line ").and_then(|rest| rest.split(':').next()?.parse::<u32>().ok())
    };
    assert_eq!(line(&error), line(&plain).map(|line| line + 2), "{error} {plain}");
    // The key has the name of another one before it.
    let nested = "{\"x\": {\"stages\": 1},\n\"train_batch_size\": 8,\n\"pipeline\": {\n\"stages\": 0}}";
    refuse(nested, "line 4: `pipeline.stages` is `0`");
}
