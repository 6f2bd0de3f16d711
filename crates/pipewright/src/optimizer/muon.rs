//! Muon: updates of matrices that are made almost orthogonal.

use burn::optim::momentum::{Momentum, MomentumConfig};
use burn::optim::{LearningRate, ModuleOptimizer, MuonState, Optimizer};
use burn::tensor::{Device, Tensor};

use super::adafactor::sum_of_squares;
use super::restored_state::RestoredState;
use crate::nn::{matrix_product, matrix_product_transposed};

/// Iterations that make an update orthogonal, and their coefficients (Jordan et al., "Muon", 2024).
const ITERATIONS: usize = 5;
const COEFFICIENTS: [f32; 3] = [3.4445, -4.775, 2.0315];
/// The least norm by which an update is divided.
const LEAST_NORM: f32 = 1e-7;

/// Burn's `Muon` with the same update and the same state. The learning rate is multiplied by `0.2 sqrt(max(rows,
/// columns))`, so that updates are as large as AdamW's (Liu et al., "Muon is Scalable for LLM Training", 2025).
///
/// On the processor, the products and the norm have the same bits whatever its instructions, its caches and the number of
/// threads.
///
/// ```
/// use pipewright::optimizer::Muon;
///
/// let optimizer = Muon { weight_decay: 0.1, ..Muon::default() }.init();
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Muon {
    /// The share of the last update that the next one keeps.
    pub momentum: f64,
    /// Whether the momentum looks ahead by one update.
    pub nesterov: bool,
    /// The decay rate: a step subtracts `learning rate x weight decay x parameter`.
    pub weight_decay: f32,
}

impl Default for Muon {
    /// The author's values.
    fn default() -> Self {
        Self { momentum: 0.95, nesterov: true, weight_decay: 0.0 }
    }
}

impl Muon {
    /// Returns the optimizer of a whole module.
    pub fn init(self) -> ModuleOptimizer {
        ModuleOptimizer::from(self)
    }
}

/// The momentum of a matrix.
pub type MuonMomentum<const D: usize> = RestoredState<MuonState<D>>;

impl Optimizer for Muon {
    type State<const D: usize> = MuonMomentum<D>;

    fn step<const D: usize>(
        &self,
        learning_rate: LearningRate,
        parameter: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<MuonMomentum<D>>,
    ) -> (Tensor<D>, Option<MuonMomentum<D>>) {
        let shape = parameter.dims();
        assert!(D == 2, "Muon updates matrices, and this parameter has {D} dimensions");
        let Self { momentum, nesterov, weight_decay } = *self;
        let momentum = Momentum::new(&MomentumConfig { momentum, dampening: 0.0, nesterov });
        let (update, momentum) = momentum.transform(gradient, state.map(|state| state.0.momentum));
        let size = 0.2 * (shape[0].max(shape[1]) as f64).sqrt();
        let update = orthogonal(update.reshape([shape[0], shape[1]])) * (learning_rate * size);
        let keep = 1.0 - learning_rate * f64::from(weight_decay);
        let kept = if weight_decay == 0.0 { parameter } else { parameter * keep };
        (kept - update.reshape(shape), Some(RestoredState(MuonState::new(momentum))))
    }

    fn to_device<const D: usize>(RestoredState(state): MuonMomentum<D>, device: &Device) -> MuonMomentum<D> {
        RestoredState(MuonState::new(state.momentum.to_device(device)))
    }
}

/// Returns a matrix with the singular vectors of `update` and singular values near 1, by iterations of Newton and Schulz.
fn orthogonal(update: Tensor<2>) -> Tensor<2> {
    let [rows, columns] = update.dims();
    let wide = if rows > columns { update.transpose() } else { update };
    let norm = sum_of_squares(wide.clone()).sqrt().clamp_min(LEAST_NORM);
    let mut x = wide / norm.unsqueeze();
    let [a, b, c] = COEFFICIENTS;
    for _ in 0..ITERATIONS {
        let gram = matrix_product_transposed(x.clone(), x.clone());
        let polynomial = gram.clone() * b + matrix_product(gram.clone(), gram) * c;
        x = x.clone() * a + matrix_product(polynomial, x);
    }
    if rows > columns { x.transpose() } else { x }
}

#[cfg(test)]
mod tests {
    use burn::optim::decay::WeightDecayConfig;
    use burn::optim::{AdjustLrFn, MuonConfig, RecordState, StateSink};
    use burn::tensor::Tolerance;

    use super::*;

    fn check(shape: [usize; 2]) {
        let count = shape[0] * shape[1];
        let numbers = |seed: f32| -> Tensor<2> {
            let values: Vec<f32> = (0..count).map(|i| (i as f32 * 0.37 + seed).sin()).collect();
            Tensor::<1>::from_floats(values.as_slice(), &Device::flex()).reshape(shape)
        };
        let own = Muon { weight_decay: 0.1, ..Muon::default() };
        let of_burn = MuonConfig::new()
            .with_weight_decay(Some(WeightDecayConfig::new(0.1)))
            .with_adjust_lr_fn(AdjustLrFn::MatchRmsAdamW)
            .build();
        let (mut parameter, mut state) = (numbers(0.0), None);
        let (mut expected, mut expected_state) = (numbers(0.0), None);
        for t in 1..=3 {
            let gradient = numbers(t as f32);
            (parameter, state) = own.step(0.02, parameter, gradient.clone(), state);
            (expected, expected_state) = of_burn.step(0.02, expected, gradient, expected_state);
        }
        let tolerance = Tolerance::<f32>::rel_abs(1e-4, 1e-5);
        parameter.into_data().assert_approx_eq(&expected.into_data(), tolerance);
    }

    #[test]
    fn steps_equal_burns() {
        check([12, 12]);
        check([7, 20]);
        check([20, 7]);
    }

    #[test]
    fn states_are_recorded_as_burns() {
        let (step, device) = ([1.0f32, -2.0], Device::flex());
        let tensor = || Tensor::<2>::from_floats([step, step], &device);
        let (_, state) = Muon::default().step(0.1, tensor(), tensor(), None);
        let mut sink = StateSink::default();
        state.expect("a step returns a state").state_flatten("p", &mut sink);
        let (_, state) = MuonConfig::new().build().step(0.1, tensor(), tensor(), None);
        let mut expected = StateSink::default();
        state.expect("a step returns a state").state_flatten("p", &mut expected);
        assert_eq!(sink.tensors, expected.tensors);
    }
}
