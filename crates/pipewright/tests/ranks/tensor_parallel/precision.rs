//! Half precision on tensor ranks: the losses of one rank within rounding, and updates that all ranks skip
//! together.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use pipewright::loss_scale::LossScaling;
use pipewright::mesh::DataParallelMode::{self, Hybrid, Replicated, Sharded};
use pipewright::pipeline::{NamedParameter, Pipeline, PipelineConfig};
use pipewright::tensor::Precision;

use super::model::{Fault, Moment, Sizes, config_of, sizes, take_step, take_steps, try_launch};
use crate::support::Step;

/// A loss scale that is small enough for the gradients of the model.
const SMALL: f64 = 1024.0;

fn launch_in(precision: Precision, sizes: Sizes, initial: f64, fault: Option<Fault>) -> Pipeline {
    let loss_scaling = LossScaling { initial, interval: 2 };
    let config = PipelineConfig { precision, loss_scaling, ..config_of(sizes) };
    try_launch("1f1b", sizes, &config, fault).expect("it starts")
}

#[test]
fn half_precision_has_the_losses_of_one_rank_within_its_rounding() {
    let steps = |precision, sizes| take_steps(&mut launch_in(precision, sizes, SMALL, None), 0..4);
    let largest = |found: &[Step], expected: &[Step]| {
        let all = |steps: &[Step]| -> Vec<f64> {
            steps.iter().flat_map(|(losses, norm)| losses.iter().copied().chain([*norm])).collect()
        };
        let errors = all(found)
            .into_iter()
            .zip(all(expected))
            .map(|(found, expected)| (found - expected).abs() / expected.abs());
        errors.fold(0.0, f64::max)
    };
    let single = steps(Precision::F32, sizes(1, 1, 1));
    for (precision, tolerance) in [(Precision::Bf16, 4e-2), (Precision::F16, 5e-3)] {
        let one_rank = steps(precision, sizes(1, 1, 1));
        let rounding = largest(&one_rank, &single);
        assert!((1e-5..tolerance).contains(&rounding), "{precision}: {rounding:.1e}");
        for sizes in [sizes(1, 1, 2), sizes(2, 1, 3), sizes(2, 2, 2)] {
            let found = steps(precision, sizes);
            let error = largest(&found, &single);
            assert!((1e-5..tolerance).contains(&error), "{precision}, {sizes:?}: {error:.1e}");
            assert_eq!(steps(precision, sizes), found, "{precision}, {sizes:?}: the same bits again");
        }
    }
}

/// Returns the bits of all shards of all ranks.
fn shards(pipeline: &mut Pipeline) -> Vec<Vec<u32>> {
    let bits = |parameter: NamedParameter| parameter.data.iter::<f32>().map(f32::to_bits).collect();
    pipeline.parameters().expect("every rank answers").into_iter().map(bits).collect()
}

#[test]
fn all_ranks_skip_the_update_of_a_scale_that_is_too_large() {
    let skipped = |mode: DataParallelMode, sizes| {
        let loss_scaling = LossScaling { initial: f64::from(1 << 24), interval: 100 };
        let config = PipelineConfig {
            precision: Precision::F16,
            loss_scaling,
            data_parallel_mode: mode,
            ..config_of(sizes)
        };
        let mut pipeline = try_launch("1f1b", sizes, &config, None).expect("it starts");
        let mut before = shards(&mut pipeline);
        let step = |step| {
            let summary = take_step(&mut pipeline, step).expect("a step");
            let after = shards(&mut pipeline);
            let changed = before.iter().zip(&after).filter(|(before, after)| before != after).count();
            assert_eq!(changed, if summary.skipped { 0 } else { after.len() }, "all shards, or none");
            assert_eq!(summary.gradient_norm.is_finite(), !summary.skipped);
            before = after;
            summary.skipped
        };
        (0..16).map(step).collect::<Vec<bool>>()
    };
    let expected = skipped(Replicated, sizes(1, 1, 1));
    assert!(expected[0] && !expected[15], "{expected:?}");
    for (mode, sizes) in
        [(Replicated, sizes(2, 1, 3)), (Sharded, sizes(2, 2, 2)), (Hybrid { shards: 2 }, sizes(1, 4, 2))]
    {
        let found = skipped(mode, sizes);
        assert!(found[0] && !found[15], "{mode:?}, {sizes:?}: {found:?}");
    }
}

#[test]
fn an_overflow_on_one_tensor_rank_makes_all_skip() {
    let sizes = sizes(2, 2, 2);
    let left = Arc::new(AtomicU32::new(1));
    let armed = left.clone();
    let fault: Fault = Arc::new(move |moment| {
        let strikes = moment == Moment { stage: 0, microbatch: 2, rank: 1, is_backward: true };
        let once = || armed.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if strikes && once().is_ok() { f32::INFINITY } else { 0.0 }
    });
    let mut pipeline = launch_in(Precision::F16, sizes, SMALL, Some(fault));
    let before = shards(&mut pipeline);
    let first = take_step(&mut pipeline, 0).expect("a step");
    assert!(first.skipped && left.load(Ordering::SeqCst) == 0, "{first:?}");
    assert!(before == shards(&mut pipeline), "no shard of any rank has changed");
    let second = take_step(&mut pipeline, 0).expect("a step");
    assert_eq!((second.skipped, second.loss_scale), (false, Some(SMALL / 2.0)));
    // The next step is the same as in a run that began with this scale.
    let mut fresh = launch_in(Precision::F16, sizes, SMALL / 2.0, None);
    let expected = take_step(&mut fresh, 0).expect("a step");
    assert_eq!((second.losses, second.gradient_norm), (expected.losses, expected.gradient_norm));
    assert!(shards(&mut pipeline) == shards(&mut fresh));
}
