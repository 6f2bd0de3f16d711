//! The metrics of models with experts: auxiliary losses by layer, and the load of each expert.

use burn::tensor::Device;
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::train::data::{DataConfig, Tokenizer};
use pipewright::train::{LearningRate, Metrics, Trainer};
use pipewright::transport::World;
use pipewright_models::decoder::DecoderConfig;
use pipewright_models::{CutModel, InitialParameters, ModelConfig};
use pipewright_schedule::lower::{TrainingLowering, for_training};
use pipewright_schedule::partition::{Method, partition};
use pipewright_schedule::{ScheduleSpec, generate};
use serde_json::{Value, json};

const EXPERTS: usize = 4;
const SEQUENCE: usize = 8;

/// Trains a small model of a family on a text for one step on this number of ranks.
fn step(family: &str, keys: &Value, ranks: u32) -> Metrics {
    let text = "the experts of a layer share the tokens of a row ".repeat(4);
    step_on(family, keys, ranks, ("text.txt", &text, SEQUENCE))
}

/// Like [`step`], on a file with this content, in rows of this number of tokens.
fn step_on(family: &str, keys: &Value, ranks: u32, (name, content, seq_len): (&str, &str, usize)) -> Metrics {
    let mut sizes = DecoderConfig::new(256, 4);
    (sizes.hidden_size, sizes.intermediate_size, sizes.initializer_range) = (32, 48, 0.2);
    let mut keys = keys.as_object().expect("an object").clone();
    let experts = json!({"num_experts_per_tok": 2, "moe_intermediate_size": 8});
    keys.extend(experts.as_object().expect("an object").clone());
    let model = CutModel::from(ModelConfig::of_sizes(family, sizes, keys).expect("it is a model"));

    let spec = ScheduleSpec { ranks, microbatches: 2, ..ScheduleSpec::default() };
    let schedule = generate("1f1b", &spec).expect("a schedule");
    let program = for_training(&schedule, &TrainingLowering::default()).expect("it is sound");
    let stages = partition(&model.describe(seq_len).weights(), ranks, &Method::Optimal).expect("it divides");
    let make = move |stage| {
        model.training_stage(stages.range(stage), &InitialParameters::Seed(3), Device::flex().autodiff())
    };
    let config = PipelineConfig { optimizer: Some(AdamW::default().init()), ..PipelineConfig::default() };
    let pipeline = Pipeline::launch(program, World::local(ranks), &config, make).expect("it starts");

    let folder = tempfile::tempdir().expect("a scratch folder");
    let text = folder.path().join(name);
    std::fs::write(&text, content).expect("a file");
    let rows = DataConfig {
        path: vec![text.display().to_string()],
        tokenizer: Tokenizer::Bytes,
        seq_len,
        shuffle: false,
        seed: 0,
        ..DataConfig::default()
    };
    let rows = rows.open(256, 2).expect("the data can be read");
    let rate = LearningRate::constant(0.0);
    let (metrics, _) = Trainer::new(pipeline, rows, 2, rate).step().expect("a step");
    metrics
}

/// Checks that each of `layers` reports the load of its experts and its part in the auxiliary losses `names`,
/// and that the loads do not depend on the cut.
fn check(family: &str, keys: &Value, layers: &[&str], names: &[&str]) {
    let (whole, cut) = (step(family, keys, 1), step(family, keys, 2));
    assert_eq!(whole.expert_load, cut.expert_load, "{family}");
    assert_eq!(cut.expert_load.keys().collect::<Vec<_>>(), layers, "{family}");
    for (layer, shares) in &cut.expert_load {
        assert_eq!(shares.len(), EXPERTS, "{family}: {layer}");
        assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-12, "{family}: {layer} {shares:?}");
    }
    assert_eq!(cut.auxiliary_by_layer.keys().collect::<Vec<_>>(), names, "{family}");
    for (name, parts) in &cut.auxiliary_by_layer {
        assert_eq!(parts.keys().collect::<Vec<_>>(), layers, "{family}: {name}");
        let (sum, loss) = (parts.values().sum::<f64>(), cut.auxiliary[name]);
        assert!(loss > 0.0 && (sum - loss).abs() < 1e-6 * loss, "{family}: {name} is {loss}, not {sum}");
    }
    assert_eq!(cut.auxiliary.keys().collect::<Vec<_>>(), names, "{family}");
}

#[test]
fn nemotron_h_reports_the_load_of_experts_and_no_auxiliary_loss() {
    let keys = json!({
        "layers_block_type": ["mamba", "moe", "attention", "moe"], "ssm_state_size": 16,
        "n_routed_experts": EXPERTS, "moe_shared_expert_intermediate_size": 8,
    });
    check("nemotron_h", &keys, &["backbone.layers.1.mixer", "backbone.layers.3.mixer"], &[]);
}

#[test]
fn hybrids_report_both_losses_of_each_layer_with_experts() {
    let keys = json!({"pattern": "AEDE", "num_experts": EXPERTS});
    check("hybrid", &keys, &["model.layers.1.mixer", "model.layers.3.mixer"], &["moe_aux", "moe_z"]);
}

#[test]
fn mixtures_report_their_balance_losses_if_these_count() {
    let keys = json!({"num_experts": EXPERTS, "output_router_logits": true});
    check("qwen3_moe", &keys, &["model.layers.0.mlp", "model.layers.1.mlp"], &["moe_aux"]);
    let keys = json!({"num_experts": EXPERTS});
    check("qwen3_moe", &keys, &["model.layers.0.mlp", "model.layers.1.mlp"], &[]);
}

/// Rows of more tokens have more filling, and every metric is the same.
fn check_filling(family: &str, keys: &Value) {
    let lines = r#"{"prompt": "the experts ", "completion": "of a layer"}
{"prompt": "a ", "completion": "row"}"#;
    let [short, long] = [24, 40].map(|seq_len| step_on(family, keys, 1, ("a.jsonl", lines, seq_len)));
    assert_eq!(short.expert_load, long.expert_load, "{family}");
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-6 * a.abs();
    assert!(near(short.loss, long.loss), "{family}: {} {}", short.loss, long.loss);
    for (name, loss) in &short.auxiliary {
        assert!(near(*loss, long.auxiliary[name]), "{family}: {name} {loss} {}", long.auxiliary[name]);
    }
}

#[test]
fn filling_counts_in_no_metric_of_experts() {
    check_filling("qwen3_moe", &json!({"num_experts": EXPERTS, "output_router_logits": true}));
    check_filling("hybrid", &json!({"pattern": "AEDE", "num_experts": EXPERTS}));
    let keys = json!({
        "layers_block_type": ["attention", "moe"], "n_routed_experts": EXPERTS,
        "moe_shared_expert_intermediate_size": 8,
    });
    check_filling("nemotron_h", &keys);
}
