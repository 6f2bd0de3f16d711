//! The rows of a parameter that a replica holds when parameters are sharded, and whose gradients it sums.
//!
//! A parameter is cut along its first dimension. A shard is a range of whole rows, which are adjacent in
//! storage, and has as many dimensions as the parameter. If a parameter has fewer rows than there are
//! replicas, the last replicas hold no rows of it.

use std::ops::Range;
use std::str::FromStr;

use burn::backend::Dispatch;
use burn::backend::ops::FloatTensorOps;
use serde::{Deserialize, Serialize};

use super::placement::range_of_shard;
use super::value::Value;

/// One of the shards into which every parameter is cut; `2/4` is the third of four.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) struct RowShard {
    /// The shard's index, from 0.
    pub index: u32,
    /// The number of shards.
    pub of: u32,
}

impl RowShard {
    /// The whole parameter.
    pub(crate) const WHOLE: Self = Self { index: 0, of: 1 };

    /// Returns all shards in order.
    pub(crate) fn all(of: u32) -> impl Iterator<Item = Self> + Clone {
        (0..of).map(move |index| Self { index, of })
    }

    /// Returns the shard's range of a parameter's `rows`.
    pub(crate) fn rows(self, rows: usize) -> Range<usize> {
        range_of_shard(self.index, self.of, rows)
    }

    /// Returns the shard of a float tensor, or `None` if it has no rows. Shares the storage if the back end
    /// can.
    pub(crate) fn cut(self, whole: &Value) -> Option<Value> {
        let Range { start, end } = self.rows(whole.shape()[0]);
        (start < end).then(|| whole.narrow(0, start, end))
    }
}

impl std::fmt::Display for RowShard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.index, self.of)
    }
}

impl FromStr for RowShard {
    type Err = InvalidRowShard;

    fn from_str(text: &str) -> Result<Self, InvalidRowShard> {
        let (index, of) = text.split_once('/').ok_or(InvalidRowShard)?;
        let part = Self {
            index: index.parse().map_err(|_| InvalidRowShard)?,
            of: of.parse().map_err(|_| InvalidRowShard)?,
        };
        if part.index < part.of { Ok(part) } else { Err(InvalidRowShard) }
    }
}

impl From<RowShard> for String {
    fn from(part: RowShard) -> Self {
        part.to_string()
    }
}

impl TryFrom<String> for RowShard {
    type Error = InvalidRowShard;

    fn try_from(text: String) -> Result<Self, InvalidRowShard> {
        text.parse()
    }
}

/// The text is not a shard.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected a shard such as `2/4`: its index, from 0, and the number of shards")]
pub(crate) struct InvalidRowShard;

pipewright_schedule::message_as_debug!(InvalidRowShard);

/// Concatenates the shards of a float tensor; `None` if there are no rows.
pub(crate) fn join(parts: impl IntoIterator<Item = Value>) -> Option<Value> {
    let mut parts: Vec<_> = parts.into_iter().map(Value::into_dispatch).collect();
    match parts.len() {
        0 | 1 => parts.pop().map(Value::from_dispatch),
        _ => Some(Value::from_dispatch(Dispatch::float_cat(parts, 0))),
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};

    use super::*;

    #[test]
    fn shards_cover_every_row_once() {
        for (rows, of) in [(10, 2), (10, 3), (1, 4), (7, 7), (3, 2), (5, 4)] {
            let all: Vec<usize> = RowShard::all(of).flat_map(|part| part.rows(rows)).collect();
            assert_eq!(all, (0..rows).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_shard_has_a_text_form() {
        let part = RowShard { index: 2, of: 4 };
        assert_eq!(part.to_string().parse(), Ok(part));
        for text in ["", "2", "4/4", "a/2", "1/-2"] {
            assert_eq!(text.parse::<RowShard>(), Err(InvalidRowShard), "{text}");
        }
    }

    #[test]
    fn shards_join_to_the_whole() {
        let whole = Value::of(Tensor::<2>::from_data([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], &Device::flex()));
        for of in 1..6 {
            let parts: Vec<_> = RowShard::all(of).map(|part| part.cut(&whole)).collect();
            assert_eq!(
                parts.iter().filter(|part| part.is_some()).count(),
                match of {
                    1 => 1,
                    2 => 2,
                    _ => 3,
                }
            );
            let joined = join(parts.into_iter().flatten()).expect("a whole");
            assert_eq!(joined.into_data(), whole.clone().into_data());
        }
    }
}
