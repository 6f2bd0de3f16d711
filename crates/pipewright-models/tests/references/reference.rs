//! The reference runs below `data`: a model's folder with the results of PyTorch and transformers, and the
//! tolerances for our runs.

use std::collections::BTreeMap;
use std::fs::read_to_string;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use burn::tensor::Tensor;
use pipewright_models::{Adapter, AdapterStart, ModelConfig, TrainingForm};
use pipewright_schedule::Method;
use serde::Deserialize;

pub(crate) struct Reference {
    pub(crate) dir: PathBuf,
    pub(crate) config: ModelConfig,
    pub(crate) expected: Expected,
    pub(crate) cut: Cut,
    /// The adapters, if only these are trained.
    pub(crate) adapter: Option<Adapter>,
    /// The changes of training.
    pub(crate) form: TrainingForm,
    /// How much the corrections of routers change in a step, if they change.
    pub(crate) balance_speed: Option<f64>,
    /// The stages of a rank that are in memory at once, if the base of the adapters stays in its files.
    pub(crate) stream_window: Option<NonZeroU32>,
}

/// How the model is cut into stages.
#[derive(Clone)]
pub(crate) struct Cut {
    /// The parts of the output head.
    pub(crate) head_parts: u32,
    /// The parts of the embedding.
    pub(crate) embedding_parts: u32,
    pub(crate) method: Method,
}

/// The fields of `expected.json` about training.
#[derive(Deserialize)]
pub(crate) struct Expected {
    /// Rows per step.
    pub(crate) batch: usize,
    pub(crate) seq_len: usize,
    #[serde(default = "usual_learning_rate")]
    pub(crate) lr: f64,
    #[serde(default = "usual_weight_decay")]
    pub(crate) weight_decay: f32,
    /// The results of the steps, in order. `tokens.jsonl` has the rows of as many batches.
    #[serde(rename = "expected")]
    pub(crate) steps: Vec<Step>,
    /// The results with the router's balance loss, by the number of microbatches.
    #[serde(default)]
    pub(crate) expected_aux: BTreeMap<u32, Vec<BalancedStep>>,
    /// Logits at the last position of the first row, after the training of `steps`; empty if they are not known.
    #[serde(default)]
    final_last_logits_first16: Vec<f32>,
    /// How many ids of the first row are before `greedy`.
    #[serde(default)]
    pub(crate) prompt: usize,
    /// The most likely tokens after these ids, before the training.
    #[serde(default)]
    pub(crate) greedy: Vec<u32>,
    /// The results of a training in which the corrections of routers change, with their speed.
    #[serde(default)]
    pub(crate) balanced: Vec<Step>,
    #[serde(default)]
    pub(crate) balance_speed: f64,
    /// The part of the probability of a target that all ids share.
    #[serde(default)]
    label_smoothing: f64,
    #[serde(default)]
    tolerance: Tolerance,
}

fn usual_learning_rate() -> f64 {
    2e-3
}

fn usual_weight_decay() -> f32 {
    0.1
}

/// Relative errors of losses and gradient norms, and the absolute error of the final logits.
#[derive(Deserialize)]
struct Tolerance {
    loss: f64,
    grad_norm: f64,
    final_logits_abs: f32,
}

impl Default for Tolerance {
    fn default() -> Self {
        Self { loss: 5e-6, grad_norm: 5e-5, final_logits_abs: 1e-5 }
    }
}

impl Expected {
    fn read(dir: &Path) -> Self {
        let text = read_to_string(dir.join("expected.json")).expect("the file can be read");
        serde_json::from_str(&text).expect("it is JSON")
    }
}

/// Returns a folder of test data.
pub(crate) fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// The results of a step.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub(crate) struct Step {
    /// The cross entropy.
    pub(crate) loss: f64,
    pub(crate) grad_norm: f64,
    /// With the balance loss.
    #[serde(skip)]
    pub(crate) balance: Option<Balance>,
}

/// The parts of a step's loss with the router's balance loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Balance {
    /// The balance loss without its coefficient.
    pub(crate) loss: f64,
    /// The sum that is minimised.
    pub(crate) total: f64,
}

/// A step of `expected_aux`, with the names of the file.
#[derive(Deserialize)]
pub(crate) struct BalancedStep {
    loss: f64,
    ce: f64,
    aux: f64,
    grad_norm: f64,
}

impl Reference {
    pub(crate) fn load(model: &str) -> Self {
        let dir = folder(model);
        let config = ModelConfig::read(&dir).expect("it is of a known family");
        let mut expected = Expected::read(&dir);
        if config.to_json()["output_router_logits"] != true {
            expected.expected_aux.clear();
        }
        let cut = Cut { head_parts: 1, embedding_parts: 1, method: Method::Optimal };
        let form = TrainingForm::default();
        Self { dir, config, expected, cut, adapter: None, form, balance_speed: None, stream_window: None }
    }

