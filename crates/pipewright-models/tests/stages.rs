//! Cutting a model: parameters and results do not depend on where.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::boundary::{pack, unpack};
use pipewright_models::llama::{LlamaConfig, LlamaInput, LlamaStage};
use pipewright_models::{ModelFamily, parameter_specs};
use proptest::prelude::*;

fn config() -> LlamaConfig {
    LlamaConfig {
        hidden_size: 24,
        intermediate_size: 20,
        num_hidden_layers: 3,
        num_key_value_heads: 2,
        head_dim: Some(6),
        ..LlamaConfig::new(31, 4)
    }
}

/// All stages of the model cut before each of `cuts`.
fn cut(cuts: &[usize]) -> Vec<LlamaStage> {
    let config = config();
    let bounds = [&[0], cuts, &[config.layers()]].concat();
    let stage = |pair: &[usize]| config.init_stage(pair[0]..pair[1], 7, &Device::flex());
    bounds.windows(2).map(|pair| stage(pair).expect("the range is valid")).collect()
}

fn parameters(stages: &[LlamaStage]) -> BTreeMap<String, TensorData> {
    let record = |stage: &LlamaStage| stage.clone().into_record();
    let values = |stage: &LlamaStage| -> Vec<(String, TensorData)> {
        let mut collector = Collector::default();
        stage.visit(&mut collector);
        assert_eq!(collector.values.len(), record(stage).len(), "a record has the same parameters");
        collector.values
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

fn run(stages: &[LlamaStage]) -> TensorData {
    let mut values = pack(LlamaInput::Tokens(tokens()));
    for stage in stages {
        values = pack(stage.run(unpack(values).expect("the boundary fits")));
    }
    unpack::<Tensor<3>>(values).expect("logits").into_data()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn any_cut_has_the_same_parameters_and_results(places in prop::collection::btree_set(1usize..5, 0..4)) {
        let cuts: Vec<usize> = places.into_iter().collect();
        let (whole, stages) = (cut(&[]), cut(&cuts));
        prop_assert_eq!(parameters(&stages), parameters(&whole));
        prop_assert_eq!(run(&stages), run(&whole));
    }
}

#[test]
fn paths_are_those_of_the_checkpoint() {
    let paths =
        |stage: &LlamaStage| parameter_specs(stage).into_iter().map(|spec| spec.path).collect::<Vec<_>>();
    let stages = cut(&[1, 3, 4]);
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
fn description_counts_what_the_stages_hold() {
    let description = config().describe(16);
    assert_eq!(description.layers.len(), config().layers());
    for (index, layer) in description.layers.iter().enumerate() {
        let stage = config().init_stage(index..index + 1, 0, &Device::flex()).expect("the range is valid");
        assert_eq!(stage.num_params() as u64, layer.parameters, "{}", layer.path);
    }
}

#[test]
fn seeds_give_different_parameters() {
    let head = |seed| config().init_stage(4..5, seed, &Device::flex()).expect("the range is valid");
    assert_ne!(parameters(&[head(1)]), parameters(&[head(2)]));
}

#[test]
fn ranges_outside_the_model_are_refused() {
    let refused =
        |range| config().init_stage(range, 0, &Device::flex()).map(|_| ()).map_err(|error| error.to_string());
    assert_eq!(refused(2..2), Err("layers 2..2 are no stage of a model of 5 layers".to_owned()));
    assert_eq!(refused(4..6), Err("layers 4..6 are no stage of a model of 5 layers".to_owned()));
}

#[test]
fn a_token_sees_no_later_token() {
    let stages = cut(&[]);
    let logits = |ids: Vec<i64>| {
        let tokens = Tensor::from_data(TensorData::new(ids, [1, 300]), &Device::flex());
        stages[0].run(LlamaInput::Tokens(tokens)).narrow(1, 0, 200).into_data()
    };
    let ids: Vec<i64> = (0..300).map(|i| i * i % 31).collect();
    let mut changed = ids.clone();
    changed[200..].fill(3);
    assert_eq!(logits(ids.clone()), logits(changed));
    let mut changed = ids.clone();
    changed[0] += 1;
    assert_ne!(logits(ids), logits(changed));
}
