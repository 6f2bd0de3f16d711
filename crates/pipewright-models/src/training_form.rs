//! The differences of a model in training, and not in evaluations: noisy embeddings and smoothed targets.

use burn::tensor::{Tensor, TensorData};
use pipewright::stage::StageContext;

use crate::rows::Rows;

/// The name of the random numbers of the noise.
const NOISE: &str = "neftune";

/// The changes of training to a model. By default, nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TrainingForm {
    /// The part of the probability of a target that all ids share
    /// ([`smoothed_cross_entropy`](pipewright::nn::smoothed_cross_entropy)).
    pub label_smoothing: f64,
    /// The strength of the noise on embeddings (NEFTune; Jain et al., 2023, <https://arxiv.org/abs/2310.05914>); 0: none.
    pub neftune_alpha: f64,
}

impl TrainingForm {
    /// Returns the label smoothing of a forward.
    pub(crate) fn smoothing(&self, context: &StageContext) -> f64 {
        if context.is_training() { self.label_smoothing } else { 0.0 }
    }

    /// Adds the noise to embeddings `[rows, tokens, width]`, which belong to this rank's tokens: `u alpha / sqrt(length
    /// width)`, with `u` uniform in `[-1, 1)` and the length of a whole row. The numbers belong to the step, the
    /// microbatch, the row and the position.
    pub(crate) fn with_noise(&self, x: Tensor<3>, rows: &Rows<'_>) -> Tensor<3> {
        let (alpha, context) = (self.neftune_alpha, rows.context);
        if alpha == 0.0 || !context.is_training() {
            return x;
        }
        let ([batch, sequence], own, [_, _, width]) = (rows.shape, rows.own_tokens(), x.dims());
        let (slice, slices) = context.slice();
        let (length, start) = (sequence * slices.get() as usize, sequence * slice.get() as usize + own.start);
        let bound = (alpha / ((length * width) as f64).sqrt()) as f32;
        let mut stream = context.random(NOISE);
        let of_row = |row: usize| {
            let first = ((row * length + start) * width) as u64;
            stream.uniform_from(first, own.len() * width).unwrap_or_default()
        };
        let noise: Vec<f32> = (0..batch).flat_map(of_row).map(|number| number * bound).collect();
        let noise = Tensor::<3>::from_data(TensorData::new(noise, x.dims()), &x.device());
        x.clone() + noise.cast(x.dtype())
    }
}
