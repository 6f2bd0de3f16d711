//! The sum of a block's input and what the block computes from it.

use burn::tensor::{DType, Tensor, bf16};
use pipewright_kernel::addition::{add_assign_bf16, add_bf16};

use super::operation::{CpuTensor, Operation, on_cpu, range_of, tensor_of};

/// Returns `a + b`, like Burn's `+`, but faster in bfloat16 on the CPU back end. The sum is written into the
/// memory of an operand that nothing else uses.
///
/// # Panics
/// When the shapes differ.
pub fn add(a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
    let (shape, of_b) = (a.dims(), b.dims());
    assert!(shape == of_b, "an addition takes two tensors of one shape, got {shape:?} and {of_b:?}");
    if [a.dtype(), b.dtype()] != [DType::BF16; 2] {
        return a + b;
    }
    let inputs = [a.clone().into_dispatch(), b.clone().into_dispatch()];
    let Some((operands, tape)) = on_cpu(inputs) else { return a + b };
    // These share the storage of the operands.
    drop((a, b));
    tape.record_tensor(sum(operands), |_| AdditionBackward)
}

/// Returns the sum of two tensors of bfloat16 that are in row-major order.
pub(super) fn sum([mut a, mut b]: [CpuTensor; 2]) -> CpuTensor {
    if add_in_place(&mut a, &b) {
        return a;
    }
    if add_in_place(&mut b, &a) {
        return b;
    }
    let [of_a, of_b] = [&a, &b].map(|tensor| &tensor.storage::<bf16>()[range_of(tensor)]);
    tensor_of(add_bf16(of_a, of_b), a.layout().shape().clone())
}

/// Adds `other` to `to` if nothing else uses the storage of `to`. Returns whether it has added.
fn add_in_place(to: &mut CpuTensor, other: &CpuTensor) -> bool {
    let range = range_of(to);
    let Some(storage) = to.try_storage_mut::<bf16>() else { return false };
    add_assign_bf16(&mut storage[range], &other.storage()[range_of(other)]);
    true
}

#[derive(Clone, Debug)]
struct AdditionBackward;

impl Operation<2> for AdditionBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 2]) -> [Option<CpuTensor>; 2] {
        [Some(gradient.clone()), Some(gradient)]
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::super::check::numbers;
    use super::*;

    fn list(tensor: Tensor<2>) -> Vec<f32> {
        tensor.into_data().iter().collect()
    }

    /// Checks the bits of the sum and of the gradients in this type, whatever else uses the operands.
    fn check(dtype: DType, device: &Device) {
        let upstream = numbers([3, 37], 1.0).cast(dtype);
        for is_shared in [[true, true], [true, false], [false, true], [false, false]] {
            let operand = |seed: f32| numbers([3, 37], seed).cast(dtype);
            let sum_and_gradients = |add: fn(Tensor<2>, Tensor<2>) -> Tensor<2>| {
                let strategy = device.gradient_checkpointing_strategy().expect("a device with a tape");
                let on_tape = |x: Tensor<2>| x.autodiff().with_gradient_checkpointing_strategy(strategy);
                let leaves = [1.0, 3.0].map(|seed| on_tape(operand(seed)).require_grad());
                let operands = leaves.clone().map(|leaf| leaf * 2.0);
                let kept = [0, 1].map(|i| is_shared[i].then(|| operands[i].clone()));
                let [a, b] = operands;
                let sum = add(a, b);
                let kept = kept.map(|kept| kept.map(list));
                let gradients = (sum.clone() * on_tape(upstream.clone())).sum().backward();
                let gradients = leaves.map(|leaf| list(leaf.grad(&gradients).expect("it is a leaf")));
                (list(sum), kept, gradients)
            };
            assert_eq!(sum_and_gradients(add), sum_and_gradients(|a, b| a + b), "{dtype:?} {is_shared:?}");
        }
    }

    #[test]
    fn sums_have_the_bits_of_burn_s_addition() {
        let device = Device::flex().autodiff();
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            check(dtype, &device);
            check(dtype, &device.clone().gradient_checkpointing());
        }
    }

    #[test]
    fn a_sum_takes_the_place_of_an_operand_that_nothing_else_uses() {
        let tensor = |data: [f32; 2]| {
            let data = TensorData::new(data.map(bf16::from_f32).to_vec(), [1, 2]);
            CpuTensor::from_data(data)
        };
        let start = |tensor: &CpuTensor| tensor.storage::<bf16>().as_ptr();
        for shared in 0..2 {
            let operands = [tensor([1.0, 2.0]), tensor([0.5, -1.0])];
            let (kept, free) = (operands[shared].clone(), start(&operands[1 - shared]));
            let found = sum(operands);
            assert_eq!(start(&found), free, "operand {shared} is shared");
            assert_ne!(start(&kept), free);
            assert_eq!(found.storage::<bf16>(), [1.5, 1.0].map(bf16::from_f32));
        }
        let both = tensor([1.0, 2.0]);
        let found = sum([both.clone(), both.clone()]);
        assert_eq!(both.storage::<bf16>(), [1.0, 2.0].map(bf16::from_f32));
        assert_eq!(found.storage::<bf16>(), [2.0, 4.0].map(bf16::from_f32));
    }

    #[test]
    #[should_panic(expected = "an addition takes two tensors of one shape, got [2, 3] and [1, 3]")]
    fn shapes_are_the_same() {
        add(numbers([2, 3], 1.0), numbers([1, 3], 1.0));
    }
}
