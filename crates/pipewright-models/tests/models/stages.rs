//! Cutting a model: parameters and results do not depend on the cut.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::nn::TensorParallel;
use pipewright::stage::StageModule;
use pipewright::tensor::{pack, unpack};
use pipewright_models::decoder::{DecoderConfig, MixtureConfig};
use pipewright_models::hybrid::HybridConfig;
use pipewright_models::llama::LlamaConfig;
use pipewright_models::qwen2::Qwen2Config;
use pipewright_models::qwen3::Qwen3Config;
use pipewright_models::qwen3_moe::Qwen3MoeConfig;
use pipewright_models::{
    FirstCopies, ModelConfig, ModelFamily, ModelStage, ROUTER_CORRECTION, StageTensors, parameter_specs,
};
use pipewright_shapes::model::Model;
use proptest::prelude::*;

/// Five layers.
fn sizes() -> DecoderConfig {
    DecoderConfig {
        hidden_size: 24,
        intermediate_size: 20,
        num_hidden_layers: 3,
        num_key_value_heads: 2,
        head_dim: Some(6),
        ..DecoderConfig::new(31, 4)
    }
}

fn tied() -> DecoderConfig {
    DecoderConfig { tie_word_embeddings: true, ..sizes() }
}

fn llama() -> LlamaConfig {
    sizes().into()
}

/// Layers 0 and 2 are dense, layer 1 has experts.
fn moe() -> Qwen3MoeConfig {
    let mixture = MixtureConfig { num_experts: 5, decoder_sparse_step: 2, ..MixtureConfig::of_width(20) };
    Qwen3MoeConfig { mixture, ..sizes().into() }
}

/// Checks that the outline of a stage has the parameters of the stage.
fn check_outline<F: ModelFamily>(config: &F) {
    let stage = config.init_stage(0..5, 7, Device::flex()).expect("the range is valid");
    let mut outline = config.outline(0..5, &TensorParallel::default()).expect("the range is valid");
    // The table of a tied head is asked for a second time, and is not among the parameters of a model
    // directory.
    outline.sort_by(|a, b| a.path.cmp(&b.path));
    outline.dedup();
    let mut held = parameter_specs(&stage);
    held.sort_by(|a, b| a.path.cmp(&b.path));
    assert_eq!(outline, held);
    let numbers: usize = held.iter().map(|spec| spec.shape.iter().product::<usize>()).sum();
    let described: u64 = config.describe(8).layers.iter().map(|layer| layer.parameters).sum();
    assert_eq!(numbers as u64, described);
}

#[test]
fn an_outline_is_what_a_stage_holds() {
    check_outline(&llama());
    check_outline(&LlamaConfig::from(tied()));
    check_outline(&Qwen2Config::from(sizes()));
    check_outline(&LlamaConfig { mlp_bias: true, ..llama() });
    check_outline(&Qwen3Config::from(tied()));
    check_outline(&moe());
    let large = DecoderConfig { hidden_size: 1 << 20, vocab_size: 1 << 28, ..sizes() };
    let outline =
        LlamaConfig::from(large).outline(0..1, &TensorParallel::default()).expect("nothing is allocated");
    assert_eq!(outline[0].shape, [1 << 28, 1 << 20]);
}

/// Makes all stages of the model, cut before each of `cuts`.
fn cut<F: ModelFamily>(config: &F, cuts: &[usize]) -> Vec<ModelStage> {
    let bounds = [&[0], cuts, &[5]].concat();
    let stage = |pair: &[usize]| config.init_stage(pair[0]..pair[1], 7, Device::flex());
    bounds.windows(2).map(|pair| stage(pair).expect("the range is valid")).collect()
}

fn parameters(stages: &[ModelStage]) -> BTreeMap<String, TensorData> {
    let record = |stage: &ModelStage| stage.clone().into_record();
    let values = |stage: &ModelStage| -> Vec<(String, TensorData)> {
        let mut collector = Collector::default();
        stage.visit(&mut collector);
        assert_eq!(collector.values.len(), record(stage).len(), "a record has the same parameters");
        collector.values.into_iter().map(|(local, data)| (stage.parameter_path(&local), data)).collect()
    };
    stages.iter().flat_map(values).collect()
}

