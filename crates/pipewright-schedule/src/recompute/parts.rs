//! The parts of a layer whose results its backward computes again: cheap results that take much memory.

use std::fmt;
use std::str::FromStr;

use serde::de::Error;
use serde::ser::SerializeSeq;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::model::LayerDesc;

/// A part of a layer. Its result is an input of matrix products, which need it for the gradients of their
/// weights.
///
/// The scores of an attention are not among the parts: no layer keeps them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LayerPart {
    /// The normalisations.
    Norms,
    /// The activation of the feed-forward layer, which is the input of its last product.
    FeedForward,
}

impl LayerPart {
    /// All parts.
    pub const ALL: [Self; 2] = [Self::Norms, Self::FeedForward];

    /// Returns the name, as texts and configurations have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Norms => "norms",
            Self::FeedForward => "feed-forward",
        }
    }

    /// Returns the part of a name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|part| part.name() == name)
    }

    /// Returns the keys of its size and of its time in a layer of a profile.
    pub fn profile_keys(self) -> [&'static str; 2] {
        match self {
            Self::Norms => ["norms_bytes", "norms_s"],
            Self::FeedForward => ["feed_forward_bytes", "feed_forward_s"],
        }
    }

    /// Returns the bytes that a layer does not keep if its backward computes the part again, for a microbatch
    /// of one row; 0 if the layer lacks the part.
    pub fn bytes_of(self, layer: &LayerDesc) -> u64 {
        match self {
            Self::Norms => layer.norms_bytes,
            Self::FeedForward => layer.feed_forward_bytes,
        }
    }
}

/// The parts of the layers of a stage that are computed again. The result is not kept: the backward of a
/// layer computes it where it is needed, for every microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct LayerParts(u8);

impl LayerParts {
    /// No part.
    pub const NONE: Self = Self(0);
    /// All parts.
    pub const ALL: Self = Self((1 << LayerPart::ALL.len()) - 1);

    /// Returns the parts with one more.
    pub fn with(self, part: LayerPart) -> Self {
        Self(self.0 | 1 << part as u8)
    }

    /// Returns the parts that are also among `others`.
    pub fn intersection(self, others: Self) -> Self {
        Self(self.0 & others.0)
    }

    /// Returns the parts that are not among `others`.
    pub fn difference(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }

    /// Returns whether a part is among them.
    pub fn contains(self, part: LayerPart) -> bool {
        self.0 & 1 << part as u8 != 0
    }

    /// Returns whether there are none.
    pub fn is_empty(self) -> bool {
        self == Self::NONE
    }

    /// Returns the parts in order.
    pub fn iter(self) -> impl Iterator<Item = LayerPart> {
        LayerPart::ALL.into_iter().filter(move |&part| self.contains(part))
    }

    /// Returns the parts that some of these layers may compute again.
    pub fn of_layers(layers: &[LayerDesc]) -> Self {
        let is_in = |&part: &LayerPart| layers.iter().any(|layer| part.bytes_of(layer) > 0);
        LayerPart::ALL.into_iter().filter(is_in).collect()
    }

    /// Returns every choice of parts, from none to all.
    pub fn every() -> impl Iterator<Item = Self> {
        (0..=Self::ALL.0).map(Self)
    }
}

impl From<LayerPart> for LayerParts {
    fn from(part: LayerPart) -> Self {
        Self::NONE.with(part)
    }
}

impl FromIterator<LayerPart> for LayerParts {
    fn from_iter<I: IntoIterator<Item = LayerPart>>(parts: I) -> Self {
        parts.into_iter().fold(Self::NONE, Self::with)
    }
}

impl fmt::Display for LayerParts {
    /// Writes the names with `+` in between.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.iter().map(LayerPart::name).collect();
        f.write_str(&names.join("+"))
    }
}

impl FromStr for LayerParts {
    type Err = ();

    /// Reads at least one name. Each may occur once.
    fn from_str(text: &str) -> Result<Self, ()> {
        text.split('+').try_fold(Self::NONE, |parts, name| {
            let part = LayerPart::of_name(name).filter(|&part| !parts.contains(part)).ok_or(())?;
            Ok(parts.with(part))
        })
    }
}

impl Serialize for LayerParts {
    /// A list of names.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(None)?;
        for part in self.iter() {
            list.serialize_element(part.name())?;
        }
        list.end()
    }
}

impl<'de> Deserialize<'de> for LayerParts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let names = Vec::<String>::deserialize(deserializer)?;
        let parts = names.iter().map(|name| {
            LayerPart::of_name(name)
                .ok_or_else(|| D::Error::custom(format!("`{name}` is not a part of a layer")))
        });
        parts.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        for parts in LayerParts::every().skip(1) {
            assert_eq!(parts.to_string().parse(), Ok(parts));
            let json = serde_json::to_string(&parts).expect("JSON");
            assert_eq!(serde_json::from_str::<LayerParts>(&json).ok(), Some(parts), "{json}");
        }
        assert_eq!(LayerParts::every().last(), Some(LayerParts::ALL));
        for text in ["", "norm", "norms+", "norms+norms", "+norms", "norms,feed-forward"] {
            assert_eq!(text.parse::<LayerParts>(), Err(()), "{text}");
        }
    }

    #[test]
    fn a_part_is_added_and_removed() {
        for part in LayerPart::ALL {
            let one = LayerParts::NONE.with(part);
            assert_eq!(one.iter().collect::<Vec<_>>(), [part]);
            assert_eq!(one.difference(part.into()), LayerParts::NONE);
            assert_eq!(one.intersection(LayerParts::ALL), one);
            assert!(!LayerParts::ALL.difference(one).contains(part));
        }
    }
}
