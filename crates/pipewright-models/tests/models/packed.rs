//! Documents that share a row do not see each other: a packed row has the loss of its documents alone.

use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::batch::Batch;
use pipewright::nn::IGNORED_TARGET;
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::train::data::{DOCUMENTS, POSITIONS, VALID_TOKENS};
use pipewright::transport::World;
use pipewright_models::{CutModel, InitialParameters, ModelConfig};
use pipewright_schedule::lower::{TrainingLowering, for_training};
use pipewright_schedule::partition::{Method, partition};
use pipewright_schedule::{ScheduleSpec, generate};
use serde_json::{Value, json};

const BOS: i32 = 1;

/// A model of a family, small and with parameters that are large enough for its tokens to matter to each
/// other.
fn model(family: &str, keys: &Value) -> ModelConfig {
    let mut sizes = pipewright_models::decoder::DecoderConfig::new(32, 4);
    (sizes.hidden_size, sizes.intermediate_size, sizes.initializer_range) = (32, 48, 0.4);
    let keys = keys.as_object().expect("an object").clone();
    ModelConfig::of_sizes(family, sizes, keys).expect("it is a model")
}

fn launch(model: &ModelConfig, ranks: u32) -> Pipeline {
    let spec = ScheduleSpec { ranks, microbatches: ranks, ..ScheduleSpec::default() };
    let schedule = generate("1f1b", &spec).expect("a schedule");
    let program = for_training(&schedule, &TrainingLowering::default()).expect("it is sound");
    let stages = partition(&model.describe(8).weights(), ranks, &Method::Optimal).expect("it divides");
    let model = CutModel::from(model.clone());
    let make = move |stage| {
        model.training_stage(stages.range(stage), &InitialParameters::Seed(3), Device::flex().autodiff())
    };
    let config = PipelineConfig { optimizer: Some(AdamW::default().init()), ..PipelineConfig::default() };
    Pipeline::launch(program, World::local(ranks), &config, make).expect("it starts")
}

fn tensor(rows: usize, numbers: &[i32]) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(numbers.to_vec(), [rows, numbers.len() / rows]), &Device::flex())
}

/// Returns the loss of each of some equal rows of ids, whose last id is a target only.
fn losses(model: &ModelConfig, rows: u32, ids: &[i32], side: &[(&str, Vec<i32>)]) -> Vec<f64> {
    let mut pipeline = launch(model, rows);
    let rows = rows as usize;
    let ids_from = |start: usize| -> Vec<i32> {
        let length = ids.len() / rows;
        ids.chunks(length).flat_map(|row| row[start..start + length - 1].to_vec()).collect()
    };
    let mut batch = Batch::split(tensor(rows, &ids_from(0)), tensor(rows, &ids_from(1)), rows as u32)
        .expect("it divides");
    for (name, numbers) in side {
        batch = batch.with_split(name, tensor(rows, numbers)).expect("it divides");
    }
    let evaluated = pipeline.eval_losses(batch.clone()).expect("an evaluation");
    let trained = pipeline.step_batch(batch, 0.0).expect("a step");
    assert_eq!(evaluated.losses, trained.losses, "side inputs reach an evaluation as they reach a step");
    trained.losses
}

fn is_near(found: f64, expected: f64) -> bool {
    (found - expected).abs() < 2e-5 * expected
}

fn check(family: &str, keys: &Value) {
    check_documents(family, keys, true);
}

/// Checks a model whose losses depend on the positions of documents in a row.
fn check_restarted(family: &str, keys: &Value) {
    check_documents(family, keys, false);
}

