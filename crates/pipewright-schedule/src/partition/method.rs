//! The methods by name, and the function that partitions.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::partition::stages::Partition;
use crate::partition::{optimal, weighted};
use crate::words::counted;

/// A method of cutting layers into stages. As text: `even`, `weighted`, `optimal`, `explicit:4,8`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Method {
    /// The same number of layers for each stage; the first stages take the remainder.
    Even,
    /// A greedy cut by weight, as in PyTorch's reference.
    Weighted,
    /// The cut whose heaviest stage is as light as possible.
    #[default]
    Optimal,
    /// Cuts at given layers.
    Explicit {
        /// The first layer of each stage but the first, ascending.
        boundaries: Vec<usize>,
    },
}

/// The reason why layers cannot be cut into stages, with what to do.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct PartitionError(String);

crate::error_text::message_as_debug!(PartitionError);

impl PartitionError {
    /// Returns the error of a stage that would be empty.
    pub fn more_stages_than_layers(layers: usize, stages: u32) -> Self {
        let advice = match layers {
            0 => "add layers".to_owned(),
            _ => format!("use at most {}", counted(layers, "stage")),
        };
        Self(format!("{} cannot fill {}; {advice}", counted(layers, "layer"), counted(stages, "stage")))
    }
}

/// A text that is not the name of a [`Method`].
#[derive(Clone, PartialEq, Eq, Error)]
#[error(
    "unknown partition method `{text}`; use `even`, `weighted`, `optimal`, or `explicit:4,8` with the first layer of each later stage"
)]
pub struct UnknownMethod {
    /// The text.
    pub text: String,
}

crate::error_text::message_as_debug!(UnknownMethod);

/// Cuts layers with these weights into `stages` stages.
///
/// # Errors
/// When there are no stages, or more stages than layers, or the boundaries of an explicit cut do not fit.
pub fn partition(weights: &[u64], stages: u32, method: &Method) -> Result<Partition, PartitionError> {
    let layers = weights.len();
    if stages == 0 {
        return Err(PartitionError("a partition needs at least one stage".to_owned()));
    }
    if stages as usize > layers {
        return Err(PartitionError::more_stages_than_layers(layers, stages));
    }
    match method {
        Method::Even => Ok(Partition::even(layers, stages as usize)),
        Method::Weighted => Ok(weighted::cut(weights, stages as usize)),
        Method::Optimal => Ok(optimal::cut(weights, stages as usize)),
        Method::Explicit { boundaries } => cut_at(layers, stages, boundaries),
    }
}

/// Cuts before each boundary. A boundary is the first layer of a stage other than the first.
fn cut_at(layers: usize, stages: u32, boundaries: &[usize]) -> Result<Partition, PartitionError> {
    if boundaries.len() + 1 != stages as usize {
        let advice = match stages {
            1 => "leave them out".to_owned(),
            _ => format!("give {}", counted(stages - 1, "boundary")),
        };
        let (given, stages) = (counted(boundaries.len(), "boundary"), counted(stages, "stage"));
        return Err(PartitionError(format!("{given} cannot make {stages}; {advice}")));
    }
    let mut starts = vec![0];
    for &boundary in boundaries {
        let previous = starts[starts.len() - 1];
        if boundary <= previous {
            return Err(PartitionError(format!(
                "boundary {boundary} does not come after {previous}; every stage needs a layer, so boundaries ascend from 1"
            )));
        }
        if boundary >= layers {
            let all = counted(layers, "layer");
            return Err(PartitionError(format!(
                "boundary {boundary} is above the last of {all}; use one below {layers}"
            )));
        }
        starts.push(boundary);
    }
    Ok(Partition::from_starts(starts, layers))
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Even => f.pad("even"),
            Self::Weighted => f.pad("weighted"),
            Self::Optimal => f.pad("optimal"),
            Self::Explicit { boundaries } => {
                let boundaries: Vec<String> = boundaries.iter().map(ToString::to_string).collect();
                f.pad(&format!("explicit:{}", boundaries.join(",")))
            }
        }
    }
}

impl FromStr for Method {
    type Err = UnknownMethod;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let unknown = || UnknownMethod { text: text.to_owned() };
        match text {
            "even" => Ok(Self::Even),
            "weighted" => Ok(Self::Weighted),
            "optimal" => Ok(Self::Optimal),
            "explicit:" => Ok(Self::Explicit { boundaries: Vec::new() }),
            _ => {
                let boundaries = text.strip_prefix("explicit:").ok_or_else(unknown)?;
                let boundaries = boundaries.split(',').map(str::parse).collect::<Result<_, _>>();
                Ok(Self::Explicit { boundaries: boundaries.map_err(|_not_a_number| unknown())? })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_error(layers: usize, stages: u32, method: &str, message: &str) {
        let method = method.parse().expect("a method");
        let error = partition(&vec![1; layers], stages, &method).expect_err("no such partition");
        assert_eq!(error.to_string(), message);
    }

    #[test]
    fn names_round_trip() {
        for text in ["even", "weighted", "optimal", "explicit:", "explicit:4", "explicit:4,8"] {
            assert_eq!(text.parse::<Method>().map(|method| method.to_string()), Ok(text.to_owned()));
        }
        for text in ["", "Even", "explicit", "explicit:x", "explicit:1,,2"] {
            assert_eq!(text.parse::<Method>(), Err(UnknownMethod { text: text.to_owned() }));
        }
    }

    #[test]
    fn impossible_cuts_are_refused() {
        check_error(3, 0, "even", "a partition needs at least one stage");
        for method in ["even", "weighted", "optimal", "explicit:1,2,3"] {
            check_error(3, 4, method, "3 layers cannot fill 4 stages; use at most 3 stages");
        }
        check_error(0, 1, "optimal", "0 layers cannot fill 1 stage; add layers");
    }

    #[test]
    fn boundaries_must_fit() {
        check_error(9, 3, "explicit:4", "1 boundary cannot make 3 stages; give 2 boundaries");
        let order = "does not come after 4; every stage needs a layer, so boundaries ascend from 1";
        check_error(9, 3, "explicit:4,4", &format!("boundary 4 {order}"));
        check_error(9, 3, "explicit:4,3", &format!("boundary 3 {order}"));
        let first =
            "boundary 0 does not come after 0; every stage needs a layer, so boundaries ascend from 1";
        check_error(9, 2, "explicit:0", first);
        check_error(9, 2, "explicit:9", "boundary 9 is above the last of 9 layers; use one below 9");
    }
}
