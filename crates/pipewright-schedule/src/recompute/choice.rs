//! The choice of what each stage recomputes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::parts::LayerParts;
use crate::ids::StageIndex;

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

    /// Returns the parts of layers that are chosen in vain, with the first stage of a list for which that holds:
    /// it has the parts `of_stage`, and its entry names these too. If the word `parts` has no effect in any of
    /// `stages` stages, it is all parts without a stage.
    pub fn parts_beyond(
        &self,
        stages: u32,
        of_stage: impl Fn(StageIndex) -> LayerParts,
    ) -> Option<(Option<StageIndex>, LayerParts)> {
        if *self == Self::Parts {
            let has_none = (0..stages).all(|stage| of_stage(StageIndex::new(stage)).is_empty());
            return has_none.then_some((None, LayerParts::ALL));
        }
        self.listed()?.iter().find_map(|(&stage, choice)| {
            let parts = choice.parts.difference(of_stage(stage));
            (!parts.is_empty()).then_some((Some(stage), parts))
        })
    }

    /// Returns the entries of a list.
    fn listed(&self) -> Option<&BTreeMap<StageIndex, StageRecompute>> {
        match self {
            Self::Stages(stages) => Some(stages),
            Self::None | Self::Stage | Self::Block | Self::Parts => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::parts::LayerPart;
    use super::*;

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
    fn parts_that_a_stage_lacks_are_found() {
        let parts = |text: &str| text.parse::<LayerParts>().expect("parts");
        let beyond = |text: &str, of_stages: [LayerParts; 2]| {
            let recompute = text.parse::<Recompute>().expect("a choice");
            recompute.parts_beyond(2, |stage| of_stages[stage.index()])
        };
        let [none, norms, all] = [LayerParts::NONE, LayerPart::Norms.into(), LayerParts::ALL];
        assert_eq!(beyond("parts", [none; 2]), Some((None, all)));
        assert_eq!(beyond("parts", [none, norms]), None, "the word means the parts that there are");
        let first = Some(StageIndex::new(0));
        assert_eq!(beyond("0:parts=norms", [none, norms]), Some((first, norms)));
        assert_eq!(beyond("0:parts=norms+feed-forward", [norms; 2]), Some((first, parts("feed-forward"))));
        let second = Some(StageIndex::new(1));
        assert_eq!(beyond("0:parts=norms,1:layers=2:parts=norms", [all, none]), Some((second, norms)));
        assert_eq!(beyond("0:parts=norms,1:parts=norms", [norms; 2]), None);
        assert_eq!(beyond("0,1:layers=2", [none; 2]), None);
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
}
