//! Recomputation: a forward keeps its inputs only, and the rank computes it again before its backward.
//!
//! The second forward fills the bubble before the backward: it runs while the gradients are on their way,
//! when the rank has nothing else to do. Block by block, it runs with the backward.
//!
//! This saves the activations between the forward and the backward of a microbatch, for the time of another
//! forward. A forward that its own backward follows at once, with no other computation of the rank in
//! between, is not recomputed: it would cost time and save nothing. So the last stage of 1F1B is never
//! recomputed.
//!
//! A stage may recompute less than everything ([`StageRecompute`]): its first layers only, so that the others
//! keep their activations, or only the microbatches above a number in flight. Less is computed again, and
//! more is kept.
//!
//! Some results inside a layer take much memory and little time. A stage may compute these parts of its layers
//! again ([`LayerParts`]), and keep the rest. There is no second forward then: each backward computes a part
//! where it needs it.
//!
//! ```
//! use pipewright_schedule::{Recompute, StageIndex};
//! let recompute: Recompute = "0,2:layers=3:keep=1".parse()?;
//! assert!(recompute.applies_to(StageIndex::new(2)) && !recompute.applies_to(StageIndex::new(1)));
//! assert_eq!(recompute.of(StageIndex::new(2)).map(|stage| stage.keep), Some(1));
//! let parts: Recompute = "0:parts=norms+feed-forward".parse()?;
//! assert!(!parts.applies_to(StageIndex::new(0)) && !parts.parts_of(StageIndex::new(0)).is_empty());
//! # Ok::<(), pipewright_schedule::recompute::RecomputeError>(())
//! ```

mod in_flight;
mod parts;

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use thiserror::Error;

use crate::action::Action;
use crate::ids::StageIndex;

pub use in_flight::KeptForwards;
pub use parts::{LayerPart, LayerParts};

/// The forwards and the parts of layers that stages compute again.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Recompute {
    /// No stage.
    #[default]
    None,
    /// Every stage, each as a whole.
    Stage,
    /// Every stage, block by block: a stage keeps the inputs of each of its blocks, and its backward holds
    /// the activations of one block at a time.
    Block,
    /// The parts of the layers of every stage. No forward is computed again.
    Parts,
    /// These stages, each as its entry says.
    Stages(BTreeMap<StageIndex, StageRecompute>),
}

/// The forwards and the parts of its layers that a stage computes again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct StageRecompute {
    /// The number of its first layers that are computed again, in one piece; `None` for all layers, and 0 if
    /// no forward is computed again, but only parts of layers. The other layers keep their activations.
    pub layers: Option<u32>,
    /// The number of microbatches in flight that keep all activations. A forward is computed again if the
    /// stage already has this many microbatches whose forward has run and kept them, and whose backward has
    /// not run. If microbatches are cut into slices, slices are counted.
    pub keep: u32,
    /// The parts of all its layers that every backward computes again.
    #[serde(default)]
    pub parts: LayerParts,
}

impl StageRecompute {
    /// All layers of all microbatches.
    pub const WHOLE: Self = Self { layers: None, keep: 0, parts: LayerParts::NONE };

    /// Returns the choice of the first `layers` layers of all microbatches; `None` for no layer.
    pub fn first(layers: u32) -> Option<Self> {
        (layers > 0).then_some(Self { layers: Some(layers), ..Self::WHOLE })
    }

    /// Returns the choice of parts of all layers, without second forwards; `None` for no part.
    pub fn of_parts(parts: LayerParts) -> Option<Self> {
        (!parts.is_empty()).then_some(Self { layers: Some(0), keep: 0, parts })
    }

    /// Returns the same choice for a stage of `count` layers, which may be fewer than it names: all layers if it
    /// names at least as many.
    pub fn within(self, count: usize) -> Self {
        Self { layers: self.layers.filter(|&layers| (layers as usize) < count), ..self }
    }

    /// Returns how many of the `count` layers of the stage are computed again.
    pub fn layers_of(self, count: usize) -> usize {
        self.layers.map_or(count, |layers| count.min(layers as usize))
    }

    /// Returns whether forwards are computed again, as a whole or their first layers.
    pub fn has_second_forwards(self) -> bool {
        self.layers != Some(0)
    }
}

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

impl Recompute {
    /// Returns the choice that recomputes these stages as a whole.
    pub fn whole_stages(stages: impl IntoIterator<Item = StageIndex>) -> Self {
        Self::Stages(stages.into_iter().map(|stage| (stage, StageRecompute::WHOLE)).collect())
    }

