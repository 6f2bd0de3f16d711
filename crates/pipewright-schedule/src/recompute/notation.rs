//! Choices of what is recomputed as text: an argument, such as `0,2:layers=3`, and lists in JSON.

use std::fmt;
use std::str::FromStr;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use thiserror::Error;

use super::choice::{Recompute, StageRecompute};
use super::parts::LayerParts;
use crate::ids::StageIndex;

/// A text that does not say what is recomputed.
#[derive(Clone, PartialEq, Eq, Error)]
#[error(
    "`{text}` is not a choice of what is recomputed; write `none`, `stage`, `block`, or stages such as `0,2`, which may name \
     their first layers, the microbatches that keep their activations, or parts of layers: `0,2:layers=3,3:keep=1`, \
     `1:parts=norms+feed-forward`, or `parts` for all parts of all stages"
)]
pub struct RecomputeError {
    /// The text.
    pub text: String,
}

crate::error_text::message_as_debug!(RecomputeError);

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Stage => f.write_str("stage"),
            Self::Block => f.write_str("block"),
            Self::Parts => f.write_str("parts"),
            Self::Stages(stages) => {
                let stages: Vec<String> =
                    stages.iter().map(|(stage, choice)| format!("{stage}{choice}")).collect();
                f.write_str(&stages.join(","))
            }
        }
    }
}

impl fmt::Display for StageRecompute {
    /// Writes what follows the number of the stage; nothing for the whole stage.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(layers) = self.layers.filter(|&layers| layers > 0) {
            write!(f, ":layers={layers}")?;
        }
        if self.keep > 0 {
            write!(f, ":keep={}", self.keep)?;
        }
        match self.layers {
            // Parts without a number of layers have no second forwards.
            None if !self.parts.is_empty() => write!(f, ":layers=all:parts={}", self.parts),
            _ if !self.parts.is_empty() => write!(f, ":parts={}", self.parts),
            _ => Ok(()),
        }
    }
}

impl Serialize for Recompute {
    /// A word, or a list of stages. A stage is a number if it is recomputed as a whole, and otherwise a table
    /// with the keys `stage`, `layers`, `keep` and `parts`.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Stages(stages) => {
                serializer.collect_seq(stages.iter().map(|(&stage, &choice)| StageEntry { stage, choice }))
            }
            word => serializer.collect_str(word),
        }
    }
}

/// A stage of a list with its choice.
struct StageEntry {
    stage: StageIndex,
    choice: StageRecompute,
}

impl Serialize for StageEntry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { stage, choice } = self;
        if *choice == StageRecompute::WHOLE {
            return stage.serialize(serializer);
        }
        let mut table = serializer.serialize_map(None)?;
        table.serialize_entry("stage", stage)?;
        match choice.layers {
            // Parts without a number of layers have no second forwards.
            None if !choice.parts.is_empty() => table.serialize_entry("layers", "all")?,
            Some(layers @ 1..) => table.serialize_entry("layers", &layers)?,
            _ => {}
        }
        if choice.keep > 0 {
            table.serialize_entry("keep", &choice.keep)?;
        }
        if !choice.parts.is_empty() {
            table.serialize_entry("parts", &choice.parts)?;
        }
        table.end()
    }
}

impl FromStr for Recompute {
    type Err = RecomputeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || RecomputeError { text: text.chars().take(40).collect() };
        match text.to_ascii_lowercase().as_str() {
            "none" => Ok(Self::None),
            "stage" => Ok(Self::Stage),
            "block" => Ok(Self::Block),
            "parts" => Ok(Self::Parts),
            list => {
                let entries: Option<Vec<_>> = list.split(',').map(entry).collect();
                entries.and_then(Self::of_entries).ok_or_else(wrong)
            }
        }
    }
}

