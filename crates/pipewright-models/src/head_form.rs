//! The last norm and the output head of a model, in the form that can be cut along the vocabulary, and the description of
//! the parts as layers.

use std::ops::Range;

use pipewright::tensor::{Placement, TensorRank};
use pipewright_schedule::{LayerDesc, ModelDesc};

use crate::cost::{ELEMENT, FLOAT, LOSS_PASSES, NORM_PASSES};
use crate::error::ConfigError;

/// The last norm and the output head of a model, whose loss is the mean cross entropy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadForm {
    /// The path of the norm.
    pub norm: &'static str,
    /// The number that the norm adds to the mean square before the root is taken.
    pub epsilon: f64,
    /// The width of the hidden states.
    pub width: usize,
    /// The size of the vocabulary.
    pub vocabulary: usize,
    /// Whether the head uses the table of the embedding instead of a matrix of its own.
    pub is_tied: bool,
}

impl HeadForm {
    /// Returns the token ids whose logits a part computes. All parts have as many, except those at the end.
    pub(crate) fn ids(&self, part: u32, parts: u32) -> Range<usize> {
        // A part has the rows that a tensor rank would have.
        Placement::of_layer(1, part, parts).shard_of(TensorRank { index: 0, of: 1 }).range(self.vocabulary)
    }

    /// Returns an error if the head cannot be cut into this number of parts.
    pub(crate) fn check(&self, parts: u32) -> Result<(), ConfigError> {
        let vocabulary = self.vocabulary;
        match () {
            () if parts == 0 || self.ids(parts - 1, parts).is_empty() => {
                Err(ConfigError::HeadParts { parts, vocabulary })
            }
            () if self.is_tied => Err(ConfigError::TiedHead { parts }),
            () => Ok(()),
        }
    }

    /// Returns `model` with a layer for each part in the place of the head. `tokens` is the number of tokens of a row.
    pub(crate) fn describe(&self, mut model: ModelDesc, parts: u32, tokens: u64) -> ModelDesc {
        model.layers.pop();
        model.layers.extend((0..parts).map(|part| self.part(part, parts, tokens)));
        model
    }

    fn part(&self, part: u32, parts: u32, tokens: u64) -> LayerDesc {
        let (width, ids) = (self.width as u64, self.ids(part, parts).len() as u64);
        let numbers = |of_token: u64| tokens * FLOAT * of_token;
        // The first part also normalises the hidden states; the others get them normalised.
        let (norm, passes, kept) = match part {
            0 => (width, NORM_PASSES * width, 2 * width + 1),
            _ => (0, 0, width),
        };
        LayerDesc {
            path: format!("lm_head {}/{parts}", part + 1),
            kind: "head part".to_owned(),
            parameters: norm + width * ids,
            weight: 6 * width * ids + ELEMENT * (passes + LOSS_PASSES * ids),
            // The input of the product, the logits, and the statistics before and after the part.
            activation_bytes: numbers(kept + ids + 2 * STATISTICS),
            output_bytes: numbers(if part + 1 == parts { STATISTICS } else { width + STATISTICS }),
            keys_values_bytes: 0,
        }
    }
}

/// The statistics of a token: the logarithm of a sum of exponentials, and the logit of the target.
const STATISTICS: u64 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    fn form(vocabulary: usize) -> HeadForm {
        HeadForm { norm: "model.norm", epsilon: 1e-5, width: 8, vocabulary, is_tied: false }
    }

    #[test]
    fn the_parts_are_the_whole_head() {
        let head = LayerDesc {
            path: "lm_head".to_owned(),
            kind: "head".to_owned(),
            parameters: 8 + 80,
            weight: 0,
            activation_bytes: 0,
            output_bytes: 0,
            keys_values_bytes: 0,
        };
        let model = form(10).describe(ModelDesc { layers: vec![head] }, 3, 5);
        let of = |number: fn(&LayerDesc) -> u64| model.layers.iter().map(number).collect::<Vec<_>>();
        assert_eq!(of(|layer| layer.parameters), [8 + 32, 32, 16]);
        assert_eq!(of(|layer| layer.output_bytes), [200, 200, 40]);
        assert_eq!(model.layers[1].path, "lm_head 2/3");
        assert_eq!((form(10).ids(0, 3), form(10).ids(2, 3)), (0..4, 8..10));
    }

    #[test]
    fn every_part_has_a_token() {
        assert!(form(10).check(10).is_ok() && form(10).check(5).is_ok());
        for parts in [0, 7, 11] {
            let error = form(10).check(parts).expect_err("a part without a token").to_string();
            assert!(error.contains(&format!("{parts} parts of a vocabulary of 10")), "{error}");
        }
        let tied = HeadForm { is_tied: true, ..form(10) };
        assert!(matches!(tied.check(2), Err(ConfigError::TiedHead { parts: 2 })));
    }
}
