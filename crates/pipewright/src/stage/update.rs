//! From a stage's gradient sums to its parameters: the hook, then the update.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::Tensor;
use pipewright_schedule::StageIndex;

use super::body::StageBody;
use super::error::{StageError, panic_message};
use super::training::TrainingStage;
use crate::optimizer::{Factors, GradientHook, ParameterGradient};
use crate::tensor::Value;

impl<M: StageBody> TrainingStage<M> {
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
        // Burn calls the optimizer of its group for each parameter, or that of the whole stage (`optimizer/adamw.rs`).
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
