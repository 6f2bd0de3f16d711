//! Configurations of other systems on a cluster: each kind of file is the layout that it says, mistakes have their line,
//! and the verdict is the prediction of the layout next to the best plan.

use pipewright_cluster::accuracy::Accuracy;
use pipewright_cluster::catalogue::by_name;
use pipewright_cluster::implementation::{
    Dispatcher, Graphs, Implementation, KernelFusion, Loss, NumberFormat, Stack, StateFormats,
};
use pipewright_cluster::judge::{Configuration, GivenRun, Judgement, RunContext, judge};
use pipewright_cluster::layout::{Cut, Layout, Modules, Precision, Recompute, ShardedState};
use pipewright_cluster::pipeline::Programs;
use pipewright_cluster::predict::predict;
use pipewright_cluster::search::Request;
use pipewright_schedule::plan::System;
use pipewright_shapes::model::Model;
use pipewright_shapes::reader;

const DENSE: &str = include_str!("llama_405b.json");
const EXPERTS: &str = include_str!("deepseek_v3.json");

fn model(config: &str) -> Model {
    reader::read(config).expect("a model").model
}

fn try_read(config: &str, gpus: u32, name: &str, text: &str) -> Result<GivenRun, String> {
    let model = model(config);
    let place = RunContext { model: &model, gpus, sequence: None, batch: None, precision: None };
    let file = Configuration::parse(name, text).map_err(|error| error.to_string())?;
    file.run(&place, None).map_err(|error| error.to_string())
}

fn read(config: &str, gpus: u32, name: &str, text: &str) -> GivenRun {
    try_read(config, gpus, name, text).expect("a run")
}

const SCRIPT: &str = r#"#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=8
PP=${PIPELINE:-16}
NODES=64
MBS=1
GBS=$((NODES * 8 / (TP * PP) * MBS * 32))
DATA_PATH=$1
PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP   # in a node
    --pipeline-model-parallel-size ${PP}
    --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --tp-comm-overlap
)
if [[ "$DTYPE" == "fp8" ]]; then
    PARALLEL_ARGS+=(--fp8-format hybrid)
fi
MODEL_ARGS="--num-layers 126 --hidden-size 16384 \
  --seq-length 8192"
TRAIN_ARGS=(
    --micro-batch-size "$MBS" --global-batch-size $GBS
    --num-virtual-stages-per-pipeline-rank 8 --decoder-last-pipeline-num-layers LAST
    --bf16 --lr 1e-4 --data-path "$DATA_PATH" --save $(pwd)/ckpt
    --recompute-granularity selective --recompute-modules core_attn layernorm
    --cross-entropy-loss-fusion --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16
)
torchrun --nproc_per_node 8 pretrain_gpt.py ${PARALLEL_ARGS[@]} $MODEL_ARGS "${TRAIN_ARGS[@]}" 2>&1 | tee log
"#;

/// The script with eight even blocks less: the model has 126, which 16 ranks do not divide.
fn script() -> String {
    let layout = "--pipeline-model-parallel-layout 'Et*3|(tttt|)*30t*3L'";
    SCRIPT.replace("--num-virtual-stages-per-pipeline-rank 8 --decoder-last-pipeline-num-layers LAST", layout)
}

#[test]
fn a_script_of_megatron_is_its_layout() {
    let run = read(DENSE, 512, "train.sh", &script());
    let mut blocks = vec![4; 32];
    (blocks[0], blocks[31]) = (3, 3);
    let formats = StateFormats {
        moments: NumberFormat::Bf16,
        ..StateFormats::usual(ShardedState::Optimizer, Precision::Half)
    };
    let expected = Layout {
        gpus: 512,
        tensor: 8,
        pipeline: 16,
        chunks: 2,
        expert_tensor: 8,
        batch: 128,
        cut: Cut::Given { blocks, predictors: 31 },
        recompute: Recompute::Modules(Modules::SCORES.with(Modules::NORMS)),
        sequence_parallel: true,
        sharding: ShardedState::Optimizer,
        implementation: Implementation {
            state: Some(formats),
            loss: Loss::Fused,
            overlaps_tensor: Some(true),
            dispatcher: Dispatcher::AllToAll,
            ..Implementation::usual(Stack::Megatron)
        },
        ..Layout::on_one_gpu(8192, Precision::Half)
    };
    assert_eq!(run.layout, expected);
    assert_eq!(run.system, System::Megatron);
    assert_eq!(run.notes, [""; 0]);
    assert_eq!(run.unused, ["--nproc_per_node", "--lr", "--data-path", "--save"]);
    let fp8 = read(DENSE, 512, "train.sh", &script().replace("TP=8\n", "TP=8\nDTYPE=fp8\n"));
    assert_eq!(fp8.layout, Layout { precision: Precision::Fp8, ..expected });
}