    /// Loads a model whose `config.json` turns the balance loss of its routers off, with this loss.
    pub(crate) fn load_balanced(model: &str) -> Self {
        let reference = Self::load(model);
        let mut json = reference.config.to_json();
        json["output_router_logits"] = true.into();
        let config = ModelConfig::from_json(json).expect("only the flag differs");
        Self { config, expected: Expected::read(&reference.dir), ..reference }
    }

    /// Loads the adapter of PEFT in a folder below the folder `lora`, with its model and the results of
    /// training the adapter.
    pub(crate) fn load_adapted(adapter: &str) -> Self {
        let dir = folder("lora").join(adapter);
        let config = read_to_string(dir.join("adapter_config.json")).expect("the file can be read");
        let config: serde_json::Value = serde_json::from_str(&config).expect("it is JSON");
        let mut base = Self::load(config["base_model_name_or_path"].as_str().expect("a name"));
        // The references of adapters have the cross entropy alone.
        let mut json = base.config.to_json();
        if json["output_router_logits"] == true {
            json["output_router_logits"] = false.into();
            base.config = ModelConfig::from_json(json).expect("only the flag differs");
            base.expected.expected_aux.clear();
        }
        let lora = base.config.read_adapter(&dir).expect("it fits the model");
        let expected = Expected::read(&dir);
        let form = TrainingForm { label_smoothing: expected.label_smoothing, ..TrainingForm::default() };
        let adapter = Some(Adapter { lora, start: AdapterStart::Directory(dir) });
        Self { expected, adapter, form, ..base }
    }

    pub(crate) fn tokens(&self) -> PathBuf {
        self.dir.join("tokens.jsonl")
    }

    /// Returns the expected results with this number of microbatches: with the balance loss if the model has
    /// one.
    pub(crate) fn steps(&self, microbatches: u32) -> Vec<Step> {
        let Some(steps) = self.expected.expected_aux.get(&microbatches) else {
            return self.expected.steps.clone();
        };
        let step = |step: &BalancedStep| Step {
            loss: step.ce,
            grad_norm: step.grad_norm,
            balance: Some(Balance { loss: step.aux, total: step.loss }),
        };
        steps.iter().map(step).collect()
    }

    /// Checks that losses and gradient norms agree within the reference's tolerance.
    pub(crate) fn assert_close(&self, run: &[Step], expected: &[Step]) {
        assert_eq!(run.len(), expected.len());
        let Tolerance { loss, grad_norm, .. } = self.expected.tolerance;
        Self::assert_within(run, expected, Within { loss, grad_norm });
    }

    /// Checks that losses and gradient norms agree within these relative errors. The run may be shorter than
    /// the expected one.
    pub(crate) fn assert_within(run: &[Step], expected: &[Step], within: Within) {
        assert!(!run.is_empty() && run.len() <= expected.len());
        let close = |step: usize, what: &str, found: f64, expected: f64, tolerance: f64| {
            let error = ((found - expected) / expected).abs();
            assert!(error <= tolerance, "step {step}: {what} {found} is {error:.1e} from {expected}");
        };
        for (step, (found, expected)) in run.iter().zip(expected).enumerate() {
            close(step, "loss", found.loss, expected.loss, within.loss);
            close(step, "gradient norm", found.grad_norm, expected.grad_norm, within.grad_norm);
            if let Some(expected) = expected.balance {
                let found = found.balance.expect("a balance loss is reported");
                close(step, "balance loss", found.loss, expected.loss, within.loss);
                close(step, "total", found.total, expected.total, within.loss);
            }
        }
    }

    /// Checks the logits `[rows, sequence, vocabulary]` of the first batch after training.
    pub(crate) fn assert_final_logits(&self, logits: Tensor<3>) {
        let expected = &self.expected.final_last_logits_first16;
        if expected.is_empty() {
            return;
        }
        let [_, sequence, _] = logits.dims();
        let found = logits.narrow(0, 0, 1).narrow(1, sequence - 1, 1).narrow(2, 0, expected.len());
        let tolerance = self.expected.tolerance.final_logits_abs;
        for (found, expected) in found.into_data().iter::<f32>().zip(expected) {
            assert!((found - expected).abs() < tolerance, "{found} for {expected}");
        }
    }
}

/// The largest relative errors.
#[derive(Clone, Copy)]
pub(crate) struct Within {
    pub(crate) loss: f64,
    pub(crate) grad_norm: f64,
}
