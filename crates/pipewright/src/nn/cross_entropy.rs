//! The training loss of a language model.

use burn::tensor::{Int, Tensor, activation};

use super::composed::at_least_single;
use super::operation::{CpuTensor, Operation, cpu_tensor, elements, indices, on_cpu};

/// Returns the mean over all rows of the cross entropy between `softmax(logits)` and the target ids, in nats.
///
/// Shapes: logits `[rows, vocabulary]`, targets `[rows]`, result `[1]`. Logits in half precision have a loss
/// in single precision.
///
/// # Panics
/// When a target is outside the vocabulary, or the number of targets differs from the number of rows.
pub fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    let [rows, vocabulary] = logits.dims();
    let [found] = targets.dims();
    assert!(found == rows, "cross_entropy takes one target for each row, got {found} for {rows}");
    let Some(([logits], tape)) = on_cpu([logits.clone().into_dispatch()]) else {
        return composed(logits, targets);
    };
    let targets = indices(targets);
    assert!(
        targets.iter().all(|&id| id < vocabulary),
        "a target lies outside the vocabulary of {vocabulary}"
    );
    let (loss, normalisers) =
        pipewright_kernel::cross_entropy::forward(&elements(&logits), &targets, vocabulary);
    tape.in_single().record(vec![loss], [1], |_| CrossEntropyBackward { logits, targets, normalisers })
}

fn composed(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    activation::log_softmax(at_least_single(logits), 1).gather(1, targets.unsqueeze_dim(1)).mean().neg()
}

#[derive(Clone, Debug)]
struct CrossEntropyBackward {
    logits: CpuTensor,
    targets: Vec<usize>,
    normalisers: Vec<f32>,
}

impl Operation<1> for CrossEntropyBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 1]) -> [Option<CpuTensor>; 1] {
        let Self { logits, targets, normalisers } = &self;
        let gradient = elements(&gradient)[0];
        let d = pipewright_kernel::cross_entropy::backward(&elements(logits), targets, normalisers, gradient);
        [Some(cpu_tensor(d, logits.layout().shape().clone()))]
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::super::check::{check, numbers};
    use super::*;

    fn check_at(scale: f32) {
        let targets = || Tensor::from_data(TensorData::new(vec![0i64, 19, 2, 1, 1, 3], [6]), &Device::flex());
        check(
            [numbers([6 * 20], scale)],
            |[x]| cross_entropy(x.reshape([6, 20]), targets()).unsqueeze(),
            |[x]| composed(x.reshape([6, 20]), targets()).unsqueeze(),
        );
    }

    #[test]
    fn equals_its_composition() {
        check_at(0.3);
        check_at(5.0);
    }

    #[test]
    fn large_logits_stay_finite() {
        check_at(300.0);
    }

    #[test]
    #[should_panic(expected = "outside the vocabulary of 3")]
    fn a_target_beyond_the_vocabulary_is_refused() {
        let device = Device::flex();
        cross_entropy(Tensor::zeros([1, 3], &device), Tensor::from_data([3], &device));
    }
}