/// Reads a stage of a list, such as `2`, `2:layers=3:keep=1` or `2:parts=norms`.
fn entry(text: &str) -> Option<(StageIndex, StageRecompute)> {
    let mut keys = text.trim().split(':');
    let stage = StageIndex::try_from(keys.next()?.parse::<u32>().ok()?).ok()?;
    let mut given = GivenChoice::default();
    for key in keys {
        match key.split_once('=')? {
            ("layers", "all") if given.layers.is_none() => given.layers = Some(None),
            ("layers", value) if given.layers.is_none() => given.layers = Some(Some(value.parse().ok()?)),
            ("keep", value) if given.keep.is_none() => given.keep = Some(value.parse().ok()?),
            ("parts", value) if given.parts.is_none() => given.parts = Some(value.parse().ok()?),
            _ => return None,
        }
    }
    Some((stage, given.choice()?))
}

/// The keys of an entry of a list, as a text or a configuration has them.
#[derive(Debug, Clone, Copy, Default)]
pub struct GivenChoice {
    /// The number of first layers; `Some(None)` for all.
    pub layers: Option<Option<u32>>,
    /// The microbatches in flight that keep their activations.
    pub keep: Option<u32>,
    /// The parts of layers.
    pub parts: Option<LayerParts>,
}

impl GivenChoice {
    /// Returns the choice. Without a number of layers it is all of them, or none if there are parts. `None` if
    /// the keys do not fit each other: 0 layers, no part, or microbatches that keep their activations where no
    /// forward is computed again.
    pub fn choice(self) -> Option<StageRecompute> {
        let Self { layers, keep, parts } = self;
        let none = parts.is_some().then_some(0);
        let choice = StageRecompute {
            layers: layers.unwrap_or(none),
            keep: keep.unwrap_or(0),
            parts: parts.unwrap_or_default(),
        };
        let is_sound = layers != Some(Some(0))
            && parts.is_none_or(|parts| !parts.is_empty())
            && (choice.has_second_forwards() || keep.is_none());
        is_sound.then_some(choice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_read_and_written() {
        for text in [
            "none",
            "stage",
            "block",
            "parts",
            "0,2,17",
            "0,2:layers=3,5:keep=1,6:layers=2:keep=4",
            "0:parts=norms,1:layers=2:keep=4:parts=norms+feed-forward,2:layers=all:parts=feed-forward",
        ] {
            assert_eq!(text.parse::<Recompute>().map(|recompute| recompute.to_string()).as_deref(), Ok(text));
        }
        for text in ["1:parts=", "1:parts=scores", "1:parts=norms:parts=norms", "1:keep=1:parts=norms"] {
            assert!(text.parse::<Recompute>().is_err(), "{text}");
        }
        for text in ["", "all", "1,", "-1", "99999999", "1:", "1:layers", "1:layers=0", "1:keep=-1"] {
            assert!(text.parse::<Recompute>().is_err(), "{text}");
        }
        for text in ["1:first=2", "1:layers=1:layers=2", "layers=2", "stage:layers=2"] {
            assert!(text.parse::<Recompute>().is_err(), "{text}");
        }
        for text in ["1:keep=2:keep=2", "1:keep=0:keep=2", "1:keep=2:keep=0"] {
            assert!(text.parse::<Recompute>().is_err(), "{text}");
        }
        // A stage that is named twice must have the same choice.
        assert_eq!("0,0".parse(), Ok(Recompute::whole_stages([StageIndex::new(0)])));
        for text in ["0,0:layers=2", "1:keep=1,2,1:keep=2"] {
            assert!(text.parse::<Recompute>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_list_has_numbers_and_tables() {
        let json =
            |text: &str| serde_json::to_string(&text.parse::<Recompute>().expect("a choice")).expect("JSON");
        assert_eq!(json("block"), "\"block\"");
        assert_eq!(json("0,2:layers=3"), r#"[0,{"stage":2,"layers":3}]"#);
        assert_eq!(
            json("1:keep=2,2:layers=1:keep=1"),
            r#"[{"stage":1,"keep":2},{"stage":2,"layers":1,"keep":1}]"#
        );
        assert_eq!(
            json("1:parts=norms,2:layers=all:parts=norms+feed-forward"),
            r#"[{"stage":1,"parts":["norms"]},{"stage":2,"layers":"all","parts":["norms","feed-forward"]}]"#
        );
    }
}
