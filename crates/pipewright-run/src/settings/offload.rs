//! The key `offload` of the `[pipeline]` section: which inputs of recomputed forwards leave memory, and where they go.

use std::collections::BTreeSet;

use pipewright_schedule::lower::OffloadConfig;
use pipewright_schedule::{Recompute, StageIndex};
use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};

use crate::settings::section::Section;

/// The inputs that leave memory between a forward and its backward.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum OffloadChoice {
    /// Everything stays.
    #[default]
    None,
    /// These inputs leave.
    To(OffloadSettings),
}

/// The inputs that leave memory, and the place to which they go.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OffloadSettings {
    to: OffloadPlace,
    /// The stages whose inputs leave; `None` for all stages that recompute forwards.
    stages: Option<BTreeSet<u32>>,
    /// The number of microbatches in flight on each stage whose inputs stay.
    #[serde(default)]
    keep: u32,
}

/// The place to which inputs go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OffloadPlace {
    /// The processor's memory, for stages on other devices.
    Host,
    /// Files.
    File,
}

impl OffloadSettings {
    /// Returns the setting for everything that recomputed forwards keep.
    fn all(to: OffloadPlace) -> Self {
        Self { to, stages: None, keep: 0 }
    }
}

impl OffloadChoice {
    /// Returns the place; `None` if everything stays.
    pub fn place(&self) -> Option<OffloadPlace> {
        match self {
            Self::None => None,
            Self::To(settings) => Some(settings.to),
        }
    }

    /// Returns the settings of the pass that adds the transfers to the program.
    pub fn pass(&self, recompute: &Recompute) -> Option<OffloadConfig> {
        let Self::To(OffloadSettings { stages, keep, .. }) = self else { return None };
        let stages =
            stages.as_ref().map(|stages| stages.iter().map(|&stage| StageIndex::new(stage)).collect());
        Some(OffloadConfig { recompute: recompute.clone(), stages, keep: *keep })
    }

    /// Returns words about what leaves memory of a stage that keeps inputs; none if they stay.
    pub fn words(&self, stage: StageIndex) -> String {
        let Self::To(OffloadSettings { to, stages, keep }) = self else { return String::new() };
        if stages.as_ref().is_some_and(|stages| !stages.contains(&stage.get())) {
            return String::new();
        }
        let place = match to {
            OffloadPlace::Host => "the host's memory",
            OffloadPlace::File => "files",
        };
        let microbatches = match keep {
            0 => String::new(),
            keep => format!(" of the microbatches after the first {keep} in flight"),
        };
        format!(", moves the inputs that it keeps{microbatches} to {place}")
    }
}

impl Serialize for OffloadChoice {
    /// A word, or a table if only some inputs leave.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let settings = match self {
            Self::None => return serializer.serialize_str("none"),
            Self::To(settings) => settings,
        };
        if *settings == OffloadSettings::all(settings.to) {
            return settings.to.serialize(serializer);
        }
        let mut table = serializer.serialize_map(None)?;
        table.serialize_entry("to", &settings.to)?;
        if let Some(stages) = &settings.stages {
            table.serialize_entry("stages", stages)?;
        }
        if settings.keep > 0 {
            table.serialize_entry("keep", &settings.keep)?;
        }
        table.end()
    }
}

/// Reads the key.
pub(super) fn read(section: &mut Section<'_>) -> OffloadChoice {
    let all = |place| OffloadChoice::To(OffloadSettings::all(place));
    let words =
        [("none", OffloadChoice::None), ("host", all(OffloadPlace::Host)), ("file", all(OffloadPlace::File))];
    let expected = "a word, or a table such as { to = \"file\", stages = [0, 2], keep = 1 }, whose last two keys may be left out";
    let read = section.word_or("offload", &words, expected, |value| {
        let settings: OffloadSettings = value.to_toml().try_into().ok()?;
        let is_empty = settings.stages.as_ref().is_some_and(BTreeSet::is_empty);
        (!is_empty).then_some(OffloadChoice::To(settings))
    });
    read.unwrap_or_default()
}

/// Refuses stages that do not exist, and stages that keep no inputs.
pub(super) fn check(section: &mut Section<'_>, offload: &OffloadChoice, recompute: &Recompute, stages: u32) {
    let OffloadChoice::To(OffloadSettings { stages: chosen, .. }) = offload else { return };
    if !recompute.has_second_forwards() {
        let other =
            "`recompute`, because only recomputed forwards keep inputs that can leave memory, and no tapes";
        let advice = "write for example `recompute = \"block\"`, or remove `offload`";
        section.report_without("offload", other, advice);
        return;
    }
    let wrong = chosen
        .iter()
        .flatten()
        .find(|&&stage| stage >= stages || !recompute.applies_to(StageIndex::new(stage)));
    if let Some(stage) = wrong {
        let range = if *stage >= stages {
            format!("stages from 0 to {}", stages - 1)
        } else {
            "stages that recompute forwards (`recompute`)".to_owned()
        };
        section.out_of_range::<()>("offload", &stage.to_string(), &range);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_say_what_leaves() {
        let settings = OffloadSettings { to: OffloadPlace::File, stages: Some([0, 2].into()), keep: 1 };
        let choice = OffloadChoice::To(settings);
        let words = [0, 1].map(|stage| choice.words(StageIndex::new(stage)));
        let expected =
            ", moves the inputs that it keeps of the microbatches after the first 1 in flight to files";
        assert_eq!(words, [expected, ""]);
        assert_eq!(OffloadChoice::None.words(StageIndex::new(0)), "");
        let host = OffloadChoice::To(OffloadSettings::all(OffloadPlace::Host));
        assert_eq!(host.words(StageIndex::new(7)), ", moves the inputs that it keeps to the host's memory");
    }
}
