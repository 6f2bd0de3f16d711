//! Nemotron-H compared with PyTorch and transformers: hidden states after each block and each tensor's
//! gradient at the loaded weights, whole training runs in the pipeline, the greedy text, model directories,
//! and configurations that are refused.

use std::collections::BTreeMap;
use std::fs::{self, read_to_string};
use std::path::Path;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Gradients, Int, Tensor, TensorData};
use pipewright::nn::TensorParallel;
use pipewright::stage::StageModule;
use pipewright::tensor::Precision;
use pipewright_models::init::SeededInit;
use pipewright_models::nemotron_h::{BlockKind, Experts, NemotronHConfig};
use pipewright_models::{
    ModelConfig, ModelError, ModelFamily, ModelStage, ParameterSource, ParameterSpec, Place,
    ROUTER_CORRECTION, StageTensors, cross_entropy, hf, parameter_specs,
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::cases::changed_json;
use crate::decoders::check_text;
use crate::pipelined_run::Model;
use crate::reference::Reference;

const NAME: &str = "nemotron-h-tiny";
static NEMOTRON_H: Model = Model::new(NAME);

#[test]
fn recomputation_changes_no_bit() {
    NEMOTRON_H.check_recomputed("1f1b", 2, 4);
}

#[test]
fn half_precision_has_the_same_bits_for_every_cut() {
    // Three times the difference that bfloat16 makes in PyTorch: `data/measure_bfloat16.py`.
    NEMOTRON_H.check_in(Precision::Bf16, 2, 8, 3.0 * 3.5e-4);
}

#[test]
fn the_greedy_text_is_that_of_transformers() {
    check_text(NAME);
}

/// The part of `expected.json` about the loaded weights.
#[derive(Deserialize)]
struct Initial {
    last_logits_first16: Vec<f32>,
    hidden_last_first8: Vec<Vec<f32>>,
    grad_norms: BTreeMap<String, f64>,
}

fn initial(reference: &Reference) -> Initial {
    let text = read_to_string(reference.dir.join("expected.json")).expect("the file can be read");
    let mut json: Value = serde_json::from_str(&text).expect("it is JSON");
    serde_json::from_value(json["initial"].take()).expect("it has the fields")
}

fn family(reference: &Reference) -> NemotronHConfig {
    match &reference.config {
        ModelConfig::NemotronH(config) => config.clone(),
        other => panic!("the folder has a Nemotron-H, not {other:?}"),
    }
}

/// Loads a stage for each layer.
fn stages(reference: &Reference, device: &Device) -> Vec<ModelStage> {
    let config = family(reference);
    let layers = config.layers();
    (0..layers)
        .map(|layer| hf::load_stage(&reference.dir, &config, layer..layer + 1, device).expect("it loads"))
        .collect()
}

/// Returns the inputs and targets of the first step.
fn first_batch(reference: &Reference, device: &Device) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let text = read_to_string(reference.tokens()).expect("the file can be read");
    let rows: Vec<Vec<i64>> = text
        .lines()
        .take(reference.expected.batch)
        .map(|line| serde_json::from_str(line).expect("it is JSON"))
        .collect();
    let length = reference.expected.seq_len;
    let tensor = |from: usize| {
        let ids: Vec<i64> = rows.iter().flat_map(|row| row[from..from + length].to_vec()).collect();
        Tensor::from_data(TensorData::new(ids, [rows.len(), length]), device)
    };
    (tensor(0), tensor(1))
}

/// Returns the first channels of the last position of row 0.
fn last(hidden: &Tensor<3>, count: usize) -> Vec<f32> {
    let [_, sequence, _] = hidden.dims();
    let last = hidden.clone().narrow(0, 0, 1).narrow(1, sequence - 1, 1).narrow(2, 0, count);
    last.into_data().iter().collect()
}

fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-5, "{what}: {found} for {expected}");
    }
}

#[derive(Default)]
struct GradientNorms<'a> {
    names: Vec<String>,
    gradients: Option<&'a Gradients>,
    norms: Vec<(String, f64)>,
}

