//! The update of the parameters: the gradient sums are scaled to their mean and clipped, and the optimizer
//! takes a step.
//!
//! With post-validation (Qi, Wan, Huang and Lin, 2023, section 4), a rank that waits for the norm updates its
//! stages meanwhile, as if the norm were small enough, and keeps what it needs to undo this. When it has the
//! norm, it keeps the updates if their factors have the bits of the right ones, and otherwise undoes them and
//! updates again. It begins the next step only after that.

use std::time::Instant;

use super::accumulation::Accumulation;
use super::context::RankContext;
use super::norm::{Norms, divisor};
use super::stages::LocalStages;
use super::step::Step;
use super::step_input::StepInput;
use crate::failure::{Cause, UpdateFailure};
use crate::optimizer::{ClipGroup, Factors};

/// Added to the norm before dividing by it, as PyTorch's `clip_grad_norm_` does.
const CLIP_EPSILON: f64 = 1e-6;

/// Scales the gradient sums to the mean over the microbatches, clips them, and takes the optimizer step. If
/// the norm is not finite, drops the sums instead. Returns the norm over all parameters.
pub(super) fn update(
    context: &RankContext,
    stages: &mut LocalStages,
    step: &mut Step,
    accumulation: Accumulation,
    norms: &Norms,
) -> Result<f64, Cause> {
    let assumed = factors(context, step.input(), accumulation, None);
    let factors = factors(context, step.input(), accumulation, Some(norms));
    let is_as_assumed = norms.whole.is_finite() && factors == assumed;
    let learning_rate = step.input().learning_rate;
    if let Some(hook) = context.hook() {
        hook.begin_update(context.world_rank);
    }
    for stage in stages.iter_mut() {
        // A skipped update notes this too: a rank that fails from here on may not learn that the loss scale
        // changes.
        step.begin_update(stage.index);
        let runner = stage.runner_mut();
        if is_as_assumed && runner.keep_update() {
            continue;
        }
        step.early_mut().undone |= runner.undo_update();
        if norms.whole.is_finite() {
            context.with_idle_threads(|| runner.update(&factors, learning_rate));
        } else {
            runner.skip_update();
        }
    }
    // The devices must have updated the parameters: in the next step a failure would be reported as one of
    // its actions.
    for stage in stages.iter() {
        step.begin_update(stage.index);
        stage.runner().await_parameters().map_err(|message| {
            let failure = UpdateFailure::of_device(message);
            Cause::Update { stage: stage.index, failure }
        })?;
    }
    // The step is complete: a later failure must not undo its changes to running statistics.
    stages.forget_buffers();
    Ok(norms.whole)
}

/// Updates the rank's next stage before it has the norm, as if no gradient were clipped. Returns `false` if
/// it has updated all of them.
pub(super) fn update_early(
    context: &RankContext,
    stages: &mut LocalStages,
    step: &mut Step,
    accumulation: Accumulation,
) -> bool {
    let Some(stage) = stages.iter_mut().nth(step.early.stages) else { return false };
    let start = Instant::now();
    let factors = factors(context, step.input(), accumulation, None);
    let (runner, learning_rate) = (stage.runner_mut(), step.input().learning_rate);
    let is_updated = context.with_idle_threads(|| runner.update_early(&factors, learning_rate));
    let early = step.early_mut();
    early.stages += 1;
    if is_updated {
        early.time += start.elapsed();
    }
    true
}

/// Returns the factors that make the clipped mean of the gradient sums; without norms, the mean that is not
/// clipped.
fn factors(
    context: &RankContext,
    input: &StepInput,
    accumulation: Accumulation,
    norms: Option<&Norms>,
) -> Factors {
    let config = &context.config;
    let clip = |limit: f64, norm: f64| (limit / (norm + CLIP_EPSILON)).min(1.0);
    let factor = |clip: f64| clip / divisor(input, accumulation) / input.loss_scale;
    let rest = config
        .clip_norm
        .zip(norms)
        .map_or(1.0, |(limit, norms)| clip(limit, norms.parts.first().copied().unwrap_or(norms.whole)));
    let clip_of_group = |(index, group): (usize, &ClipGroup)| {
        let norm = norms.and_then(|norms| norms.parts.get(1 + index));
        norm.map_or(1.0, |&norm| clip(group.norm, norm))
    };
    let groups = config.clip_groups.iter().enumerate().map(clip_of_group).map(factor).collect();
    Factors { rest: factor(rest), groups }
}
