//! Models whose stages several ranks compute together: losses and gradient norms are within the tolerance of
//! PyTorch that one rank has.

use std::path::Path;

use burn::tensor::Device;
use pipewright::loss_scale::LossScaling;
use pipewright::nn::TensorParallel;
use pipewright::pipeline::PipelineConfig;
use pipewright::tensor::{Precision, TensorRank};
use pipewright_models::decoder::DecoderConfig;
use pipewright_models::generation::{Request, generate};
use pipewright_models::hybrid::HybridConfig;
use pipewright_models::llama::LlamaConfig;
use pipewright_models::{CutModel, ModelConfig, ModelFamily, Place, hf, parameter_specs};
use pipewright_schedule::Recompute;
use pipewright_schedule::generate::catalogue;

use crate::pipelined_run::{FIRST_STEPS, in_part, train, train_first, train_steps};
use crate::reference::Reference;

fn config(data_parallel: u32, tensor_parallel: u32) -> PipelineConfig {
    PipelineConfig { data_parallel, tensor_parallel, ..PipelineConfig::default() }
}

/// Trains a reference model for the first steps and compares the results with the results of PyTorch.
fn check(model: &str, schedule: &str, ranks: u32, microbatches: u32, config: &PipelineConfig) {
    let reference = Reference::load(model);
    let run = train_first(&reference, schedule, ranks, microbatches, config);
    reference.assert_close(&run, &reference.steps(microbatches)[..run.len()]);
}

/// Does the same for all steps.
fn check_to_the_end(model: &str, schedule: &str, ranks: u32, microbatches: u32, config: &PipelineConfig) {
    let reference = Reference::load(model);
    let run = train(&reference, schedule, ranks, microbatches, config);
    reference.assert_close(&run, &reference.steps(microbatches));
}

/// Like [`config`], but with whole experts on each rank.
fn whole_experts(data_parallel: u32, tensor_parallel: u32) -> PipelineConfig {
    PipelineConfig { whole_experts: true, ..config(data_parallel, tensor_parallel) }
}

/// The models with experts, eight in each mixture.
const MIXTURES: [&str; 2] = ["qwen3-moe-tiny", "nemotron-h-tiny"];

const MODELS: [&str; 6] =
    ["llama-tiny", "llama-tied-tiny", "qwen2-tiny", "qwen3-tiny", "qwen3-moe-tiny", "nemotron-h-tiny"];

#[test]
fn one_rank_of_a_pipeline_is_two_or_four_tensor_ranks() {
    check_to_the_end("llama-tiny", "gpipe", 1, 2, &config(1, 2));
    for tensor in [2, 4] {
        for model in MODELS {
            check(model, "gpipe", 1, 2, &config(1, tensor));
        }
    }
}

#[test]
#[ignore = "takes long; `.ci/run nightly` runs it"]
fn every_schedule_trains_with_tensor_ranks() {
    let reference = Reference::load("llama-tiny");
    let expected = &reference.steps(8)[..FIRST_STEPS];
    for generator in catalogue().iter().filter(|generator| generator.trains) {
        let run = train_steps(&reference, generator.name, 2, 8, &config(1, 2), FIRST_STEPS);
        reference.assert_close(&run, expected);
    }
    check_to_the_end("llama-tiny", "zbvzerobubble", 2, 8, &config(1, 2));
}

#[test]
fn replicas_of_pipelines_of_tensor_ranks() {
    for model in MODELS {
        check(model, "1f1b", 2, 8, &config(2, 2));
    }
}

#[test]
fn recomputed_stages_exchange_again() {
    for recompute in [Recompute::Block, in_part(), Recompute::Parts] {
        let config = PipelineConfig { recompute, ..config(1, 2) };
        check("qwen3-tiny", "zbvzerobubble", 2, 8, &config);
    }
    let config = PipelineConfig { recompute: Recompute::Block, ..whole_experts(1, 2) };
    check("qwen3-moe-tiny", "zbvzerobubble", 2, 8, &config);
}

#[test]
fn ranks_with_whole_experts_have_the_results_of_one_rank() {
    for model in MIXTURES {
        check_to_the_end(model, "gpipe", 1, 2, &whole_experts(1, 2));
        check(model, "gpipe", 1, 2, &whole_experts(1, 4));
        check(model, "1f1b", 2, 8, &whole_experts(2, 2));
        // Weight gradients wait.
        check(model, "zbvzerobubble", 2, 8, &whole_experts(1, 4));
    }
}

