//! Sums over the elements of rows, and operations whose backward is such a sum. Burn's processor back end adds the
//! elements of a row in as many lanes as the processor's vectors have, so its sums depend on the processor. Sums of rows,
//! over dimensions before the last one, do not.

use burn::tensor::{Tensor, activation};
use pipewright_kernel::routing;
use pipewright_kernel::rows::{centred, dots, repeated, scaled, softmax_slopes, sums};

use super::operation::{CpuTensor, Operation, cpu_tensor, elements, on_cpu};

/// Returns the sum of each row. Shapes: `[rows, width]`, result `[rows, 1]`.
pub fn row_sums(x: Tensor<2>) -> Tensor<2> {
    let [rows, width] = x.dims();
    let Some(([values], tape)) = on_cpu([x.clone().into_dispatch()]) else { return x.sum_dim(1) };
    let sums = if width == 0 { vec![0.0; rows] } else { sums(&elements(&values), width) };
    tape.record(sums, [rows, 1], |_| SumsBackward { rows, width })
}

/// Returns the sum of all elements, `[1]`, with the same bits every time: on devices, Burn's sum over all elements adds in
/// no fixed order, and its sum along a dimension in a fixed one.
pub fn sum<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    let count = x.shape().num_elements();
    if count == 0 {
        // Burn copies a dimension that a reshape names 0.
        return Tensor::zeros([1], (&x.device(), x.dtype()));
    }
    row_sums(x.reshape([1, count])).reshape([1])
}

/// Returns the sums along a dimension, which gets the size 1.
pub fn sum_dim<const D: usize>(x: Tensor<D>, dim: usize) -> Tensor<D> {
    let mut shape = x.dims();
    if shape[dim + 1..].iter().product::<usize>() != 1 {
        return x.sum_dim(dim);
    }
    // The summands follow each other, as the elements of a row.
    let width = std::mem::replace(&mut shape[dim], 1);
    row_sums(x.reshape([shape.iter().product::<usize>(), width])).reshape(shape)
}

/// Returns the exponentials of the elements of each row, divided by their sum. Shapes: `[rows, width]` in and out.
pub fn softmax(x: Tensor<2>) -> Tensor<2> {
    let shape = x.dims();
    let Some(([values], tape)) = on_cpu([x.clone().into_dispatch()]) else {
        return activation::softmax(x, 1);
    };
    let probabilities = routing::softmax(&elements(&values), shape[1].max(1));
    tape.record(probabilities, shape, |probabilities| SoftmaxBackward {
        probabilities: probabilities.clone(),
        shape,
    })
}

/// Returns each row times its factor. Shapes: `x [rows, width]`, `factors [rows, 1]`, result as `x`.
pub fn scale_rows(x: Tensor<2>, factors: Tensor<2>) -> Tensor<2> {
    let shape = x.dims();
    assert_eq!(factors.dims(), [shape[0], 1], "each row has a factor");
    let inputs = [x.clone().into_dispatch(), factors.clone().into_dispatch()];
    let Some(([x, factors], tape)) = on_cpu(inputs) else { return x * factors };
    let y = scaled(&elements(&x), &elements(&factors), shape[1].max(1));
    tape.record(y, shape, |_| ScaleBackward { x, factors, shape })
}

/// Returns each row less its mean. Shapes: `[rows, width]` in and out.
pub fn centre_rows(x: Tensor<2>) -> Tensor<2> {
    let shape = x.dims();
    let Some(([values], tape)) = on_cpu([x.clone().into_dispatch()]) else {
        return x.clone() - x.mean_dim(1);
    };
    tape.record(centred(&elements(&values), shape[1].max(1)), shape, |_| CentreBackward { shape })
}

#[derive(Clone, Debug)]
struct SumsBackward {
    rows: usize,
    width: usize,
}

impl Operation<1> for SumsBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 1]) -> [Option<CpuTensor>; 1] {
        let Self { rows, width } = self;
        [Some(cpu_tensor(repeated(&elements(&gradient), width), [rows, width]))]
    }
}

