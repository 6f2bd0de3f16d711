//! Documents that share a row do not see each other: a packed row has the loss of its documents alone, and
//! further predictions stay in their document.

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
    launch_cut(&CutModel::from(model.clone()), ranks, ranks)
}

fn launch_cut(model: &CutModel, ranks: u32, microbatches: u32) -> Pipeline {
    let spec = ScheduleSpec { ranks, microbatches, ..ScheduleSpec::default() };
    let schedule = generate("1f1b", &spec).expect("a schedule");
    let program = for_training(&schedule, &TrainingLowering::default()).expect("it is sound");
    let stages = partition(&model.describe(8).weights(), ranks, &Method::Optimal).expect("it divides");
    let model = model.clone();
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

/// The second layer of each model has an attention.
#[test]
fn documents_begin_without_a_state() {
    let keys = json!({"full_attention_interval": 2, "linear_num_key_heads": 2});
    check("qwen3_5_text", &keys);
    check("granitemoehybrid", &json!({"layer_types": ["mamba", "attention"]}));
    check(
        "qwen3_next",
        &json!({"full_attention_interval": 2, "num_experts": 4, "moe_intermediate_size": 24}),
    );
}

/// Queries grow with positions in a document, which begin again if a side input says so.
#[test]
fn queries_grow_in_their_documents() {
    let yarn = json!({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 3,
        "llama_4_scaling_beta": 0.5});
    check_restarted("ministral3", &json!({"rope_scaling": yarn, "max_position_embeddings": 6}));
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

/// The further predictions of a step.
#[derive(Debug)]
struct Predicted {
    mtp: f64,
    loss: f64,
    gradient_norm: f64,
}

/// A row of documents, each with the target of its last token.
type DocumentRow<'a> = &'a [&'a [i32]];

/// Returns a batch of one microbatch, whose rows are filled. A side input names the documents if `is_named`.
/// `counts` says which targets count.
fn batch_of(rows: &[DocumentRow<'_>], is_named: bool, counts: fn(i32) -> bool) -> Batch {
    const SEQUENCE: usize = 12;
    let [mut ids, mut targets, mut documents, mut positions] = [const { Vec::<i32>::new() }; 4];
    let mut valid = Vec::new();
    for row in rows {
        let start = ids.len();
        for (index, document) in row.iter().enumerate() {
            let places = document.len() - 1;
            ids.extend(&document[..places]);
            targets
                .extend(document[1..].iter().map(|&id| if counts(id) { id } else { IGNORED_TARGET as i32 }));
            documents.extend(vec![index as i32; places]);
            positions.extend(0..places as i32);
        }
        valid.push((ids.len() - start) as i32);
        let missing = SEQUENCE - (ids.len() - start);
        ids.extend(vec![0; missing]);
        targets.extend(vec![IGNORED_TARGET as i32; missing]);
        documents.extend(vec![row.len() as i32; missing]);
        positions.extend(0..missing as i32);
    }
    let count = rows.len();
    let batch = Batch::split(tensor(count, &ids), tensor(count, &targets), 1).expect("it divides");
    let batch = batch.ignoring(IGNORED_TARGET).expect("some targets count").with_targets_for_all();
    let valid = Tensor::<1, Int>::from_data(TensorData::new(valid, [count]), &Device::flex());
    let batch = batch.with_split(VALID_TOKENS, valid).expect("it divides");
    if !is_named {
        return batch;
    }
    let batch = batch.with_split(DOCUMENTS, tensor(count, &documents)).expect("it divides");
    batch.with_split(POSITIONS, tensor(count, &positions)).expect("it divides")
}

fn predicted(keys: &Value, head_parts: u32, batch: Batch) -> Predicted {
    let model = CutModel::new(model("hybrid", keys), head_parts).expect("it can be cut");
    let ranks = if head_parts > 1 { 2 } else { 1 };
    let summary = launch_cut(&model, ranks, 1).step_batch(batch, 0.0).expect("a step");
    Predicted { mtp: summary.auxiliary["mtp"], loss: summary.loss(), gradient_norm: summary.gradient_norm }
}

/// Two documents of different lengths, whose further predictions have other losses in each other's place.
const FIRST: &[i32] = &[2, 7, 30, 9, 4, 17];
const SECOND: &[i32] = &[3, 11, 5, 22];

/// Checks that rows of documents in any order have the further predictions of the documents alone.
fn check_predictions(keys: &Value, counts: fn(i32) -> bool) {
    for head_parts in [1, 3] {
        let found = |rows: &[DocumentRow<'_>]| predicted(keys, head_parts, batch_of(rows, true, counts));
        let alone = found(&[&[FIRST], &[SECOND]]);
        for rows in [&[&[FIRST, SECOND][..]], &[&[SECOND, FIRST][..]]] {
            let packed = found(rows);
            assert!(
                is_near(packed.mtp, alone.mtp)
                    && is_near(packed.loss, alone.loss)
                    && is_near(packed.gradient_norm, alone.gradient_norm),
                "{keys} in {head_parts} parts: {packed:?}, not {alone:?}"
            );
        }
    }
}

#[test]
fn further_predictions_stay_in_their_document() {
    let mut keys = json!({"pattern": "AD", "mtp_loss_weight": 0.3, "mtp_depth": 1});
    check_predictions(&keys, |_| true);
    check_predictions(&keys, |id| id != 30 && id != 11);
    keys["mtp_depth"] = 3.into();
    check_predictions(&keys, |_| true);
    keys["tie_word_embeddings"] = true.into();
    check_predictions(&keys, |id| id != 9);
    let mamba = json!({"pattern": "AMD", "mtp_loss_weight": 0.3, "mtp_block": "M", "mamba_num_heads": 4,
        "mamba_head_dim": 8, "ssm_state_size": 8, "bos_token_id": BOS});
    check_predictions(&mamba, |_| true);
}

/// A document begins behind another one without a side input. The beginning is a target of the next token, but
/// of no further prediction.
#[test]
fn further_predictions_stop_before_the_next_beginning() {
    let first = [&[BOS], FIRST].concat();
    let second = [&[BOS], SECOND].concat();
    for (mtp_depth, counts) in
        [(1, (|_| true) as fn(i32) -> bool), (2, |_| true), (2, |id| id != BOS && id != 7)]
    {
        let keys =
            json!({"pattern": "AD", "mtp_loss_weight": 0.3, "mtp_depth": mtp_depth, "bos_token_id": BOS});
        for head_parts in [1, 3] {
            let mtp =
                |rows: &[DocumentRow<'_>]| predicted(&keys, head_parts, batch_of(rows, false, counts)).mtp;
            let alone = mtp(&[&[&first], &[&second]]);
            for row in [[first.clone(), second.clone()].concat(), [second.clone(), first.clone()].concat()] {
                let joined = mtp(&[&[&row]]);
                assert!(is_near(joined, alone), "{keys} in {head_parts} parts: {joined}, not {alone}");
            }
        }
    }
}