#[derive(Default)]
struct Collector {
    names: Vec<String>,
    values: Vec<(String, TensorData)>,
}

impl burn::module::ModuleVisitor for Collector {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.names.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.names.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<Tensor<D>>) {
        self.values.push((self.names.join("."), param.val().to_data()));
    }
}

fn tokens() -> Tensor<2, Int> {
    let ids: Vec<i64> = (0..2 * 9).map(|i| i * 7 % 31).collect();
    Tensor::from_data(TensorData::new(ids, [2, 9]), &Device::flex())
}

fn run(stages: &[ModelStage]) -> TensorData {
    let mut values = pack(StageTensors::from(tokens()));
    for stage in stages {
        values = pack(stage.run(unpack::<StageTensors>(values).expect("the boundary fits")));
    }
    unpack::<Tensor<3>>(values).expect("logits").into_data()
}

fn check_cut<F: ModelFamily>(config: &F, cuts: &[usize]) {
    let (whole, stages) = (cut(config, &[]), cut(config, cuts));
    assert_eq!(parameters(&stages), parameters(&whole));
    assert_eq!(run(&stages), run(&whole));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn any_cut_has_the_same_parameters_and_results(indices in prop::collection::btree_set(1usize..5, 0..4)) {
        let cuts: Vec<usize> = indices.into_iter().collect();
        check_cut(&llama(), &cuts);
        check_cut(&LlamaConfig { attention_bias: true, ..tied().into() }, &cuts);
        check_cut(&Qwen2Config::from(sizes()), &cuts);
        check_cut(&Qwen3Config { attention_bias: true, ..tied().into() }, &cuts);
        check_cut(&moe(), &cuts);
    }
}

fn paths(stage: &ModelStage) -> Vec<String> {
    parameter_specs(stage).into_iter().map(|spec| spec.path).collect()
}

#[test]
fn paths_are_those_of_the_checkpoint() {
    let stages = cut(&llama(), &[1, 3, 4]);
    assert_eq!(paths(&stages[0]), ["model.embed_tokens.weight"]);
    assert_eq!(
        paths(&stages[2]),
        [
            "model.layers.2.input_layernorm.weight",
            "model.layers.2.self_attn.q_proj.weight",
            "model.layers.2.self_attn.k_proj.weight",
            "model.layers.2.self_attn.v_proj.weight",
            "model.layers.2.self_attn.o_proj.weight",
            "model.layers.2.post_attention_layernorm.weight",
            "model.layers.2.mlp.gate_proj.weight",
            "model.layers.2.mlp.up_proj.weight",
            "model.layers.2.mlp.down_proj.weight",
        ]
    );
    assert_eq!(paths(&stages[3]), ["model.norm.weight", "lm_head.weight"]);
}

#[test]
fn paths_of_experts_are_those_of_the_checkpoint() {
    let stages = cut(&moe(), &[1, 2, 3, 4]);
    let dense: Vec<_> = paths(&stages[1]).into_iter().filter(|path| path.contains(".mlp.")).collect();
    let path_of = |layer: usize, name: &str| format!("model.layers.{layer}.mlp.{name}_proj.weight");
    assert_eq!(dense, [path_of(0, "gate"), path_of(0, "up"), path_of(0, "down")]);
    let sparse: Vec<_> = paths(&stages[2]).into_iter().filter(|path| path.contains(".mlp.")).collect();
    let experts = (0..5).flat_map(|expert| {
        ["gate", "up", "down"].map(|name| format!("model.layers.1.mlp.experts.{expert}.{name}_proj.weight"))
    });
    let expected: Vec<_> = ["model.layers.1.mlp.gate.weight".to_owned()].into_iter().chain(experts).collect();
    assert_eq!(sparse, expected);
    let norms: Vec<_> = paths(&stages[2]).into_iter().filter(|path| path.contains("_norm")).collect();
    assert_eq!(norms, ["model.layers.1.self_attn.q_norm.weight", "model.layers.1.self_attn.k_norm.weight"]);
}

