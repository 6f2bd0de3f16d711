//! How the losses of the microbatches make the loss of a step: their mean by rows, their mean by tokens, or
//! their sum.
//!
//! Each loss is multiplied by a factor before its backward, and the sums of gradients are divided by a
//! divisor at the end. The divisors of batches whose gradients are accumulated add up, so a mean by tokens is
//! the mean over the tokens of all of them.

use burn::tensor::{Int, Tensor};
use pipewright_schedule::words::counted;
use serde::{Deserialize, Serialize};

use super::split::SplitError;
use crate::tensor::{Value, ValueKind, Values};

/// How the losses of the microbatches make the loss of the step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) enum Reduction {
    /// Their mean, in which each microbatch counts by its rows.
    #[default]
    Rows,
    /// Their mean, in which each microbatch counts by its weight.
    Weights {
        weights: Vec<f64>,
        /// The targets that do not count, if the weight of a microbatch is the number of its other targets.
        ignored: Option<i64>,
    },
    /// Their sum.
    Sum,
}

/// The factors of a batch.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LossFactors {
    /// The factor of the losses of each microbatch in their backward.
    pub losses: Vec<f64>,
    /// The part of the batch in the divisor of the gradient sums, and the divisor of the auxiliary losses.
    pub divisor: f64,
    /// Whether the sums are not divided.
    pub is_sum: bool,
    /// The weight of each microbatch in the loss of the step, times the number of microbatches.
    pub shares: Vec<f64>,
    /// The weight of the batch in a mean over several batches: its rows, or the sum of its weights. It is the
    /// number of microbatches if losses are added.
    pub weight: f64,
}

/// The properties that batches have in common if their gradients are accumulated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ReductionUnit {
    kind: std::mem::Discriminant<Reduction>,
    /// The weight that counts as 1 in all batches, so that all rows or tokens of a step have the same weight;
    /// `None` if losses are added.
    pub(crate) weight: Option<f64>,
}

impl ReductionUnit {
    /// Returns whether losses are reduced in the same way.
    pub(crate) fn is_like(self, other: Self) -> bool {
        self.kind == other.kind
    }
}

impl Reduction {
    /// Returns the mean by these weights, which are `expected` if their number is known.
    pub(super) fn by_weights(weights: Vec<f64>, expected: Option<usize>) -> Result<Self, SplitError> {
        Ok(Self::Weights { weights: checked(weights, expected)?, ignored: None })
    }

    /// Returns the mean by the numbers of target ids that are not `ignored`.
    pub(super) fn by_ids(
        targets: &[Values],
        ignored: i64,
        expected: Option<usize>,
    ) -> Result<Self, SplitError> {
        let count = |(microbatch, targets): (usize, &Values)| {
            counted_ids(targets, ignored).ok_or_else(|| {
                SplitError(format!(
                    "the targets of microbatch {microbatch} have no integer tensor whose elements could be counted"
                ))
            })
        };
        let counts = targets.iter().enumerate().map(count).collect::<Result<_, _>>()?;
        Ok(Self::Weights { weights: checked(counts, expected)?, ignored: Some(ignored) })
    }

    /// Returns the factors of a batch whose microbatches have these sizes. `unit` is the unit of the weights
    /// of the batches that are accumulated with it; by default it is the batch's own.
    pub(super) fn factors(&self, sizes: &[usize], unit: Option<f64>) -> LossFactors {
        let Some(weights) = self.weights(sizes) else {
            let count = sizes.len();
            let (losses, shares) = (vec![1.0; count], vec![count as f64; count]);
            return LossFactors { losses, divisor: 1.0, is_sum: true, shares, weight: count as f64 };
        };
        let (mean, weight) = (mean(&weights), weights.iter().sum::<f64>());
        let in_units = |unit: f64| -> Vec<f64> {
            weights.iter().map(|&weight| if weight == unit { 1.0 } else { weight / unit }).collect()
        };
        let shares = in_units(mean);
        let (losses, divisor) = match unit.filter(|&unit| unit != mean) {
            None => (shares.clone(), weights.len() as f64),
            Some(unit) => (in_units(unit), weight / unit),
        };
        LossFactors { losses, divisor, is_sum: false, shares, weight }
    }

    /// Returns the properties that a batch of these sizes has in common with the batches that are accumulated
    /// with it.
    pub(super) fn unit(&self, sizes: &[usize]) -> ReductionUnit {
        let weight = self.weights(sizes).map(|weights| mean(&weights));
        ReductionUnit { kind: std::mem::discriminant(self), weight }
    }

    /// Returns the weight of each microbatch in the mean; `None` if losses are added.
    fn weights(&self, sizes: &[usize]) -> Option<Vec<f64>> {
        match self {
            Self::Rows => Some(sizes.iter().map(|&size| size as f64).collect()),
            Self::Weights { weights, .. } => Some(weights.clone()),
            Self::Sum => None,
        }
    }
}

fn mean(weights: &[f64]) -> f64 {
    weights.iter().sum::<f64>() / weights.len().max(1) as f64
}

/// Returns the number of ids of the first integer tensor that are not `ignored`, if there is such a tensor.
pub(super) fn counted_ids(targets: &Values, ignored: i64) -> Option<f64> {
    let ids = targets.iter().find(|value| value.kind() == ValueKind::Int)?;
    // The number of dimensions does not matter for a sum over all elements; 1 is arbitrary.
    let ids = Tensor::<1, Int>::from_dispatch(Value::clone(ids).into_dispatch());
    Some(ids.not_equal_elem(ignored).int().sum().into_data().iter::<i64>().sum::<i64>() as f64)
}

/// Returns the weights if there are as many as expected and they have a mean.
fn checked(weights: Vec<f64>, expected: Option<usize>) -> Result<Vec<f64>, SplitError> {
    let found = weights.len();
    if let Some(expected) = expected.filter(|&expected| expected != found) {
        let (found, expected) = (counted(found, "weight"), counted(expected, "microbatch"));
        return Err(SplitError(format!("{found}, and the batch has {expected}: give one for each")));
    }
    let is_bad = |weight: &f64| !weight.is_finite() || *weight < 0.0;
    if let Some(microbatch) = weights.iter().position(is_bad) {
        let weight = weights[microbatch];
        return Err(SplitError(format!(
            "the weight of microbatch {microbatch} is {weight}: give a finite number, 0 or above"
        )));
    }
    if weights.iter().all(|weight| *weight == 0.0) {
        let reason = "no token of the batch counts, so its loss has no mean: leave the batch out";
        return Err(SplitError(reason.to_owned()));
    }
    Ok(weights)
}