#[test]
#[ignore = "takes long; `.ci/run nightly` runs it"]
fn half_precision_on_tensor_ranks_is_near_single_precision() {
    // The tolerances of one rank: see pipelined.rs, families.rs and nemotron_h.rs.
    let tolerances = [("llama-tiny", 1.3e-3), ("qwen3-moe-tiny", 1.6e-4), ("nemotron-h-tiny", 3.5e-4)];
    for (model, tolerance) in tolerances {
        let reference = Reference::load(model);
        let single = train(&reference, "gpipe", 1, 8, &PipelineConfig::default());
        for precision in [Precision::Bf16, Precision::F16] {
            let loss_scaling = LossScaling { initial: 256.0, ..LossScaling::default() };
            let configs = [config(1, 2), whole_experts(1, 2)];
            // A model without experts is the same in both.
            let differing = if MIXTURES.contains(&model) { 2 } else { 1 };
            for config in configs.into_iter().take(differing) {
                let config = PipelineConfig { precision, loss_scaling, ..config };
                let found = train(&reference, "1f1b", 2, 8, &config);
                let errors = found
                    .iter()
                    .zip(&single)
                    .map(|(found, single)| (found.loss - single.loss).abs() / single.loss);
                let largest = errors.fold(0.0, f64::max);
                assert!((1e-7..3.0 * tolerance).contains(&largest), "{model}, {precision}: {largest:.1e}");
            }
        }
    }
}

#[test]
fn a_stage_with_shards_is_neither_saved_nor_generates() {
    let refused = |error: &str, expected: &str| assert!(error.starts_with(expected), "{error}");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let (model, device) = (LlamaConfig::from(DecoderConfig::new(64, 4)), Device::flex());
    let tensor = TensorParallel::unconnected(TensorRank { index: 1, of: 2 });
    let layers = model.layers();
    let place = Place { tensor, ..(&device).into() };
    let stage = model.init_stage(0..layers, 1, place).expect("a stage");
    let dir = folder.path().join("model");
    let error = hf::save(&dir, &model, &[&stage]).expect_err("it has shards").to_string();
    let shards =
        "the stage has one of 2 shards of tensor `model.embed_tokens.weight`: save a checkpoint and write";
    refused(&error, shards);
    let specs = parameter_specs(&stage);
    let mut writer = hf::Writer::create(&dir, &model, specs, u64::MAX).expect("an empty folder");
    refused(&writer.write_stage(&stage).expect_err("it has shards").to_string(), shards);
    drop(writer);
    assert!(!dir.exists());

    let split = "the model is split over 2 ranks, and one of them cannot predict a token: save a checkpoint";
    let request = Request { prompt: &[1, 2], tokens: 1, ..Request::default() };
    refused(&generate(&stage, &request, &mut |_| {}).expect_err("it has shards").to_string(), split);
    let whole = model.init_stage(0..layers, 1, &device).expect("a stage");
    assert_eq!(generate(&whole, &request, &mut |_| {}).map(|text| text.tokens.len()), Ok(1));
    hf::save(&dir, &model, &[&whole]).expect("whole parameters are saved");
}

#[test]
fn a_layer_that_cannot_be_split_is_named() {
    let refused = |sizes: DecoderConfig, ranks: u32, expected: &str| {
        let rank = TensorParallel::unconnected(TensorRank { index: 0, of: ranks });
        let model = LlamaConfig::from(sizes);
        let error = model.outline(0..model.layers(), &rank).expect_err("it cannot be split");
        assert_eq!(error.to_string(), expected);
    };
    let sizes = || DecoderConfig { num_key_value_heads: 2, ..DecoderConfig::new(64, 4) };
    refused(
        sizes(),
        3,
        "`model.layers.0.self_attn` cannot be split over 3 tensor ranks: \
         `model.layers.0.self_attn.q_proj.weight` is split by `num_attention_heads = 4`, which is not a multiple of the \
         number of ranks; use another `mesh.tensor_parallel`",
    );
    refused(
        DecoderConfig { num_attention_heads: 12, num_key_value_heads: 4, hidden_size: 96, ..sizes() },
        6,
        "`model.layers.0.self_attn` cannot be split over 6 tensor ranks: \
         `model.layers.0.self_attn.k_proj.weight` is split by `num_key_value_heads = 4`, which neither is a multiple of \
         the number of ranks nor divides it; use another `mesh.tensor_parallel`",
    );
    refused(
        DecoderConfig { vocab_size: 3, ..sizes() },
        4,
        "`model.embed_tokens` cannot be split over 4 tensor ranks: `model.embed_tokens.weight` is split by \
         `vocab_size = 3`, which leaves a rank without a part; use another `mesh.tensor_parallel`",
    );
    refused(
        DecoderConfig { intermediate_size: 1, ..sizes() },
        2,
        "`model.layers.0.mlp` cannot be split over 2 tensor ranks: `model.layers.0.mlp.gate_proj.weight` is split by \
         `intermediate_size = 1`, which leaves a rank without a part; use another `mesh.tensor_parallel`",
    );
}

#[test]
fn a_table_that_cannot_be_split_has_its_name_in_files() {
    let model = ModelConfig::of_sizes("gpt2", DecoderConfig::new(3, 4), serde_json::Map::new());
    let model = CutModel::from(model.expect("a model"));
    let rank = TensorParallel::unconnected(TensorRank { index: 0, of: 4 });
    let error = model.outline(0..1, &rank).expect_err("it cannot be split").to_string();
    assert!(error.starts_with("`transformer.wte` cannot be split over 4 tensor ranks"), "{error}");
}

