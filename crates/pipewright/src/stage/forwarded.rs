//! The results of a forward, and a small part of them, which shows whether a second forward computes
//! something else.

use burn::tensor::Tensor;

use super::module::{Auxiliary, ExpertLoad};
use crate::device::computes_behind;
use crate::tensor::{Value, Values};

/// The results of a forward. The stage keeps none of them.
pub(crate) struct Forwarded {
    /// The stage's outputs, off the tape. A stage with a loss returns them only if they are asked for.
    pub outputs: Values,
    /// The last stage's loss, off the tape (shape `[1]`).
    pub loss: Option<Tensor<1>>,
    /// Auxiliary losses in the order in which they were added, off the tape.
    pub auxiliary: Vec<Auxiliary>,
    /// The loads of experts that the forward reported.
    pub loads: Vec<ExpertLoad>,
}

/// The most elements that are read at each end of an output.
const ELEMENTS: usize = 32;

/// The bits of the losses of a forward, or of some elements of its outputs if it has no loss.
#[derive(Debug, PartialEq)]
pub(super) struct Fingerprint(Vec<Vec<u8>>);

impl Fingerprint {
    /// Reads the results, except tensors on a device: reading them would make the rank wait for its device,
    /// whose operations may also differ in their last bits from one run to the next.
    pub(super) fn of(found: &Forwarded) -> Self {
        let losses = found.auxiliary.iter().map(|auxiliary| &auxiliary.loss).chain(&found.loss);
        let losses = losses.map(|loss| Value::of(loss.clone()));
        // A stage with a loss returns its outputs only if they are asked for; otherwise only the loss is
        // known.
        let outputs = found.outputs.iter().filter(|_| found.loss.is_none()).flat_map(ends);
        let read = losses.chain(outputs).filter(|value| !computes_behind(&value.device()));
        Self(read.map(|value| value.into_data().as_bytes().to_vec()).collect())
    }
}

/// Returns the first and the last elements of a tensor.
fn ends(value: &Value) -> Vec<Value> {
    let shape = value.shape().to_vec();
    let Some((&last, outer)) = shape.split_last() else { return vec![value.clone()] };
    if shape.contains(&0) {
        return Vec::new();
    }
    let row = |index: fn(usize) -> usize| {
        let narrow = |value: Value, (dimension, &size): (usize, &usize)| {
            value.narrow(dimension, index(size), index(size) + 1)
        };
        outer.iter().enumerate().fold(value.clone(), narrow)
    };
    let count = last.min(ELEMENTS);
    let dimension = outer.len();
    vec![row(|_| 0).narrow(dimension, 0, count), row(|size| size - 1).narrow(dimension, last - count, last)]
}
