//! The training loss of a language model.

use burn::tensor::{IndexingUpdateOp, Int, Tensor};

/// The mean over all tokens of the cross entropy between `softmax(logits)` and the target ids, in nats.
///
/// Shapes: logits `[batch, sequence, vocabulary]`, targets `[batch, sequence]`, result `[1]`. Each target must lie in
/// the vocabulary.
///
/// Softmax and loss share one exponential pass outside the tape. The gradient, `(softmax - one_hot) / tokens`, is known
/// in closed form; it joins the tape as the slope of a function that is linear around the given logits, so that the
/// backward pass is one product.
pub fn cross_entropy(logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<1> {
    let [batch, sequence, vocabulary] = logits.dims();
    let tokens = batch * sequence;
    let logits = logits.reshape([tokens, vocabulary]);
    let targets = targets.reshape([tokens, 1]);

    let point = logits.clone().inner();
    let shifted = point.clone() - point.clone().max_dim(1);
    let target = shifted.clone().gather(1, targets.clone());
    let exponentials = shifted.exp();
    let sum = exponentials.clone().sum_dim(1);
    let value = (sum.clone().log() - target).mean();
    if !logits.is_autodiff() {
        return value;
    }

    let share = 1.0 / tokens as f64;
    let minus_one_hot = Tensor::full([tokens, 1], -share, &point.device());
    let slope =
        (exponentials * (sum.recip() * share)).scatter(1, targets, minus_one_hot, IndexingUpdateOp::Add);
    ((logits - point) * slope).sum() + value
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData, activation};

    use super::*;

    fn check(scale: f32) {
        let device = Device::flex().autodiff();
        let values: Vec<f32> = (0..2 * 3 * 5).map(|i| ((i * 37 % 11) as f32 - 5.0) * scale).collect();
        let logits = Tensor::<3>::from_data(TensorData::new(values, [2, 3, 5]), &device).require_grad();
        let targets =
            Tensor::<2, Int>::from_data(TensorData::new(vec![0i64, 4, 2, 1, 1, 3], [2, 3]), &device);

        let loss = cross_entropy(logits.clone(), targets.clone());
        let gradient = logits.grad(&loss.backward()).expect("the logits are a leaf");

        let plain = activation::log_softmax(logits.clone(), 2).gather(2, targets.reshape([2, 3, 1]));
        let plain = plain.mean().neg();
        let expected = logits.grad(&plain.backward()).expect("the logits are a leaf");
        loss.into_data().assert_approx_eq::<f32>(&plain.into_data(), burn::tensor::Tolerance::absolute(1e-6));
        gradient
            .into_data()
            .assert_approx_eq::<f32>(&expected.into_data(), burn::tensor::Tolerance::absolute(1e-7));
    }

    #[test]
    fn equals_log_softmax() {
        check(0.3);
    }

    #[test]
    fn large_logits_stay_finite() {
        check(100.0);
    }
}
