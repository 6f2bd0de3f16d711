//! [`Suspicion`], the reason why a step is computed again, and [`Verification`], the result of the repetitions.

use std::collections::VecDeque;
use std::fmt;

use pipewright_schedule::{Microbatch, StageIndex};
use serde::{Deserialize, Serialize};

use super::difference::Difference;

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

/// The number of norms whose median is the usual one.
pub const NORMS: usize = 32;

/// The number of norms that must be known before a norm is a jump.
pub const FIRST_NORMS: usize = 8;

/// A norm that is more than this multiple of the usual one is a jump.
pub const JUMP: f64 = 10.0;

/// The gradient norms of the last updates.
#[derive(Clone, Debug, Default)]
pub(crate) struct UsualNorm(VecDeque<f64>);

impl UsualNorm {
    /// Adds the norm of an update. A norm that is not finite, of an update that was skipped, does not count.
    pub(crate) fn observe(&mut self, norm: f64) {
        if !norm.is_finite() {
            return;
        }
        if self.0.len() == NORMS {
            self.0.pop_front();
        }
        self.0.push_back(norm);
    }

    /// Forgets all norms, for the parameters of another step.
    pub(crate) fn forget(&mut self) {
        self.0.clear();
    }

    /// Returns the median of the norms; `None` as long as too few are known, and if it is 0:
    /// every norm would be a jump.
    pub(crate) fn median(&self) -> Option<f64> {
        if self.0.len() < FIRST_NORMS {
            return None;
        }
        let mut norms: Vec<f64> = self.0.iter().copied().collect();
        norms.sort_unstable_by(f64::total_cmp);
        Some(norms[norms.len() / 2]).filter(|&median| median > 0.0)
    }
}

/// The most repetitions of a step.
pub const REPETITIONS: u32 = 3;

/// Whether suspicious steps are computed again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verify {
    /// No step is repeated.
    #[default]
    Off,
    /// A suspicious step is repeated, and the bits are compared.
    OnSuspicion,
}

impl Verify {
    /// All values with their names in configurations.
    pub const NAMED: [(&'static str, Self); 2] = [("off", Self::Off), ("on-suspicion", Self::OnSuspicion)];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_follows_the_last_norms() {
        let mut usual = UsualNorm::default();
        for norm in 1..FIRST_NORMS {
            usual.observe(norm as f64);
            usual.observe(f64::INFINITY);
        }
        assert_eq!(usual.median(), None);
        usual.observe(1e9);
        assert_eq!(usual.median(), Some(5.0));
        (0..NORMS).for_each(|_| usual.observe(7.0));
        (0..NORMS / 2).for_each(|_| usual.observe(70.0));
        assert_eq!(usual.median(), Some(70.0), "a new level becomes the usual one");
        usual.forget();
        assert_eq!(usual.median(), None);
    }
}
