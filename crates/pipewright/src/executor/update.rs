//! The update of the parameters: the gradient sums are scaled to their mean and clipped, and the optimizer
//! takes a step.

use super::accumulation::Accumulation;
use super::context::RankContext;
use super::norm::{Norms, divisor};
use super::stages::LocalStages;
use super::step::Step;
use super::step_input::StepInput;
use crate::failure::{Cause, UpdateFailure};
use crate::optimizer::Factors;

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
    let factors = factors(context, step.input(), accumulation, norms);
    let learning_rate = step.input().learning_rate;
    for stage in stages.iter_mut() {
        // A skipped update notes this too: a rank that fails from here on may not learn that the loss scale
        // changes.
        step.begin_update(stage.index());
        if norms.whole.is_finite() {
            stage.runner_mut().update(&factors, learning_rate);
        } else {
            stage.runner_mut().drop_gradients();
        }
    }
    // The devices must have updated the parameters: in the next step a failure would be reported as one of
    // its actions.
    for stage in stages.iter() {
        step.begin_update(stage.index());
        stage.runner().await_parameters().map_err(|message| {
            let failure = UpdateFailure::of_device(message);
            Cause::Update { stage: stage.index(), failure }
        })?;
    }
    // The step is complete: a later failure must not undo its changes to running statistics.
    stages.forget_buffers();
    Ok(norms.whole)
}

/// Returns the factors that make the clipped mean of the gradient sums.
fn factors(context: &RankContext, input: &StepInput, accumulation: Accumulation, norms: &Norms) -> Factors {
    let config = context.config();
    let factor = |limit: Option<f64>, norm: f64| {
        let clip = limit.map_or(1.0, |limit| (limit / (norm + CLIP_EPSILON)).min(1.0));
        clip / divisor(input, accumulation) / input.loss_scale
    };
    let rest = factor(config.clip_norm, norms.parts.first().copied().unwrap_or(norms.whole));
    let groups = config.clip_groups.iter().zip(norms.parts.iter().skip(1));
    Factors { rest, groups: groups.map(|(group, &norm)| factor(Some(group.norm), norm)).collect() }
}
