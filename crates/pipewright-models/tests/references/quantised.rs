//! Adapters on a base that bitsandbytes has quantised: within tolerance of PEFT on the same base, and with the
//! bits of the decoded base and of every cut.

use std::fs;

use burn::tensor::Device;
use pipewright::pipeline::PipelineConfig;
use pipewright::tensor::Precision;
use pipewright_models::{Adapter, AdapterStart, LoraConfig, hf};
use pipewright_schedule::Recompute;
use tempfile::TempDir;

use crate::pipelined_run::{FIRST_STEPS, in_part, train, train_steps};
use crate::reference::{Reference, Step, Within};

/// The bases: double quantisation, and single quantisation.
const BASES: [&str; 2] = ["llama-nf4", "llama-fp4"];

fn run(reference: &Reference, schedule: &str, ranks: u32, config: &PipelineConfig) -> Vec<Step> {
    train_steps(reference, schedule, ranks, 8, config, FIRST_STEPS)
}

#[test]
fn one_rank_trains_as_peft_does() {
    for base in BASES {
        let reference = Reference::load_adapted(base);
        let run = train(&reference, "gpipe", 1, 1, &PipelineConfig::default());
        assert_eq!(run.len(), reference.expected.steps.len());
        Reference::assert_within(&run, &reference.expected.steps, Within { loss: 5e-6, grad_norm: 5e-6 });
    }
}

#[test]
fn cuts_and_recomputation_have_the_bits_of_one_rank() {
    for base in BASES {
        let reference = Reference::load_adapted(base);
        let one_rank = run(&reference, "gpipe", 1, &PipelineConfig::default());
        for (schedule, ranks) in [("zb-h1", 4), ("zbvzerobubble", 2), ("1f1b", 2)] {
            assert_eq!(run(&reference, schedule, ranks, &PipelineConfig::default()), one_rank, "{schedule}");
        }
        for recompute in [Recompute::Stage, in_part(), Recompute::Parts] {
            let config = PipelineConfig { recompute, ..PipelineConfig::default() };
            assert_eq!(run(&reference, "1f1b", 2, &config), one_rank);
        }
    }
}

#[test]
fn replicas_and_tensor_ranks_train_as_peft_does() {
    let within = Within { loss: 5e-6, grad_norm: 5e-6 };
    for base in BASES {
        let reference = Reference::load_adapted(base);
        // Cuts of the inputs go through blocks of 64 elements.
        for (tensor_parallel, data_parallel) in [(1, 2), (2, 1), (4, 1)] {
            let config = PipelineConfig { tensor_parallel, data_parallel, ..PipelineConfig::default() };
            Reference::assert_within(&run(&reference, "1f1b", 2, &config), &reference.expected.steps, within);
        }
    }
}

/// Returns the same run on a base with the decoded elements.
fn on_decoded(reference: &Reference) -> (TempDir, Reference) {
    let folder = TempDir::new().expect("a folder");
    let dir = folder.path().join("decoded");
    let config = &*reference.config;
    let stage = hf::load_stage(&reference.dir, config, 0..config.layers(), Device::flex()).expect("it loads");
    hf::save(&dir, config, &[&stage]).expect("it is written");
    fs::copy(reference.tokens(), dir.join("tokens.jsonl")).expect("the rows");
    let decoded =
        Reference { dir, adapter: reference.adapter.clone(), ..Reference::load_adapted("llama-nf4") };
    (folder, decoded)
}

#[test]
fn results_have_the_bits_of_the_decoded_base() {
    let dora = LoraConfig { rank: 4, dora: true, dropout: 0.2, ..LoraConfig::default() };
    for base in BASES {
        let mut reference = Reference::load_adapted(base);
        for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
            let config = PipelineConfig { precision, ..PipelineConfig::default() };
            let (_folder, decoded) = on_decoded(&reference);
            assert_eq!(run(&reference, "1f1b", 2, &config), run(&decoded, "1f1b", 2, &config), "{precision}");
        }
        reference.adapter = Some(Adapter { lora: dora.clone(), start: AdapterStart::Seed(5) });
        let (_folder, decoded) = on_decoded(&reference);
        let config = PipelineConfig::default();
        assert_eq!(run(&reference, "1f1b", 2, &config), run(&decoded, "1f1b", 2, &config), "with magnitudes");
    }
}