impl ModuleVisitor for GradientNorms<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.names.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.names.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.and_then(|gradients| param.val().grad(gradients)) {
            let norm = gradient.into_data().iter::<f64>().map(|x| x * x).sum::<f64>().sqrt();
            self.norms.push((self.names.join("."), norm));
        }
    }
}

#[test]
fn hidden_states_and_gradients_are_those_of_the_reference() {
    let reference = Reference::load(NAME);
    let expected = initial(&reference);
    let device = Device::flex().autodiff();
    let stages = stages(&reference, &device);
    let (tokens, targets) = first_batch(&reference, &device);
    let mut input = StageTensors::from(tokens);
    let mut logits = None;
    for (layer, stage) in stages.iter().enumerate() {
        let output = stage.run(input);
        match expected.hidden_last_first8.get(layer) {
            Some(expected) => assert_close(&format!("after layer {layer}"), &last(&output, 8), expected),
            None => assert_close("logits", &last(&output, 16), &expected.last_logits_first16),
        }
        logits = Some(output.clone());
        input = output.into();
    }
    let gradients = cross_entropy(logits.expect("there are layers"), targets).backward();
    let mut found = BTreeMap::new();
    for stage in &stages {
        let mut norms = GradientNorms { gradients: Some(&gradients), ..GradientNorms::default() };
        stage.visit(&mut norms);
        found.extend(norms.norms.into_iter().map(|(path, norm)| (stage.parameter_path(&path), norm)));
    }
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.grad_norms.keys().collect::<Vec<_>>());
    for (path, expected) in expected.grad_norms {
        let error = (found[&path] - expected).abs() / expected.max(1e-6);
        assert!(error < 2e-5, "{path}: {} for {expected}", found[&path]);
    }
}

macro_rules! cases {
    ($($name:ident: $schedule:literal, $ranks:literal, $microbatches:literal;)*) => {$(
        #[test]
        fn $name() {
            NEMOTRON_H.check($schedule, $ranks, $microbatches);
        }
    )*};
}

cases! {
    one_rank: "gpipe", 1, 1;
    one_rank_2_microbatches: "1f1b", 1, 2;
    gpipe_2_ranks: "gpipe", 2, 4;
    gpipe_4_ranks: "gpipe", 4, 4;
    one_f_one_b_2_ranks: "1f1b", 2, 2;
    one_f_one_b_2_ranks_4_microbatches: "1f1b", 2, 4;
    one_f_one_b_4_ranks: "1f1b", 4, 8;
    interleaved_2_ranks: "interleaved1f1b", 2, 4;
    interleaved_4_ranks: "interleaved1f1b", 4, 8;
    zbv_2_ranks: "zbvzerobubble", 2, 4;
    zbv_4_ranks: "zbvzerobubble", 4, 8;
    dualpipev_2_ranks: "dualpipev", 2, 8;
    dualpipev_4_ranks: "dualpipev", 4, 8;
    weight_gradients_wait_2_ranks: "zb-h1", 2, 4;
    weight_gradients_wait_4_ranks: "zb-h1", 4, 8;
}

#[test]
fn a_run_agrees_to_its_end() {
    NEMOTRON_H.check_to_the_end("1f1b", 4, 8);
    NEMOTRON_H.check_to_the_end("zbvzerobubble", 2, 4);
}

#[test]
fn every_schedule_retraces_the_reference() {
    NEMOTRON_H.check_every_schedule(2, 8);
}

/// Returns the tensors of a file by name, each with its shape and bytes.
fn tensors(dir: &Path) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let bytes = fs::read(dir.join("model.safetensors")).expect("the file can be read");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("it is a safetensors file");
    let entry = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        (name, (view.shape().to_vec(), view.data().to_vec()))
    };
    file.tensors().into_iter().map(entry).collect()
}

