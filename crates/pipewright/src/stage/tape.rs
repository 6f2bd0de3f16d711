//! The tape of one forward: the leaves at which its backward ends, and the roots from which it starts.

use burn::tensor::{Gradients, Tensor};

use super::carry::CarryEnds;
use super::error::StageError;
use super::module::Auxiliary;
use super::shards::Catches;
use super::tape_ends::{OutputRoot, fill_roots, join};
use crate::autodiff::inner_of;
use crate::nn::{Deferred, at_least_single};
use crate::tensor::{OptionalTensors, Value};

/// The start and the end points of one backward.
pub(super) struct Tape {
    /// The inputs as leaves; `None` for inputs that carry no gradient.
    pub(super) leaves: Vec<Option<Tensor<1>>>,
    /// The loss, from which the backward of the last stage starts.
    pub(super) loss: Option<Tensor<1>>,
    /// The outputs, from which the backward of every other stage starts.
    pub(super) outputs: Vec<OutputRoot>,
    /// The weighted auxiliary losses, which the backward of any stage starts from too.
    pub(super) auxiliary: Option<Tensor<1>>,
    /// The tensors that the forward of a slice took from earlier slices and left for later ones.
    pub(super) carry: Option<CarryEnds>,
    /// The weight gradients that the layers defer; `None` if nothing was recorded.
    pub(super) deferred: Option<Deferred>,
    /// The other gradients, which are caught if parameters are sharded.
    pub(super) catches: Catches,
}

/// A backward that has run.
pub(super) struct FinishedTape {
    /// The gradients of the inputs and of the parameters; `None` if no parameter and no input has one.
    pub(super) gradients: Option<Gradients>,
    pub(super) leaves: Vec<Option<Tensor<1>>>,
    pub(super) carry: Option<CarryEnds>,
    pub(super) deferred: Option<Deferred>,
    pub(super) catches: Catches,
}

impl Tape {
    /// Makes the tape of a forward with a loss, or with outputs.
    pub(super) fn new(
        leaves: Vec<Option<Tensor<1>>>,
        loss: Option<Tensor<1>>,
        outputs: Vec<OutputRoot>,
        auxiliary: Option<Tensor<1>>,
    ) -> Self {
        Self { leaves, loss, outputs, auxiliary, carry: None, deferred: None, catches: Catches::new() }
    }

    /// Adds the tensors that the forward of a slice took from earlier slices and left for later ones.
    pub(super) fn with_carry(self, carry: Option<CarryEnds>) -> Self {
        Self { carry, ..self }
    }

    /// Adds the collectors of gradients that the forward ran with.
    pub(super) fn with(self, deferred: Deferred, catches: Catches) -> Self {
        Self { deferred: Some(deferred), catches, ..self }
    }

    /// Runs the backward, from the loss or from the gradients of the outputs.
    pub(super) fn backward(self, gradients: OptionalTensors) -> Result<FinishedTape, StageError> {
        let Self { leaves, loss, outputs, auxiliary, mut carry, deferred, catches } = self;
        let root = match loss {
            Some(loss) => Some(loss),
            None => fill_roots(outputs, gradients)?,
        };
        let carried = carry.as_mut().map(CarryEnds::start_backward).transpose()?.flatten();
        let root = join(join(root, carried), auxiliary).filter(Tensor::is_tracked);
        let gradients = root.map(|root| root.backward());
        Ok(FinishedTape { gradients, leaves, carry, deferred, catches })
    }

    /// Frees the tensors that the operations recorded. Burn frees a tape only when its backward runs, so this
    /// runs the backward, with gradients of zero, and drops the result.
    pub(super) fn discard(self) {
        let Self { loss, outputs, auxiliary, .. } = self;
        let roots = outputs.into_iter().filter_map(|output| output.root.map(|(root, _)| root));
        let root = roots.fold(join(loss, auxiliary), |joined, root| join(joined, Some(root)));
        if let Some(root) = root.filter(Tensor::is_tracked) {
            drop(root.backward());
        }
    }
}

impl FinishedTape {
    /// Adds the gradients of the tensors of earlier slices to their sums.
    pub(super) fn pass_to_earlier_slices(&mut self) {
        if let (Some(carry), Some(gradients)) = (self.carry.take(), &mut self.gradients) {
            carry.add_gradients(gradients);
        }
    }

    /// Takes the gradients of the inputs out.
    pub(super) fn input_gradients(&mut self) -> OptionalTensors {
        let leaves = std::mem::take(&mut self.leaves);
        let Some(gradients) = &mut self.gradients else { return vec![None; leaves.len()] };
        leaves.into_iter().map(|leaf| Some(Value::of(leaf?.grad_remove(gradients)?))).collect()
    }
}

/// Returns the losses off the tape, as they are reported, and their weighted sum on the tape.
pub(super) fn split_auxiliary(
    losses: Vec<Auxiliary>,
    auxiliary_weight: f64,
) -> Result<(Vec<Auxiliary>, Option<Tensor<1>>), StageError> {
    let mut weighted = None;
    let mut reported = Vec::with_capacity(losses.len());
    for Auxiliary { name, layer, weight, loss } in losses {
        check_scalar(&loss, || format!("the auxiliary loss `{name}`"))?;
        let loss = at_least_single(loss);
        reported.push(Auxiliary { name, layer, weight, loss: inner_of(loss.clone()) });
        weighted = join(weighted, Some(scaled(loss, weight * auxiliary_weight)));
    }
    Ok((reported, weighted))
}

pub(super) fn check_scalar(loss: &Tensor<1>, what: impl Fn() -> String) -> Result<(), StageError> {
    match loss.dims() {
        [1] => Ok(()),
        [elements] => Err(StageError::LossShape { what: what(), elements }),
    }
}

pub(super) fn scaled(loss: Tensor<1>, factor: f64) -> Tensor<1> {
    if factor == 1.0 { loss } else { loss * factor }
}
