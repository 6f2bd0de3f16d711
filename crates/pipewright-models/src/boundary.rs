//! The tensors between the layers of a model, which are also the inputs and outputs of its stages.

use burn::tensor::{Int, Tensor};
use pipewright::tensor::{Boundary, BoundaryError, Unpack, Value, ValueKind, Values};

/// The tensors that a layer takes or returns.
///
/// The embedding takes token ids `[batch, sequence]`. Blocks take and return hidden states `[batch, sequence,
/// hidden]`, and in the hybrid family the token ids too. There, the states of each further prediction follow
/// as further rows. The head returns logits `[batch, sequence, vocabulary]` of the next token, and those of each
/// further prediction. Parts of an embedding or of a head return what they have found so far.
#[derive(Debug, Clone, Default)]
pub struct StageTensors {
    /// Hidden states, logits, or the results of parts.
    pub floats: Vec<Tensor<3>>,
    /// The token ids, if the layer takes or returns them.
    pub ids: Option<Tensor<2, Int>>,
}

impl StageTensors {
    /// Returns the first tensor: hidden states, or the logits of the next token.
    ///
    /// # Panics
    /// When there are token ids alone.
    pub fn first(self) -> Tensor<3> {
        let first = self.floats.into_iter().next();
        first.expect("a stage without the embedding takes hidden states, not token ids")
    }

    /// Returns the hidden states that a layer takes.
    ///
    /// # Panics
    /// When there are token ids alone, or several tensors.
    pub(crate) fn hidden(self) -> Tensor<3> {
        let given = self.floats.len();
        assert!(given <= 1, "a layer takes one tensor of hidden states, and {given} tensors are given");
        self.first()
    }
}

impl From<Tensor<2, Int>> for StageTensors {
    fn from(ids: Tensor<2, Int>) -> Self {
        Self { floats: Vec::new(), ids: Some(ids) }
    }
}

impl From<Tensor<3>> for StageTensors {
    fn from(hidden: Tensor<3>) -> Self {
        Self { floats: vec![hidden], ids: None }
    }
}

impl Boundary for StageTensors {
    fn pack(self, into: &mut Values) {
        self.floats.into_iter().for_each(|float| float.pack(into));
        self.ids.into_iter().for_each(|ids| ids.pack(into));
    }

    fn unpack(from: &mut Unpack) -> Result<Self, BoundaryError> {
        let mut tensors = Self::default();
        while from.peek().map(Value::kind) != Some(ValueKind::Int) {
            if from.peek().is_none() && !tensors.floats.is_empty() {
                return Ok(tensors);
            }
            tensors.floats.push(Tensor::unpack(from)?);
        }
        tensors.ids = Some(Tensor::unpack(from)?);
        Ok(tensors)
    }
}
