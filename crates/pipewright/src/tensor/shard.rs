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

/// Consecutive parts of the equal parts into which the rows of a parameter are cut; `2/4` is the third of
/// four, and `2-3/4` the third and the fourth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) struct RowShard {
    /// The index of the first part, from 0.
    pub index: u32,
    /// The number of parts that the shard has.
    pub count: u32,
    /// The number of all parts.
    pub of: u32,
}

impl RowShard {
    /// The whole parameter.
    pub(crate) const WHOLE: Self = Self::one(0, 1);

    /// Returns the shard that has one of `of` parts.
    pub(crate) const fn one(index: u32, of: u32) -> Self {
        Self { index, count: 1, of }
    }

    /// Returns all shards of one part, in order.
    pub(crate) fn all(of: u32) -> impl Iterator<Item = Self> + Clone {
        (0..of).map(move |index| Self::one(index, of))
    }

    /// Returns the parts of the shard, in order.
    pub(crate) fn parts(self) -> impl Iterator<Item = Self> {
        (self.index..self.end()).map(move |index| Self::one(index, self.of))
    }

    /// Returns the shards that have as many parts as this one each, in order.
    pub(crate) fn all_alike(self) -> impl Iterator<Item = Self> {
        (0..self.of).step_by(self.count as usize).map(move |index| Self { index, ..self })
    }

    /// Returns the index of the first part after the shard.
    pub(crate) fn end(self) -> u32 {
        self.index + self.count
    }

    /// Returns whether the shard has all parts.
    pub(crate) fn has_all(self) -> bool {
        self.count == self.of
    }

    /// Returns the shard's range of a parameter's `rows`.
    pub(crate) fn rows(self, rows: usize) -> Range<usize> {
        let start = |index| range_of_shard(index, self.of, rows).start;
        start(self.index)..start(self.end())
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
        match self.count {
            1 => write!(f, "{}/{}", self.index, self.of),
            _ => write!(f, "{}-{}/{}", self.index, self.end() - 1, self.of),
        }
    }
}

impl FromStr for RowShard {
    type Err = InvalidRowShard;

    fn from_str(text: &str) -> Result<Self, InvalidRowShard> {
        let number = |text: &str| text.parse::<u32>().map_err(|_| InvalidRowShard);
        let (parts, of) = text.split_once('/').ok_or(InvalidRowShard)?;
        let (first, last) = parts.split_once('-').unwrap_or((parts, parts));
        let (first, last, of) = (number(first)?, number(last)?, number(of)?);
        let is_valid = first <= last && last < of;
        is_valid.then(|| Self { index: first, count: last - first + 1, of }).ok_or(InvalidRowShard)
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
#[error(
    "expected a shard such as `2/4` or `2-3/4`: the indices of its parts, from 0, and the number of all parts"
)]
pub(crate) struct InvalidRowShard;

pipewright_schedule::message_as_debug!(InvalidRowShard);

/// The rows of the trained parameters of a stage that a replica holds, if parameters are sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowShards {
    /// The rows of the experts that only some replicas hold. Fewer replicas share them, so a replica holds
    /// several parts, or all.
    pub experts: RowShard,
    /// The rows of all other parameters: one part.
    pub others: RowShard,
}

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

    /// A part of a part has the same rows whether a replica holds one part or several.
    #[test]
    fn a_shard_of_several_parts_has_their_rows() {
        for (rows, count, of) in [(10, 2, 4), (10, 4, 4), (3, 2, 4), (7, 3, 6)] {
            let shards: Vec<_> = RowShard { index: 0, count, of }.all_alike().collect();
            assert_eq!(shards.len() as u32, of / count);
            for shard in &shards {
                let of_parts: Vec<usize> = shard.parts().flat_map(|part| part.rows(rows)).collect();
                assert_eq!(shard.rows(rows).collect::<Vec<_>>(), of_parts, "{shard} of {rows}");
            }
            let all: Vec<usize> = shards.iter().flat_map(|shard| shard.rows(rows)).collect();
            assert_eq!(all, (0..rows).collect::<Vec<_>>());
        }
        assert!(RowShard { index: 0, count: 4, of: 4 }.has_all() && !RowShard::one(0, 4).has_all());
    }

    #[test]
    fn a_shard_has_a_text_form() {
        for (part, text) in [(RowShard::one(2, 4), "2/4"), (RowShard { index: 1, count: 3, of: 4 }, "1-3/4")]
        {
            assert_eq!((part.to_string().as_str(), text.parse()), (text, Ok(part)));
        }
        for text in ["", "2", "4/4", "a/2", "1/-2", "2-4/4", "3-2/4", "1-/4"] {
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
