//! Calls the gradient hook for the gradient sums of a stage.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::Tensor;
use pipewright_schedule::StageIndex;

use super::TrainingStage;
use crate::optimizer::{GradientHook, ParameterGradient};
use crate::stage::body::StageBody;
use crate::stage::error::{StageError, panic_message};
use crate::tensor::Value;

impl<M: StageBody> TrainingStage<M> {
    /// Calls the hook for each gradient. `factor` makes the mean of the sums. The norm is checked after the
    /// hook, so an element that is not finite before it is not a number after it.
    pub(super) fn show_gradients(
        &mut self,
        stage: StageIndex,
        factor: f64,
        hook: &dyn GradientHook,
    ) -> Result<(), StageError> {
        for index in 0..self.table.paths().len() {
            let Some(sum) = self.sums.get(index) else { continue };
            let (path, shape) = (self.table.paths()[index].clone(), sum.shape().to_vec());
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
            self.sums.set(index, Some(changed.reshaped(&shape).scaled(factor.recip())));
        }
        Ok(())
    }
}

/// Returns `changed` with an element that is not a number wherever `before` is infinite or not a number. Both
/// have one dimension. Nothing is read from the device.
fn not_finite_where(before: Value, changed: Value) -> Value {
    let is_finite = Tensor::<1>::from_dispatch(before.into_dispatch()).is_finite();
    let changed = Tensor::<1>::from_dispatch(changed.into_dispatch());
    Value::of(changed.mask_fill(is_finite.bool_not(), f32::NAN))
}
