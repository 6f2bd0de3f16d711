//! [`Suspicion`], the reason why a step is computed again, and [`Verification`], the result of the repetitions.

use std::fmt;

use pipewright_schedule::{Microbatch, StageIndex};
use serde::{Deserialize, Serialize};

use super::difference::Difference;
use super::usual_norm::JUMP;

/// Why a step is suspicious.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Suspicion {
    /// A microbatch's loss is infinite or not a number.
    Loss {
        /// The microbatch, counted over all replicas.
        microbatch: Microbatch,
        /// Its loss.
        loss: f64,
    },
    /// An auxiliary loss is infinite or not a number.
    Auxiliary {
        /// Its name.
        name: String,
        /// The stage that computed it.
        stage: StageIndex,
        /// The microbatch, counted over all replicas.
        microbatch: Microbatch,
        /// Its value.
        loss: f64,
    },
    /// A number inside a stage is infinite or not a number.
    Layer {
        /// The number and its layer.
        what: String,
    },
    /// A parameter's gradient is infinite or not a number.
    Gradient {
        /// The first such parameter, by path.
        parameter: String,
    },
    /// A parameter is infinite or not a number.
    Parameter {
        /// The first such parameter of a rank, by path.
        parameter: String,
    },
    /// A forward had other results when a backward computed it again.
    Recomputed,
    /// The gradient norm is a multiple of the usual one.
    Jump {
        /// The norm.
        norm: f64,
        /// The median of the last norms.
        usual: f64,
    },
}

impl fmt::Display for Suspicion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loss { microbatch, loss } => write!(f, "the loss of microbatch {microbatch} is {loss}"),
            Self::Auxiliary { name, stage, microbatch, loss } => {
                write!(
                    f,
                    "the auxiliary loss `{name}` of stage {stage} and microbatch {microbatch} is {loss}"
                )
            }
            Self::Layer { what } => write!(f, "{what} is not finite"),
            Self::Gradient { parameter } => write!(f, "the gradient of `{parameter}` is not finite"),
            Self::Parameter { parameter } => write!(f, "the parameter `{parameter}` is not finite"),
            Self::Recomputed => {
                f.write_str("a forward has other results when its backward computes it again")
            }
            Self::Jump { norm, usual } => {
                write!(
                    f,
                    "the gradient norm is {norm:.3e}, more than {JUMP} times the usual norm {usual:.3e}"
                )
            }
        }
    }
}

/// The result of the repetitions of a suspicious step, whose last one counts.
#[derive(Clone, Debug, PartialEq)]
pub struct Verification {
    /// Why the step was repeated.
    pub suspicion: Suspicion,
    /// The number of repetitions.
    pub repetitions: u32,
    /// The first result whose bits differ; `None` if all bits that were compared agree.
    pub difference: Option<Difference>,
    /// Whether the last repetition shows the reason of the suspicion again. If it does not, and no result
    /// differs, something was wrong that is not compared, such as a sum over replicas or the gradient norm.
    pub is_reproduced: bool,
}
