//! Error feedback: a correction for parameters that are delayed by one update, around any optimizer.

use burn::optim::{LearningRate, ModuleOptimizer, Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{Device, Tensor};

use crate::checkpoint::LAST_UPDATE;

/// An optimizer whose updates are corrected for a delay of one update.
///
/// With a delay ([`PipelineConfig::delayed`](crate::pipeline::PipelineConfig::delayed)), the gradient of each batch comes one
/// update too late: where a synchronous run makes the update `u(t)`, this one makes `u(t - 1)`. The next update adds the
/// error `u(t) - u(t - 1)` to its own:
///
/// `W(t + 1) = W(t) + u(t) + (u(t) - u(t - 1))`
///
/// Here `u(t)` is the whole update of the optimizer, with learning rate and weight decay; the first update is not corrected.
/// It is the correction of [Zmushko et al., 2026](https://arxiv.org/abs/2606.30634), for updates rather than gradients, with a
/// coefficient of 1, as the documentation of [RamTorch](https://github.com/lodestone-rock/RamTorch) gives their algorithm. The
/// state has one tensor more, `u(t)`, which is the difference of the parameters after and before the update.
///
/// ```
/// use pipewright::optimizer::{ErrorFeedback, Lion};
///
/// let optimizer = ErrorFeedback(Lion::default()).init();
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ErrorFeedback<O>(pub O);

impl<O: Optimizer> ErrorFeedback<O> {
    /// Returns the optimizer of a whole module.
    pub fn init(self) -> ModuleOptimizer {
        ModuleOptimizer::from(self)
    }
}

/// The state of the optimizer for a parameter, and its last update, with the parameter's shape. A state that was stored without
/// a correction, or of a parameter that is trained again, has no last update, and the next update is not corrected.
#[derive(Clone)]
pub struct ErrorFeedbackState<S, const D: usize> {
    inner: Option<S>,
    update: Option<Tensor<D>>,
}

impl<S: RecordState, const D: usize> RecordState for ErrorFeedbackState<S, D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        if let Some(update) = &self.update {
            out.push_tensor(prefix, LAST_UPDATE, update.to_data());
        }
        if let Some(inner) = &self.inner {
            inner.state_flatten(prefix, out);
        }
    }

    fn state_unflatten(prefix: &str, from: &mut StateSource, device: &Device) -> Option<Self> {
        let update = from.take_tensor(prefix, LAST_UPDATE).filter(|data| data.shape().len() == D);
        // The next step moves it to the device of the parameter.
        let update = update.map(|update| Tensor::from_data(update, &Device::flex()));
        let inner = S::state_unflatten(prefix, from, device);
        (inner.is_some() || update.is_some()).then_some(Self { inner, update })
    }
}

impl<O: Optimizer> Optimizer for ErrorFeedback<O> {
    type State<const D: usize> = ErrorFeedbackState<O::State<D>, D>;

    fn step<const D: usize>(
        &self,
        learning_rate: LearningRate,
        parameter: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let (inner, last) = state.map_or((None, None), |state| (state.inner, state.update));
        let (updated, inner) = self.0.step(learning_rate, parameter.clone(), gradient, inner);
        let update = updated.clone() - parameter;
        let corrected = match last {
            Some(last) => updated + (update.clone() - last),
            None => updated,
        };
        (corrected, Some(ErrorFeedbackState { inner, update: Some(update) }))
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        let inner = state.inner.map(|inner| O::to_device(inner, device));
        ErrorFeedbackState { inner, update: state.update.map(|update| update.to_device(device)) }
    }
}

#[cfg(test)]
mod tests {
    use burn::optim::{Sgd, SgdConfig};
    use burn::tensor::Tolerance;

    use super::*;
    use crate::optimizer::AdamW;

    const RATES: [f64; 4] = [0.1, 0.2, 0.2, 0.05];

    fn tensor(values: &[f32]) -> Tensor<1> {
        Tensor::from_floats(values, &Device::flex())
    }

    fn gradient(step: usize) -> Vec<f32> {
        (0..5).map(|i| ((i * 7 + step * 3) as f32).sin()).collect()
    }

    /// Takes the steps with `optimizer`, and puts its state away and back after each of them.
    fn steps<O: Optimizer>(optimizer: &O) -> Tensor<1> {
        let mut parameter = tensor(&[1.0, -2.0, 0.5, 3.0, 0.0]);
        let mut state = None;
        for (step, rate) in RATES.into_iter().enumerate() {
            (parameter, state) = optimizer.step(rate, parameter, tensor(&gradient(step)), state);
            let mut sink = StateSink::default();
            state.iter().for_each(|state: &O::State<1>| state.state_flatten("p", &mut sink));
            let mut source = StateSource::new(sink.scalars.into_iter().collect());
            sink.tensors.into_iter().for_each(|(name, data)| source.insert_tensor(name, data));
            state = O::State::<1>::state_unflatten("p", &mut source, &Device::flex());
        }
        parameter
    }

    /// Gradient descent with weight decay in the gradient, corrected as the formula says, in double precision.
    #[test]
    fn updates_follow_the_formula() {
        let sgd: Sgd = SgdConfig::new().build();
        let found = steps(&ErrorFeedback(sgd));
        let mut expected = [1.0, -2.0, 0.5, 3.0, 0.0_f64];
        let mut last: Option<Vec<f64>> = None;
        for (step, rate) in RATES.into_iter().enumerate() {
            let update: Vec<f64> =
                gradient(step).iter().map(|gradient| -rate * f64::from(*gradient)).collect();
            for (index, value) in expected.iter_mut().enumerate() {
                *value += update[index] + last.as_ref().map_or(0.0, |last| update[index] - last[index]);
            }
            last = Some(update);
        }
        let expected = expected.map(|value| value as f32);
        found.to_data().assert_approx_eq::<f32>(&tensor(&expected).to_data(), Tolerance::absolute(1e-6));
    }

    /// The moments take each gradient once, and weight decay is a part of the update.
    #[test]
    fn the_state_of_the_optimizer_is_kept() {
        let adamw = AdamW { weight_decay: 0.1, ..AdamW::default() };
        let found = steps(&ErrorFeedback(adamw));
        let mut parameter = tensor(&[1.0, -2.0, 0.5, 3.0, 0.0]);
        let (mut state, mut last) = (None, None);
        for (step, rate) in RATES.into_iter().enumerate() {
            let (plain, next) = adamw.step(rate, parameter.clone(), tensor(&gradient(step)), state);
            let update = plain - parameter.clone();
            parameter = parameter + update.clone() + update.clone() - last.unwrap_or_else(|| update.clone());
            (state, last) = (next, Some(update));
        }
        found.to_data().assert_approx_eq::<f32>(&parameter.to_data(), Tolerance::absolute(1e-6));
    }
}
