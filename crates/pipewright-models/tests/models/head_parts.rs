//! Models whose head is cut into parts, compared with one head: the loss of the first step, and every
//! gradient.

use std::collections::BTreeMap;

use burn::optim::SgdConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::batch::{Batch, TARGETS};
use pipewright::nn::TensorParallel;
use pipewright::pipeline::{NamedParameter, Pipeline, PipelineConfig};
use pipewright::tensor::TensorRank;
use pipewright::transport::World;
use pipewright_models::decoder::DecoderConfig;
use pipewright_models::{ConfigError, CutModel, InitialParameters, ModelConfig};
use pipewright_schedule::lower::{TrainingLowering, for_training};
use pipewright_schedule::partition::{Method, partition};
use pipewright_schedule::{ScheduleSpec, generate};
use serde_json::{Value, json};

const VOCABULARY: usize = 50;
const MICROBATCHES: u32 = 4;
const SEQUENCE: usize = 6;

fn model(family: &str, keys: &Value) -> ModelConfig {
    let mut sizes = DecoderConfig::new(VOCABULARY, 4);
    (sizes.hidden_size, sizes.intermediate_size, sizes.initializer_range) = (32, 48, 0.2);
    let keys = keys.as_object().expect("an object").clone();
    ModelConfig::of_sizes(family, sizes, keys).expect("it is a model")
}

fn launch(model: &CutModel, schedule: &str, ranks: u32) -> Pipeline {
    let spec = ScheduleSpec { ranks, microbatches: MICROBATCHES, ..ScheduleSpec::default() };
    let schedule = generate(schedule, &spec).expect("a schedule");
    let program = for_training(&schedule, &TrainingLowering::default()).expect("it is sound");
    let weights = model.describe(SEQUENCE).weights();
    let stages = partition(&weights, program.placement().stages(), &Method::Optimal).expect("it divides");
    let model = model.clone();
    let make = move |stage| {
        model.training_stage(stages.range(stage), &InitialParameters::Seed(3), Device::flex().autodiff())
    };
    let optimizer = Some(SgdConfig::new().init());
    let config = PipelineConfig { optimizer, clip_norm: None, ..PipelineConfig::default() };
    Pipeline::launch(program, World::local(ranks), &config, make).expect("it starts")
}

fn batch() -> Batch {
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

/// Returns the parameters by path. Shards are joined.
fn joined(parameters: Vec<NamedParameter>) -> BTreeMap<String, TensorData> {
    let mut shards: BTreeMap<String, Vec<NamedParameter>> = BTreeMap::new();
    for parameter in parameters {
        shards.entry(parameter.path.to_string()).or_default().push(parameter);
    }
    let join = |mut shards: Vec<NamedParameter>| {
        shards.sort_by_key(|shard| shard.shard.range(VOCABULARY).start);
        match shards.len() {
            1 => shards.remove(0).data,
            _ => {
                let tensors =
                    shards.into_iter().map(|shard| Tensor::<2>::from_data(shard.data, &Device::flex()));
                Tensor::cat(tensors.collect(), 1).into_data()
            }
        }
    };
    shards.into_iter().map(|(path, shards)| (path, join(shards))).collect()
}

/// Takes a step at the rate 1, so that the parameters change by their gradients. Returns the loss, the
/// parameters before the step, and their gradients.
fn step(pipeline: &mut Pipeline) -> (f64, BTreeMap<String, TensorData>, BTreeMap<String, Vec<f32>>) {
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
fn weight_gradients_of_parts_wait() {
    let model = CutModel::new(model("llama", &json!({})), 3).expect("it can be cut");
    let summary = launch(&model, "zb-h1", 2).step_batch(batch(), 0.0).expect("a step");
    let undeferred: Vec<&str> = summary.undeferred.iter().map(|found| &*found.path).collect();
    assert!(!undeferred.contains(&"lm_head.weight"), "{undeferred:?}");
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
    refused(
        "hybrid",
        &json!({}),
        2,
        "use one of the families llama, qwen2, qwen3, qwen3_moe, qwen2_moe, mistral, mixtral, smollm3, granite, phi3, olmo2, gemma2, gemma3_text, starcoder2, gpt2, gpt_oss, deepseek_v2, deepseek_v3, nemotron_h",
    );
    refused("llama", &json!({}), 0, "0 parts of a vocabulary of 50 tokens");
    refused("llama", &json!({}), 51, "51 parts of a vocabulary of 50 tokens leave a part without a token");
    assert!(CutModel::new(model("hybrid", &json!({})), 1).is_ok());
    let mut tied = DecoderConfig::new(VOCABULARY, 4);
    tied.tie_word_embeddings = true;
    let tied = ModelConfig::of_sizes("llama", tied, serde_json::Map::new()).expect("it is a model");
    let error = CutModel::new(tied, 2).expect_err("it is tied").to_string();
    assert!(error.contains("set `tie_word_embeddings` to false"), "{error}");
}

#[test]
fn parts_and_tensor_ranks_are_refused() {
    let model = CutModel::new(model("llama", &json!({})), 2).expect("it can be cut");
    let rank = TensorParallel::unconnected(TensorRank { index: 0, of: 2 });
    let error = model.outline(0..5, &rank).expect_err("both split the vocabulary");
    assert!(matches!(error, ConfigError::HeadPartsOfRanks { parts: 2, ranks: 2 }), "{error}");
    let alone = TensorParallel::default();
    assert!(matches!(model.outline(3..6, &alone), Err(ConfigError::LayerRange { layers: 5, .. })));
    let parts = model.outline(3..5, &alone).expect("the parts");
    let shapes: Vec<(&str, &[usize])> =
        parts.iter().map(|spec| (spec.path.as_str(), spec.shape.as_slice())).collect();
    assert_eq!(
        shapes,
        [("model.norm.weight", &[32][..]), ("lm_head.weight", &[32, 25]), ("lm_head.weight", &[32, 25])]
    );
}
