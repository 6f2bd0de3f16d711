//! Adafactor: second moments by row and column, and steps relative to the size of a parameter.

use burn::optim::{AdafactorState, LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor};
use pipewright_kernel::squares::sum_squares;

use super::adamw::cpu;
use super::restored_state::RestoredState;
use crate::nn::{elements, sum, sum_dim};

/// Added to squared gradients, and the least size of a parameter for the size of its step.
const EPSILONS: [f32; 2] = [1e-30, 1e-3];
/// The exponent of the weight `step^-0.8` of a step's squares in the second moment.
const DECAY_RATE: f64 = -0.8;

/// Burn's `Adafactor` with the same update and the same state (Shazeer and Stern, 2018,
/// <https://arxiv.org/abs/1804.04235>), for parameters in single precision. The learning rate is the upper limit of the
/// relative step.
///
/// On the processor, its means have the same bits whatever the length of vectors and the number of threads.
///
/// ```
/// use pipewright::optimizer::Adafactor;
///
/// let optimizer = Adafactor { weight_decay: 0.1 }.init();
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Adafactor {
    /// The decay rate: a step subtracts `learning rate x weight decay x parameter`.
    pub weight_decay: f32,
}

impl Adafactor {
    /// Returns the optimizer of a whole module.
    pub fn init(self) -> ModuleOptimizer {
        ModuleOptimizer::from(self)
    }
}

/// The second moments of a parameter.
pub type AdafactorMoments<const D: usize> = RestoredState<AdafactorState<D>>;

impl Optimizer for Adafactor {
    type State<const D: usize> = AdafactorMoments<D>;

    fn step<const D: usize>(
        &self,
        learning_rate: LearningRate,
        parameter: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<AdafactorMoments<D>>,
    ) -> (Tensor<D>, Option<AdafactorMoments<D>>) {
        let state = next_state(&gradient, state);
        let update = match &state.column_second_moment {
            Some(columns) => {
                // The moments of rows are divided first, because the product of two small moments may be zero.
                let rows = state.second_moment.clone();
                gradient / (rows.clone() / mean_dim(rows, D - 2)).sqrt() / columns.clone().sqrt()
            }
            None => gradient / state.second_moment.clone().sqrt(),
        };
        let excess = root_mean_square(update.clone()).clamp_min(1.0);
        let size = root_mean_square(parameter.clone()).clamp_min(EPSILONS[1]);
        let step = learning_rate.min(1.0 / (state.time as f64).sqrt());
        let update = update / excess.unsqueeze() * size.unsqueeze() * step;
        let keep = 1.0 - learning_rate * f64::from(self.weight_decay);
        let kept = if self.weight_decay == 0.0 { parameter } else { parameter * keep };
        (kept - update, Some(RestoredState(state)))
    }

    fn to_device<const D: usize>(
        RestoredState(state): AdafactorMoments<D>,
        device: &Device,
    ) -> AdafactorMoments<D> {
        RestoredState(AdafactorState {
            time: state.time,
            second_moment: state.second_moment.to_device(device),
            column_second_moment: state.column_second_moment.map(|columns| columns.to_device(device)),
        })
    }
}

/// Returns the moments after a gradient. The moments of a vector have a number for each element.
fn next_state<const D: usize>(
    gradient: &Tensor<D>,
    before: Option<AdafactorMoments<D>>,
) -> AdafactorState<D> {
    let squares = gradient.clone().square() + EPSILONS[0];
    let (second_moment, column_second_moment) = if D >= 2 {
        (mean_dim(squares.clone(), D - 1), Some(mean_dim(squares, D - 2)))
    } else {
        (squares, None)
    };
    let Some(RestoredState(before)) = before else {
        return AdafactorState { time: 1, second_moment, column_second_moment };
    };
    let time = before.time + 1;
    let weight = libm::pow(time as f64, DECAY_RATE);
    let mixed = |old: Tensor<D>, new: Tensor<D>| old * (1.0 - weight) + new * weight;
    let columns = before.column_second_moment.zip(column_second_moment);
    AdafactorState {
        time,
        second_moment: mixed(before.second_moment, second_moment),
        column_second_moment: columns.map(|(old, new)| mixed(old, new)),
    }
}

fn mean_dim<const D: usize>(x: Tensor<D>, dim: usize) -> Tensor<D> {
    let count = x.dims()[dim];
    sum_dim(x, dim) / count as f64
}

fn root_mean_square<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    let count = x.shape().num_elements();
    (sum_of_squares(x) / count as f64).sqrt()
}

/// Returns the sum of the squares of all elements, `[1]`. On the processor, it is added in double precision.
pub(super) fn sum_of_squares<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    let device = x.device();
    match cpu(x.clone()) {
        Some(values) => Tensor::from_floats([sum_squares(&elements(&values)) as f32], &device),
        None => sum(x.square()),
    }
}

#[cfg(test)]
mod tests {
    use burn::optim::{AdafactorConfig, RecordState, StateSink};
    use burn::tensor::Tolerance;

    use super::*;

    fn check<const D: usize>(shape: [usize; D]) {
        let count: usize = shape.iter().product();
        let numbers = |seed: f32| -> Tensor<D> {
            let values: Vec<f32> = (0..count).map(|i| (i as f32 * 0.37 + seed).sin()).collect();
            Tensor::<1>::from_floats(values.as_slice(), &Device::flex()).reshape(shape)
        };
        let (own, of_burn) =
            (Adafactor { weight_decay: 0.1 }, AdafactorConfig::new().with_weight_decay(0.1).build());
        let (mut parameter, mut state) = (numbers(0.0), None);
        let (mut expected, mut expected_state) = (numbers(0.0), None);
        for t in 1..=3 {
            let gradient = numbers(t as f32);
            (parameter, state) = own.step(0.02, parameter, gradient.clone(), state);
            (expected, expected_state) = of_burn.step(0.02, expected, gradient, expected_state);
        }
        parameter.into_data().assert_approx_eq(&expected.into_data(), Tolerance::<f32>::rel_abs(1e-5, 1e-6));
        let (mut found, mut expected) = (StateSink::default(), StateSink::default());
        state.expect("a step returns a state").state_flatten("p", &mut found);
        expected_state.expect("a step returns a state").state_flatten("p", &mut expected);
        let names = |sink: &StateSink| -> Vec<String> {
            let tensors = sink.tensors.iter().map(|(name, _)| name);
            tensors.chain(sink.scalars.iter().map(|(name, _)| name)).cloned().collect()
        };
        assert_eq!(names(&found), names(&expected));
    }

    #[test]
    fn steps_and_states_equal_burns() {
        check([37]);
        check([7, 40]);
        check([40, 1]);
        check([5, 1, 4]);
    }
}
