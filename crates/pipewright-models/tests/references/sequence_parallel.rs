//! Tensor ranks that have shares of the tokens between the layers that they compute together: losses are those of one
//! rank, and boundaries send shares.

use std::path::Path;

use pipewright::mesh::DataParallelMode;
use pipewright::nn::TensorParallel;
use pipewright::pipeline::PipelineConfig;
use pipewright::tensor::TensorRank;
use pipewright_models::{CutModel, ModelConfig};
use pipewright_schedule::Recompute;

use crate::pipelined_run::{parts, train, train_first};
use crate::reference::{Reference, Step};

/// The largest relative difference of a loss from the loss of one rank.
const TOLERANCE: f64 = 5e-6;

fn config(tensor_parallel: u32) -> PipelineConfig {
    PipelineConfig { tensor_parallel, sequence_parallel: true, ..PipelineConfig::default() }
}

/// A reference and its run on one rank.
struct OneRank {
    reference: Reference,
    losses: Vec<Step>,
}

impl OneRank {
    /// Trains for all steps.
    fn train(reference: Reference) -> Self {
        let losses = train(&reference, "gpipe", 1, 4, &PipelineConfig::default());
        Self { reference, losses }
    }

    /// Trains for the first steps.
    fn train_first(reference: Reference) -> Self {
        let losses = train_first(&reference, "gpipe", 1, 4, &PipelineConfig::default());
        Self { reference, losses }
    }

    /// Compares the first steps of a run with PyTorch and with one rank.
    fn check(&self, schedule: &str, config: &PipelineConfig) {
        self.check_run(schedule, &train_first(&self.reference, schedule, 2, 4, config));
    }

    /// Does the same for all steps.
    fn check_to_the_end(&self, schedule: &str, config: &PipelineConfig) {
        let run = train(&self.reference, schedule, 2, 4, config);
        assert_eq!(run.len(), self.losses.len());
        self.check_run(schedule, &run);
    }

    fn check_run(&self, schedule: &str, run: &[Step]) {
        assert!(run.len() <= self.losses.len());
        let pairs = run.iter().zip(&self.losses);
        for (step, (Step { loss, .. }, Step { loss: expected, .. })) in pairs.enumerate() {
            let error = (loss - expected).abs() / expected;
            assert!(error <= TOLERANCE, "{schedule}, step {step}: {loss} is {error:.1e} from {expected}");
        }
        self.reference.assert_close(run, &self.reference.steps(4)[..run.len()]);
    }
}

fn check_family(name: &str) {
    let one_rank = OneRank::train(Reference::load(name));
    one_rank.check_to_the_end("1f1b", &config(2));
    one_rank.check("zbvzerobubble", &config(2));
}

macro_rules! families {
    ($($test:ident $name:literal),* $(,)?) => {$(
        #[test]
        fn $test() {
            check_family($name);
        }
    )*};
}

families! {
    llama "llama-tiny",
    llama_with_a_tied_head "llama-tied-tiny",
    qwen2 "qwen2-tiny",
    qwen3 "qwen3-tiny",
    mistral "mistral-tiny",
    smollm3 "smollm3-tiny",
    granite "granite-tiny",
    phi3 "phi3-tiny",
    olmo2 "olmo2-tiny",
    ministral3 "ministral3-tiny",
    gemma2 "gemma2-tiny",
    gemma3 "gemma3-tiny",
    starcoder2 "starcoder2-tiny",
    gpt2 "gpt2-tiny",
}

#[test]
fn four_ranks_and_replicas() {
    let one_rank = OneRank::train_first(Reference::load("llama-tiny"));
    one_rank.check("1f1b", &config(4));
    let sharded = DataParallelMode::Sharded;
    one_rank.check("zb-h1", &PipelineConfig { data_parallel: 2, data_parallel_mode: sharded, ..config(2) });
}

#[test]
fn adapters_on_shares_train_as_peft_does() {
    for name in ["qwen3-tiny", "llama-tiny", "gpt2-tiny", "qwen2-tiny-dora"] {
        let one_rank = OneRank::train_first(Reference::load_adapted(name));
        for schedule in ["1f1b", "zbvzerobubble"] {
            one_rank.check(schedule, &config(2));
        }
    }
}

#[test]
fn recomputed_layers_exchange_again() {
    let one_rank = OneRank::train_first(Reference::load("qwen3-tiny"));
    for recompute in [Recompute::Stage, Recompute::Block, Recompute::Parts, parts()] {
        one_rank.check("zbvzerobubble", &PipelineConfig { recompute, ..config(2) });
    }
}

#[test]
fn shares_have_the_losses_of_whole_tensors_in_every_schedule() {
    let reference = Reference::load("llama-tiny");
    let whole = PipelineConfig { sequence_parallel: false, ..config(2) };
    let expected = train_first(&reference, "gpipe", 1, 4, &whole);
    for schedule in ["gpipe", "interleaved1f1b", "zb-h1", "dualpipev"] {
        let run = train_first(&reference, schedule, 2, 4, &config(2));
        for (Step { loss, .. }, Step { loss: expected, .. }) in run.iter().zip(&expected) {
            assert!((loss - expected).abs() <= TOLERANCE * expected, "{schedule}: {loss} {expected}");
        }
    }
}

#[test]
fn models_whose_layers_need_all_tokens_are_refused() {
    let refused = |name: &str, expected: &str| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
        let model = CutModel::from(ModelConfig::read(&folder).expect("it is of a known family"));
        let rank = TensorParallel::unconnected(TensorRank { index: 0, of: 2 });
        let layers = 0..model.layers();
        assert!(model.outline(layers.clone(), &rank).is_ok(), "{name} without shares");
        let error =
            model.outline(layers, &rank.with_sequence_parallel(true)).expect_err("it needs all tokens");
        let expected =
            format!("`mesh.sequence_parallel` does not work with this model: {expected}; set it to false");
        assert_eq!(error.to_string(), expected);
    };
    refused("qwen3-moe-tiny", "the routers of its mixtures need all tokens on every rank");
    refused("deepseek-v2-tiny", "the routers of its mixtures need all tokens on every rank");
    refused("hybrid-min", "layers of the family `hybrid` need all tokens on every rank");
    refused("nemotron-h-tiny", "layers of the family `nemotron_h` need all tokens on every rank");
}
