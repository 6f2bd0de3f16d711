//! The loss scale in f16: updates that are skipped, the scale's way down and up, and its place in
//! checkpoints.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use pipewright::loss_scale::LossScaling;
use pipewright::mesh::DataParallelMode;
use pipewright::optimizer::ParameterGradient;
use pipewright::pipeline::{Layers, Pipeline, PipelineConfig};
use pipewright::stage::{StageContext, StageModule};
use pipewright::tensor::Precision;

use super::run::{Outcome, batch_of, in_precision, launch, run, saved, train};

/// Enough for a scale that is too large, updates until it is doubled, and a second time that it is too large.
const STEPS: u64 = 16;

fn scaled(initial: f64, interval: u32) -> PipelineConfig {
    let loss_scaling = LossScaling { initial, interval };
    PipelineConfig { loss_scaling, ..in_precision(Precision::F16) }
}

/// A scale that is too large for the gradients of the small model.
fn too_large() -> PipelineConfig {
    scaled(f64::from(1 << 24), 2)
}

/// Checks that updates were skipped at the start and again later, after the scale was doubled.
fn assert_varied(outcome: &Outcome) {
    let Outcome { skipped, scales, norms, .. } = outcome;
    let first_update = skipped.iter().position(|skipped| !skipped).expect("the scale becomes small enough");
    assert!(first_update > 0, "the first scale is too large: {scales:?}");
    assert!(skipped[first_update..].contains(&true), "the scale becomes too large again: {scales:?}");
    for (step, pair) in scales.windows(2).enumerate() {
        let (Some(before), Some(after)) = (pair[0], pair[1]) else { panic!("f16 has a scale") };
        let expected: &[f64] = if skipped[step] { &[0.5] } else { &[1.0, 2.0] };
        assert!(expected.contains(&(after / before)), "step {step}: {scales:?} {skipped:?}");
    }
    for (norm, skipped) in norms.iter().zip(skipped) {
        assert_eq!(norm.is_finite(), !skipped);
    }
}

#[test]
fn skipped_updates_are_the_same_for_every_cut() {
    let expected = run("gpipe", 1, &too_large(), STEPS).expect("one stage");
    assert_varied(&expected);
    for schedule in ["gpipe", "1f1b", "zb-h1", "interleaved1f1b", "zbvzerobubble", "dualpipev"] {
        for ranks in [1, 2, 4] {
            let Some(found) = run(schedule, ranks, &too_large(), STEPS) else { continue };
            assert_eq!(found, expected, "{schedule} on {ranks} ranks");
        }
    }
}

#[test]
fn replicas_skip_the_same_updates_whole_and_sharded() {
    let of = |data_parallel_mode| PipelineConfig { data_parallel: 2, data_parallel_mode, ..too_large() };
    let whole = run("1f1b", 2, &of(DataParallelMode::Replicated), STEPS).expect("two stages");
    assert_varied(&whole);
    let sharded = run("1f1b", 2, &of(DataParallelMode::Sharded), STEPS).expect("two stages");
    assert_eq!(sharded, whole);
}

#[test]
fn a_skipped_update_changes_neither_parameters_nor_optimizer_state() {
    let mut pipeline = launch("1f1b", 2, &too_large()).expect("two stages");
    let initial = train(&mut pipeline, 0..0).parameters;
    let scale = loop {
        let Outcome { scales, skipped, parameters, .. } = train(&mut pipeline, 0..1);
        if !skipped[0] {
            assert_ne!(parameters, initial);
            break scales[0].expect("f16 has a scale");
        }
        assert_eq!(parameters, initial);
    };
    // A run that begins with the scale that is small enough has no skipped update.
    let mut fresh = launch("1f1b", 2, &scaled(scale, 2)).expect("two stages");
    assert_eq!(train(&mut fresh, 0..1).skipped, [false]);
    assert_eq!(train(&mut fresh, 1..STEPS), train(&mut pipeline, 1..STEPS));
}

#[test]
fn the_scale_does_not_change_the_norm() {
    let [small, large] =
        [64.0, 4096.0].map(|scale| run("1f1b", 2, &scaled(scale, 2000), 1).expect("two stages"));
    // Only gradients that are too small for a full mantissa differ.
    let (small, large) = (small.norms[0], large.norms[0]);
    assert!((small - large).abs() <= 1e-3 * large, "{small} {large}");
}

#[test]
fn a_gradient_hook_does_not_hide_an_overflow() {
    let skipped = |gradient_hook| {
        run("1f1b", 2, &PipelineConfig { gradient_hook, ..too_large() }, STEPS).expect("two stages").skipped
    };
    let zero = |gradient: &mut ParameterGradient<'_>| gradient.map(|flat| flat.zeros_like());
    let found = skipped(Some(Arc::new(zero)));
    let expected = skipped(None);
    // With gradients of zero the parameters stay, so that later overflows may differ.
    let first_update = expected.iter().position(|skipped| !skipped).expect("the scale becomes small enough");
    assert_eq!(found[..=first_update], expected[..=first_update]);
    assert!(first_update > 0 && found[first_update..].contains(&true), "{found:?}");
}

