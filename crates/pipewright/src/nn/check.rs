//! Compares an operation with its plain composition, forward and backward.

use burn::tensor::{DType, Device, Tensor, TensorData, Tolerance};

/// Returns numbers between `-scale` and `scale` with a long period.
pub(super) fn numbers<const D: usize>(shape: [usize; D], scale: f32) -> Tensor<D> {
    let count = shape.iter().product();
    let value = |place: usize| ((place * 7919 + count * 31) % 2003) as f32 / 1001.5 - 1.0;
    let values: Vec<f32> = (0..count).map(|place| value(place) * scale).collect();
    Tensor::from_data(TensorData::new(values, shape), &Device::flex())
}

/// Checks that the results and the gradients of all inputs agree, for an upstream gradient that is not
/// uniform. On a tape with gradient checkpointing, the operation itself is composed of Burn's.
pub(super) fn check<const N: usize>(
    inputs: [Tensor<1>; N],
    operation: impl Fn([Tensor<1>; N]) -> Tensor<2>,
    composition: impl Fn([Tensor<1>; N]) -> Tensor<2>,
) {
    let run = |function: &dyn Fn([Tensor<1>; N]) -> Tensor<2>, device: &Device| {
        let leaves =
            inputs.clone().map(|input| Tensor::<1>::from_data(input.into_data(), device).require_grad());
        let result = function(leaves.clone());
        let upstream = (numbers(result.dims(), 1.0) + 0.5).into_data();
        let gradients = (result.clone() * Tensor::from_data(upstream, device)).sum().backward();
        let gradients = leaves.map(|leaf| leaf.grad(&gradients).expect("each input is differentiated"));
        (result.into_data(), gradients.map(Tensor::into_data))
    };
    let device = Device::flex().autodiff();
    let found = run(&operation, &device);
    let with_checkpointing = run(&operation, &device.clone().gradient_checkpointing());
    let (expected, expected_gradients) = run(&composition, &device);
    let tolerance = Tolerance::<f32>::rel_abs(2e-5, 2e-5);
    for (result, gradients) in [&found, &with_checkpointing] {
        result.assert_approx_eq::<f32>(&expected, tolerance);
        for (found, expected) in gradients.iter().zip(&expected_gradients) {
            found.assert_approx_eq::<f32>(expected, tolerance);
        }
    }
    // Without a tape the result has the same bits.
    let plain = operation(inputs.clone()).into_data();
    assert_eq!(plain, found.0);
}

/// Like [`check`], but the composition is `operation` in double precision: hand-written operations are in
/// single precision only.
pub(super) fn check_in_f64<const N: usize>(
    inputs: [Tensor<1>; N],
    operation: impl Fn([Tensor<1>; N]) -> Tensor<2>,
) {
    let precise =
        |inputs: [Tensor<1>; N]| operation(inputs.map(|input| input.cast(DType::F64))).cast(DType::F32);
    check(inputs, &operation, precise);
}