const RECIPE: &str = "\
model:
  pipeline_model_parallel_size: 16
  virtual_pipeline_model_parallel_size: null
  pipeline_model_parallel_layout: [[embedding, decoder, decoder, decoder], STAGES [mtp], [loss]]
  expert_model_parallel_size: 64
  seq_length: 4096
  mtp_num_layers: 1
  moe_token_dispatcher_type: flex
  moe_flex_dispatcher_backend: hybridep
  cuda_graph_impl: transformer_engine
  cuda_graph_scope: [attn, moe_router]
  recompute_granularity: selective
  recompute_modules: [mla_up_proj, mlp]
  cross_entropy_loss_fusion: true
  moe_router_padding_for_fp8: true
train:
  micro_batch_size: 1
  global_batch_size: 8192
ddp:
  use_distributed_optimizer: true
  grad_reduce_in_fp32: false
comm_overlap:
  overlap_moe_expert_parallel_comm: true
mixed_precision: bf16_with_mxfp8_mixed
optimizer:
  lr: 0.0003
";

#[test]
fn a_recipe_of_megatron_bridge_is_its_layout() {
    let run = read(EXPERTS, 1024, "r.yaml", &RECIPE.replace("STAGES", &"[decoder, decoder], ".repeat(29)));
    let mut blocks = vec![3];
    blocks.extend([2; 29]);
    blocks.extend([0, 0]);
    let expected = Layout {
        gpus: 1024,
        pipeline: 16,
        chunks: 2,
        expert: 64,
        batch: 8192,
        cut: Cut::Given { blocks, predictors: 30 },
        precision: Precision::Mxfp8,
        recompute: Recompute::Modules(Modules::LATENT.with(Modules::DENSE)),
        implementation: Implementation {
            loss: Loss::Fused,
            graphs: Graphs::Partial,
            overlaps_tensor: Some(false),
            overlaps_experts: true,
            dispatcher: Dispatcher::HybridEp,
            ..Implementation::usual(Stack::Megatron)
        },
        ..Layout::on_one_gpu(4096, Precision::Half)
    };
    assert_eq!(run.layout, expected);
    assert_eq!(run.unused, ["model.moe_router_padding_for_fp8", "optimizer.lr"]);
    assert_eq!(run.model.predictors, 1);
}

/// The options of a run of torchtitan 0.3, which has a pipeline.
const TORCHTITAN: &str = "\
--module llama3 --config llama3_405b --training.seq_len 8192 --training.local_batch_size 16
--parallelism.pipeline_parallel_degree 4 --parallelism.tensor_parallel_degree=8
--parallelism.pipeline_parallel_schedule Interleaved1F1B --parallelism.data_parallel_replicate_degree 2
--compile.enable activation-checkpoint:full
";

fn torchtitan() -> Layout {
    let mut blocks = vec![16; 8];
    (blocks[0], blocks[7]) = (15, 15);
    Layout {
        gpus: 256,
        tensor: 8,
        pipeline: 4,
        chunks: 2,
        expert_tensor: 8,
        batch: 128,
        cut: Cut::Given { blocks, predictors: 7 },
        recompute: Recompute::Full,
        sequence_parallel: true,
        sharding: ShardedState::Parameters,
        shards: Some(4),
        implementation: Implementation {
            overlaps_tensor: Some(false),
            reshards: false,
            ..Implementation::usual(Stack::Torchtitan)
        },
        ..Layout::on_one_gpu(8192, Precision::Half)
    }
}