    /// Returns the choice with these entries; `None` if two entries of a stage differ.
    pub fn of_entries(entries: impl IntoIterator<Item = (StageIndex, StageRecompute)>) -> Option<Self> {
        let mut stages = BTreeMap::new();
        for (stage, choice) in entries {
            if *stages.entry(stage).or_insert(choice) != choice {
                return None;
            }
        }
        Some(Self::Stages(stages))
    }

    /// Returns the choice with an entry for each stage, from the first one on; `None` for a stage that is not
    /// recomputed.
    pub fn of_stages(stages: &[Option<StageRecompute>]) -> Self {
        let are_all = |choice| !stages.is_empty() && stages.iter().all(|&own| own == choice);
        if are_all(Some(StageRecompute::WHOLE)) {
            return Self::Stage;
        }
        if are_all(StageRecompute::of_parts(LayerParts::ALL)) {
            return Self::Parts;
        }
        let stages = (0..).map(StageIndex::new).zip(stages);
        let chosen: BTreeMap<_, _> =
            stages.filter_map(|(stage, choice)| choice.map(|choice| (stage, choice))).collect();
        if chosen.is_empty() { Self::None } else { Self::Stages(chosen) }
    }

    /// Returns the entry of `stage`; `None` if it computes nothing again.
    pub fn choice_of(&self, stage: StageIndex) -> Option<StageRecompute> {
        match self {
            Self::None => None,
            Self::Stage | Self::Block => Some(StageRecompute::WHOLE),
            Self::Parts => StageRecompute::of_parts(LayerParts::ALL),
            Self::Stages(stages) => stages.get(&stage).copied(),
        }
    }

    /// Returns the part of the forwards of `stage` that is computed again; `None` if there are no second
    /// forwards.
    pub fn of(&self, stage: StageIndex) -> Option<StageRecompute> {
        self.choice_of(stage).filter(|choice| choice.has_second_forwards())
    }

    /// Returns the parts of the layers of `stage` that are computed again.
    pub fn parts_of(&self, stage: StageIndex) -> LayerParts {
        self.choice_of(stage).map_or(LayerParts::NONE, |choice| choice.parts)
    }

    /// Whether `stage` computes its forward again, as a whole or in part.
    pub fn applies_to(&self, stage: StageIndex) -> bool {
        self.of(stage).is_some()
    }

    /// Whether any stage computes parts of its layers again.
    pub fn has_parts(&self) -> bool {
        match self {
            Self::None | Self::Stage | Self::Block => false,
            Self::Parts => true,
            Self::Stages(stages) => stages.values().any(|choice| !choice.parts.is_empty()),
        }
    }

    /// Whether any stage computes a forward again, as a whole or in part.
    pub fn has_second_forwards(&self) -> bool {
        match self {
            Self::None | Self::Parts => false,
            Self::Stage | Self::Block => true,
            Self::Stages(stages) => stages.values().any(|choice| choice.has_second_forwards()),
        }
    }

    /// Whether stages are recomputed block by block.
    pub fn is_by_block(&self) -> bool {
        *self == Self::Block
    }

    /// Returns the stages of a list that recompute a part of their layers.
    pub fn in_part(&self) -> impl Iterator<Item = StageIndex> {
        let stages = self.listed().into_iter().flatten();
        stages.filter(|(_, choice)| choice.layers.is_some_and(|layers| layers > 0)).map(|(&stage, _)| stage)
    }

    /// Returns the largest stage of a list, which must exist.
    pub fn largest_stage(&self) -> Option<StageIndex> {
        self.listed()?.keys().next_back().copied()
    }

    /// Returns the first stage that is to recompute more layers than it has, with both numbers. `count`
    /// returns the number of layers of a stage.
    pub fn beyond_layers(&self, count: impl Fn(StageIndex) -> usize) -> Option<(StageIndex, u32, usize)> {
        self.listed()?.iter().find_map(|(&stage, choice)| {
            let (layers, count) = (choice.layers?, count(stage));
            (layers as usize > count).then_some((stage, layers, count))
        })
    }

    /// Returns the parts of layers that are chosen in vain, if the layers of the model have only the parts
    /// `existing`: the parts that a list names, or all parts if the word `parts` has no effect at all.
    pub fn parts_beyond(&self, existing: LayerParts) -> LayerParts {
        let is_beyond = |part: &LayerPart| !existing.contains(*part);
        match self {
            Self::Parts if existing.is_empty() => LayerParts::ALL,
            Self::None | Self::Stage | Self::Block | Self::Parts => LayerParts::NONE,
            Self::Stages(stages) => {
                stages.values().flat_map(|choice| choice.parts.iter()).filter(is_beyond).collect()
            }
        }
    }