fn check_biases<F: ModelFamily>(config: &F, expected: &[&str]) {
    let block = &cut(config, &[1, 2])[1];
    let biases: Vec<_> = parameters(std::slice::from_ref(block))
        .into_iter()
        .filter_map(|(path, values)| Some((path.strip_suffix("_proj.bias")?.to_owned(), values)))
        .collect();
    let expected: Vec<_> = expected.iter().map(|name| format!("model.layers.0.self_attn.{name}")).collect();
    assert_eq!(biases.iter().map(|(path, _)| path.clone()).collect::<Vec<_>>(), expected);
    for (path, values) in biases {
        assert!(values.iter::<f32>().all(|bias| bias == 0.0), "{path}");
    }
}

#[test]
fn biases_start_as_zeros_and_are_where_the_family_has_them() {
    check_biases(&llama(), &[]);
    check_biases(&LlamaConfig { attention_bias: true, ..llama() }, &["k", "o", "q", "v"]);
    check_biases(&Qwen2Config::from(sizes()), &["k", "q", "v"]);
    check_biases(&Qwen3Config { attention_bias: true, ..sizes().into() }, &["k", "o", "q", "v"]);
}

#[test]
fn a_tied_head_is_a_copy_of_the_table_under_its_path() {
    let stages = cut(&LlamaConfig::from(tied()), &[4]);
    let (first, last) = (parameters(&stages[..1]), parameters(&stages[1..]));
    let table = "layers.0.Embedding.tokens.shards.0.Parameter.weight";
    let copy = "layers.0.Head.matrix.Tied.weight";
    let path = "model.embed_tokens.weight";
    assert_eq!(last[path], first[path]);
    assert_eq!([stages[0].parameter_path(table), stages[1].parameter_path(copy)], [path, path]);
    assert_eq!(paths(&stages[1]), ["model.norm.weight"], "a file has the table from the first stage");
}

fn check_description(config: &dyn ModelFamily) {
    let description = config.describe(16);
    assert_eq!(description.layers.len(), config.layers());
    let mut copies = FirstCopies::default();
    for (index, layer) in description.layers.iter().enumerate() {
        let specs = config.outline(index..index + 1, &TensorParallel::default()).expect("a layer");
        // Corrections of routers are not trained, and do not count, as in transformers.
        let counted = copies.of(&specs).into_iter().filter(|spec| !spec.path.ends_with(ROUTER_CORRECTION));
        let count: usize = counted.map(|spec| spec.shape.iter().product::<usize>()).sum();
        assert_eq!(count as u64, layer.parameters, "{} of {}", layer.path, config.family().name());
    }
}

#[test]
fn description_counts_what_the_stages_bring_to_the_model() {
    check_description(&llama());
    check_description(&LlamaConfig { attention_bias: true, ..llama() });
    check_description(&LlamaConfig::from(tied()));
    check_description(&Qwen2Config::from(sizes()));
    check_description(&LlamaConfig { attention_bias: true, mlp_bias: true, ..llama() });
    check_description(&Qwen3Config { attention_bias: true, ..sizes().into() });
    check_description(&moe());
    check_description(&HybridConfig { mod_layers: vec![1], ..HybridConfig::of_sizes(sizes()) });
}

/// Checks a golden model of each family, and that its file has the same shape as its configuration.
#[test]
fn every_family_has_the_parameters_that_its_shape_counts() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let mut families = BTreeSet::new();
    for folder in fs::read_dir(data).expect("the golden models") {
        let folder = folder.expect("an entry").path();
        let Ok(text) = fs::read_to_string(folder.join("config.json")) else { continue };
        let config = ModelConfig::read(&folder).expect("a model");
        check_description(&*config);
        // Training leaves out the predictors of some files.
        let of_file = Model { predictors: 0, ..pipewright_shapes::read(&text).expect("a shape").model };
        let shape = Model { predictors: 0, ..config.shape().expect("a shape") };
        assert_eq!(of_file.layers(), shape.layers(), "{}", folder.display());
        families.insert(config.family().name());
    }
    assert_eq!(families.len(), ModelConfig::MODEL_TYPES.len(), "{families:?}");
}

