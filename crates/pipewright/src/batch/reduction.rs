//! How the losses of the microbatches make the loss of a step: their mean by rows, their mean by tokens, or their sum.
//!
//! Each loss is multiplied by a factor before its backward, and the sums of gradients are divided by a divisor at the end.
//! The divisors of batches whose gradients are accumulated add up, so a mean by tokens is that over the tokens of all of
//! them.

use burn::tensor::{Int, Tensor};
use serde::{Deserialize, Serialize};

use crate::batch::{Batch, SplitError};
use crate::tensor::{Value, ValueKind, Values};

/// How the losses of the microbatches make the loss of the step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) enum Reduction {
    /// Their mean, in which each microbatch counts by its rows.
    #[default]
    Rows,
    /// Their mean, in which each microbatch counts by its weight.
    Weights(Vec<f64>),
    /// Their sum.
    Sum,
}

/// The factors of a batch.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LossFactors {
    /// The factor of the losses of each microbatch in their backward.
    pub losses: Vec<f64>,
    /// What the batch adds to the divisor of the gradient sums, and the divisor of the auxiliary losses.
    pub divisor: f64,
    /// Whether the sums are not divided.
    pub is_sum: bool,
    /// The weight of each microbatch in the loss of the step, times the number of microbatches.
    pub shares: Vec<f64>,
}

impl Batch {
    /// Sets the weight of each microbatch in the loss of the step: usually the number of tokens over which its loss is a
    /// mean. The loss of the step is then the mean over all tokens of the batch, and over those of all batches whose
    /// gradients are accumulated. Without weights each microbatch counts by its rows, and a token of a microbatch with few
    /// valid tokens counts more than others.
    ///
    /// ```
    /// # use burn::tensor::{Device, Tensor};
    /// # use pipewright::batch::Batch;
    /// # let x = Tensor::<2>::zeros([4, 8], &Device::flex());
    /// let batch = Batch::split(x.clone(), x, 2)?.weighted([31.0, 7.0])?;
    /// # Ok::<(), pipewright::batch::SplitError>(())
    /// ```
    ///
    /// # Errors
    /// When there is another number of weights than of microbatches, one is negative or not finite, or all are 0.
    pub fn weighted(mut self, weights: impl Into<Vec<f64>>) -> Result<Self, SplitError> {
        let weights = weights.into();
        let (found, expected) = (weights.len(), self.microbatches());
        // A process that has neither inputs nor targets does not know the number yet.
        if found != expected && expected > 0 {
            return Err(SplitError::Weights { found, expected });
        }
        let is_bad = |weight: &f64| !weight.is_finite() || *weight < 0.0;
        if let Some(microbatch) = weights.iter().position(is_bad) {
            return Err(SplitError::Weight { microbatch, weight: weights[microbatch].to_string() });
        }
        if weights.iter().all(|weight| *weight == 0.0) {
            return Err(SplitError::NoWeight);
        }
        (self.reduction, self.ignored) = (Reduction::Weights(weights), None);
        Ok(self)
    }

    /// As [`Batch::weighted`], by the number of targets that are not `ignored`: those of the first integer tensor of each
    /// microbatch. The loss must be the mean over the same tokens, and 0 if there are none
    /// ([`weighted_cross_entropy`](crate::nn::weighted_cross_entropy)).
    ///
    /// # Errors
    /// When the targets have no integer tensor, or all are ignored.
    pub fn ignoring(self, ignored: i64) -> Result<Self, SplitError> {
        let count = |(microbatch, targets): (usize, &Values)| {
            let ids = targets.iter().find(|value| value.kind() == ValueKind::Int);
            ids.map(|ids| valid(ids.clone(), ignored)).ok_or(SplitError::NoIds { microbatch })
        };
        let counts = self.targets.iter().enumerate().map(count).collect::<Result<Vec<f64>, _>>()?;
        let mut batch = self.weighted(counts)?;
        batch.ignored = Some(ignored);
        Ok(batch)
    }