fn check_documents(family: &str, keys: &Value, is_relative: bool) {
    let model = model(family, keys);
    // Two rows with the same documents of 5, 2 and 4 tokens. The beginning of the next one is the last target
    // of each.
    let documents: [&[i32]; 3] = [&[BOS, 7, 30, 9, 4], &[BOS, 11], &[BOS, 5, 30, 22]];
    let row: Vec<i32> = documents.concat().into_iter().chain([BOS]).collect();
    let ids = [row.clone(), row].concat();
    let doc_ids = [1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3].repeat(2);
    let positions = [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3].repeat(2);
    let alone: f64 = documents
        .iter()
        .map(|document| {
            let ids: Vec<i32> = document.iter().copied().chain([BOS]).collect();
            document.len() as f64 * losses(&model, 1, &ids, &[])[0]
        })
        .sum::<f64>()
        / 11.0;
    let near = |found: f64| is_near(found, alone);
    let packed = losses(&model, 2, &ids, &[(DOCUMENTS, doc_ids.clone())]);
    assert_eq!(packed.iter().all(|&loss| near(loss)), is_relative, "{family}: {packed:?}, and {alone}");
    let restarted = losses(&model, 2, &ids, &[(DOCUMENTS, doc_ids), (POSITIONS, positions)]);
    assert!(restarted.iter().all(|&loss| near(loss)), "{family}: {restarted:?}, not {alone}");
    let open = losses(&model, 2, &ids, &[(DOCUMENTS, vec![0; 22])]);
    assert!(open.iter().all(|&loss| !near(loss)), "{family}: {open:?} should differ from {alone}");
}

#[test]
fn documents_of_decoders_do_not_see_each_other() {
    check("llama", &json!({}));
    check("qwen2", &json!({}));
    check("qwen3", &json!({"head_dim": 16}));
    check("qwen3_moe", &json!({"num_experts": 4, "moe_intermediate_size": 24}));
    check("gpt_oss", &json!({"num_local_experts": 4, "sliding_window": 3}));
}

/// Vectors of positions begin again with each document, if a side input says so.
#[test]
fn documents_of_gpt2_do_not_see_each_other() {
    check_restarted("gpt2", &json!({}));
}

#[test]
fn documents_of_hybrids_do_not_see_each_other() {
    check("nemotron_h", &json!({"hybrid_override_pattern": "M*-M", "ssm_state_size": 16}));
    check(
        "hybrid",
        &json!({"pattern": "AMD", "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8}),
    );
}

/// Checks positions that change after 5 tokens: the length of a row is the number of its valid tokens, and
/// in packed rows the longest document.
fn check_length(family: &str, keys: &Value) {
    let model = model(family, keys);
    let document = [BOS, 7, 30, 9, 4];
    let alone = losses(&model, 1, &[&document[..], &[BOS]].concat(), &[])[0];
    let row = [&document[..], &document[..], &[BOS]].concat();
    let documents = (DOCUMENTS, vec![1, 1, 1, 1, 1, 2, 2, 2, 2, 2]);
    let positions = (POSITIONS, vec![0, 1, 2, 3, 4, 0, 1, 2, 3, 4]);
    let restarted = losses(&model, 1, &row, &[documents.clone(), positions])[0];
    assert!(is_near(restarted, alone), "{family}: {restarted}, not {alone}");
    let continued = losses(&model, 1, &row, &[documents])[0];
    assert!(!is_near(continued, alone), "{family}: {continued} should differ from {alone}");

    // A row of 5 tokens that is filled up to 10.
    let inputs = [document, [0; 5]].concat();
    let targets = [7, 30, 9, 4, BOS].into_iter().chain([IGNORED_TARGET as i32; 5]).collect::<Vec<_>>();
    let batch = Batch::split(tensor(1, &inputs), tensor(1, &targets), 1).expect("it divides");
    let batch = batch.ignoring(IGNORED_TARGET).expect("some targets count");
    let counts = Tensor::<1, Int>::from_data(TensorData::from([5]), &Device::flex());
    let filled = batch.with_split(VALID_TOKENS, counts).expect("it divides");
    let filled = launch(&model, 1).eval_losses(filled).expect("an evaluation").losses[0];
    assert!(is_near(filled, alone), "{family}: {filled}, not {alone}");
}

#[test]
fn positions_of_long_sequences_are_for_valid_tokens_alone() {
    check_length(
        "llama",
        &json!({"max_position_embeddings": 5, "rope_scaling": {"type": "dynamic", "factor": 8.0}}),
    );
    let long = json!({"type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [9, 5, 3, 2]});
    check_length(
        "phi3",
        &json!({"max_position_embeddings": 20, "original_max_position_embeddings": 5, "rope_scaling": long}),
    );
}
