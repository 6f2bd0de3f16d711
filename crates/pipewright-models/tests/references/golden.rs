//! Training of small models compared with PyTorch and transformers: losses, gradient norms and final logits.
//!
//! The stages are chained on one tape, so that only the model is under test, without auxiliary losses.
//! `data/make_references.py` makes the expected numbers of two of the models and shows the recipe of the
//! others, and `data/make_family_references.py` makes the ones of the smallest models.

use std::collections::BTreeMap;
use std::fs::read_to_string;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Gradients, Int, Tensor, TensorData};
use pipewright::stage::StageModule;
use pipewright_models::{ModelStage, cross_entropy, hf};

use crate::reference::{Reference, Step};

/// Returns the inputs and targets of one step.
fn batch(rows: &[Vec<i64>], device: &Device) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let length = rows[0].len() - 1;
    let tensor = |from: usize| {
        let ids: Vec<i64> = rows.iter().flat_map(|row| row[from..from + length].to_vec()).collect();
        Tensor::from_data(TensorData::new(ids, [rows.len(), length]), device)
    };
    (tensor(0), tensor(1))
}

fn logits(stages: &[ModelStage], tokens: Tensor<2, Int>) -> Tensor<3> {
    let (first, rest) = stages.split_first().expect("there is a stage");
    let hidden = first.run(tokens);
    rest.iter().fold(hidden, |hidden, stage| stage.run(hidden))
}

/// Calls `visit` for each trained parameter with its global path and its tensor, without the rank in the
/// type.
struct ByPath<'a, F> {
    stage: &'a ModelStage,
    names: Vec<String>,
    visit: F,
}

impl<F: FnMut(String, &dyn AnyParameter)> ModuleVisitor for ByPath<'_, F> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.names.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.names.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            (self.visit)(self.stage.parameter_path(&self.names.join(".")), param);
        }
    }
}

/// A parameter of any rank; gradients are flat.
trait AnyParameter {
    fn value(&self) -> TensorData;
    fn gradient(&self, gradients: &Gradients) -> Tensor<1>;
    fn register(&self, gradient: Tensor<1>, gradients: &mut GradientsParams);
}

impl<const D: usize> AnyParameter for Param<Tensor<D>> {
    fn value(&self) -> TensorData {
        self.val().to_data()
    }

    fn gradient(&self, gradients: &Gradients) -> Tensor<1> {
        self.val().grad(gradients).expect("every parameter has a gradient").flatten(0, D - 1)
    }

    fn register(&self, gradient: Tensor<1>, gradients: &mut GradientsParams) {
        gradients.register(self.id, gradient.reshape(self.val().dims()));
    }
}

fn by_path(stage: &ModelStage, visit: impl FnMut(String, &dyn AnyParameter)) {
    stage.visit(&mut ByPath { stage, names: Vec::new(), visit });
}

/// Returns the gradient of each parameter. Copies of one path are one parameter, and their gradients are
/// summed.
fn gradients_of(stages: &[ModelStage], gradients: &Gradients) -> BTreeMap<String, Tensor<1>> {
    let mut sums = BTreeMap::new();
    for stage in stages {
        by_path(stage, |path, parameter| {
            let gradient = parameter.gradient(gradients);
            let sum = match sums.remove(&path) {
                Some(sum) => sum + gradient,
                None => gradient,
            };
            sums.insert(path, sum);
        });
    }
    sums
}

fn norm(gradients: &BTreeMap<String, Tensor<1>>) -> f64 {
    let squares = |gradient: &Tensor<1>| gradient.to_data().iter::<f64>().map(|x| x * x).sum::<f64>();
    gradients.values().map(squares).sum::<f64>().sqrt()
}

/// Trains the stages, and returns the results of each step.
fn train(stages: &mut [ModelStage], reference: &Reference, rows: &[Vec<i64>], device: &Device) -> Vec<Step> {
    let adam =
        AdamWConfig::new().with_beta_1(0.9).with_beta_2(0.95).with_epsilon(1e-8).with_weight_decay(0.1);
    let mut optimizers: Vec<_> = stages.iter().map(|_| adam.init()).collect();
    let mut steps = Vec::new();
    for rows in rows.chunks(reference.expected.batch) {
        let (tokens, targets) = batch(rows, device);
        let loss = cross_entropy(logits(stages, tokens), targets);
        let value: f32 = loss.clone().into_scalar();
        let gradients = gradients_of(stages, &loss.backward());
        let norm = norm(&gradients);
        steps.push(Step { loss: f64::from(value), grad_norm: norm, balance: None });

        let clip = (1.0 / (norm + 1e-6)).min(1.0);
        for (stage, optimizer) in stages.iter_mut().zip(&mut optimizers) {
            let mut own = GradientsParams::new();
            by_path(stage, |path, parameter| parameter.register(gradients[&path].clone() * clip, &mut own));
            *stage = optimizer.step(reference.expected.lr, stage.clone(), own);
        }
    }
    steps
}

/// Trains the model, cut before each of `cuts`, and compares it with the reference.
fn check(model: &str, cuts: &[usize]) {
    let reference = Reference::load(model);
    let text = read_to_string(reference.tokens()).expect("the file can be read");
    let rows: Vec<Vec<i64>> =
        text.lines().map(|line| serde_json::from_str(line).expect("it is JSON")).collect();
    assert_eq!(rows[0].len(), reference.expected.seq_len + 1);

    let device = Device::flex().autodiff();
    let mut stages = load(&reference, cuts, &device);
    let steps = train(&mut stages, &reference, &rows, &device);
    reference.assert_close(&steps, &reference.expected.steps);
    check_copies(&stages);
    let tokens = batch(&rows[..reference.expected.batch], &device).0;
    reference.assert_final_logits(logits(&stages, tokens));
}