#[test]
fn options_of_torchtitan_are_their_layout() {
    let run = read(DENSE, 256, "run.sh", TORCHTITAN);
    assert_eq!(run.layout, torchtitan());
    assert_eq!(run.unused, ["--module", "--config"]);
    let separate = read(DENSE, 256, "run.sh", &TORCHTITAN.replace("--compile.enable ", ""));
    assert_eq!(separate.layout.implementation.kernels, KernelFusion::Separate);
    let twice = read(DENSE, 256, "run.sh", &format!("--training.global_batch_size 256 {TORCHTITAN}"));
    assert_eq!(twice.layout, Layout { batch: 256, pass_microbatches: Some(16), ..torchtitan() });
}

#[test]
fn the_main_branch_of_torchtitan_counts_tokens() {
    let tokens = "--training.max_context_length 8192 --training.num_tokens_per_microbatch_per_dp_rank 8192 \
                  --parallelism.num_pp_microbatches 16 --training.disable_cuda_graphs";
    let main = TORCHTITAN.replace("--training.seq_len 8192 --training.local_batch_size 16", tokens);
    let run = read(DENSE, 256, "run.sh", &main);
    let usual = torchtitan();
    let implementation = Implementation { loss: Loss::Chunked, ..usual.implementation };
    assert_eq!(run.layout, Layout { implementation, ..usual });
    let refused = |text: &str| try_read(DENSE, 256, "run.sh", text).expect_err("a mistake");
    assert_eq!(
        refused(&format!("{main}--training.local_batch_size 16")),
        "line 5: `--training.local_batch_size` is an option of torchtitan 0.3, and \
         `--training.num_tokens_per_microbatch_per_dp_rank` of versions since August 2026; use one version's"
    );
    assert_eq!(
        refused(&main.replace("_rank 8192", "_rank 8000")),
        "line 1: `--training.num_tokens_per_microbatch_per_dp_rank` is `8000`, and expected a multiple of 8192, the tokens of a row"
    );
}

#[test]
fn toml_of_torchtitan_is_its_layout() {
    let text = "\
[model]
converters = [\"float8\"]
[training]
seq_len = 8192
local_batch_size = 16
[parallelism]
pipeline_parallel_degree = 4
tensor_parallel_degree = 8
data_parallel_replicate_degree = 2
pipeline_parallel_schedule = \"Interleaved1F1B\"
[activation_checkpoint]
mode = \"full\"
[compile]
enable = true
[optimizer]
lr = 1e-4
";
    let run = read(DENSE, 256, "run.toml", text);
    assert_eq!(run.layout, Layout { precision: Precision::Fp8, ..torchtitan() });
    assert_eq!(run.unused, ["optimizer.lr"]);
    let wrong =
        try_read(DENSE, 256, "run.toml", &text.replace("tensor_parallel_degree", "tensor_parallel_degre"));
    assert_eq!(
        wrong,
        Err("line 8: torchtitan has no key `parallelism.tensor_parallel_degre`; did you mean \
             `--parallelism.tensor-parallel-degree`?"
            .to_owned())
    );
}

const DEEPSPEED: &str = r#"{
    "train_micro_batch_size_per_gpu": 1,
	"gradient_accumulation_steps": 4,
    "bf16": {"enabled": true},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": true
    }
}"#;

#[test]
fn a_configuration_of_deepspeed_is_its_layout() {
    let read = |text: &str| {
        let model = model(DENSE);
        let (sequence, batch) = (Some(4096), None);
        let place = RunContext { model: &model, gpus: 64, sequence, batch, precision: None };
        let file = Configuration::parse("ds.json", text).map_err(|error| error.to_string())?;
        file.run(&place, None).map_err(|error| error.to_string())
    };
    let run = read(DEEPSPEED).expect("a run");
    let expected = Layout {
        gpus: 64,
        batch: 256,
        cut: Cut::Given { blocks: vec![126], predictors: 0 },
        sharding: ShardedState::Parameters,
        ..Layout::on_one_gpu(4096, Precision::Half)
    };
    assert_eq!(run.layout, expected);
    assert_eq!(run.unused, ["zero_optimization.overlap_comm"]);
    let pipeline = DEEPSPEED.replace("\"stage\": 3", "\"stage\": 1").replace(
        "    \"bf16\"",
        "    \"pipeline\": {\"stages\": 4, \"partition\": \"uniform\", \"activation_checkpoint_interval\": 1},\n    \"bf16\"",
    );
    let run = read(&pipeline).expect("a run");
    let cut = Cut::Given { blocks: vec![31, 32, 32, 31], predictors: 3 };
    assert_eq!((run.layout.pipeline, run.layout.cut, run.layout.recompute), (4, cut, Recompute::Full));
    let refuse = |from: &str, to: &str, words: &str| {
        assert_eq!(read(&DEEPSPEED.replace(from, to)).map(|run| run.layout), Err(words.to_owned()));
    };
    refuse(
        "\"stage\": 3",
        "\"stage\": 4",
        "line 6: `zero_optimization.stage` is `4`, and expected one of 0, 1, 2, 3",
    );
    refuse(
        "gpu\": 1",
        "gpu\": \"auto\"",
        "line 2: `train_micro_batch_size_per_gpu` is `\"auto\"`, and expected a whole number from 1 to 1000000",
    );
    refuse("}\n}", "}", "line 8: the JSON cannot be read: EOF while parsing an object at line 8 column 5");
}