#[test]
fn accumulated_gradients_are_skipped_together() {
    let mut pipeline = launch("1f1b", 2, &too_large()).expect("two stages");
    let before = train(&mut pipeline, 0..0).parameters;
    let first = pipeline.accumulate(batch_of(0)).expect("a step");
    assert_eq!((first.loss_scale, first.skipped), (Some(f64::from(1 << 24)), false), "nothing was due");
    let Outcome { scales, skipped, parameters, .. } = train(&mut pipeline, 1..2);
    assert_eq!((scales[0], skipped[0]), (first.loss_scale, true));
    assert_eq!(parameters, before);
}

#[test]
fn a_run_resumes_with_its_scale_to_the_bit() {
    let expected = run("gpipe", 1, &too_large(), STEPS).expect("one stage");
    for stop in [1, 3, STEPS / 2, STEPS - 3] {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let mut pipeline = launch("1f1b", 2, &too_large()).expect("two stages");
        train(&mut pipeline, 0..stop);
        let checkpoint = saved(&mut pipeline, stop, folder.path());
        let mut resumed = launch("zbvzerobubble", 4, &too_large()).expect("eight stages");
        resumed.restore(&checkpoint).expect("it fits");
        let found = train(&mut resumed, stop..STEPS);
        let place = stop as usize;
        assert_eq!(found.losses, expected.losses[place..], "from step {stop}");
        assert_eq!(found.norms, expected.norms[place..], "from step {stop}");
        assert_eq!(found.scales, expected.scales[place..], "from step {stop}");
        assert_eq!(found.parameters, expected.parameters, "from step {stop}");
    }
}

#[test]
fn a_checkpoint_of_another_precision_has_no_scale() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let mut pipeline = launch("1f1b", 2, &in_precision(Precision::F32)).expect("two stages");
    let summary = pipeline.step_batch(batch_of(0), 1e-2).expect("a step");
    assert_eq!((summary.loss_scale, summary.skipped), (None, false));
    let checkpoint = saved(&mut pipeline, 1, folder.path());
    let mut resumed = launch("1f1b", 2, &scaled(512.0, 2)).expect("two stages");
    // The scale of the steps before a restore does not remain.
    train(&mut resumed, 0..3);
    resumed.restore(&checkpoint).expect("it fits");
    assert_eq!(train(&mut resumed, 1..3).scales, [512.0, 512.0].map(Some));
}

/// Multiplies by its factors. The gradient of its output is too large for f16 at every scale.
#[derive(Module, Debug)]
struct Steep {
    factors: Param<Tensor<1>>,
}

impl StageModule for Steep {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        input * self.factors.val().unsqueeze()
    }
}

fn steep(config: PipelineConfig) -> Pipeline {
    let layer = |_| Steep { factors: Param::from_tensor(Tensor::ones([4], &Device::flex())) };
    let builder = Pipeline::builder(Layers::new(2, layer)).ranks(2).microbatches(2);
    let loss = |output: Tensor<2>, target: Tensor<2>| ((output - target) * 1e6).mean();
    builder.loss(loss).config(config).launch().expect("it starts")
}

#[test]
fn a_gradient_that_no_scale_makes_finite_is_an_error() {
    let mut pipeline = steep(scaled(4.0, 2));
    let batch = || Tensor::<2>::ones([4, 4], &Device::flex());
    let mut step = || pipeline.step(batch(), batch(), 1e-2);
    for scale in [4.0, 2.0] {
        let summary = step().expect("it is skipped");
        assert_eq!((summary.loss_scale, summary.skipped), (Some(scale), true));
    }
    for _ in 0..2 {
        let error = step().expect_err("there is no smaller scale").to_string();
        assert!(error.contains("the gradient of `layers.0.factors` is not finite"), "{error}");
    }
}

#[test]
fn settings_outside_their_bounds_are_refused() {
    let layer = |_| Steep { factors: Param::from_tensor(Tensor::ones([4], &Device::flex())) };
    for (initial, interval) in [(3.0, 1), (0.5, 1), (2.0, 0)] {
        let builder = Pipeline::builder(Layers::new(1, layer)).microbatches(1);
        let loss = |output: Tensor<2>, target: Tensor<2>| (output - target).square().mean();
        let error = builder.loss(loss).config(scaled(initial, interval)).launch();
        let error = error.err().expect("they are wrong").to_string();
        assert!(error.contains("a power of two"), "{error}");
    }
}