#[test]
fn what_is_read_is_written_with_the_same_bits() {
    let reference = Reference::load(NAME);
    let config = family(&reference);
    let stages = stages(&reference, &Device::flex());
    let folder = tempfile::TempDir::new().expect("a temporary folder");
    let dir = folder.path().join("written");
    hf::save(&dir, &config, &stages.iter().collect::<Vec<_>>()).expect("it is written");
    assert_eq!(tensors(&dir), tensors(&reference.dir));
    assert_eq!(ModelConfig::read(&dir).expect("it is read"), reference.config);
}

#[test]
fn the_correction_of_the_scores_is_not_trained() {
    let config = family(&Reference::load(NAME));
    let stage = config.init_stage(4..5, 3, Device::flex().autodiff()).expect("the fourth block has experts");
    struct Trained(Vec<bool>);
    impl ModuleVisitor for Trained {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.val().is_require_grad());
        }
    }
    let mut trained = Trained(Vec::new());
    stage.visit(&mut trained);
    let paths: Vec<String> = parameter_specs(&stage).into_iter().map(|spec| spec.path).collect();
    let untrained: Vec<&String> =
        paths.iter().zip(&trained.0).filter(|(_, trained)| !**trained).map(|(path, _)| path).collect();
    assert_eq!(untrained, ["backbone.layers.3.mixer.gate.e_score_correction_bias"]);
}

#[test]
fn descriptions_count_the_parameters_of_each_layer() {
    let config = family(&Reference::load(NAME));
    let variants = [
        config.clone(),
        NemotronHConfig { tie_word_embeddings: true, use_bias: true, use_conv_bias: false, ..config.clone() },
        NemotronHConfig { experts: Some(with_latent_width(&config, 24)), ..config.clone() },
        NemotronHConfig { experts: None, mlp_bias: true, blocks: vec![BlockKind::Mlp], ..config },
    ];
    for config in variants {
        for (index, layer) in config.describe(16).layers.iter().enumerate() {
            let stage = config.init_stage(index..index + 1, 7, Device::flex()).expect("it is a layer");
            let specs = parameter_specs(&stage);
            // The correction of a router's scores has no gradient.
            let trained = specs.iter().filter(|spec| !spec.path.ends_with(ROUTER_CORRECTION));
            let count: usize = trained.map(|spec| spec.shape.iter().product::<usize>()).sum();
            assert_eq!(count as u64, layer.parameters, "{}", layer.path);
            assert!(layer.weight > 0 && layer.activation_bytes > 0, "{}", layer.path);
        }
        let layers = config.layers();
        let whole = config.init_stage(0..layers, 7, Device::flex()).expect("it is the model");
        let mut outline = config.outline(0..layers, &TensorParallel::default()).expect("it is the model");
        let mut held = parameter_specs(&whole);
        outline.sort_by(|a, b| a.path.cmp(&b.path));
        outline.dedup();
        held.sort_by(|a, b| a.path.cmp(&b.path));
        // A stage does not know that files may have the matrices of all experts in one tensor.
        for (held, outlined) in held.iter_mut().zip(&outline).filter(|(held, _)| held.is_of_routed_expert()) {
            let stack = outlined.layout.stack.clone();
            assert!(stack.is_some(), "{}", held.path);
            held.layout.stack = stack;
        }
        assert_eq!(outline, held);
    }
}

/// Returns the experts of a model with projections to another width around the routed ones.
fn with_latent_width(config: &NemotronHConfig, width: usize) -> Experts {
    let experts = config.experts.clone().expect("the reference has experts");
    Experts { moe_latent_size: Some(width), ..experts }
}

/// Returns parameters by a function, and otherwise the initial ones of a seed.
struct Given<F>(F);

impl<F: Fn(&ParameterSpec) -> Option<Vec<f32>>> ParameterSource for Given<F> {
    fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, ModelError> {
        match (self.0)(spec) {
            Some(values) => Ok(values),
            None => SeededInit { seed: 3, deviation: 0.3 }.parameter(spec),
        }
    }
}