/// Checks that a script with a change is refused at its line.
fn refuse(from: &str, to: &str, expected: &str) {
    let text = script().replacen(from, to, 1);
    assert_ne!(text, script(), "{from}");
    let error = try_read(DENSE, 512, "train.sh", &text).map(|run| run.layout);
    assert_eq!(error, Err(expected.to_owned()), "{to}");
}

#[test]
fn mistakes_of_scripts_have_their_line() {
    refuse(
        "TP=8",
        "TP=$(nproc)",
        "line 10: `--tensor-model-parallel-size` is not known: `$(nproc)` of line 3 is not run; write its value",
    );
    refuse(
        "MBS=1",
        "MBS=$2",
        "line 22: `--micro-batch-size` is not known: `$2` of line 6 is an argument of the script; write its value",
    );
    refuse(
        "PP=${PIPELINE:-16}",
        "if test -f x; then PP=16; fi",
        "line 11: `--pipeline-model-parallel-size` is not known: `PP` depends on a condition or a loop of line 4, which is not run; \
         write its value",
    );
    refuse(
        "--sequence-parallel",
        "--sequence-paralel",
        "line 12: Megatron has no key `--sequence-paralel`; did you mean `--sequence-parallel`?",
    );
    refuse(
        "--bf16",
        "--bf16 --expert-pipeline-size 2",
        "line 24: the prediction does not know `--expert-pipeline-size` of Megatron, whose name says that it changes the layout; \
         leave it out if it does not",
    );
    refuse(
        "core_attn layernorm",
        "core_attn norms",
        "line 25: `--recompute-modules` is `norms`, and expected some of core_attn, mla_up_proj, layernorm, moe_act, mlp, moe, \
         shared_experts",
    );
    refuse(
        "--num-layers 126",
        "--num-layers 80",
        "line 19: `--num-layers` is `80`, and expected 126, as the model has; use the configuration of this model",
    );
    refuse(
        "Et*3|",
        "Et*3x|",
        "line 23: the layout has `x` at character 5; Megatron knows `E`, `t`, `m`, `L`, `|`, `*3` and parentheses",
    );
}

#[test]
fn mistakes_of_recipes_have_their_line() {
    let refuse = |from: &str, to: &str, expected: &str| {
        let text = RECIPE.replace("STAGES", &"[decoder, decoder], ".repeat(29)).replace(from, to);
        assert_eq!(try_read(EXPERTS, 1024, "r.yml", &text).map(|run| run.layout), Err(expected.to_owned()));
    };
    refuse(
        "size: 64",
        "size: many",
        "line 5: `model.expert_model_parallel_size` is `many`, and expected a whole number from 1 to 1000000",
    );
    refuse(
        "mtp_num_layers: 1",
        "mtp_num_layers: 2",
        "line 7: `model.mtp_num_layers` is `2`, and expected at most 1, the predictors of the model",
    );
    refuse("size: 1\n", "size: [1\n", "line 18: illegal placement of ':' indicator");
}

