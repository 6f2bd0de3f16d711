//! The inputs and outputs of stages.

use burn::tensor::{Int, Tensor};
use pipewright::tensor::{Boundary, BoundaryError, Unpack, Value, ValueKind, Values};

/// The input of a stage.
#[expect(
    clippy::large_enum_variant,
    reason = "an input lives for one call, and a box would cost an allocation"
)]
#[derive(Debug, Clone)]
pub enum HybridInput {
    /// Token ids `[batch, sequence]`, for the stage with the embeddings.
    Tokens(Tensor<2, Int>),
    /// Hidden states `[predictions * batch, sequence, hidden]` and the token ids. The states of the last block
    /// before the stage come first. The states of each further prediction before the stage follow. The stage
    /// with the last part of the embedding takes the rows of the table that earlier parts have found.
    Hidden(Tensor<3>, Tensor<2, Int>),
}

/// The output of a stage.
#[expect(
    clippy::large_enum_variant,
    reason = "an output lives for one call, and a box would cost an allocation"
)]
#[derive(Debug, Clone)]
pub enum HybridOutput {
    /// Hidden states and the token ids, as in [`HybridInput::Hidden`].
    Hidden(Tensor<3>, Tensor<2, Int>),
    /// The logits `[batch, sequence, vocabulary]` of the last stage.
    Logits {
        /// The logits of the next token.
        logits: Tensor<3>,
        /// The logits of each further prediction.
        further: Vec<Tensor<3>>,
    },
}

impl HybridInput {
    /// Returns the token ids.
    pub(super) fn ids(&self) -> &Tensor<2, Int> {
        match self {
            Self::Tokens(ids) | Self::Hidden(_, ids) => ids,
        }
    }
}

impl Boundary for HybridInput {
    fn pack(self, into: &mut Values) {
        match self {
            Self::Tokens(ids) => ids.pack(into),
            Self::Hidden(hidden, ids) => (hidden, ids).pack(into),
        }
    }

    fn unpack(from: &mut Unpack) -> Result<Self, BoundaryError> {
        match from.peek().map(Value::kind) {
            Some(ValueKind::Int) => Tensor::unpack(from).map(Self::Tokens),
            _ => <(Tensor<3>, Tensor<2, Int>)>::unpack(from).map(|(hidden, ids)| Self::Hidden(hidden, ids)),
        }
    }
}

impl Boundary for HybridOutput {
    fn pack(self, into: &mut Values) {
        match self {
            Self::Hidden(hidden, ids) => (hidden, ids).pack(into),
            Self::Logits { logits, further } => {
                logits.pack(into);
                further.into_iter().for_each(|logits| logits.pack(into));
            }
        }
    }

    fn unpack(from: &mut Unpack) -> Result<Self, BoundaryError> {
        let first = Tensor::unpack(from)?;
        if from.peek().map(Value::kind) == Some(ValueKind::Int) {
            return Tensor::unpack(from).map(|ids| Self::Hidden(first, ids));
        }
        let mut further = Vec::new();
        while from.peek().is_some() {
            further.push(Tensor::unpack(from)?);
        }
        Ok(Self::Logits { logits: first, further })
    }
}
