//! Models whose head is cut into parts, compared with one head: the loss of the first step, and every
//! gradient.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use burn::optim::SgdConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::batch::{Batch, TARGETS};
use pipewright::checkpoint::{CheckpointFolder, CheckpointWriter, TrainingState};
use pipewright::nn::{IGNORED_TARGET, TensorParallel};
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{NamedParameter, Pipeline, PipelineConfig};
use pipewright::tensor::{Precision, TensorRank};
use pipewright::train::data::Cursor;
use pipewright::transport::World;
use pipewright_models::decoder::DecoderConfig;
use pipewright_models::{CutModel, InitialParameters, ModelConfig};
use pipewright_schedule::analytic::{PeakRates, Workload, estimate};
use pipewright_schedule::lower::{TrainingLowering, for_training};
use pipewright_schedule::partition::{Method, partition};
use pipewright_schedule::plan::{PlanRequest, plan};
use pipewright_schedule::profile::LinkProfile;
use pipewright_schedule::{ScheduleSpec, generate};
use serde_json::{Value, json};

const VOCABULARY: usize = 50;
const MICROBATCHES: u32 = 4;
pub(crate) const SEQUENCE: usize = 6;

pub(crate) fn model(family: &str, keys: &Value) -> ModelConfig {
    let mut sizes = DecoderConfig::new(VOCABULARY, 4);
    (sizes.hidden_size, sizes.intermediate_size, sizes.initializer_range) = (32, 48, 0.2);
    let keys = keys.as_object().expect("an object").clone();
    ModelConfig::of_sizes(family, sizes, keys).expect("it is a model")
}

fn launch(model: &CutModel, schedule: &str, ranks: u32) -> Pipeline {
    let config = PipelineConfig { optimizer: Some(SgdConfig::new().init()), ..PipelineConfig::default() };
    launch_with(model, schedule, ranks, config)
}

pub(crate) fn launch_with(model: &CutModel, schedule: &str, ranks: u32, config: PipelineConfig) -> Pipeline {
    let spec = ScheduleSpec { ranks, microbatches: MICROBATCHES, ..ScheduleSpec::default() };
    let schedule = generate(schedule, &spec).expect("a schedule");
    let program = for_training(&schedule, &TrainingLowering::default()).expect("it is sound");
    let weights = model.describe(SEQUENCE).weights();
    let stages = partition(&weights, program.placement().stages(), &Method::Optimal).expect("it divides");
    let model = model.clone();
    let make = move |stage| {
        model.training_stage(stages.range(stage), &InitialParameters::Seed(3), Device::flex().autodiff())
    };
    let config = PipelineConfig { clip_norm: None, ..config };
    Pipeline::launch(program, World::local(ranks), &config, make).expect("it starts")
}

pub(crate) fn batch() -> Batch {
    let rows = MICROBATCHES as usize;
    let ids = |shift: i32| {
        let ids =
            (0..(rows * SEQUENCE) as i32).map(|index| (index * index * 7 + shift * 13) % VOCABULARY as i32);
        Tensor::<2, Int>::from_data(
            TensorData::new(ids.collect::<Vec<_>>(), [rows, SEQUENCE]),
            &Device::flex(),
        )
    };
    Batch::split(ids(0), ids(1), MICROBATCHES).expect("it divides").with_targets_for_all()
}

/// Returns the parameters by path. Shards are joined, and copies must be equal.
pub(crate) fn joined(parameters: Vec<NamedParameter>) -> BTreeMap<String, TensorData> {
    let mut shards: BTreeMap<String, Vec<NamedParameter>> = BTreeMap::new();
    for parameter in parameters {
        shards.entry(parameter.path.to_string()).or_default().push(parameter);
    }
    let join = |mut shards: Vec<NamedParameter>| {
        shards.sort_by_key(|shard| shard.shard.range(VOCABULARY).start);
        shards.dedup_by(|copy, first| {
            let is_copy = copy.shard.range(VOCABULARY) == first.shard.range(VOCABULARY);
            assert!(!is_copy || copy.data == first.data, "{}: copies differ", copy.path);
            is_copy
        });
        match shards.len() {
            1 => shards.remove(0).data,
            _ => {
                // A matrix is cut along its columns, a table along its rows.
                let dimension = shards[0].shard.dimension;
                let tensors =
                    shards.into_iter().map(|shard| Tensor::<2>::from_data(shard.data, &Device::flex()));
                Tensor::cat(tensors.collect(), dimension).into_data()
            }
        }
    };
    shards.into_iter().map(|(path, shards)| (path, join(shards))).collect()
}

