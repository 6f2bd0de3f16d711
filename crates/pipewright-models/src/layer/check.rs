//! For tests: a layer against its definition, in values and in gradients.

use burn::tensor::{Device, Tensor, TensorData, Tolerance};

/// Asserts that `layer` and `definition` agree, for an input of `shape` with elements of up to `scale`, in the result and
/// in the gradient of a sum that weighs each element of the result differently.
pub(super) fn check<const D: usize, const E: usize>(
    shape: [usize; D],
    scale: f32,
    layer: impl Fn(Tensor<D>) -> Tensor<E>,
    definition: impl Fn(Tensor<D>) -> Tensor<E>,
) {
    let run = |function: &dyn Fn(Tensor<D>) -> Tensor<E>| {
        let input = numbers(shape, scale, 31).require_grad();
        let result = function(input.clone());
        let loss = (result.clone() * numbers(result.dims(), 1.0, 17)).sum();
        let gradient = input.grad(&loss.backward()).expect("the input is a leaf");
        (result.into_data(), gradient.into_data())
    };
    let (result, gradient) = run(&layer);
    let (expected_result, expected_gradient) = run(&definition);
    let tolerance = Tolerance::<f32>::rel_abs(1e-4, 2e-6 * scale.max(1.0));
    result.assert_approx_eq(&expected_result, tolerance);
    gradient.assert_approx_eq(&expected_gradient, tolerance);
}

/// Numbers without a pattern in `-scale..scale`.
pub(super) fn numbers<const D: usize>(shape: [usize; D], scale: f32, step: u32) -> Tensor<D> {
    let mut state = step;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (f64::from(state) / f64::from(u32::MAX) * 2.0 - 1.0) as f32 * scale
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    Tensor::from_data(TensorData::new(values, shape), &Device::flex().autodiff())
}
