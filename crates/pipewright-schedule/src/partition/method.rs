//! The methods by name, and the function that partitions.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use thiserror::Error;

use crate::partition::stages::Partition;
use crate::partition::{optimal, weighted};
use crate::words::counted;

/// A method of cutting layers into stages. As text: `even`, `weighted`, `optimal`, `explicit:4,8`,
/// `blocks:1..9`, `blocks:1..9:2,4,6`.
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
    /// The same number of blocks for each stage; the first stages take the remainder. The layers before the
    /// blocks belong to the first stage, and those behind them to the last one.
    Blocks {
        /// The layers that are blocks.
        blocks: Range<usize>,
        /// Cuts at given blocks instead: the first block of each stage but the first, ascending, counted from
        /// 0 without the layers before the blocks. Empty for the same number of blocks.
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
        Self::more_stages_than(layers, "layer", stages)
    }

    fn more_stages_than(number: usize, unit: &str, stages: u32) -> Self {
        let advice = match number {
            0 => format!("add {unit}s"),
            _ => format!("use at most {}", counted(number, "stage")),
        };
        Self(format!("{} cannot fill {}; {advice}", counted(number, unit), counted(stages, "stage")))
    }
}

/// A text that is not the name of a [`Method`].
#[derive(Clone, PartialEq, Eq, Error)]
#[error(
    "unknown partition method `{text}`; use `even`, `weighted`, `optimal`, `explicit:4,8` with the first layer of each later stage, or \
     `blocks:1..9` with the layers that are blocks"
)]
pub struct UnknownMethod {
    /// The text.
    pub text: String,
}

crate::error_text::message_as_debug!(UnknownMethod);

/// Cuts layers with these weights into `stages` stages.
///
/// # Errors
/// When `stages` is 0 or larger than the number of layers or blocks, or when the boundaries of `method` do not fit the
/// layers and the stages.
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
        Method::Explicit { boundaries } => cut_at((layers, "layer"), stages, boundaries),
        Method::Blocks { blocks, boundaries } => cut_blocks(layers, blocks, stages, boundaries),
    }
}

/// Cuts the blocks alone, and gives the other layers to the first and to the last stage.
fn cut_blocks(
    layers: usize,
    blocks: &Range<usize>,
    stages: u32,
    boundaries: &[usize],
) -> Result<Partition, PartitionError> {
    if blocks.end > layers {
        let all = counted(layers, "layer");
        let Range { start, end } = blocks;
        return Err(PartitionError(format!("the blocks {start}..{end} end behind the last of {all}")));
    }
    if stages as usize > blocks.len() {
        return Err(PartitionError::more_stages_than(blocks.len(), "block", stages));
    }
    let cut = match boundaries {
        [] => Partition::even(blocks.len(), stages as usize),
        boundaries => cut_at((blocks.len(), "block"), stages, boundaries)?,
    };
    let starts = cut.ranges().map(|range| if range.start == 0 { 0 } else { blocks.start + range.start });
    Ok(Partition::from_starts(starts.collect(), layers))
}

/// Cuts before each boundary: the first layer of a stage other than the first, or its first block. `units` has
/// their number, and the word for one.
fn cut_at(units: (usize, &str), stages: u32, boundaries: &[usize]) -> Result<Partition, PartitionError> {
    let (number, unit) = units;
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
                "boundary {boundary} does not come after {previous}; every stage needs a {unit}, so boundaries ascend from 1"
            )));
        }
        if boundary >= number {
            let all = counted(number, unit);
            return Err(PartitionError(format!(
                "boundary {boundary} is above the last of {all}; use one below {number}"
            )));
        }
        starts.push(boundary);
    }
    Ok(Partition::from_starts(starts, number))
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Even => f.pad("even"),
            Self::Weighted => f.pad("weighted"),
            Self::Optimal => f.pad("optimal"),
            Self::Explicit { boundaries } => f.pad(&format!("explicit:{}", listed(boundaries))),
            Self::Blocks { blocks: Range { start, end }, boundaries } if boundaries.is_empty() => {
                f.pad(&format!("blocks:{start}..{end}"))
            }
            Self::Blocks { blocks: Range { start, end }, boundaries } => {
                f.pad(&format!("blocks:{start}..{end}:{}", listed(boundaries)))
            }
        }
    }
}

impl FromStr for Method {
    type Err = UnknownMethod;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let method = match text.split_once(':') {
            None => match text {
                "even" => Some(Self::Even),
                "weighted" => Some(Self::Weighted),
                "optimal" => Some(Self::Optimal),
                _ => None,
            },
            Some(("explicit", boundaries)) => {
                read_numbers(boundaries).map(|boundaries| Self::Explicit { boundaries })
            }
            Some(("blocks", blocks)) => read_blocks(blocks),
            Some(_) => None,
        };
        method.ok_or_else(|| UnknownMethod { text: text.to_owned() })
    }
}

fn listed(numbers: &[usize]) -> String {
    let numbers: Vec<String> = numbers.iter().map(ToString::to_string).collect();
    numbers.join(",")
}

/// Reads numbers separated by commas. An empty text has none.
fn read_numbers(text: &str) -> Option<Vec<usize>> {
    let numbers = text.split(',').filter(|_| !text.is_empty());
    numbers.map(|number| number.parse().ok()).collect()
}

fn read_blocks(text: &str) -> Option<Method> {
    let (blocks, boundaries) = text.split_once(':').unwrap_or((text, ""));
    let (start, end) = blocks.split_once("..")?;
    let blocks = start.parse().ok()?..end.parse().ok()?;
    Some(Method::Blocks { blocks, boundaries: read_numbers(boundaries)? })
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
        for text in [
            "even",
            "weighted",
            "optimal",
            "explicit:",
            "explicit:4",
            "explicit:4,8",
            "blocks:1..9",
            "blocks:0..4:1,3",
        ] {
            assert_eq!(text.parse::<Method>().map(|method| method.to_string()), Ok(text.to_owned()));
        }
        for text in [
            "",
            "Even",
            "explicit",
            "explicit:x",
            "explicit:1,,2",
            "blocks",
            "blocks:1",
            "blocks:1..",
            "even:1",
        ] {
            assert_eq!(text.parse::<Method>(), Err(UnknownMethod { text: text.to_owned() }));
        }
    }

    #[test]
    fn impossible_cuts_of_blocks_are_refused() {
        check_error(6, 5, "blocks:1..5", "4 blocks cannot fill 5 stages; use at most 4 stages");
        check_error(6, 1, "blocks:3..3", "0 blocks cannot fill 1 stage; add blocks");
        check_error(6, 2, "blocks:1..7", "the blocks 1..7 end behind the last of 6 layers");
        check_error(6, 3, "blocks:1..5:2", "1 boundary cannot make 3 stages; give 2 boundaries");
        check_error(6, 2, "blocks:1..5:4", "boundary 4 is above the last of 4 blocks; use one below 4");
        let no_block =
            "boundary 0 does not come after 0; every stage needs a block, so boundaries ascend from 1";
        check_error(6, 2, "blocks:1..5:0", no_block);
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