#[test]
fn the_verdict_is_the_prediction_next_to_the_best_plan() {
    let machine = by_name("h100").expect("a machine");
    let verdict = |text: &str| {
        let run = read(DENSE, 512, "train.sh", text);
        let layout = &run.layout;
        let request = Request {
            implementation: layout.implementation,
            simulations: 8,
            ..Request::new(
                run.model.clone(),
                machine.clone(),
                512,
                layout.batch,
                layout.sequence,
                layout.precision,
            )
        };
        let verdict = judge(&request, &run).expect("a verdict");
        let own = predict(&request.setting(layout), &mut Programs::default()).expect("a prediction");
        assert_eq!(verdict.plan.prediction, own);
        verdict
    };
    let slow = verdict(
        &script()
            .replace("selective --recompute-modules core_attn layernorm", "full --recompute-method uniform"),
    );
    assert!(slow.fits(), "{}", slow.plan.prediction.peak_memory());
    let gain = slow.gain().expect("a best plan");
    assert!(gain > 0.1, "{gain}");
    assert!(
        slow.changes.iter().any(|change| change.option == "--recompute-granularity" && change.from == "full")
    );
    assert!(slow.is_beaten() && gain > slow.accuracy.mean);
    // A gain that is within the error of predictions is no reason to change a run.
    let mut doubtful = slow.clone();
    doubtful.accuracy.mean = gain;
    assert!(!doubtful.is_beaten());
    let large = verdict(
        &script().replace("PP=${PIPELINE:-16}", "PP=2").replace("Et*3|(tttt|)*30t*3L", "Et*63|t*63L"),
    );
    assert!(!large.fits());
    let unsure = Accuracy { mean: f64::INFINITY, ..large.accuracy.clone() };
    assert!(Judgement { accuracy: unsure, ..large.clone() }.is_beaten());
    assert!(large.best.is_ok_and(|best| best.prediction.peak_memory() <= large.memory_limit));
}

/// A run that overlaps nothing and has groups of shards, next to the best plan without groups.
#[test]
fn the_overlap_of_experts_and_groups_of_shards_are_changes() {
    let text = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --num-layers 61 --micro-batch-size 1 --bf16 \
                --pipeline-model-parallel-layout Et*15|t*16|t*16|t*14L --seq-length 4096 --global-batch-size 512 \
                --expert-model-parallel-size 16 --use-distributed-optimizer --num-distributed-optimizer-instances 2 \
                --moe-token-dispatcher-type alltoall";
    let run = read(EXPERTS, 256, "train.sh", text);
    let machine = by_name("h100").expect("a machine");
    let layout = &run.layout;
    let request = Request {
        implementation: layout.implementation,
        simulations: 2,
        memory: Some(1e15),
        ..Request::new(run.model.clone(), machine, 256, layout.batch, layout.sequence, layout.precision)
    };
    let verdict = judge(&request, &run).expect("a verdict");
    let best = verdict.best.as_ref().expect("a best plan");
    let change = |option: &str| {
        let change = verdict.changes.iter().find(|change| change.option == option);
        change.map(|change| (change.from.as_str(), change.to.as_str()))
    };
    assert_eq!(best.layout.shard_groups(), 1, "{:?}", best.layout);
    assert_eq!(change("--num-distributed-optimizer-instances"), Some(("2", "1")));
    let overlaps = best.layout.implementation.overlaps_experts && best.layout.expert > 1;
    assert_eq!(change("--overlap-moe-expert-parallel-comm"), overlaps.then_some(("off", "on")));
}

/// Returns the precision and the notes of a script of Megatron with a change.
fn changed(from: &str, to: &str) -> GivenRun {
    let text = script().replacen(from, to, 1);
    assert_ne!(text, script(), "{from}");
    read(DENSE, 512, "train.sh", &text)
}