    /// Adds the weights of tokens as the side input `name`, split along dimension 0, and sets the weight of each microbatch
    /// to their sum ([`Batch::weighted`]). The loss must be the mean weighted by them.
    ///
    /// # Errors
    /// As [`Batch::with_split`] and [`Batch::weighted`].
    pub fn with_token_weights<const D: usize>(
        self,
        name: &str,
        weights: Tensor<D>,
    ) -> Result<Self, SplitError> {
        let batch = self.with_split(name, weights.clone())?;
        let mut start = 0;
        let sums = batch.sizes().into_iter().map(|size| {
            let part = weights.clone().narrow(0, start, size);
            start += size;
            part.sum().into_data().iter::<f64>().sum()
        });
        let sums: Vec<f64> = sums.collect();
        batch.weighted(sums)
    }

    /// Makes the loss of the step the sum of the losses of the microbatches, as PyTorch's `scale_grads=False` does: the
    /// gradients are those of the sum. Gradients of accumulated batches are added.
    pub fn summed(mut self) -> Self {
        self.reduction = Reduction::Sum;
        self
    }

    /// Returns the factors of the batch. `unit` is the unit of the weights of the batches that are accumulated with it; by
    /// default it is the batch's own.
    pub(crate) fn loss_factors(&self, unit: Option<f64>) -> LossFactors {
        let Some(weights) = self.weights() else {
            let count = self.microbatches();
            let (losses, shares) = (vec![1.0; count], vec![count as f64; count]);
            return LossFactors { losses, divisor: 1.0, is_sum: true, shares };
        };
        let mean = mean(&weights);
        let in_units = |unit: f64| -> Vec<f64> {
            weights.iter().map(|&weight| if weight == unit { 1.0 } else { weight / unit }).collect()
        };
        let shares = in_units(mean);
        match unit.filter(|&unit| unit != mean) {
            None => {
                LossFactors { losses: shares.clone(), divisor: weights.len() as f64, is_sum: false, shares }
            }
            Some(unit) => {
                let divisor = weights.iter().sum::<f64>() / unit;
                LossFactors { losses: in_units(unit), divisor, is_sum: false, shares }
            }
        }
    }

    /// Returns the unit in which the weights of batches that are accumulated with this one are expressed, so that all rows
    /// or tokens of a step have the same weight; `None` if losses are added.
    pub(crate) fn unit(&self) -> Option<f64> {
        self.weights().map(|weights| mean(&weights))
    }

    /// Returns what the batch counts in a mean over several batches: its rows, or the sum of its weights. It is the number
    /// of microbatches if losses are added.
    pub(crate) fn weight(&self) -> f64 {
        self.weights().map_or(self.microbatches() as f64, |weights| weights.iter().sum())
    }

    /// Returns the weight of each microbatch in the mean; `None` if losses are added.
    fn weights(&self) -> Option<Vec<f64>> {
        match &self.reduction {
            Reduction::Rows => Some(self.sizes().into_iter().map(|size| size as f64).collect()),
            Reduction::Weights(weights) => Some(weights.clone()),
            Reduction::Sum => None,
        }
    }

    /// Returns the number of weights that the batch was given; `None` if it was given none.
    pub(crate) fn weight_count(&self) -> Option<usize> {
        match &self.reduction {
            Reduction::Weights(weights) => Some(weights.len()),
            Reduction::Rows | Reduction::Sum => None,
        }
    }

    /// Returns whether the losses of this batch and of another are reduced in the same way.
    pub(crate) fn reduction_kind(&self) -> std::mem::Discriminant<Reduction> {
        std::mem::discriminant(&self.reduction)
    }
}

fn mean(weights: &[f64]) -> f64 {
    weights.iter().sum::<f64>() / weights.len().max(1) as f64
}

/// Returns the number of elements that differ from `ignored`.
pub(super) fn valid(ids: Value, ignored: i64) -> f64 {
    // The number of dimensions does not matter for a sum over all elements; 1 is arbitrary.
    let ids = Tensor::<1, Int>::from_dispatch(ids.into_dispatch());
    ids.not_equal_elem(ignored).int().sum().into_data().iter::<i64>().sum::<i64>() as f64
}