    /// Returns the entries of a list.
    fn listed(&self) -> Option<&BTreeMap<StageIndex, StageRecompute>> {
        match self {
            Self::Stages(stages) => Some(stages),
            Self::None | Self::Stage | Self::Block | Self::Parts => None,
        }
    }
}

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
                serializer.collect_seq(stages.iter().map(|(&stage, &choice)| Entry { stage, choice }))
            }
            word => serializer.collect_str(word),
        }
    }
}

/// A stage of a list with its choice.
struct Entry {
    stage: StageIndex,
    choice: StageRecompute,
}

impl Serialize for Entry {
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

/// Returns whether the next computation of the rank after the forward at `position` of its row is the
/// backward of the same stage and microbatch.
pub fn backward_follows(row: &[Action], position: usize) -> bool {
    let Some(&Action::Forward { stage, microbatch }) = row.get(position) else { return false };
    let next = row[position + 1..].iter().find(|action| action.is_compute());
    next.is_some_and(|&next| {
        [Action::Backward { stage, microbatch }, Action::InputBackward { stage, microbatch }].contains(&next)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::parse_program;

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

    #[test]
    fn parts_alone_have_no_second_forwards() {
        let recompute: Recompute = "0:parts=norms,1:layers=2:parts=norms,2".parse().expect("a choice");
        let second = [0, 1, 2, 3].map(|stage| recompute.applies_to(StageIndex::new(stage)));
        assert_eq!(second, [false, true, true, false]);
        let parts = [0, 1, 2, 3].map(|stage| recompute.parts_of(StageIndex::new(stage)).to_string());
        assert_eq!(parts, ["norms", "norms", "", ""]);
        assert_eq!(recompute.in_part().collect::<Vec<_>>(), [StageIndex::new(1)]);
        assert!(recompute.has_second_forwards() && !Recompute::Parts.has_second_forwards());
        assert_eq!(Recompute::of_stages(&[StageRecompute::of_parts(LayerParts::ALL); 2]), Recompute::Parts);
    }

    #[test]
    fn parts_that_no_layer_has_are_found() {
        let beyond = |text: &str, existing: LayerParts| {
            text.parse::<Recompute>().expect("a choice").parts_beyond(existing).to_string()
        };
        let norms = LayerPart::Norms.into();
        assert_eq!(beyond("parts", LayerParts::NONE), "norms+feed-forward");
        // The word stands for the parts that the layers have.
        assert_eq!(beyond("parts", norms), "");
        assert_eq!(beyond("0:parts=norms,1:layers=2:parts=norms+feed-forward", norms), "feed-forward");
        assert_eq!(beyond("0:parts=norms", norms), "");
        assert_eq!(beyond("0,1:layers=2", LayerParts::NONE), "");
    }

    #[test]
    fn as_many_layers_as_the_stage_has_are_all() {
        let choice = StageRecompute { keep: 2, ..StageRecompute::first(3).expect("a layer") };
        assert_eq!(choice.within(4), choice);
        for count in [1, 3] {
            assert_eq!(choice.within(count), StageRecompute { keep: 2, ..StageRecompute::WHOLE });
        }
        assert_eq!(StageRecompute::WHOLE.within(1), StageRecompute::WHOLE);
    }

    #[test]
    fn layers_beyond_the_stage_are_found() {
        let recompute: Recompute = "0,1:layers=3,2:layers=4".parse().expect("a choice");
        assert_eq!(recompute.beyond_layers(|_| 4), None);
        assert_eq!(recompute.beyond_layers(|_| 3), Some((StageIndex::new(2), 4, 3)));
        assert_eq!(Recompute::Stage.beyond_layers(|_| 0), None);
    }

    #[test]
    fn only_messages_may_stand_between() {
        let program = parse_program("1RECV_F0,1F0,1RECV_F1,1I0,1SEND_B0,1W0,1F1,1F2,1B1,1B2\n0F0\n");
        let program = program.expect("a program");
        let row = program.row(crate::ids::Rank::new(0));
        let follows: Vec<usize> =
            (0..row.len()).filter(|&position| backward_follows(row, position)).collect();
        assert_eq!(follows, [1]);
    }
}