#[test]
fn the_weight_of_a_mixture_follows_the_experts_that_a_token_meets() {
    let layer = |experts, chosen| {
        let mixture = MixtureConfig {
            num_experts: experts,
            num_experts_per_tok: chosen,
            moe_intermediate_size: 1024,
            ..MixtureConfig::of_width(1024)
        };
        let sizes = DecoderConfig { hidden_size: 512, intermediate_size: 1024, ..DecoderConfig::new(256, 8) };
        let config = Qwen3MoeConfig { mixture, ..sizes.clone().into() };
        let dense = Qwen3Config::from(sizes).describe(4096).layers.remove(1);
        let sparse = config.describe(4096).layers.remove(1);
        assert_eq!((dense.kind.as_str(), sparse.kind.as_str()), ("decoder", "mixture"));
        let ratio = |number: fn(&pipewright_schedule::LayerDesc) -> u64| {
            number(&sparse) as f64 / number(&dense) as f64
        };
        (ratio(|layer| layer.weight), ratio(|layer| layer.activation_bytes))
    };
    let (weight, activations) = layer(8, 1);
    assert!((1.0..1.1).contains(&weight), "one expert is as wide as the dense layer: {weight}");
    assert!((1.0..1.1).contains(&activations), "{activations}");
    let (more_experts, _) = layer(64, 1);
    assert!(more_experts < 1.2 * weight, "{more_experts} {weight}");
    let (more_choices, more_activations) = layer(8, 4);
    assert!(more_choices > 1.5 * weight, "{more_choices} {weight}");
    assert!(more_activations > 1.5 * activations, "{more_activations}");
}

#[test]
fn seeds_give_different_parameters() {
    let head = |seed| llama().init_stage(4..5, seed, Device::flex()).expect("the range is valid");
    assert_ne!(parameters(&[head(1)]), parameters(&[head(2)]));
}

#[test]
fn ranges_outside_the_model_are_refused() {
    let refused =
        |range| llama().init_stage(range, 0, Device::flex()).map(|_| ()).map_err(|error| error.to_string());
    assert_eq!(refused(2..2), Err("layers 2..2 are not a stage of a model of 5 layers".to_owned()));
    assert_eq!(refused(4..6), Err("layers 4..6 are not a stage of a model of 5 layers".to_owned()));
}

#[test]
fn a_token_sees_no_later_token() {
    let stages = cut(&llama(), &[]);
    let logits = |ids: Vec<i64>| {
        let tokens = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, 300]), &Device::flex());
        stages[0].run(tokens).narrow(1, 0, 200).into_data()
    };
    let ids: Vec<i64> = (0..300).map(|i| i * i % 31).collect();
    let mut changed = ids.clone();
    changed[200..].fill(3);
    assert_eq!(logits(ids.clone()), logits(changed));
    let mut changed = ids.clone();
    changed[0] += 1;
    assert_ne!(logits(ids), logits(changed));
}

/// Checks the operations of matrix products of a row, forward and backward.
fn check_products<F: ModelFamily>(config: &F, expected: u64) {
    let layers = config.describe(TOKENS as usize).layers;
    assert_eq!(layers.iter().map(|layer| layer.products).sum::<u64>(), expected);
}

const TOKENS: u64 = 8;

#[test]
fn products_are_of_the_matrices_that_a_token_meets() {
    let (attention, feed_forward, head) = (24 * (24 + 12 + 12 + 24), 3 * 24 * 20, 24 * 31);
    // Scores and values, in which a token meets half of the row on average.
    let pairs = 24 * TOKENS;
    check_products(&llama(), TOKENS * 6 * (3 * (attention + feed_forward + pairs) + head));
    check_products::<LlamaConfig>(
        &tied().into(),
        TOKENS * 6 * (3 * (attention + feed_forward + pairs) + head),
    );
    let config = moe();
    let (chosen, inner) = (config.mixture.num_experts_per_tok, config.mixture.moe_intermediate_size);
    let experts = 24 * 5 + 3 * 24 * (chosen * inner) as u64;
    let blocks = 3 * (attention + pairs) + 2 * feed_forward + experts;
    check_products(&config, TOKENS * 6 * (blocks + head));
}
