//! Adapters on a frozen base, trained by the pipeline: within tolerance of PEFT
//! (`data/make_lora_references.py`), and bit-identical for every cut and schedule.

use pipewright::mesh::DataParallelMode;
use pipewright::pipeline::PipelineConfig;
use pipewright::tensor::Precision;
use pipewright_models::{Adapter, AdapterStart, LoraConfig, LoraTargets};
use pipewright_schedule::Recompute;

use crate::pipelined_run::{FIRST_STEPS, train, train_steps};
use crate::reference::{Reference, Step, Within};

/// Trains the adapter of a model for all steps of its reference.
fn check(model: &str, schedule: &str, ranks: u32, microbatches: u32) -> Vec<Step> {
    let reference = Reference::load_adapted(model);
    let run = train(&reference, schedule, ranks, microbatches, &PipelineConfig::default());
    reference.assert_close(&run, &reference.expected.steps);
    run
}

/// Trains the adapter of a model for the first steps with other settings.
fn check_first_steps(model: &str, schedule: &str, ranks: u32, config: &PipelineConfig) -> Vec<Step> {
    let reference = Reference::load_adapted(model);
    let run = train_steps(&reference, schedule, ranks, 8, config, FIRST_STEPS);
    reference.assert_close(&run, &reference.expected.steps[..FIRST_STEPS]);
    run
}

#[test]
fn one_rank_trains_as_peft_does() {
    for model in ["qwen3-tiny", "llama-tiny", "gpt2-tiny"] {
        check(model, "gpipe", 1, 1);
    }
}

#[test]
fn schedules_have_the_bits_of_one_rank() {
    for model in ["qwen3-tiny", "llama-tiny", "gpt2-tiny"] {
        let one_rank = check(model, "gpipe", 1, 4);
        for schedule in ["1f1b", "zb-h1", "zbvzerobubble"] {
            assert_eq!(check(model, schedule, 2, 4), one_rank, "{model}, {schedule}");
        }
    }
}

#[test]
fn other_cuts_and_recomputation_have_the_bits_of_one_rank() {
    let plain = PipelineConfig::default();
    let one_rank = check_first_steps("qwen3-tiny", "gpipe", 1, &plain);
    for (schedule, ranks) in [("zb-h1", 4), ("interleavedzerobubble", 2), ("dualpipev", 2)] {
        assert_eq!(check_first_steps("qwen3-tiny", schedule, ranks, &plain), one_rank, "{schedule}");
    }
    for recompute in [Recompute::Stage, Recompute::Block] {
        let config = PipelineConfig { recompute, ..PipelineConfig::default() };
        assert_eq!(check_first_steps("qwen3-tiny", "1f1b", 2, &config), one_rank);
    }
}

#[test]
fn replicas_and_tensor_ranks_train_as_peft_does() {
    for data_parallel_mode in [DataParallelMode::Replicated, DataParallelMode::Sharded] {
        let config = PipelineConfig { data_parallel: 2, data_parallel_mode, ..PipelineConfig::default() };
        check_first_steps("qwen3-tiny", "1f1b", 2, &config);
    }
    // The outputs of joined projections are in groups.
    let config = PipelineConfig { tensor_parallel: 2, ..PipelineConfig::default() };
    check_first_steps("gpt2-tiny", "zb-h1", 2, &config);
    for (tensor_parallel, ranks) in [(2, 2), (4, 1)] {
        let config = PipelineConfig { tensor_parallel, ..PipelineConfig::default() };
        check_first_steps("qwen3-tiny", "zb-h1", ranks, &config);
        check_first_steps("llama-tiny", "1f1b", ranks, &config);
    }
}

/// Returns a model with new adapters, which drop elements of their inputs.
fn with_dropout() -> Reference {
    let (targets, start) = (LoraTargets::AllLinear, AdapterStart::Seed(5));
    let lora = LoraConfig { rank: 4, alpha: 8.0, dropout: 0.3, rslora: false, targets };
    Reference { adapter: Some(Adapter { lora, start }), ..Reference::load_adapted("qwen3-tiny") }
}

#[test]
fn masks_and_first_values_do_not_depend_on_the_cut() {
    let plain = PipelineConfig::default();
    let run = |schedule, ranks, config| train_steps(&with_dropout(), schedule, ranks, 8, config, FIRST_STEPS);
    let one_rank = run("gpipe", 1, &plain);
    assert_eq!(run("zbvzerobubble", 2, &plain), one_rank);
    let recompute = PipelineConfig { recompute: Recompute::Stage, ..PipelineConfig::default() };
    assert_eq!(run("1f1b", 4, &recompute), one_rank);
    let reference = Reference::load_adapted("qwen3-tiny");
    assert_ne!(one_rank[1].grad_norm, reference.expected.steps[1].grad_norm, "nothing is dropped");
    // New adapters add zero, so the first loss is the base's.
    assert!((one_rank[0].loss - reference.expected.steps[0].loss).abs() < 1e-6 * one_rank[0].loss);
}

/// The base computes in half precision, and the adapters in single precision.
#[test]
fn half_precision_stays_near_single_precision() {
    let config = PipelineConfig { precision: Precision::Bf16, ..PipelineConfig::default() };
    let reference = Reference::load_adapted("llama-tiny");
    let run = train_steps(&reference, "1f1b", 2, 8, &config, 3);
    Reference::assert_within(&run, &reference.expected.steps, Within { loss: 4e-3, grad_norm: 5e-2 });
}
