//! [`Watch`]: the search for the first value of a microbatch that is not finite, in a step that has failed because of
//! such a value and is computed again ([`crate::failure::FirstNotFinite`]).
//!
//! Values are read back from the device and change no bit. A layer counts as the origin if its result has such a value
//! and its inputs have none of that kind: a layer may take a mask of infinite numbers.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::Tensor;

use super::error::StageError;
use super::first_value::FirstValue;
use super::tape_ends::without_tape;
use crate::autodiff::{Rule, inner_of, record_one};
use crate::checkpoint::NotFinite;
use crate::tensor::{OptionalTensors, Value, ValueKind};

/// Checks the values of one microbatch in a stage. Clones share what they have found.
#[derive(Clone, Debug)]
pub(crate) struct Watch(Arc<Mutex<Watched>>);

#[derive(Debug, Default)]
struct Watched {
    /// Whether gradients are checked too. Gradients of scaled losses may be infinite: then the scale falls.
    checks_gradients: bool,
    /// The layers whose outputs were checked inside a forward, in order.
    layers: Vec<Arc<str>>,
    first: Option<FirstValue>,
}

impl Watch {
    /// Makes a watch. `checks_gradients` says whether gradients are checked too.
    pub(super) fn new(checks_gradients: bool) -> Self {
        Self(Arc::new(Mutex::new(Watched { checks_gradients, ..Watched::default() })))
    }

    /// Returns whether gradients are checked too.
    pub(super) fn checks_gradients(&self) -> bool {
        self.lock().checks_gradients
    }

    /// Fails if a value that is not finite was found.
    pub(super) fn outcome(&self) -> Result<(), StageError> {
        let first = self.lock().first.clone();
        first.map_or(Ok(()), |value| Err(StageError::FirstNotFinite { value }))
    }

    /// Keeps the first value that is not finite.
    pub(super) fn note(&self, value: FirstValue) {
        self.lock().first.get_or_insert(value);
    }

    /// Checks the inputs of a layer, and returns what was found in them. An infinite number may be meant.
    pub(super) fn inputs(&self, layer: &str, inputs: &[Value]) -> NotFinite {
        let found = found_in(inputs);
        if found.nan > 0 {
            self.note(FirstValue::Input { layer: layer.to_owned() });
        }
        found
    }

    /// Checks the outputs of a layer whose inputs had `before`.
    pub(super) fn outputs(&self, layer: &str, outputs: &[Value], before: NotFinite) {
        let found = found_in(outputs);
        if found.nan > before.nan || (found.infinite > 0 && before.infinite == 0) {
            self.note(FirstValue::Output { layer: layer.to_owned() });
        }
    }

    /// Checks a loss.
    pub(super) fn loss(&self, loss: &Tensor<1>, value: impl FnOnce() -> FirstValue) {
        if !found_in(&[Value::of(loss.clone())]).is_empty() {
            self.note(value());
        }
    }

    /// Checks the gradients that a backward was given or has computed.
    pub(super) fn gradients(&self, gradients: &OptionalTensors, value: impl FnOnce() -> FirstValue) {
        if !self.checks_gradients() {
            return;
        }
        let gradients: Vec<_> = gradients.iter().flatten().cloned().collect();
        if !found_in(&gradients).is_empty() {
            self.note(value());
        }
    }

    /// Checks the output of a layer inside the forward of a module, and its gradient in the backward. Returns
    /// the output with the same bits.
    pub(super) fn inside<const D: usize>(&self, layer: &str, output: Tensor<D>) -> Tensor<D> {
        let index = {
            let mut watched = self.lock();
            watched.layers.push(layer.into());
            watched.layers.len() - 1
        };
        self.outputs(layer, &[Value::of(output.clone())], NotFinite::default());
        if !output.is_tracked() || !self.checks_gradients() {
            return output;
        }
        // The number of dimensions does not matter on the tape; 2 is arbitrary.
        let output = Tensor::<2>::from_dispatch(output.into_dispatch());
        let rule = GradientWatch { watch: self.clone(), index };
        Tensor::from_dispatch(record_one(output.clone(), inner_of(output), Arc::new(rule)).into_dispatch())
    }

    fn lock(&self) -> MutexGuard<'_, Watched> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Checks the gradient of the output of a layer. The backward of the layer after it has computed the gradient.
#[derive(Debug)]
struct GradientWatch {
    watch: Watch,
    index: usize,
}

impl Rule<1> for GradientWatch {
    fn backward(&self, gradient: Tensor<2>, _: [bool; 1]) -> [Option<Tensor<2>>; 1] {
        if !found_in(&[Value::of(gradient.clone())]).is_empty() {
            let mut watched = self.watch.lock();
            let value = match watched.layers.get(self.index + 1) {
                Some(layer) => FirstValue::InputGradient { layer: layer.to_string() },
                None => FirstValue::OutputGradient { layer: watched.layers[self.index].to_string() },
            };
            watched.first.get_or_insert(value);
        }
        [Some(gradient)]
    }
}

/// Returns the elements of float tensors that are not finite.
pub(super) fn found_in(values: &[Value]) -> NotFinite {
    let mut found = NotFinite::default();
    for value in values.iter().filter(|value| value.kind() == ValueKind::Float) {
        let data = without_tape(value.clone()).into_data();
        found.scan(data.dtype(), data.as_bytes());
    }
    found
}
