//! The activations of one of several ranks that compute each stage together.

use pipewright_schedule::{LayerDesc, ModelDesc};

use crate::cut_model::CutModel;

/// The ranks that compute each stage together, as far as the memory of one of them depends on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorShare {
    /// The number of ranks.
    pub ranks: u32,
    /// Whether each of them has a share of the tokens between the layers that they compute together.
    pub shares_tokens: bool,
}

impl TensorShare {
    /// One rank that computes whole stages.
    pub const ALONE: Self = Self { ranks: 1, shares_tokens: false };

    /// Returns the layers with what a rank keeps of them, from layers in which `number` bytes are one number. Rows have
    /// `tokens` tokens. A family that does not say what all ranks keep keeps all of it on each of them.
    pub(super) fn of(self, layers: ModelDesc, model: &CutModel, tokens: usize, number: u64) -> ModelDesc {
        let Some(hidden) = model.model().hidden_kept().filter(|_| self.ranks > 1) else { return layers };
        let (blocks, last) = (layers.blocks(), layers.layers.len().saturating_sub(1));
        let own = |(index, layer): (usize, LayerDesc)| {
            let numbers = match index {
                _ if blocks.contains(&index) => hidden.block,
                _ if index == last => hidden.head,
                // The embedding keeps token ids.
                _ => return LayerDesc { output_bytes: self.of_tokens(layer.output_bytes), ..layer },
            };
            let hidden = (numbers * tokens as u64 * number).min(layer.activation_bytes);
            let others = self.part(layer.activation_bytes - hidden);
            LayerDesc {
                activation_bytes: self.of_tokens(hidden) + others,
                output_bytes: self.of_tokens(layer.output_bytes),
                keys_values_bytes: self.part(layer.keys_values_bytes),
                norms_bytes: self.of_tokens(layer.norms_bytes),
                feed_forward_bytes: self.part(layer.feed_forward_bytes),
                ..layer
            }
        };
        ModelDesc { layers: layers.layers.into_iter().enumerate().map(own).collect() }
    }

    /// Returns the bytes of a rank's tokens, from the bytes of all tokens.
    fn of_tokens(self, bytes: u64) -> u64 {
        if self.shares_tokens { self.part(bytes) } else { bytes }
    }

    /// Returns the bytes of a rank's heads or inner width, from the bytes of all ranks.
    fn part(self, bytes: u64) -> u64 {
        bytes.div_ceil(u64::from(self.ranks.max(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelConfig;
    use crate::decoder::DecoderConfig;

    fn layers(family: &str, share: TensorShare) -> Vec<[u64; 2]> {
        let model = ModelConfig::of_sizes(family, DecoderConfig::new(256, 4), serde_json::Map::new());
        let model = CutModel::from(model.expect("a model"));
        let layers = share.of(model.describe(8), &model, 8, 4).layers;
        layers.iter().map(|layer| [layer.activation_bytes, layer.output_bytes]).collect()
    }

    #[test]
    fn a_rank_keeps_its_heads_and_its_tokens() {
        let share = |shares_tokens| TensorShare { ranks: 2, shares_tokens };
        let [alone, whole, shares] =
            [TensorShare::ALONE, share(false), share(true)].map(|share| layers("llama", share));
        let hidden = 8 * 4 * (DecoderConfig::new(256, 4).hidden_size as u64);
        for block in 1..alone.len() - 1 {
            let [alone, whole, shares] = [&alone, &whole, &shares].map(|layers| layers[block]);
            // Two norms keep their inputs and results, and a scale of each token.
            let replicated = 4 * hidden + 2 * 8 * 4;
            assert_eq!(whole[0] - replicated, (alone[0] - replicated) / 2);
            assert_eq!(shares[0], alone[0] / 2);
            assert_eq!([whole[1], shares[1]], [alone[1], alone[1] / 2]);
        }
        assert_eq!((whole[0], shares[0]), (alone[0], [alone[0][0], hidden / 2]));
    }

    #[test]
    fn a_family_that_does_not_say_keeps_all() {
        let share = TensorShare { ranks: 2, shares_tokens: false };
        assert_eq!(layers("mixtral", share), layers("mixtral", TensorShare::ALONE));
    }
}