/// Returns the output of the first block of a model, whose parameters are `given`.
fn first_block(config: &NemotronHConfig, given: impl Fn(&ParameterSpec) -> Option<Vec<f32>>) -> Vec<f32> {
    let device = Device::flex();
    let stage = config.build_stage(1..2, &mut Given(given), &Place::from(&device)).expect("it is a block");
    let size = 2 * 5 * config.hidden_size;
    let values: Vec<f32> = (0..size).map(|index| ((index * 37 % 101) as f32 - 50.0) / 40.0).collect();
    let hidden = Tensor::<3>::from_data(TensorData::new(values, [2, 5, config.hidden_size]), &device);
    stage.run(hidden).into_data().iter().collect()
}

#[test]
fn routed_experts_may_have_a_width_of_their_own() {
    let config = NemotronHConfig { blocks: vec![BlockKind::Experts], ..family(&Reference::load(NAME)) };
    let width = config.hidden_size;
    let latent = NemotronHConfig { experts: Some(with_latent_width(&config, width)), ..config.clone() };
    // An expert squares its inputs: of twice the inputs, it returns four times the output.
    let diagonal = |factor: f32| -> Vec<f32> {
        (0..width * width).map(|index| if index % (width + 1) == 0 { factor } else { 0.0 }).collect()
    };
    let projections = |spec: &ParameterSpec| match spec.path.as_str() {
        "backbone.layers.0.mixer.fc1_latent_proj.weight" => Some(diagonal(2.0)),
        "backbone.layers.0.mixer.fc2_latent_proj.weight" => Some(diagonal(0.25)),
        _ => None,
    };
    let (found, expected) = (first_block(&latent, projections), first_block(&config, |_| None));
    assert_close("experts with projections that cancel out", &found, &expected);
    assert_ne!(first_block(&latent, |_| None), expected, "other projections have another result");

    let narrow = NemotronHConfig { experts: Some(with_latent_width(&config, 24)), ..config };
    assert_eq!(NemotronHConfig::from_json(narrow.to_json()).ok().as_ref(), Some(&narrow));
    let outline = narrow.outline(1..2, &TensorParallel::default()).expect("it is a block");
    let shape = |name: &str| {
        let spec = outline.iter().find(|spec| spec.path == format!("backbone.layers.0.mixer.{name}.weight"));
        spec.map(|spec| spec.shape.clone()).expect(name)
    };
    assert_eq!(shape("fc1_latent_proj"), [width, 24]);
    assert_eq!(shape("fc2_latent_proj"), [24, width]);
    assert_eq!(shape("experts.0.up_proj")[0], 24);
    assert_eq!(shape("shared_experts.up_proj")[0], width);
}

#[test]
fn heads_may_have_an_odd_width() {
    let config = NemotronHConfig { blocks: vec![BlockKind::Attention], ..family(&Reference::load(NAME)) };
    let odd = NemotronHConfig { head_dim: 3, ..config.clone() };
    // The same attention with heads of four channels: the last one is zero, and the queries make up for the
    // root of the width by which the scores are divided.
    let even = NemotronHConfig { head_dim: 4, ..config };
    let own = |spec: &ParameterSpec, shape: [usize; 2]| {
        let spec = ParameterSpec { shape: shape.to_vec(), ..spec.clone() };
        SeededInit { seed: 3, deviation: 0.3 }.parameter(&spec).expect("it is drawn")
    };
    let widened = |spec: &ParameterSpec| {
        let &[inputs, outputs] = spec.shape.as_slice() else { return None };
        let factor = if spec.path.contains("q_proj") { (4.0f32 / 3.0).sqrt() } else { 1.0 };
        if spec.path.contains("o_proj") {
            let narrow = own(spec, [inputs / 4 * 3, outputs]);
            let row = |input: usize| -> Vec<f32> {
                let index = input / 4 * 3 + input % 4;
                if input % 4 == 3 {
                    vec![0.0; outputs]
                } else {
                    narrow[index * outputs..][..outputs].to_vec()
                }
            };
            return Some((0..inputs).flat_map(row).collect());
        }
        let narrow = own(spec, [inputs, outputs / 4 * 3]);
        let mut values = Vec::new();
        for head in narrow.chunks(3) {
            values.extend(head.iter().map(|value| value * factor));
            values.push(0.0);
        }
        Some(values)
    };
    let (found, expected) = (first_block(&odd, |_| None), first_block(&even, widened));
    assert!(found.iter().any(|value| value.abs() > 0.1));
    assert_close("heads of three channels", &found, &expected);
}

