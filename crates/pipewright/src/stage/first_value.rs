//! [`FirstValue`]: the first value of a step that is not finite.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A value that is not finite although the values from which it was computed are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FirstValue {
    /// The input of a layer, as the batch or another rank gave it.
    Input {
        /// The layer.
        layer: String,
    },
    /// The output of a layer.
    Output {
        /// The layer.
        layer: String,
    },
    /// A number inside a layer, which the layer has named
    /// ([`StageContext::not_finite`](super::StageContext::not_finite)).
    Inside {
        /// The number and its layer.
        what: String,
    },
    /// An auxiliary loss.
    Auxiliary {
        /// Its name.
        name: String,
    },
    /// The loss.
    Loss,
    /// The gradient of the output of a layer, as the loss or another rank gave it.
    OutputGradient {
        /// The layer.
        layer: String,
    },
    /// The gradient of the input of a layer, which its backward has computed.
    InputGradient {
        /// The layer.
        layer: String,
    },
    /// The gradient of a parameter.
    ParameterGradient {
        /// The path of the parameter.
        parameter: String,
    },
}

impl FirstValue {
    /// Returns whether a backward has computed the value.
    pub(crate) fn is_gradient(&self) -> bool {
        matches!(
            self,
            Self::OutputGradient { .. } | Self::InputGradient { .. } | Self::ParameterGradient { .. }
        )
    }
}

/// A sentence with a colon, such as `` `layers.3` is the first layer with a value that is not finite: its output ``.
impl fmt::Display for FirstValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = "is the first layer with a value that is not finite";
        match self {
            Self::Input { layer } => write!(f, "`{layer}` {first}: the input that it was given"),
            Self::Output { layer } => write!(f, "`{layer}` {first}: its output"),
            Self::Inside { what } => write!(f, "the first value that is not finite is {what}"),
            Self::Auxiliary { name } => {
                write!(f, "the first value that is not finite is the auxiliary loss `{name}`")
            }
            Self::Loss => f.write_str("the first value that is not finite is the loss"),
            Self::OutputGradient { layer } => {
                write!(f, "`{layer}` {first}: the gradient of its output that it was given")
            }
            Self::InputGradient { layer } => write!(f, "`{layer}` {first}: the gradient of its input"),
            Self::ParameterGradient { parameter } => {
                write!(f, "the first value that is not finite is the gradient of `{parameter}`")
            }
        }
    }
}
