//! Schedules that cut microbatches into slices: losses, gradient norms and logits are within the tolerance of
//! PyTorch that whole microbatches have, and every gradient is the gradient of whole microbatches.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use burn::tensor::Tensor;
use pipewright::loss_scale::LossScaling;
use pipewright::mesh::DataParallelMode;
use pipewright::optimizer::ParameterGradient;
use pipewright::pipeline::PipelineConfig;
use pipewright::tensor::Precision;
use pipewright_models::ModelConfig;
use pipewright_schedule::{ScheduleSpec, Slices};

use crate::pipelined_run::{first_steps, train_first, train_spec};
use crate::reference::{Reference, Step};

/// The largest relative difference from whole microbatches.
const CLOSE: f64 = 1e-5;

/// Loads a reference without the balance loss of its routers, which slices do not have.
fn reference(model: &str) -> Reference {
    let mut reference = Reference::load(model);
    if let ModelConfig::Qwen3Moe(config) = &mut reference.config {
        config.mixture.output_router_logits = false;
        reference.expected.expected_aux.clear();
    }
    reference
}

fn sliced(
    reference: &Reference,
    ranks: u32,
    microbatches: u32,
    slices: u32,
    config: &PipelineConfig,
    steps: usize,
) -> Vec<Step> {
    let spec = ScheduleSpec { ranks, microbatches, slices: Slices::new(slices), ..ScheduleSpec::default() };
    train_spec(reference, "seq1f1b", spec, config, steps)
}

/// Trains with slices and compares the first steps with PyTorch's.
fn check(model: &str, ranks: u32, microbatches: u32, slices: u32, config: &PipelineConfig) {
    let reference = reference(model);
    let run = sliced(&reference, ranks, microbatches, slices, config, first_steps(&reference));
    reference.assert_close(&run, &reference.expected.steps[..run.len()]);
}

/// Trains on two ranks with slices and compares all steps, and the logits of an evaluation, with PyTorch's.
fn check_to_the_end(model: &str, microbatches: u32, slices: u32) {
    let reference = reference(model);
    let steps = reference.expected.steps.len();
    let run = sliced(&reference, 2, microbatches, slices, &PipelineConfig::default(), steps);
    reference.assert_close(&run, &reference.expected.steps);
}

#[test]
fn llama_in_slices_retraces_the_reference() {
    check_to_the_end("llama-tiny", 8, 2);
    for (ranks, microbatches, slices) in [(1, 2, 4), (4, 4, 4), (4, 8, 8)] {
        check("llama-tiny", ranks, microbatches, slices, &PipelineConfig::default());
    }
}

#[test]
fn other_families_in_slices_retrace_theirs() {
    check_to_the_end("qwen3-moe-tiny", 4, 4);
    for model in ["qwen2-tiny", "qwen3-tiny", "llama31-tiny", "llama-tied-tiny"] {
        check(model, 2, 4, 4, &PipelineConfig::default());
    }
}

#[test]
fn replicas_run_slices_whole_and_sharded() {
    use DataParallelMode::{Replicated, Sharded};
    for (ranks, data_parallel, data_parallel_mode) in [(1, 2, Replicated), (2, 2, Sharded)] {
        let config = PipelineConfig { data_parallel, data_parallel_mode, ..PipelineConfig::default() };
        check("llama-tiny", ranks, 8, 2, &config);
    }
}

#[test]
fn one_slice_has_the_bits_of_whole_microbatches() {
    let (reference, config) = (reference("llama-tiny"), PipelineConfig::default());
    let steps = first_steps(&reference);
    assert_eq!(sliced(&reference, 2, 4, 1, &config, steps), train_first(&reference, "1f1b", 2, 4, &config));
}

#[test]
fn slices_of_half_precision_stay_as_close_as_whole_microbatches() {
    let reference = reference("llama-tiny");
    let steps = first_steps(&reference);
    for precision in [Precision::Bf16, Precision::F16] {
        // In f16, with a scale that needs no skipped update to become small enough.
        let loss_scaling = LossScaling { initial: 256.0, ..LossScaling::default() };
        let config = PipelineConfig { precision, loss_scaling, ..PipelineConfig::default() };
        let run = sliced(&reference, 2, 4, 4, &config, steps);
        for (Step { loss, .. }, Step { loss: expected, .. }) in run.iter().zip(&reference.expected.steps) {
            // The bound of `pipelined.rs` for whole microbatches.
            assert!((loss - expected).abs() <= 3.0 * 1.3e-3 * expected, "{precision}: {loss} {expected}");
        }
    }
}

/// The gradients of the parameters in the first step, by path.
type Gradients = BTreeMap<String, Vec<f64>>;

/// Runs one step and returns it with all gradients before clipping.
fn gradients(model: &str, ranks: u32, microbatches: u32, slices: Option<u32>) -> (Step, Gradients) {
    let found = Arc::new(Mutex::new(Gradients::new()));
    let seen = found.clone();
    let hook = move |gradient: &mut ParameterGradient<'_>| {
        let path = gradient.path().to_owned();
        gradient.map(|flat: Tensor<1>| {
            let numbers = flat.to_data().iter::<f64>().collect();
            seen.lock().expect("no panic").insert(path, numbers);
            flat
        });
    };
    let config = PipelineConfig { gradient_hook: Some(Arc::new(hook)), ..PipelineConfig::default() };
    let reference = reference(model);
    let spec = ScheduleSpec {
        ranks,
        microbatches,
        slices: slices.map(|slices| Slices::new(slices).expect("not 0")),
        ..ScheduleSpec::default()
    };
    let schedule = if slices.is_some() { "seq1f1b" } else { "1f1b" };
    let step = train_spec(&reference, schedule, spec, &config, 1)[0];
    let found = std::mem::take(&mut *found.lock().expect("no panic"));
    (step, found)
}

#[test]
fn every_gradient_is_that_of_whole_microbatches() {
    for model in ["llama-tiny", "qwen2-tiny", "qwen3-moe-tiny"] {
        for ranks in [1, 2, 4] {
            let (whole, expected) = gradients(model, ranks, 4, None);
            assert!(expected.len() > 10, "{:?}", expected.keys());
            for slices in [1, 2, 4] {
                let (step, found) = gradients(model, ranks, 4, Some(slices));
                let what = format!("{model} on {ranks} ranks in {slices} slices");
                assert!(((step.loss - whole.loss) / whole.loss).abs() <= CLOSE, "{what}: {step:?} {whole:?}");
                assert!(found.keys().eq(expected.keys()), "{what}");
                for (path, expected) in &expected {
                    let found = &found[path];
                    let largest = expected.iter().fold(0f64, |largest, x| largest.max(x.abs()));
                    let error = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                    assert!(
                        error <= CLOSE * largest,
                        "{what}: {path} differs by {error:.1e} of {largest:.1e}"
                    );
                }
            }
        }
    }
}