#[test]
fn fresh_states_have_many_lengths_of_memory() {
    let config = family(&Reference::load(NAME));
    let parameter = |path: &str| -> Vec<f32> {
        let stage = config.init_stage(1..2, 11, Device::flex()).expect("the first block is a mixer");
        let mut values = ByName { path: path.to_owned(), names: Vec::new(), values: Vec::new() };
        stage.visit(&mut values);
        values.values
    };
    let close = |found: f32, expected: f32| (found - expected).abs() < 1e-6;
    let rates = parameter("A_log");
    assert!(rates.iter().zip([1f32, 2.0, 3.0, 4.0]).all(|(log, rate)| close(*log, rate.ln())), "{rates:?}");
    assert_eq!(parameter("D"), [1.0; 4]);
    let (low, high) = config.time_step_range;
    let steps: Vec<f64> = parameter("dt_bias").iter().map(|bias| f64::from(*bias).exp().ln_1p()).collect();
    assert!(steps.iter().all(|step| (low * 0.999..high * 1.001).contains(step)), "{steps:?}");
    assert!(parameter("weight").iter().any(|weight| *weight != 1.0));
}

/// Collects the values of the parameters of one name.
struct ByName {
    path: String,
    names: Vec<String>,
    values: Vec<f32>,
}

impl ModuleVisitor for ByName {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.names.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.names.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.names.last() == Some(&self.path) {
            self.values.extend(param.val().into_data().iter::<f32>());
        }
    }
}

/// Returns the configuration of the reference with changes; `null` removes a key.
fn changed(changes: Value) -> Result<NemotronHConfig, String> {
    let path = Reference::load(NAME).dir.join("config.json");
    let text = read_to_string(path).expect("the file can be read");
    let json = serde_json::from_str(&text).expect("it is JSON");
    changed_json(json, changes, NemotronHConfig::from_json)
}

/// The step of the scan is at least `time_step_min`, and `time_step_limit` has no effect. The losses come
/// from transformers 5.23 for the same weights and tokens.
#[test]
fn the_lowest_step_is_that_of_transformers() {
    let device = Device::flex();
    let loss = |changes: Value| -> f32 {
        let config = changed(changes).expect("it is valid");
        let dir = Reference::load(NAME).dir;
        let layers = 0..config.layers();
        let stage = hf::load_stage(&dir, &config, layers, &device).expect("it loads");
        let ids = |from: i64| {
            let ids: Vec<i64> = (from..from + 15).collect();
            Tensor::<2, Int>::from_data(TensorData::new(ids, [1, 15]), &device)
        };
        cross_entropy(stage.run(ids(40)), ids(41)).into_scalar()
    };
    let check = |changes: Value, expected: f32| {
        let found = loss(changes.clone());
        assert!((found - expected).abs() < 1e-5, "{changes}: {found} for {expected}");
    };
    let infinity = json!({"__float__": "Infinity"});
    check(json!({}), 5.469_294_5);
    check(json!({"time_step_limit": [0.0, infinity], "time_step_min": 0.3}), 5.465_152_3);
    check(json!({"time_step_limit": [0.3, infinity]}), 5.469_294_5);
    check(json!({"time_step_limit": [0.3, 0.31]}), 5.469_294_5);
}