#[test]
fn options_of_megatron_that_change_costs_are_read_or_refused() {
    let run = changed("--bf16", "");
    assert_eq!(run.layout.precision, Precision::Single);
    assert_eq!(run.notes, ["neither `--bf16` nor `--fp16` is given, so Megatron trains in f32"]);
    let full = "selective --recompute-modules core_attn layernorm";
    let run = changed(full, "full --recompute-method uniform --recompute-num-layers 4");
    assert_eq!((run.layout.recompute, run.layout.recompute_layers), (Recompute::Full, None));
    assert!(
        run.notes[0].starts_with("the checkpoints of 4 blocks each are predicted as one"),
        "{:?}",
        run.notes
    );
    let run = changed(full, "full --recompute-method block --recompute-num-layers 2");
    assert_eq!((run.layout.recompute_layers, run.notes.len()), (Some(2), 0));
    refuse(
        full,
        "full",
        "line 25: `--recompute-method` is missing; with `--recompute-granularity full`, Megatron needs `uniform` or `block`",
    );
    refuse(
        full,
        "full --recompute-method uniform --recompute-num-layers 127",
        "line 25: `--recompute-num-layers` is `127`, and expected at most 126, the blocks of the model",
    );
    refuse(
        "--bf16",
        "--bf16 --optimizer sgd",
        "line 24: `--optimizer` is `sgd`, and expected one of adam, adamw, fused_adam, distributed_fused_adam, muon, dist_muon",
    );
    refuse(
        "--bf16",
        "--bf16 --num-experts 8",
        "line 24: `--num-experts` is `8`, and expected no experts, because the model has none; use the configuration of this model",
    );
    refuse(
        "--bf16",
        "--bf16 --expert-model-parallel-size 2",
        "line 24: --expert-model-parallel-size 2: the model has no experts; use 1",
    );
    refuse(
        "--bf16",
        "--bf16 --cpu-offloading-num-layers 126",
        "line 24: `--cpu-offloading-num-layers` is `126`, and expected fewer than 126, the blocks of the model",
    );
    refuse(
        "--bf16",
        "--bf16 --num-distributed-optimizer-instances 3",
        "line 24: `--num-distributed-optimizer-instances` is `3`, and expected a divisor of 4, the replicas",
    );
    refuse(
        "--tensor-model-parallel-size $TP",
        "--tensor-model-parallel-size 64",
        "512 GPUs cannot be divided into a mesh of 1024 (--tensor-model-parallel-size 64, --pipeline-model-parallel-size 16, \
         --context-parallel-size 1); use --ranks 1024, or use another mesh",
    );
    refuse(
        "--global-batch-size $GBS",
        "--global-batch-size 127",
        "line 22: 127 rows of a step cannot be divided into microbatches of 1 row on each of 4 replicas; use \
         --global-batch-size 128, or use another mesh",
    );
}

/// All groups of shards of a model with experts divide the replicas of its experts too.
#[test]
fn groups_of_shards_divide_the_replicas_of_experts() {
    let options = |copies: u32| {
        let text = format!(
            "--tensor-model-parallel-size 1 --micro-batch-size 1 --seq-length 4096 --bf16 --use-distributed-optimizer\n\
             --expert-model-parallel-size 16 --num-distributed-optimizer-instances {copies}"
        );
        try_read(EXPERTS, 64, "train.sh", &text).map(|run| run.layout.shards)
    };
    assert_eq!(options(4), Ok(Some(16)));
    let error = "line 2: `--num-distributed-optimizer-instances` is `8`, and expected a divisor of 4, the replicas of the experts";
    assert_eq!(options(8), Err(error.to_owned()));
}

/// Checks that each of some options is read behind any others: a known key is never a mistake.
#[test]
fn known_options_are_no_mistakes() {
    let pairs = [
        ("--fp4-format e2m1", "--fp8-format hybrid --fp8-recipe mxfp8"),
        ("--use-torch-fsdp2", "--use-megatron-fsdp"),
        ("--recompute-activations", "--recompute-granularity full --recompute-method uniform"),
        ("--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32"),
        ("--cuda-graph-impl local", "--enable-cuda-graph --external-cuda-graph"),
    ];
    for (one, other) in pairs {
        changed("--bf16", &format!("--bf16 {one} {other}"));
    }
    let fp8 = RECIPE
        .replace("STAGES", &"[decoder, decoder], ".repeat(29))
        .replace("train:", "  fp4: e2m1\n  fp8: hybrid\ntrain:");
    assert_eq!(read(EXPERTS, 1024, "r.yaml", &fp8).layout.precision, Precision::Nvfp4);
}

#[test]
fn the_default_dispatcher_of_megatron_has_a_note() {
    let options = "--tensor-model-parallel-size 1 --micro-batch-size 1 --seq-length 4096 --bf16 --expert-model-parallel-size 8";
    for (more, expected) in [
        ("", 1),
        (" --moe-token-dispatcher-type allgather", 1),
        (" --moe-token-dispatcher-type alltoall", 0),
        (" --moe-token-dispatcher-type flex", 0),
    ] {
        let run = read(EXPERTS, 64, "train.sh", &format!("{options}{more}"));
        let notes = run.notes.iter().filter(|note| note.contains("dispatcher `allgather`")).count();
        assert_eq!(notes, expected, "{more}: {:?}", run.notes);
    }
}