fn load(reference: &Reference, cuts: &[usize], device: &Device) -> Vec<ModelStage> {
    let config = &*reference.config;
    let layers = config.describe(reference.expected.seq_len).layers.len();
    let bounds: Vec<usize> = [&[0], cuts, &[layers]].concat();
    let load = |pair: &[usize]| hf::load_stage(&reference.dir, config, pair[0]..pair[1], device);
    bounds.windows(2).map(|pair| load(pair).expect("it loads")).collect()
}

/// Checks that copies of one parameter are equal to the bit.
fn check_copies(stages: &[ModelStage]) {
    let mut values = BTreeMap::new();
    for stage in stages {
        by_path(stage, |path, parameter| {
            let value = parameter.value();
            if let Some(other) = values.insert(path.clone(), value.clone()) {
                assert_eq!(value, other, "{path}");
            }
        });
    }
}

macro_rules! cases {
    ($($name:ident: $model:literal, $cuts:expr;)*) => {$(
        #[test]
        fn $name() {
            check($model, &$cuts);
        }
    )*};
}

cases! {
    llama: "llama-tiny", [];
    llama_cut_anywhere: "llama-tiny", [1, 4, 9];
    qwen2: "qwen2-tiny", [];
    qwen2_cut_anywhere: "qwen2-tiny", [1, 3];
    llama31: "llama31-tiny", [];
    llama31_cut_anywhere: "llama31-tiny", [1, 4];
    qwen3: "qwen3-tiny", [];
    qwen3_cut_anywhere: "qwen3-tiny", [2, 3, 8];
    qwen3_moe: "qwen3-moe-tiny", [];
    qwen3_moe_cut_anywhere: "qwen3-moe-tiny", [1, 2, 5];
    llama_tied: "llama-tied-tiny", [];
    llama_tied_cut_anywhere: "llama-tied-tiny", [2, 5];
    mistral: "mistral-tiny", [];
    mistral_cut_anywhere: "mistral-tiny", [1, 3];
    mixtral: "mixtral-tiny", [];
    mixtral_cut_anywhere: "mixtral-tiny", [1, 3];
    smollm3: "smollm3-tiny", [];
    smollm3_cut_anywhere: "smollm3-tiny", [2, 4];
    granite: "granite-tiny", [];
    granite_cut_anywhere: "granite-tiny", [1, 2];
    granite_hybrid: "granite-hybrid-tiny", [];
    granite_hybrid_cut_anywhere: "granite-hybrid-tiny", [1, 3];
    granite_hybrid_experts: "granite-hybrid-rope-tiny", [2];
    phi3: "phi3-tiny", [];
    phi3_cut_anywhere: "phi3-tiny", [2, 3];
    olmo2: "olmo2-tiny", [];
    olmo2_cut_anywhere: "olmo2-tiny", [1, 3];
    olmo3: "olmo3-tiny", [];
    qwen3_next: "qwen3-next-tiny", [];
    qwen3_5_cut_anywhere: "qwen3-5-tiny", [1, 3];
    qwen3_5_moe: "qwen3-5-moe-tiny", [2];
    ministral3: "ministral3-tiny", [2];
    glm4_moe: "glm4-moe-tiny", [];
    glm4_moe_plain_cut_anywhere: "glm4-moe-plain-tiny", [1, 3];
    gemma2: "gemma2-tiny", [];
    gemma2_cut_anywhere: "gemma2-tiny", [2, 4];
    gemma3: "gemma3-tiny", [];
    gemma3_cut_anywhere: "gemma3-tiny", [2, 4];
    starcoder2: "starcoder2-tiny", [];
    starcoder2_cut_anywhere: "starcoder2-tiny", [1, 4];
    gpt2: "gpt2-tiny", [];
    gpt2_cut_anywhere: "gpt2-tiny", [1, 3, 4];
    gpt2_scaled: "gpt2-scaled-tiny", [];
    gpt2_scaled_cut_anywhere: "gpt2-scaled-tiny", [2, 4];
    qwen2_moe: "qwen2-moe-tiny", [];
    qwen2_moe_cut_anywhere: "qwen2-moe-tiny", [1, 3];
    qwen2_moe_window_cut_anywhere: "qwen2-moe-window-tiny", [2, 4];
    qwen3_moe_window_cut_anywhere: "qwen3-moe-window-tiny", [1, 3];
    smollm3_window_cut_anywhere: "smollm3-window-tiny", [2];
    gpt_oss: "gpt-oss-tiny", [];
    gpt_oss_cut_anywhere: "gpt-oss-tiny", [1, 3];
    deepseek_v2_greedy_cut_anywhere: "deepseek-v2-greedy-tiny", [2];
    deepseek_v3_plain_cut_anywhere: "deepseek-v3-plain-tiny", [1, 4];
    deepseek_v2: "deepseek-v2-tiny", [];
    deepseek_v2_cut_anywhere: "deepseek-v2-tiny", [2, 3];
    deepseek_v3: "deepseek-v3-tiny", [];
    deepseek_v3_cut_anywhere: "deepseek-v3-tiny", [1, 3];
}