/// Takes a step at the rate 1, so that the parameters change by their gradients. Returns the loss, the
/// parameters before the step, and their gradients.
pub(crate) fn step(
    pipeline: &mut Pipeline,
) -> (f64, BTreeMap<String, TensorData>, BTreeMap<String, Vec<f32>>) {
    let before = joined(pipeline.parameters().expect("the parameters"));
    let evaluated = pipeline.eval_losses(batch()).expect("an evaluation");
    let trained = pipeline.step_batch(batch(), 1.0).expect("a step");
    assert_eq!(evaluated.losses, trained.losses, "an evaluation computes the same losses");
    let after = joined(pipeline.parameters().expect("the parameters"));
    let gradient = |(path, before): (&String, &TensorData)| {
        let pairs = before.iter::<f32>().zip(after[path].iter::<f32>());
        (path.clone(), pairs.map(|(before, after)| before - after).collect())
    };
    (trained.loss(), before.clone(), before.iter().map(gradient).collect())
}

fn check(family: &str, keys: &Value) {
    let model = model(family, keys);
    let cut = |parts| CutModel::new(model.clone(), parts).expect("it can be cut");
    let (expected_loss, initial, expected) = step(&mut launch(&cut(1), "gpipe", 1));
    for (parts, schedule, ranks) in [
        (1, "1f1b", 2),
        (2, "1f1b", 2),
        (3, "1f1b", 3),
        (3, "interleaved1f1b", 2),
        (3, "zb-h1", 2),
        (10, "1f1b", 4),
    ] {
        let (loss, before, gradients) = step(&mut launch(&cut(parts), schedule, ranks));
        let what = format!("{family} in {parts} parts, {schedule}");
        assert_eq!(before, initial, "{what}: the same initial parameters");
        assert!((loss - expected_loss).abs() <= 1e-6 * expected_loss, "{what}: {loss} {expected_loss}");
        for (path, expected) in &expected {
            let largest = expected.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            assert!(largest > 0.0, "{what}: {path} has a gradient");
            for (found, expected) in gradients[path].iter().zip(expected) {
                assert!(
                    (found - expected).abs() <= 2e-5 * largest + 1e-7,
                    "{what}: {path}: {found} {expected}"
                );
            }
        }
    }
}

#[test]
fn decoders_have_the_gradients_of_one_head() {
    check("llama", &json!({}));
    check("qwen2", &json!({}));
    check("qwen3_moe", &json!({"num_experts": 4, "moe_intermediate_size": 24}));
}

#[test]
fn a_hybrid_of_mamba_and_attention_has_the_gradients_of_one_head() {
    check("nemotron_h", &json!({"hybrid_override_pattern": "M*-M", "ssm_state_size": 16}));
}

#[test]
fn tied_heads_have_the_gradients_of_one_head() {
    check("llama", &json!({"tie_word_embeddings": true}));
    let pattern =
        json!({"hybrid_override_pattern": "M*-M", "ssm_state_size": 16, "tie_word_embeddings": true});
    check("nemotron_h", &pattern);
}

#[test]
fn a_hybrid_with_further_predictions_has_the_gradients_of_one_head() {
    let keys = json!({"pattern": "ADAD", "mod_layers": [2], "mtp_loss_weight": 0.3, "mtp_depth": 2});
    check("hybrid", &keys);
    let mut tied = keys;
    tied["tie_word_embeddings"] = true.into();
    check("hybrid", &tied);
}

/// Returns the norm of all gradients of a step with a row of 30 tokens in each microbatch, and the gradient of
/// the head's matrix. Some targets do not count.
fn gradients(model: &ModelConfig, parts: u32, precision: Precision) -> (f64, Vec<f32>) {
    const TOKENS: usize = 30;
    let rows = MICROBATCHES as usize;
    let ids = |factor: usize| {
        let ids = (0..rows * TOKENS).map(|index| ((index * index * factor + index) % VOCABULARY) as i64);
        Tensor::<2, Int>::from_data(TensorData::new(ids.collect::<Vec<_>>(), [rows, TOKENS]), &Device::flex())
    };
    let targets = ids(7);
    let targets = targets.clone().mask_fill(targets.equal_elem(8), IGNORED_TARGET);
    let batch = Batch::split(ids(3), targets, MICROBATCHES).expect("it divides");
    let batch = batch.ignoring(IGNORED_TARGET).expect("some count").with_targets_for_all();
    let optimizer = Some(SgdConfig::new().init());
    let config = PipelineConfig { optimizer, precision, ..PipelineConfig::default() };
    let model = CutModel::new(model.clone(), parts).expect("it can be cut");
    let mut pipeline = launch_with(&model, "1f1b", parts.min(2), config);
    let mut matrix = || {
        let parameters = joined(pipeline.parameters().expect("the parameters"));
        (parameters["lm_head.weight"].clone(), pipeline.step_batch(batch.clone(), 1.0).expect("a step"))
    };
    let ((before, summary), (after, _)) = (matrix(), matrix());
    let gradient = before.iter::<f32>().zip(after.iter::<f32>()).map(|(before, after)| before - after);
    (summary.gradient_norm, gradient.collect())
}

