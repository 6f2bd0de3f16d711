//! From a stage's gradient sums to its parameters: the hook, the groups of the optimizer, the update.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use burn::module::ParamId;
use burn::optim::ModuleOptimizer;
use burn::tensor::Tensor;
use pipewright_schedule::StageIndex;

use super::body::StageBody;
use super::error::{StageError, panic_message};
use super::module_parameters::parameters_of;
use super::training::TrainingStage;
use crate::optimizer::{ClipGroup, Factors, GradientHook, OptimizerGroup, ParameterGradient, group_of};
use crate::tensor::Value;

/// The optimizer of a stage as its pipeline configures it, without state.
#[derive(Clone, Default)]
pub(super) struct ConfiguredOptimizer {
    optimizer: Option<ModuleOptimizer>,
    groups: Arc<[OptimizerGroup]>,
    clip_groups: Arc<[ClipGroup]>,
    /// The group by whose norm each parameter is clipped.
    clipped_with: Vec<Option<usize>>,
}

impl<M: StageBody> TrainingStage<M> {
    /// Sets the optimizer and the groups of parameters. Must be called after the paths are set.
    pub(super) fn set_optimizer(
        &mut self,
        optimizer: Option<ModuleOptimizer>,
        groups: Arc<[OptimizerGroup]>,
        clip_groups: Arc<[ClipGroup]>,
    ) {
        self.configured = ConfiguredOptimizer { optimizer, groups, clip_groups, clipped_with: Vec::new() };
        self.optimizer = self.fresh_optimizer();
    }

    /// Finds the groups of the stage's parameters. Returns the optimizer without state.
    pub(super) fn fresh_optimizer(&mut self) -> Option<ModuleOptimizer> {
        let ids: Vec<ParamId> = parameters_of(self.module()).iter().map(|found| found.id).collect();
        let (paths, configured) = (self.sums.paths(), &mut self.configured);
        let clipped_with = paths.iter().map(|path| group_of(&configured.clip_groups, path));
        configured.clipped_with = clipped_with.collect();
        let groups = &configured.groups;
        let group_of: Vec<Option<usize>> = paths.iter().map(|path| group_of(groups, path)).collect();
        let members = |group| {
            let members = ids.iter().zip(&group_of).filter(|(_, found)| **found == Some(group));
            members.map(|(id, _)| *id).collect()
        };
        let add = |whole, (place, group): (usize, &OptimizerGroup)| group.add_to(whole, members(place));
        configured.optimizer.clone().map(|whole| groups.iter().enumerate().fold(whole, add))
    }

    /// Calls the hook for each gradient. `factor` makes the mean of the sums. The norm is checked after the hook, so an
    /// element that is not finite before it is not a number after it.
    pub(super) fn show_gradients(
        &mut self,
        stage: StageIndex,
        factor: f64,
        hook: &dyn GradientHook,
    ) -> Result<(), StageError> {
        for place in 0..self.sums.paths().len() {
            let Some(sum) = self.sums.get(place) else { continue };
            let (path, shape) = (self.sums.paths()[place].clone(), sum.shape().to_vec());
            let mut gradient = ParameterGradient::new(stage, &path, sum.clone().scaled(factor));
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| hook.change(&mut gradient))) {
                return Err(StageError::HookPanicked { parameter: path, message: panic_message(&*panic) });
            }
            let Some(changed) = gradient.changed() else { continue };
            let (found, expected) = (changed.shape().to_vec(), shape.iter().product());
            if found != [expected] {
                return Err(StageError::HookShape { parameter: path, expected, found });
            }
            let changed = not_finite_where(sum.reshaped(&[expected]), changed);
            self.sums.set(place, Some(changed.reshaped(&shape).scaled(factor.recip())));
        }
        Ok(())
    }

    /// Multiplies the gradient sums by their factors, takes one optimizer step with them and clears them.
    pub(super) fn take_step(&mut self, factors: &Factors, learning_rate: f64) {
        let Some(mut optimizer) = self.optimizer.take() else { return self.sums.clear() };
        // The module is moved through the optimizer, so that it owns the storage and may write in place.
        let module = self.take_module();
        let groups = &self.configured.clipped_with;
        let gradients = self.sums.take(&module, |place| factors.of(groups[place]));
        self.module = Some(optimizer.step(learning_rate, module, gradients));
        self.optimizer = Some(optimizer);
    }
}

/// Returns `changed` with elements that are not a number where those of `before` are infinite or not a number. Both have
/// one dimension. Nothing is read from the device.
fn not_finite_where(before: Value, changed: Value) -> Value {
    let is_finite = Tensor::<1>::from_dispatch(before.into_dispatch()).is_finite();
    let changed = Tensor::<1>::from_dispatch(changed.into_dispatch());
    Value::of(changed.mask_fill(is_finite.bool_not(), f32::NAN))
}
