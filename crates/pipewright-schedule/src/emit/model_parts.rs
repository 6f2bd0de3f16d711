//! The layers of a profile as other systems divide a model: the embedding, the blocks, and the head.

use std::ops::Range;

use crate::emit::read_error::ReadError;
use crate::model::{is_embedding, is_head};
use crate::plan::with_head_parts;
use crate::profile::Profile;
use crate::words::counted;

/// The division of a model's layers. The head has the norm before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelParts {
    /// Whether the first layer is the embedding. Otherwise the first block has its costs.
    has_embedding: bool,
    /// Whether the last layer is the head. Otherwise the last block has its costs.
    has_head: bool,
    /// The kinds of the blocks, in order.
    blocks: Vec<String>,
}

/// The layers of one stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageParts {
    /// Whether the stage has the embedding.
    pub embedding: bool,
    /// The blocks, counted from 0 over the model.
    pub blocks: Range<usize>,
    /// Whether the stage has the head.
    pub head: bool,
}

impl ModelParts {
    /// Divides the layers of a profile by their kinds. A head in parts counts as one layer.
    pub fn of(profile: &Profile) -> Self {
        let profile = with_head_parts(profile, Some(1));
        let mut blocks: Vec<String> = profile.each_layer().map(|layer| layer.kind.clone()).collect();
        let has_embedding = blocks.len() > 1 && is_embedding(&blocks[0]);
        if has_embedding {
            blocks.remove(0);
        }
        let has_head = blocks.len() > 1 && blocks.last().is_some_and(|kind| is_head(kind));
        if has_head {
            blocks.pop();
        }
        Self { has_embedding, has_head, blocks }
    }

    /// Returns whether the first layer of the profile is the embedding.
    pub fn has_embedding(&self) -> bool {
        self.has_embedding
    }

    /// Returns whether the last layer of the profile is the head.
    pub fn has_head(&self) -> bool {
        self.has_head
    }

    /// Returns the kinds of the blocks, in order.
    pub fn blocks(&self) -> &[String] {
        &self.blocks
    }

    /// Returns the number of layers in the profile.
    pub fn layers(&self) -> usize {
        self.blocks.len() + usize::from(self.has_embedding) + usize::from(self.has_head)
    }

    /// Returns the stages between `boundaries`, the first layer of each stage except the first.
    pub fn stages(&self, boundaries: &[usize]) -> Vec<StageParts> {
        let before = usize::from(self.has_embedding);
        let block_at = |layer: usize| layer.saturating_sub(before).min(self.blocks.len());
        let starts = [0].into_iter().chain(boundaries.iter().copied());
        let ends = boundaries.iter().copied().chain([self.layers()]);
        let stages = boundaries.len() + 1;
        let stage = |(index, (start, end))| StageParts {
            embedding: index == 0,
            blocks: block_at(start)..block_at(end),
            head: index + 1 == stages,
        };
        starts.zip(ends).enumerate().map(stage).collect()
    }

    /// Returns the boundaries between stages, which have all parts of a model in order.
    pub(super) fn boundaries(&self, stages: &[StageParts]) -> Result<Vec<usize>, ReadError> {
        let found: usize = stages.iter().map(|stage| stage.blocks.len()).sum();
        if found != self.blocks.len() {
            return Err(ReadError::new(format!(
                "the stages have {}, and the profile has {}; put each block into a stage, or use the profile of this model",
                counted(found, "block"),
                self.blocks.len()
            )));
        }
        let mut layer = 0;
        let mut ends = Vec::new();
        for (stage, parts) in stages.iter().enumerate() {
            let ends_of_model = [(parts.embedding, self.has_embedding), (parts.head, self.has_head)];
            let own = ends_of_model.into_iter().filter(|&(is_here, is_layer)| is_here && is_layer).count();
            if own + parts.blocks.len() == 0 {
                return Err(ReadError::new(format!(
                    "stage {stage} has no layer that the profile has costs for; give it a block"
                )));
            }
            layer += own + parts.blocks.len();
            ends.push(layer);
        }
        ends.pop();
        Ok(ends)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::LayerProfile;

    fn parts(kinds: &[(&str, u32)]) -> ModelParts {
        let layer = |&(kind, count): &(&str, u32)| LayerProfile {
            kind: kind.to_owned(),
            count,
            ..LayerProfile::default()
        };
        ModelParts::of(&Profile { layers: kinds.iter().map(layer).collect(), ..Profile::default() })
    }

    #[test]
    fn stages_and_boundaries_are_inverse() {
        let whole = parts(&[("embedding", 1), ("block", 4), ("head", 1)]);
        let bare = parts(&[("block", 6)]);
        for model in [whole, bare] {
            for boundaries in [vec![], vec![1], vec![3, 5], vec![1, 2, 3, 4, 5]] {
                let stages = model.stages(&boundaries);
                assert_eq!(model.boundaries(&stages), Ok(boundaries), "{model:?}");
            }
        }
    }

    #[test]
    fn a_head_in_parts_is_one_layer() {
        let model = parts(&[("embedding", 1), ("block", 2), ("head part", 4)]);
        assert_eq!((model.layers(), model.blocks().len(), model.has_head()), (4, 2, true));
    }

    #[test]
    fn wrong_stages_are_refused() {
        let model = parts(&[("block", 4)]);
        let stage = |embedding, blocks, head| StageParts { embedding, blocks, head };
        let short = [stage(true, 0..1, false), stage(false, 1..3, true)];
        let refuse = |stages: &[StageParts], expected: &str| {
            let error = model.boundaries(stages).expect_err("wrong stages").to_string();
            assert!(error.starts_with(expected), "{error}");
        };
        refuse(&short, "the stages have 3 blocks, and the profile has 4; ");
        let empty = [stage(true, 0..0, false), stage(false, 0..4, true)];
        refuse(&empty, "stage 0 has no layer ");
    }
}
