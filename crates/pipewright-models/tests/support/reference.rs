//! The reference runs below `data`: a model's folder with the results of PyTorch and transformers, and the tolerances
//! for our runs.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

use pipewright_models::ModelConfig;
use serde::Deserialize;

pub(crate) struct Reference {
    pub(crate) dir: PathBuf,
    pub(crate) config: ModelConfig,
    pub(crate) expected: Expected,
}

/// The fields of `expected.json` about training.
#[derive(Deserialize)]
pub(crate) struct Expected {
    /// Rows a step.
    pub(crate) batch: usize,
    pub(crate) seq_len: usize,
    /// The learning rate; absent in the oldest references.
    #[serde(default = "usual_rate")]
    pub(crate) lr: f64,
    /// The results of the steps, in order. `tokens.jsonl` has the rows of as many batches.
    #[serde(rename = "expected")]
    pub(crate) steps: Vec<Step>,
}

fn usual_rate() -> f64 {
    2e-3
}

/// The results of a step.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub(crate) struct Step {
    pub(crate) loss: f64,
    pub(crate) grad_norm: f64,
}

impl Reference {
    pub(crate) fn load(model: &str) -> Self {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(model);
        let config = ModelConfig::read(&dir).expect("it is of a known family");
        let text = read_to_string(dir.join("expected.json")).expect("the file is here");
        let expected = serde_json::from_str(&text).expect("it is JSON");
        Self { dir, config, expected }
    }

    pub(crate) fn tokens(&self) -> PathBuf {
        self.dir.join("tokens.jsonl")
    }

    /// Checks that losses agree within 5e-6 and gradient norms within 5e-5.
    pub(crate) fn assert_close(&self, run: &[Step]) {
        assert_eq!(run.len(), self.expected.steps.len());
        let close = |step: usize, what: &str, found: f64, expected: f64, tolerance: f64| {
            let error = ((found - expected) / expected).abs();
            assert!(error <= tolerance, "step {step}: {what} {found} is {error:.1e} from {expected}");
        };
        for (step, (found, expected)) in run.iter().zip(&self.expected.steps).enumerate() {
            close(step, "loss", found.loss, expected.loss, 5e-6);
            close(step, "gradient norm", found.grad_norm, expected.grad_norm, 5e-5);
        }
    }
}
