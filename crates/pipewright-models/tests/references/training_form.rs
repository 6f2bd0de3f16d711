//! Smoothed targets and noisy embeddings in training: within tolerance of PyTorch where that has the same numbers, and
//! bit-identical for every cut and schedule.

use pipewright::pipeline::PipelineConfig;
use pipewright_models::TrainingForm;
use pipewright_schedule::Recompute;

use crate::pipelined_run::{FIRST_STEPS, train, train_steps};
use crate::reference::{Reference, Step};

/// Trains for the first steps.
fn first(reference: &Reference, schedule: &str, ranks: u32, config: &PipelineConfig) -> Vec<Step> {
    train_steps(reference, schedule, ranks, 8, config, FIRST_STEPS)
}

/// Checks that schedules, cuts and recomputation have the bits of one rank, and returns the steps.
fn check_bits(reference: &Reference) -> Vec<Step> {
    let plain = PipelineConfig::default();
    let one_rank = first(reference, "gpipe", 1, &plain);
    for (schedule, ranks) in [("1f1b", 2), ("zb-h1", 4), ("zbvzerobubble", 2)] {
        assert_eq!(first(reference, schedule, ranks, &plain), one_rank, "{schedule}");
    }
    let config = PipelineConfig { recompute: Recompute::Stage, ..PipelineConfig::default() };
    assert_eq!(first(reference, "1f1b", 2, &config), one_rank);
    one_rank
}

#[test]
fn smoothed_targets_train_as_in_pytorch() {
    let mut reference = Reference::load_adapted("llama-tiny-smoothed");
    assert_eq!(reference.form.label_smoothing, 0.1);
    let run = train(&reference, "gpipe", 1, 1, &PipelineConfig::default());
    reference.assert_close(&run, &reference.expected.steps);
    check_bits(&reference);
    let expected = reference.expected.steps[..FIRST_STEPS].to_vec();
    for tensor_parallel in [2, 4] {
        let config = PipelineConfig { tensor_parallel, ..PipelineConfig::default() };
        reference.assert_close(&first(&reference, "zb-h1", 2, &config), &expected);
    }
    reference.cut.head_parts = 3;
    reference.assert_close(&first(&reference, "1f1b", 2, &PipelineConfig::default()), &expected);
}

#[test]
fn noise_does_not_depend_on_the_cut() {
    let plain = Reference::load_adapted("llama-tiny");
    let without = first(&plain, "gpipe", 1, &PipelineConfig::default());
    let form = TrainingForm { neftune_alpha: 5.0, ..TrainingForm::default() };
    let mut noisy = Reference { form, ..plain };
    let one_rank = check_bits(&noisy);
    assert!(one_rank.iter().zip(&without).all(|(one, other)| one.loss != other.loss), "there is noise");
    // Ranks that share the tokens of a row add the same numbers.
    for (tensor_parallel, sequence_parallel) in [(2, false), (2, true), (4, true)] {
        let config = PipelineConfig { tensor_parallel, sequence_parallel, ..PipelineConfig::default() };
        noisy.assert_close(&first(&noisy, "1f1b", 2, &config), &one_rank);
    }
    noisy.cut.embedding_parts = 3;
    assert_eq!(first(&noisy, "1f1b", 2, &PipelineConfig::default()), one_rank);
}
