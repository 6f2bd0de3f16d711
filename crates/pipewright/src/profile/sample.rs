//! The layers of a model that are measured.

use std::ops::Range;

use pipewright_schedule::{LayerDesc, ModelDesc, TrainedStages};

/// The bytes of an element of a parameter.
pub(super) const PARAMETER_BYTES: u64 = 4;

/// The stages of the short model: ranges of equal layers.
#[derive(Debug, PartialEq)]
pub(super) struct Sample {
    pub(super) stages: Vec<SampleStage>,
    /// The first layer of each kind.
    pub(super) kinds: Vec<usize>,
}

/// A stage of the short model.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SampleStage {
    /// Its layers in the whole model.
    pub(super) layers: Range<usize>,
    /// The kind, as an index of [`Sample::kinds`].
    pub(super) kind: usize,
}

impl Sample {
    /// Takes the first `copies` layers of each kind. Layers are of one kind if their descriptions differ in
    /// nothing but the path. Layers that follow each other in the model form one stage.
    pub(super) fn of(model: &ModelDesc, copies: usize) -> Self {
        let mut sample = Self { stages: Vec::new(), kinds: Vec::new() };
        let mut taken: Vec<usize> = Vec::new();
        for (index, layer) in model.layers.iter().enumerate() {
            let known = sample.kinds.iter().position(|&first| model.layers[first].is_like(layer));
            let kind = known.unwrap_or_else(|| {
                sample.kinds.push(index);
                taken.push(0);
                taken.len() - 1
            });
            if taken[kind] == copies.max(1) {
                continue;
            }
            taken[kind] += 1;
            match sample.stages.last_mut() {
                Some(stage) if stage.kind == kind && stage.layers.end == index => stage.layers.end += 1,
                _ => sample.stages.push(SampleStage { layers: index..index + 1, kind }),
            }
        }
        sample
    }

    /// Returns the same layers, each a stage.
    pub(super) fn split(&self) -> Self {
        let stages = self.stages.iter().flat_map(|stage| {
            stage.layers.clone().map(|layer| SampleStage { layers: layer..layer + 1, kind: stage.kind })
        });
        Self { stages: stages.collect(), kinds: self.kinds.clone() }
    }

    /// Returns the bytes of the parameters of all stages.
    pub(super) fn parameter_bytes(&self, model: &ModelDesc) -> u64 {
        self.bytes(model, LayerDesc::all_parameters)
    }

    /// Returns the bytes of the trained parameters of all stages.
    pub(super) fn trained_bytes(&self, model: &ModelDesc) -> u64 {
        self.bytes(model, LayerDesc::trained_parameters)
    }

    fn bytes(&self, model: &ModelDesc, parameters: impl Fn(&LayerDesc) -> u64) -> u64 {
        let layers = self.stages.iter().flat_map(|stage| &model.layers[stage.layers.clone()]);
        layers.map(|layer| parameters(layer).saturating_mul(PARAMETER_BYTES)).fold(0, u64::saturating_add)
    }

    /// Returns the stages that are trained. The first trained layer of the model is the first one of its
    /// kind, so the sample has it, and each layer of the sample runs backward if it does so in the model.
    ///
    /// The stage before the first trained layer counts as trained too, although it has no backward to
    /// compute. Otherwise the first trained layer would not compute the gradient of its input, and the time
    /// of its kind would be too short for all other layers of the kind.
    pub(super) fn trained(&self, model: &ModelDesc) -> TrainedStages {
        let is_trained = |stage: &SampleStage| model.layers[stage.layers.start].is_trained();
        let mut trained: Vec<bool> = self.stages.iter().map(is_trained).collect();
        if let Some(before) = trained.iter().position(|&is| is).and_then(|first| first.checked_sub(1)) {
            trained[before] = true;
        }
        TrainedStages::of(&trained)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pipewright_schedule::{StageBackward, StageIndex};

    fn check(kinds: &str, copies: usize, expected: &[(Range<usize>, usize)]) {
        let layer = |kind: char| LayerDesc {
            path: String::new(),
            kind: kind.to_string(),
            parameters: 10,
            weight: 1,
            activation_bytes: 1,
            output_bytes: 1,
            keys_values_bytes: 0,
            norms_bytes: 0,
            feed_forward_bytes: 0,
            products: 0,
            mixing: 0,
            copied: 0,
            device_activation_bytes: None,
            trained: None,
        };
        let model = ModelDesc { layers: kinds.chars().map(layer).collect() };
        let sample = Sample::of(&model, copies);
        let found: Vec<_> = sample.stages.iter().map(|stage| (stage.layers.clone(), stage.kind)).collect();
        assert_eq!(found, expected, "{kinds}");
        let layers: usize = expected.iter().map(|(range, _)| range.len()).sum();
        assert_eq!(sample.parameter_bytes(&model), layers as u64 * 40);
        let split = sample.split();
        assert!(split.stages.len() == layers && split.stages.iter().all(|stage| stage.layers.len() == 1));
        assert_eq!(split.parameter_bytes(&model), layers as u64 * 40);
    }

    #[test]
    fn the_depth_of_a_model_does_not_matter() {
        check("EDDDDH", 2, &[(0..1, 0), (1..3, 1), (5..6, 2)]);
        check("EDDDDDDDDDDH", 2, &[(0..1, 0), (1..3, 1), (11..12, 2)]);
    }

    /// Layers of one kind that differ in their adapters, or are below the first one, are of different kinds.
    #[test]
    fn frozen_layers_run_as_in_the_model() {
        let layer = |weight, trained| LayerDesc {
            path: String::new(),
            kind: "block".to_owned(),
            parameters: 10,
            weight,
            activation_bytes: 1,
            output_bytes: 1,
            keys_values_bytes: 0,
            norms_bytes: 0,
            feed_forward_bytes: 0,
            products: 0,
            mixing: 0,
            copied: 0,
            device_activation_bytes: None,
            trained: Some(trained),
        };
        let layers =
            [layer(3, 0), layer(1, 0), layer(1, 0), layer(2, 3), layer(2, 0), layer(2, 3), layer(2, 5)];
        let model = ModelDesc { layers: layers.to_vec() };
        let sample = Sample::of(&model, 1);
        let first: Vec<usize> = sample.stages.iter().map(|stage| stage.layers.start).collect();
        assert_eq!(first, [0, 1, 3, 4, 6]);
        let trained = sample.trained(&model);
        let backwards = [0, 1, 2, 3, 4].map(|stage| trained.backward_of(StageIndex::new(stage)));
        let (none, inputs, whole) = (StageBackward::None, StageBackward::Inputs, StageBackward::Whole);
        // The first trained layer sends the gradient of its input to the stage before it.
        assert_eq!(backwards, [none, whole, whole, inputs, whole]);
        assert_eq!(sample.trained_bytes(&model), 4 * (3 + 5));
    }

    #[test]
    fn kinds_that_alternate_are_stages_of_their_own() {
        check("EAMAMAH", 2, &[(0..1, 0), (1..2, 1), (2..3, 2), (3..4, 1), (4..5, 2), (6..7, 3)]);
        check("EAMAMAH", 1, &[(0..1, 0), (1..2, 1), (2..3, 2), (6..7, 3)]);
    }
}