/// Returns the paths and shapes of the parameters of `model` that a rank holds.
fn outlined(model: &ModelConfig, rank: &TensorParallel) -> Vec<(String, Vec<usize>)> {
    let outline = CutModel::from(model.clone()).outline(0..model.layers(), rank);
    let outline = outline.expect("the ranks can share it");
    outline.into_iter().map(|spec| (spec.path, spec.shape)).collect()
}

#[test]
fn each_expert_is_whole_on_one_rank() {
    let is_routed = |(path, _): &(String, Vec<usize>)| path.contains(".experts.");
    for model in [&MIXTURES[..], &["hybrid-full"]].concat() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(model);
        let model = ModelConfig::read(&folder).expect("it is of a known family");
        let whole = outlined(&model, &TensorParallel::default());
        let rank = |index| TensorParallel::unconnected(TensorRank { index, of: 4 });
        let by_rank = [0, 1, 2, 3].map(|index| outlined(&model, &rank(index).with_whole_experts(true)));
        let (mut found, mut expected): (Vec<_>, Vec<_>) = (
            by_rank.iter().flatten().filter(|found| is_routed(found)).collect(),
            whole.iter().filter(|found| is_routed(found)).collect(),
        );
        found.sort();
        expected.sort();
        assert_eq!(found, expected, "each expert is on one rank, in its whole shape");
        assert!(by_rank.iter().all(|rank| rank.iter().any(is_routed)));
        // All other parameters are the same as with shards of experts.
        let others = |found: &[(String, Vec<usize>)]| -> Vec<_> {
            found.iter().filter(|found| !is_routed(found)).cloned().collect()
        };
        assert_eq!(others(&by_rank[1]), others(&outlined(&model, &rank(1))));
    }
}

#[test]
fn fewer_whole_experts_than_ranks_are_refused() {
    let refused = |family: &str, keys: serde_json::Value, layer: &str, projection: &str, key: &str| {
        let keys = keys.as_object().expect("a table").clone();
        let model = ModelConfig::of_sizes(family, DecoderConfig::new(64, 4), keys).expect("a model");
        let model = CutModel::from(model);
        let rank = |of| TensorParallel::unconnected(TensorRank { index: 0, of }).with_whole_experts(true);
        let error = model.outline(1..2, &rank(4)).expect_err("a rank has no expert");
        assert_eq!(
            error.to_string(),
            format!(
                "`{layer}` cannot be divided among 4 tensor ranks that hold whole experts (`mesh.whole_experts`): \
                 `{layer}.experts.0.{projection}.weight` belongs to one of `{key} = 3`, so some rank would get nothing; use \
                 another `mesh.tensor_parallel`, or set `mesh.whole_experts` to false"
            )
        );
        assert!(model.outline(1..2, &rank(2)).is_ok(), "three experts on two ranks");
    };
    let keys = serde_json::json!({ "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8 });
    refused("qwen3_moe", keys, "model.layers.0.mlp", "gate_proj", "num_experts");
    let keys = serde_json::json!({
        "layers_block_type": ["moe"], "n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "moe_shared_expert_intermediate_size": 8,
    });
    refused("nemotron_h", keys, "backbone.layers.0.mixer", "up_proj", "n_routed_experts");
    let keys = serde_json::json!({
        "pattern": "E", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    });
    refused("hybrid", keys, "model.layers.0.mixer", "gate_proj", "num_experts");
}

#[test]
fn a_part_of_a_hybrid_that_cannot_be_split_is_named() {
    let refused = |changes: serde_json::Value, ranks: u32, expected: &str| {
        let mut json = serde_json::json!({
            "model_type": "hybrid", "vocab_size": 64, "hidden_size": 32, "pattern": "AE", "num_attention_heads": 8,
            "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
        });
        json.as_object_mut().expect("an object").extend(changes.as_object().expect("an object").clone());
        let model = HybridConfig::from_json(json).expect("a model");
        let rank = TensorParallel::unconnected(TensorRank { index: 0, of: ranks });
        let error = model.outline(0..4, &rank).expect_err("it cannot be split").to_string();
        assert!(error.starts_with(expected), "{error}");
    };
    refused(
        serde_json::json!({ "num_key_value_heads": 8 }),
        3,
        "`model.layers.0.mixer` cannot be split over 3 tensor ranks: `model.layers.0.mixer.q_proj.weight` is split by \
         `num_attention_heads = 8`",
    );
    refused(
        serde_json::json!({ "shared_expert_intermediate_size": 3 }),
        4,
        "`model.layers.1.mixer` cannot be split over 4 tensor ranks: \
         `model.layers.1.mixer.shared_expert.gate_proj.weight` is split by `shared_expert_intermediate_size = 3`",
    );
}
