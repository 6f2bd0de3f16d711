//! Adapters on a base in GGUF, with matrices of all types: within tolerance of PEFT on the weights that gguf-py decodes, and
//! with the bits of the decoded base and of every cut.

use std::fs;

use burn::tensor::Device;
use pipewright::pipeline::PipelineConfig;
use pipewright::tensor::Precision;
use pipewright_models::{Adapter, AdapterStart, LoraConfig, hf};
use pipewright_schedule::Recompute;
use tempfile::TempDir;

use crate::pipelined_run::{FIRST_STEPS, train, train_steps};
use crate::reference::{Reference, Step, Within};

const BASES: [&str; 2] = ["llama-gguf", "gpt2-gguf"];

fn run(reference: &Reference, schedule: &str, ranks: u32, config: &PipelineConfig) -> Vec<Step> {
    train_steps(reference, schedule, ranks, 8, config, FIRST_STEPS)
}

#[test]
fn a_base_in_gguf_trains_as_with_peft() {
    for base in BASES {
        let reference = Reference::load_adapted(base);
        let within = Within { loss: 5e-6, grad_norm: 5e-6 };
        let one_rank = train(&reference, "gpipe", 1, 1, &PipelineConfig::default());
        assert_eq!(one_rank.len(), reference.expected.steps.len());
        Reference::assert_within(&one_rank, &reference.expected.steps, within);
        // Cuts of the inputs go through blocks of 32 and 256 elements.
        for (tensor_parallel, data_parallel) in [(2, 1), (4, 1), (1, 2)] {
            let config = PipelineConfig { tensor_parallel, data_parallel, ..PipelineConfig::default() };
            Reference::assert_within(&run(&reference, "1f1b", 2, &config), &reference.expected.steps, within);
        }
    }
}

#[test]
fn a_base_in_gguf_has_the_bits_of_the_decoded_base_for_every_cut() {
    BASES.iter().for_each(|base| check_bits(base));
}

fn check_bits(base: &str) {
    let mut reference = Reference::load_adapted(base);
    let folder = TempDir::new().expect("a folder");
    let dir = folder.path().join("decoded");
    let config = &*reference.config;
    let stage = hf::load_stage(&reference.dir, config, 0..config.layers(), Device::flex()).expect("it loads");
    hf::save(&dir, config, &[&stage]).expect("it is written");
    fs::copy(reference.tokens(), dir.join("tokens.jsonl")).expect("the rows");
    let mut decoded = Reference { dir, ..Reference::load_adapted(base) };
    let plain = PipelineConfig::default();
    for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
        let config = PipelineConfig { precision, ..PipelineConfig::default() };
        assert_eq!(run(&reference, "1f1b", 2, &config), run(&decoded, "1f1b", 2, &config), "{precision}");
    }
    let one_rank = run(&decoded, "gpipe", 1, &plain);
    for (schedule, ranks) in [("zb-h1", 4), ("zbvzerobubble", 2), ("1f1b", 2)] {
        assert_eq!(run(&reference, schedule, ranks, &plain), one_rank, "{schedule}");
    }
    let recompute = PipelineConfig { recompute: Recompute::Stage, ..PipelineConfig::default() };
    assert_eq!(run(&reference, "1f1b", 2, &recompute), one_rank);
    let dora = LoraConfig { rank: 4, dora: true, ..LoraConfig::default() };
    for reference in [&mut reference, &mut decoded] {
        reference.adapter = Some(Adapter { lora: dora.clone(), start: AdapterStart::Seed(5) });
    }
    assert_eq!(run(&reference, "1f1b", 2, &plain), run(&decoded, "1f1b", 2, &plain), "with magnitudes");
}
