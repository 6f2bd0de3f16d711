//! A small Llama trained by PyTorch and transformers, retraced here: losses, gradient norms and final logits.
//!
//! The stages are chained on one tape, so that nothing but the model is under test.

use std::path::Path;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Gradients, Int, Tensor, TensorData};
use pipewright_models::llama::{LlamaConfig, LlamaInput, LlamaStage};
use pipewright_models::{ModelConfig, cross_entropy, hf};
use serde::Deserialize;

const DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/llama-tiny");

#[derive(Deserialize)]
struct Expected {
    batch: usize,
    seq_len: usize,
    steps: usize,
    expected: Vec<Step>,
    final_last_logits_first16: Vec<f32>,
}

#[derive(Deserialize)]
struct Step {
    loss: f64,
    grad_norm: f64,
}

fn config() -> LlamaConfig {
    match hf::read_config(Path::new(DIR)) {
        Ok(ModelConfig::Llama(config)) => config,
        other => panic!("llama-tiny is a Llama, not {other:?}"),
    }
}

/// Inputs and targets of one step.
fn batch(rows: &[Vec<i64>], device: &Device) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let length = rows[0].len() - 1;
    let tensor = |from: usize| {
        let ids: Vec<i64> = rows.iter().flat_map(|row| row[from..from + length].to_vec()).collect();
        Tensor::from_data(TensorData::new(ids, [rows.len(), length]), device)
    };
    (tensor(0), tensor(1))
}

fn logits(stages: &[LlamaStage], tokens: Tensor<2, Int>) -> Tensor<3> {
    let (first, rest) = stages.split_first().expect("there is a stage");
    let hidden = first.run(LlamaInput::Tokens(tokens));
    rest.iter().fold(hidden, |hidden, stage| stage.run(LlamaInput::Hidden(hidden)))
}

/// Collects the sum of squares of all gradients, or scales them.
struct GradientPass<'a> {
    gradients: &'a mut GradientsParams,
    scale: Option<f64>,
    squares: f64,
}

impl ModuleVisitor for GradientPass<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = self.gradients.remove::<D>(param.id).expect("every parameter has a gradient");
        self.squares += gradient.to_data().iter::<f64>().map(|x| x * x).sum::<f64>();
        let gradient = match self.scale {
            Some(scale) => gradient * scale,
            None => gradient,
        };
        self.gradients.register(param.id, gradient);
    }
}

fn pass(stages: &[LlamaStage], gradients: &mut [GradientsParams], scale: Option<f64>) -> f64 {
    let passes = stages.iter().zip(gradients).map(|(stage, gradients)| {
        let mut pass = GradientPass { gradients, scale, squares: 0.0 };
        stage.visit(&mut pass);
        pass.squares
    });
    passes.sum::<f64>().sqrt()
}

fn per_stage(stages: &[LlamaStage], mut gradients: Gradients) -> Vec<GradientsParams> {
    stages.iter().map(|stage| GradientsParams::from_module(&mut gradients, stage)).collect()
}

fn assert_close(what: &str, step: usize, found: f64, expected: f64, tolerance: f64) {
    let error = ((found - expected) / expected).abs();
    assert!(error <= tolerance, "step {step}: {what} {found} is {error:.1e} from {expected}");
}

/// Trains the model cut before each of `cuts`.
fn check(cuts: &[usize]) {
    let text = std::fs::read_to_string(format!("{DIR}/expected.json")).expect("the file is here");
    let expected: Expected = serde_json::from_str(&text).expect("it is JSON");
    let text = std::fs::read_to_string(format!("{DIR}/tokens.jsonl")).expect("the file is here");
    let rows: Vec<Vec<i64>> =
        text.lines().map(|line| serde_json::from_str(line).expect("it is JSON")).collect();
    assert_eq!(rows[0].len(), expected.seq_len + 1);

    let device = Device::flex().autodiff();
    let config = config();
    let bounds: Vec<usize> = [&[0], cuts, &[config.layers()]].concat();
    let load = |pair: &[usize]| hf::load_stage(Path::new(DIR), &config, pair[0]..pair[1], &device);
    let mut stages: Vec<LlamaStage> = bounds.windows(2).map(|pair| load(pair).expect("it loads")).collect();
    let adam =
        AdamWConfig::new().with_beta_1(0.9).with_beta_2(0.95).with_epsilon(1e-8).with_weight_decay(0.1);
    let mut optimizers: Vec<_> = stages.iter().map(|_| adam.init()).collect();

    for step in 0..expected.steps {
        let (tokens, targets) = batch(&rows[step * expected.batch..][..expected.batch], &device);
        let loss = cross_entropy(logits(&stages, tokens), targets);
        let value: f32 = loss.clone().into_scalar();
        let mut gradients = per_stage(&stages, loss.backward());
        let norm = pass(&stages, &mut gradients, None);
        assert_close("loss", step, f64::from(value), expected.expected[step].loss, 5e-6);
        assert_close("gradient norm", step, norm, expected.expected[step].grad_norm, 5e-5);

        let clip = (1.0 / (norm + 1e-6)).min(1.0);
        pass(&stages, &mut gradients, Some(clip));
        let updates = stages.into_iter().zip(gradients).zip(&mut optimizers);
        stages =
            updates.map(|((stage, gradients), optimizer)| optimizer.step(2e-3, stage, gradients)).collect();
    }

    let tokens = batch(&rows[..expected.batch], &device).0;
    check_final_logits(logits(&stages, tokens), &expected.final_last_logits_first16);
}

/// The trained model's logits at the last position of the first row.
fn check_final_logits(logits: Tensor<3>, expected: &[f32]) {
    let [_, sequence, _] = logits.dims();
    let found = logits.narrow(0, 0, 1).narrow(1, sequence - 1, 1).narrow(2, 0, expected.len());
    for (found, expected) in found.into_data().iter::<f32>().zip(expected) {
        assert!((found - expected).abs() < 1e-5, "{found} for {expected}");
    }
}

#[test]
fn one_stage() {
    check(&[]);
}

#[test]
fn stages_cut_anywhere() {
    check(&[1, 4, 9]);
}
