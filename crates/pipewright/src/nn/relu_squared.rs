//! The squared rectifier (So et al., 2021).

use burn::tensor::{Tensor, activation};

use super::operation::{CpuTensor, Operation, cpu_tensor, elements, on_cpu};

/// Returns `max(x, 0)²`, element by element. The result has the shape of `x`.
pub fn relu_squared(x: Tensor<2>) -> Tensor<2> {
    let shape = x.dims();
    let Some(([x], tape)) = on_cpu([x.clone().into_dispatch()]) else { return composed(x) };
    let y = pipewright_kernel::relu_squared::forward(&elements(&x));
    tape.record(y, shape, |_| ReluSquaredBackward { x, shape })
}

fn composed(x: Tensor<2>) -> Tensor<2> {
    activation::relu(x).square()
}

#[derive(Clone, Debug)]
struct ReluSquaredBackward {
    x: CpuTensor,
    shape: [usize; 2],
}

impl Operation<1> for ReluSquaredBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 1]) -> [Option<CpuTensor>; 1] {
        let d = pipewright_kernel::relu_squared::backward(&elements(&self.x), &elements(&gradient));
        [Some(cpu_tensor(d, self.shape))]
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{check, numbers};
    use super::*;

    #[test]
    fn equals_its_composition() {
        check([numbers([45], 3.0)], |[x]| relu_squared(x.reshape([5, 9])), |[x]| composed(x.reshape([5, 9])));
    }
}
