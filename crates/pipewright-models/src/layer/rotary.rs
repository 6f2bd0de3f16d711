//! Rotary position embedding (Su et al., 2021) in Hugging Face's layout: element `j` of a head is rotated together with
//! element `j + width / 2`.

use burn::tensor::{Device, Tensor, TensorData};

/// Cosines and sines for positions `0..sequence`, each `[1, sequence, 1, head_dim / 2]`.
#[derive(Debug, Clone)]
pub(crate) struct Rotary {
    cos: Tensor<4>,
    sin: Tensor<4>,
}

impl Rotary {
    /// Position `p` turns pair `j` by `p / theta^(2 j / head_dim)`; the result is multiplied by `scale`.
    ///
    /// Angles are single precision, because the checkpoints were trained with such angles.
    pub(crate) fn new(sequence: usize, head_dim: usize, theta: f64, scale: f64, device: &Device) -> Self {
        let half = head_dim / 2;
        let frequencies: Vec<f32> =
            (0..half).map(|j| 1.0 / (theta as f32).powf((2 * j) as f32 / head_dim as f32)).collect();
        let table = |function: fn(f32) -> f32| {
            let angles = (0..sequence).flat_map(|p| frequencies.iter().map(move |f| p as f32 * f));
            let values: Vec<f32> = angles.map(|angle| function(angle) * scale as f32).collect();
            Tensor::from_data(TensorData::new(values, [1, sequence, 1, half]), device)
        };
        Self { cos: table(f32::cos), sin: table(f32::sin) }
    }

    /// Rotates `[batch, sequence, heads, head_dim]`.
    pub(crate) fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        let half = x.dims()[3] / 2;
        let first = x.clone().narrow(3, 0, half);
        let second = x.narrow(3, half, half);
        let turned_first = first.clone() * self.cos.clone() - second.clone() * self.sin.clone();
        let turned_second = second * self.cos.clone() + first * self.sin.clone();
        Tensor::cat(vec![turned_first, turned_second], 3)
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::check;
    use super::*;

    #[test]
    fn pairs_turn_by_the_position_times_their_frequency() {
        let turned = |x: Tensor<4>| {
            let elements: Vec<Tensor<4>> = (0..6).map(|j| x.clone().narrow(3, j, 1)).collect();
            let angle =
                |j: usize| Tensor::arange(0..5, &x.device()).float() / 100f32.powf((2 * j) as f32 / 6.0);
            let rotate = |j: usize, sign: f32, partner: usize| {
                let angle = angle(j % 3).reshape([1, 5, 1, 1]);
                elements[j].clone() * angle.clone().cos() + elements[partner].clone() * angle.sin() * sign
            };
            let turned = [(0, 3), (1, 4), (2, 5)].map(|(j, partner)| rotate(j, -1.0, partner));
            let partners = [(3, 0), (4, 1), (5, 2)].map(|(j, partner)| rotate(j, 1.0, partner));
            Tensor::cat([turned, partners].concat(), 3) * 0.5
        };
        let rotary = Rotary::new(5, 6, 100.0, 0.5, &Device::flex());
        check([2, 5, 3, 6], 2.0, |x| rotary.apply(x), turned);
    }
}
