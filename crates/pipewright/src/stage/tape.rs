//! The tape of one forward: the ends of its parts, at which their backwards end and from which they start.
//!
//! Burn adds the gradients of a value with several uses in an order that depends on the depth of each operation
//! below the leaves of the tape, and on the path from the root of the backward to it. Both depend on everything
//! that the tape contains, and a sum of three floats depends on its order. So each layer has a tape of its own, a
//! part: its inputs come onto the tape where it begins, and its outputs leave the tape where it ends, with their
//! gradient roots. A part contains one layer and its auxiliary losses under every cut, and therefore the order is
//! the same under every cut. The values between two parts are moved, so this adds no arithmetic and no copy.
//!
//! A module whose layers are not known to the stage (`StageBody::layers`) has one part.

use std::sync::Arc;

use burn::tensor::{Gradients, Tensor};

use super::carry::CarryEnds;
use super::error::StageError;
use super::first_value::FirstValue;
use super::module::Auxiliary;
use super::shards::Catches;
use super::side_leaves::{SideLeaf, add_gradients};
use super::tape_ends::{OutputRoot, fill_roots, join};
use super::watch::Watch;
use crate::autodiff::{Caught, inner_of};
use crate::batch::SideSums;
use crate::nn::{Deferred, at_least_single};
use crate::tensor::OptionalTensors;

/// The tape of a segment.
pub(super) struct Tape {
    /// The parts, in the order of the layers.
    parts: Vec<TapePart>,
    /// The weight gradients that the layers defer; `None` if nothing was recorded.
    pub(super) deferred: Option<Deferred>,
    /// The other gradients, which are caught if parameters are sharded.
    pub(super) catches: Catches,
}

/// The tape of one layer: the start and the end points of its backward.
pub(super) struct TapePart {
    /// The gradients of the inputs; `None` for inputs that carry no gradient.
    pub(super) inputs: Vec<Option<Caught>>,
    /// The loss, from which the backward of the last stage starts.
    pub(super) loss: Option<Tensor<1>>,
    /// The outputs, from which every other backward starts.
    pub(super) outputs: Vec<OutputRoot>,
    /// The weighted auxiliary losses, which the backward of any layer starts from too.
    pub(super) auxiliary: Option<Tensor<1>>,
    /// The tensors that the forward of a slice took from earlier slices and left for later ones.
    pub(super) carry: Option<CarryEnds>,
    /// The side inputs that require a gradient.
    pub(super) sides: Vec<SideLeaf>,
    /// The check of the gradients, and the name of the layer; `None` if they are not checked.
    pub(super) watch: Option<(Watch, Arc<str>)>,
}

/// A backward that has run.
pub(super) struct FinishedTape {
    /// The gradients of the inputs.
    pub(super) inputs: OptionalTensors,
    /// The gradients of side inputs.
    pub(super) sides: SideSums,
    /// The other results; `None` if no parameter and no input has a gradient.
    pub(super) parameters: Option<(Option<Deferred>, Catches)>,
}

impl Tape {
    /// Makes the tape of a forward from the tapes of its layers.
    pub(super) fn new(parts: Vec<TapePart>) -> Self {
        Self { parts, deferred: None, catches: Catches::new() }
    }

    /// Adds the collectors of gradients that the forward ran with.
    pub(super) fn with(self, deferred: Deferred, catches: Catches) -> Self {
        Self { deferred: Some(deferred), catches, ..self }
    }

    /// Runs the backwards of the parts, from the last to the first: from the loss, or from the gradients of the
    /// outputs. Calls `add` with the gradients that each of them has computed.
    pub(super) fn backward(
        self,
        gradients: OptionalTensors,
        mut add: impl FnMut(&mut Gradients) -> Result<(), StageError>,
    ) -> Result<FinishedTape, StageError> {
        let Self { parts, deferred, catches } = self;
        let (mut inputs, mut has_run, mut sides) = (gradients, false, SideSums::new());
        for part in parts.into_iter().rev() {
            inputs = part.backward(inputs, &mut sides, |gradients| {
                has_run = true;
                add(gradients)
            })?;
        }
        Ok(FinishedTape { inputs, sides, parameters: has_run.then_some((deferred, catches)) })
    }

    /// Frees the tensors that the operations recorded. Burn frees a tape only when its backward runs, so this
    /// runs the backward, with gradients of zero, and drops the result.
    pub(super) fn discard(self) {
        for TapePart { loss, outputs, auxiliary, .. } in self.parts {
            let roots = outputs.into_iter().filter_map(|output| output.root.map(|(root, _)| root));
            let root = roots.fold(join(loss, auxiliary), |joined, root| join(joined, Some(root)));
            if let Some(root) = root.filter(Tensor::is_tracked) {
                drop(root.backward());
            }
        }
    }
}

impl TapePart {
    /// Runs the backward, and calls `add` with the gradients if there are any. Returns the gradients of the
    /// inputs, and adds the gradients of side inputs to `sums`.
    fn backward(
        self,
        gradients: OptionalTensors,
        sums: &mut SideSums,
        add: impl FnOnce(&mut Gradients) -> Result<(), StageError>,
    ) -> Result<OptionalTensors, StageError> {
        let Self { inputs, loss, outputs, auxiliary, mut carry, sides, watch } = self;
        if let Some((watch, layer)) = &watch {
            watch.gradients(&gradients, || FirstValue::OutputGradient { layer: layer.to_string() });
            watch.outcome()?;
        }
        let root = match loss {
            Some(loss) => Some(loss),
            None => fill_roots(outputs, gradients)?,
        };
        let carried = carry.as_mut().map(CarryEnds::start_backward).transpose()?.flatten();
        let root = join(join(root, carried), auxiliary).filter(Tensor::is_tracked);
        let mut added = Ok(());
        if let Some(root) = root {
            let mut gradients = root.backward();
            if let Some(carry) = carry {
                carry.add_gradients(&mut gradients);
            }
            added = add(&mut gradients);
            add_gradients(sides, sums);
        }
        let gradients = inputs.into_iter().map(|caught| caught?.take()).collect();
        if let Some((watch, layer)) = watch {
            watch.gradients(&gradients, || FirstValue::InputGradient { layer: layer.to_string() });
            watch.outcome()?;
        }
        added.map(|()| gradients)
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
        // A loss of weight 0 is only reported.
        if weight != 0.0 {
            weighted = join(weighted, Some(scaled(loss, weight * auxiliary_weight)));
        }
    }
    Ok((reported, weighted))
}

pub(super) fn check_scalar(loss: &Tensor<1>, what: impl Fn() -> String) -> Result<(), StageError> {
    match loss.dims() {
        [1] => Ok(()),
        [elements] => Err(StageError::Mistake(format!(
            "{} has {elements} elements; a loss is one number, the mean over the microbatch (shape [1])",
            what()
        ))),
    }
}

pub(super) fn scaled(loss: Tensor<1>, factor: f64) -> Tensor<1> {
    if factor == 1.0 { loss } else { loss * factor }
}