#[test]
fn a_pattern_of_letters_is_the_same_model() {
    let listed = changed(json!({})).expect("it is the reference");
    let letters = json!({"layers_block_type": null, "hybrid_override_pattern": "M-ME*MM-*E"});
    assert_eq!(changed(letters).as_ref(), Ok(&listed));
    let names = json!({"layers_block_type": [
        "mamba", "mlp", "mamba", "moe", "attention", "mamba", "mamba", "mlp", "attention", "moe"]});
    assert_eq!(changed(names).as_ref(), Ok(&listed));
    let older =
        json!({"head_dim": null, "attention_head_dim": 16, "layer_norm_epsilon": null, "norm_eps": 1e-5});
    assert_eq!(changed(older), Ok(listed));
    for key in ["norm_eps", "rms_norm_eps"] {
        let error =
            changed(json!({"layer_norm_epsilon": null, key: 1e-6})).expect_err("transformers computes 1e-5");
        assert!(error.to_string().contains(&format!("`{key} = 0.000001` is not supported")), "{error}");
    }
}

#[test]
fn a_bare_infinity_of_python_is_read() {
    let reference = Reference::load(NAME);
    let folder = tempfile::TempDir::new().expect("a temporary folder");
    let text = read_to_string(reference.dir.join("config.json")).expect("the file can be read");
    let start = text.find("\"time_step_limit\"").expect("the key");
    let end = start + text[start..].find(']').expect("the list's end") + 1;
    let write = |limits: &str| {
        let text = format!("{}\"time_step_limit\": {limits}{}", &text[..start], &text[end..]);
        fs::write(folder.path().join("config.json"), text).expect("it is written");
        ModelConfig::read(folder.path())
    };
    assert_eq!(write("[0.02, Infinity]").expect("it is read"), reference.config);
    let error = write("[0.02, Infinite]").expect_err("this is nothing").to_string();
    assert!(error.contains("config.json"), "{error}");
}

#[test]
fn models_that_cannot_be_are_refused_where_they_are_wrong() {
    let check = |changes: Value, message: &str| {
        let error = changed(changes).expect_err(message);
        assert!(error.contains(message), "{error}\nhas not: {message}");
    };
    check(
        json!({"layers_block_type": null, "hybrid_override_pattern": "M-X"}),
        "`hybrid_override_pattern`: block 2 is `X`, counted from 0; the kinds of blocks are M (Mamba-2)",
    );
    check(json!({"layers_block_type": ["mamba", "rwkv"]}), "`layers_block_type`: block 1 is `rwkv`");
    check(json!({"layers_block_type": []}), "`layers_block_type = []` is out of range");
    check(json!({"layers_block_type": null}), "missing field `layers_block_type`");
    check(
        json!({"num_experts_per_tok": 5}),
        "`num_experts_per_tok = 5` is out of range: it must be at most the experts",
    );
    check(json!({"n_group": 3}), "`n_routed_experts = 8` is not divisible by `n_group = 3`");
    check(json!({"topk_group": 3}), "`topk_group = 3` is out of range: it must be at most `n_group`");
    check(json!({"n_groups": 3}), "`mamba_num_heads = 4` is not divisible by `n_groups = 3`");
    check(json!({"num_key_value_heads": 3}), "`num_attention_heads = 4` is not divisible");
    check(json!({"time_step_limit": [0.5, 0.1]}), "`time_step_limit = [0.5, 0.1]` is out of range");
    check(json!({"moe_latent_size": 0}), "`moe_latent_size = 0` is out of range: it must be at least 1");
    check(json!({"mlp_hidden_act": "silu"}), "`mlp_hidden_act = silu` is not supported: only relu2 is");
    let needed = ["n_routed_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size"];
    for key in needed {
        check(
            json!({key: null}),
            &format!("missing field `{key}`, which a model with blocks of experts needs"),
        );
    }
    check(
        json!({"layers_block_type": ["mamba", "mlp"], "num_experts_per_tok": "two"}),
        "the value of `num_experts_per_tok` cannot be used: invalid type: string \"two\"",
    );
    check(
        json!({"ssm_state_size": 1 << 20, "n_groups": 32}),
        "`ssm_state_size = 1048576` times `n_groups = 32` is too wide: it must be at most 16777216",
    );
}