/// Half precision rounds no factor of the gradients of a row or a part, so the gradient of the matrix is the
/// same as with one head. The gradients behind it are sums of as many rounded ones as there are parts.
#[test]
fn parts_in_half_precision_have_the_gradients_of_one_head() {
    let norm = |numbers: &[f32]| numbers.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
    let predictions = json!({"pattern": "AD", "mtp_loss_weight": 0.3, "mtp_depth": 2, "bos_token_id": 1});
    for (family, keys) in [("llama", json!({})), ("hybrid", predictions)] {
        let model = model(family, &keys);
        let (single, _) = gradients(&model, 1, Precision::F32);
        for precision in [Precision::Bf16, Precision::F16] {
            let (_, whole) = gradients(&model, 1, precision);
            for parts in [2, 3, 7] {
                let (found, matrix) = gradients(&model, parts, precision);
                let difference: Vec<f32> = matrix.iter().zip(&whole).map(|(a, b)| a - b).collect();
                let error = norm(&difference) / norm(&whole);
                let what = format!("{family} in {parts} parts, {precision}");
                assert!(error <= 1e-5, "{what}: {error:.1e}");
                assert!((found / single - 1.0).abs() <= 2e-3, "{what}: {found} {single}");
            }
        }
    }
}

/// Saves the state of a pipeline, and restores it to another one.
fn hand_over(from: &mut Pipeline, to: &mut Pipeline) {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let ranks = from.state().expect("a state");
    let (folder, parts) = (CheckpointFolder::own(scratch.path()).expect("a folder"), ranks.len() as u32);
    let mut writer = CheckpointWriter::start(folder, 1, parts, Duration::from_secs(60)).expect("a writer");
    let cursor = Cursor { epoch: 0, index: 1 };
    let state = TrainingState { step: 1, cursor, description: Default::default(), ranks };
    writer.save(state).expect("it is saved");
    writer.wait().expect("it is written");
    let checkpoint = CheckpointFolder::newest(scratch.path()).expect("a checkpoint");
    to.restore(&Arc::new(checkpoint)).expect("it is restored");
}

/// Trains `first` for a step, and hands its state from one pipeline to the next. All have its parameters to the
/// bit. The last one also has the numbers of the optimizer, which the next step shows.
pub(crate) fn check_handed_over(mut first: Pipeline, mut cuts: [Pipeline; 3]) {
    first.step_batch(batch(), 0.1).expect("a step");
    let parameters = |pipeline: &mut Pipeline| joined(pipeline.parameters().expect("the parameters"));
    let expected = parameters(&mut first);
    hand_over(&mut first, &mut cuts[0]);
    for index in 1..cuts.len() {
        let [from, to] = &mut cuts[index - 1..=index] else { panic!("there are two") };
        hand_over(from, to);
        assert_eq!(parameters(to), expected);
    }
    let last = |pipeline: &mut Pipeline| {
        let loss = pipeline.step_batch(batch(), 0.1).expect("a step").loss();
        (loss, parameters(pipeline))
    };
    assert_eq!(last(&mut cuts[2]), last(&mut first));
}

/// A state that goes to another number of parts and back is the state: the parameters, and the optimizer's
/// numbers, which the next step shows.
#[test]
fn checkpoints_have_the_same_bits_under_any_number_of_parts() {
    let pattern = json!({"pattern": "ADM", "mtp_loss_weight": 0.3, "mtp_depth": 2, "mamba_num_heads": 4,
        "mamba_head_dim": 16, "ssm_state_size": 16});
    for is_tied in [false, true] {
        let mut keys = pattern.clone();
        keys["tie_word_embeddings"] = is_tied.into();
        let model = model("hybrid", &keys);
        let start = |parts, schedule, ranks| {
            let adam = AdamW { betas: (0.9, 0.95), epsilon: 1e-8, weight_decay: 0.1 };
            let config = PipelineConfig { optimizer: Some(adam.init()), ..PipelineConfig::default() };
            let model = CutModel::new(model.clone(), parts).expect("it can be cut");
            launch_with(&model, schedule, ranks, config)
        };
        let cuts = [start(5, "zb-h1", 4), start(1, "gpipe", 1), start(3, "1f1b", 3)];
        check_handed_over(start(3, "1f1b", 2), cuts);
    }
}

#[test]
fn weight_gradients_of_parts_wait() {
    for (is_tied, path) in [(false, "lm_head.weight"), (true, "model.embed_tokens.weight")] {
        let model = model("llama", &json!({"tie_word_embeddings": is_tied}));
        let model = CutModel::new(model, 3).expect("it can be cut");
        let summary = launch(&model, "zb-h1", 2).step_batch(batch(), 0.0).expect("a step");
        let undeferred: Vec<&str> = summary.undeferred.iter().map(|found| &*found.path).collect();
        assert!(!undeferred.contains(&path), "{undeferred:?}");
    }
}