#[derive(Clone, Debug)]
struct SoftmaxBackward {
    probabilities: CpuTensor,
    shape: [usize; 2],
}

impl Operation<1> for SoftmaxBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 1]) -> [Option<CpuTensor>; 1] {
        let Self { probabilities, shape } = self;
        let d = softmax_slopes(&elements(&probabilities), &elements(&gradient), shape[1].max(1));
        [Some(cpu_tensor(d, shape))]
    }
}

#[derive(Clone, Debug)]
struct ScaleBackward {
    x: CpuTensor,
    factors: CpuTensor,
    shape: [usize; 2],
}

impl Operation<2> for ScaleBackward {
    fn backward(self, gradient: CpuTensor, [for_x, for_factors]: [bool; 2]) -> [Option<CpuTensor>; 2] {
        let Self { x, factors, shape: [rows, width] } = self;
        let gradient = elements(&gradient);
        let d_x = for_x.then(|| scaled(&gradient, &elements(&factors), width.max(1)));
        let d_factors = for_factors
            .then(|| if width == 0 { vec![0.0; rows] } else { dots(&gradient, &elements(&x), width) });
        [d_x.map(|d| cpu_tensor(d, [rows, width])), d_factors.map(|d| cpu_tensor(d, [rows, 1]))]
    }
}

/// Subtracting the mean is symmetric, so its gradient is the gradient less its mean.
#[derive(Clone, Debug)]
struct CentreBackward {
    shape: [usize; 2],
}

impl Operation<1> for CentreBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 1]) -> [Option<CpuTensor>; 1] {
        let d = centred(&elements(&gradient), self.shape[1].max(1));
        [Some(cpu_tensor(d, self.shape))]
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::super::check::{check, numbers};
    use super::*;

    #[test]
    fn operations_equal_burns_with_their_gradients() {
        let rows = |x: Tensor<1>| x.reshape([5, 37]);
        let x = || numbers([5 * 37], 2.0);
        check([x()], |[x]| row_sums(rows(x)), |[x]| rows(x).sum_dim(1));
        check([x()], |[x]| sum_dim(rows(x), 0), |[x]| rows(x).sum_dim(0));
        check([x()], |[x]| sum_dim(x.reshape([185, 1]), 0), |[x]| x.sum().unsqueeze());
        check([x()], |[x]| softmax(rows(x)), |[x]| activation::softmax(rows(x), 1));
        check([x()], |[x]| sum(rows(x)).unsqueeze(), |[x]| x.sum().unsqueeze());
        check([x()], |[x]| centre_rows(rows(x)), |[x]| rows(x.clone()) - rows(x).mean_dim(1));
        check(
            [x(), numbers([5], 1.0)],
            |[x, factors]| scale_rows(rows(x), factors.reshape([5, 1])),
            |[x, factors]| rows(x) * factors.reshape([5, 1]),
        );
    }

    #[test]
    fn there_may_be_no_rows() {
        let none = || numbers([0, 3], 1.0);
        assert_eq!(row_sums(none()).dims(), [0, 1]);
        assert_eq!(centre_rows(none()).dims(), [0, 3]);
        assert_eq!(scale_rows(none(), numbers([0, 1], 1.0)).dims(), [0, 3]);
        assert_eq!(sum(numbers([0], 1.0)).into_data(), Tensor::<1>::zeros([1], &Device::flex()).into_data());
    }

    #[test]
    fn rows_may_be_empty() {
        let none = || numbers([3, 0], 1.0);
        let zeros = || Tensor::<2>::zeros([3, 1], &Device::flex());
        assert_eq!(row_sums(none()).into_data(), zeros().into_data());
        let factors = zeros().autodiff().require_grad();
        let y = scale_rows(none().autodiff(), factors.clone());
        let gradients = row_sums(y).sum().backward();
        let gradient = factors.grad(&gradients).expect("a gradient");
        assert_eq!(gradient.into_data(), zeros().into_data());
    }
}