#[test]
fn torchtitan_says_its_precision_and_the_tokens_of_a_row() {
    let single = format!("--training.mixed_precision_param float32 {TORCHTITAN}");
    assert_eq!(read(DENSE, 256, "run.sh", &single).layout.precision, Precision::Single);
    let error =
        try_read(DENSE, 256, "run.sh", &single.replace("float32", "float16")).expect_err("no such format");
    assert!(error.ends_with("is `float16`, and expected one of bfloat16, float32"), "{error}");
    let model = model(DENSE);
    let given = |sequence, batch| {
        let place = RunContext { model: &model, gpus: 256, sequence, batch, precision: None };
        let tokens = "--parallelism.tensor_parallel_degree 8 --training.num_tokens_per_microbatch_per_dp_rank 16384 \
                      activation-checkpoint:full";
        let file = Configuration::parse("run.sh", tokens).expect("options");
        file.run(&place, None).map(|run| (run.layout.microbatch, run.layout.sequence))
    };
    assert_eq!(given(Some(8192), None), Ok((2, 8192)));
    assert_eq!(given(Some(4096), Some(128)), Ok((4, 4096)));
    let error = given(Some(4096), Some(64)).expect_err("another batch").to_string();
    assert_eq!(error, "the file has 128 rows per step, and 64 are given; leave --global-batch out");
}

#[test]
fn deepspeed_may_keep_its_state_on_the_host() {
    let text = DEEPSPEED.replace(
        "\"stage\": 3,",
        "\"stage\": 3,\n \"offload_optimizer\": {\"device\": \"cpu\", \"pin_memory\": true}, \"offload_param\": {\"device\": \"none\"},",
    );
    let model = model(DENSE);
    let place = RunContext { model: &model, gpus: 64, sequence: Some(4096), batch: None, precision: None };
    let file = Configuration::parse("ds.json", &format!("\u{feff}{text}")).expect("a file");
    let run = file.run(&place, None).expect("a run");
    assert_eq!(
        run.notes,
        [
            "`zero_optimization.offload_optimizer.device` of line 7 is `cpu`, and the prediction keeps the optimizer's state on the \
          GPUs: the run needs less memory there, and more time"
        ]
    );
}

#[test]
fn a_flag_that_depends_on_a_condition_has_a_note() {
    let run = changed(
        "MODEL_ARGS=",
        "[ -f x ] && PARALLEL_ARGS+=(--overlap-moe-expert-parallel-comm)\nMODEL_ARGS=",
    );
    assert_eq!(
        run.notes,
        [
            "`--overlap-moe-expert-parallel-comm` of line 19 counts, although `PARALLEL_ARGS` depends on a condition or a loop of line \
          19, which is not run"
        ]
    );
}

/// Each file would take minutes if an option were looked at as often as there are options.
#[test]
fn long_files_are_read_or_refused_soon() {
    let many = |option: &dyn Fn(usize) -> String| (0..40_000).map(option).collect::<String>();
    let files = [
        ("run.sh", format!("--micro-batch-size 1 {}", many(&|index| format!("--x{index} ")))),
        ("run.sh", format!("--micro-batch-size 1 {}", many(&|_| "--x ".to_owned()))),
        ("run.sh", format!("--micro-batch-size 1 --{}", "micro-batch-".repeat(80_000))),
        ("r.yaml", format!("model:\n{}", many(&|index| format!("  x{index}: 1\n")))),
        ("r.yaml", format!("{}:\n{}", "x".repeat(500_000), many(&|index| format!("  x{index}: 1\n")))),
        ("t.toml", format!("[{}]\n{}", "x".repeat(500_000), many(&|index| format!("x{index} = 1\n")))),
        (
            "d.json",
            format!(
                "{{\"{}\": {{{}\"x\": 1}}}}",
                "x".repeat(500_000),
                many(&|index| format!("\"x{index}\": 1,"))
            ),
        ),
    ];
    for (name, text) in files {
        let start = std::time::Instant::now();
        try_read(DENSE, 8, name, &text).expect_err("too many options");
        assert!(start.elapsed().as_secs() < 20, "{name}: {:?}", start.elapsed());
    }
}
