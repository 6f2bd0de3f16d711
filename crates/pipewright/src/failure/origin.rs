//! [`NotFiniteOrigin`]: where the first value of a failed step is that is not finite.

use std::fmt;
use std::sync::Arc;

use pipewright_schedule::{Microbatch, StageIndex};
use serde::{Deserialize, Serialize};

use crate::checkpoint::NotFinite;
use crate::ids::WorldRank;
use crate::stage::FirstValue;

/// The result of computing a step again that failed because a loss or a gradient is not finite
/// ([`PipelineConfig::name_not_finite`](crate::pipeline::PipelineConfig::name_not_finite)).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum NotFiniteOrigin {
    /// The first value that is not finite.
    First(FirstNotFinite),
    /// The values of all layers are finite, and a sum of gradients is not.
    Sum,
    /// All values are finite.
    NotRepeated,
}

/// The first value of a step that is not finite. If several ranks have such values at once, it is the one that a rank
/// found first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FirstNotFinite {
    /// The value.
    pub value: FirstValue,
    /// The stage that computed it.
    pub stage: StageIndex,
    /// The microbatch, counted over all replicas.
    pub microbatch: Microbatch,
    /// The rank.
    pub rank: WorldRank,
    /// A parameter of the rank that an earlier update has ruined, with its elements that are not finite; `None` if all
    /// parameters of the rank are finite.
    pub parameter: Option<(Arc<str>, NotFinite)>,
}

impl fmt::Display for NotFiniteOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the step was computed again with checks: ")?;
        match self {
            Self::First(first) => write!(f, "{first}"),
            Self::Sum => f.write_str(
                "the values of all layers are finite, and only a sum of gradients over microbatches or ranks is not",
            ),
            Self::NotRepeated => f.write_str(
                "all values are finite this time, so a device computes wrong numbers, or a layer computes other numbers \
                 each time",
            ),
        }
    }
}

impl fmt::Display for FirstNotFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { value, stage, microbatch, rank, parameter } = self;
        write!(f, "{value}, in microbatch {microbatch} of stage {stage} on rank {rank}")?;
        match parameter {
            Some((parameter, found)) => write!(f, ", where the parameter `{parameter}` has {found}"),
            None => Ok(()),
        }
    }
}