#[test]
fn a_step_without_targets_for_all_says_what_to_do() {
    let model = CutModel::new(model("llama", &json!({})), 2).expect("it can be cut");
    let ids = || Tensor::<2, Int>::zeros([MICROBATCHES as usize, SEQUENCE], &Device::flex());
    let batch = Batch::split(ids(), ids(), MICROBATCHES).expect("it divides");
    let error =
        launch(&model, "1f1b", 2).step_batch(batch, 0.0).expect_err("a part has no targets").to_string();
    assert!(error.contains(TARGETS) && error.contains("`Batch::with_targets_for_all`"), "{error}");
}

#[test]
fn heads_that_cannot_be_cut_are_refused() {
    let refused = |family: &str, keys: &Value, parts: u32, expected: &str| {
        let error = CutModel::new(model(family, keys), parts).expect_err("it cannot be cut").to_string();
        assert!(error.contains(expected), "{error}");
    };
    refused("llama", &json!({}), 0, "0 parts of a vocabulary of 50 tokens");
    refused("llama", &json!({}), 51, "51 parts of a vocabulary of 50 tokens leave a part without a token");
    refused("hybrid", &json!({"mtp_loss_weight": 0.3}), 51, "51 parts of a vocabulary of 50 tokens");
}

/// Plans for a hybrid with a further prediction and a large vocabulary, by the costs of its layers.
#[test]
fn plans_of_a_hybrid_keep_all_ranks_busy() {
    let keys = json!({"pattern": "ADADADAD", "mtp_loss_weight": 0.3, "vocab_size": 3200});
    let layers = model("hybrid", &keys).describe(SEQUENCE);
    let workload = Workload { model: &layers, tokens: SEQUENCE as u32, rows: 1 };
    let rates = PeakRates { flops_per_s: 1e11, bytes_per_s: 1e10 };
    let profile = estimate(&workload, rates, LinkProfile::new(0.0, 1e12));
    let bubble = |ranks, head_parts| {
        let request = PlanRequest {
            ranks,
            microbatches: 32,
            data_parallel: Some(1),
            larger_microbatches: false,
            head_parts,
            effort: PlanRequest::EFFORT / 8,
            ..PlanRequest::default()
        };
        plan(&profile, &request, &mut || true).expect("a plan").plans[0].bubble_fraction
    };
    for ranks in [2, 4] {
        let (whole, parts) = (bubble(ranks, vec![1]), bubble(ranks, vec![1, ranks, 2 * ranks]));
        assert!(parts <= 0.05 && whole >= 0.25, "{ranks} ranks: {whole} with one head, {parts} with parts");
    }
}

/// Each part shares the rows of one shard of the table.
#[test]
fn the_table_of_a_tied_head_has_as_many_shards() {
    let model = model("llama", &json!({"tie_word_embeddings": true}));
    let shapes = |parts, layers| {
        let model = CutModel::new(model.clone(), parts).expect("it can be cut");
        let specs = model.outline(layers, &TensorParallel::default()).expect("the layers exist");
        let table = specs.into_iter().filter(|spec| spec.path == "model.embed_tokens.weight");
        table.map(|spec| spec.shape).collect::<Vec<_>>()
    };
    let rows = [[17, 32], [17, 32], [16, 32]];
    assert_eq!(shapes(3, 0..1), rows);
    assert_eq!(shapes(3, 4..5), rows[1..2]);
    assert_eq!(shapes(1, 0..1), [[50, 32]]);
}

#[test]
fn parts_and_tensor_ranks_are_refused() {
    let model = CutModel::new(model("llama", &json!({})), 2).expect("it can be cut");
    let rank = TensorParallel::unconnected(TensorRank { index: 0, of: 2 });
    let error = model.outline(0..5, &rank).expect_err("both split the vocabulary");
    assert!(error.to_string().starts_with("the head is cut into 2 parts, and 2 tensor ranks"), "{error}");
    let alone = TensorParallel::default();
    let error = model.outline(3..6, &alone).expect_err("no such layer").to_string();
    assert_eq!(error, "layers 3..6 are not a stage of a model of 5 layers");
    let parts = model.outline(3..5, &alone).expect("the parts");
    let shapes: Vec<(&str, &[usize])> =
        parts.iter().map(|spec| (spec.path.as_str(), spec.shape.as_slice())).collect();
    assert_eq!(
        shapes,
        [("model.norm.weight", &[32][..]), ("lm_head.weight", &[32, 25]), ("lm_head.weight", &[32, 25])]
    );
}
