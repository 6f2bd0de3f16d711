//! The costs of the layers that several families have, for partition, simulation and the estimate of memory.
//!
//! The table of a tied head counts as parameters of the embedding, and as a copy ([`LayerDesc::copied`]) of
//! the head, so that the sum of parameters over the layers is the number of parameters of the model.

use std::ops::Add;

use pipewright_schedule::LayerDesc;
use pipewright_schedule::profile::{EMBEDDING, HEAD};
use pipewright_shapes::kept::{self, KeptNumbers};
use pipewright_shapes::model::Dense;
use pipewright_shapes::operations::LayerCount;

use crate::attention::AttentionSizes;
use crate::norm::NormForm;

/// The cost of reading and writing an element in an element-wise pass, in floating point operations of a
/// matrix product. A CPU core computes a few hundred operations of a product in the time in which memory
/// moves ten floats.
pub(crate) const ELEMENT: u64 = 32;

/// Bytes of a number, and of a token id that the embedding keeps for its backward.
pub(crate) const FLOAT: u64 = 4;
pub(crate) const TOKEN_ID: u64 = 8;

/// Element-wise passes of a row of a table: the forward copies it, and the backward adds to it.
pub(crate) const TABLE_PASSES: u64 = 4;
/// Element-wise passes of a bias, of a normalisation, of the loss, and of a gated activation, forward and
/// backward.
pub(crate) const BIAS_PASSES: u64 = 4;
pub(crate) const NORM_PASSES: u64 = 16;
pub(crate) const LOSS_PASSES: u64 = 12;
pub(crate) const GATE_PASSES: u64 = 12;

/// Floating-point operations of a parameter of a matrix for a token that meets it: three multiply-adds, forward and
/// backward.
pub(crate) const OPERATIONS: u64 = 6;

/// The costs of a layer, or of a part of one, in addition to its products with matrices.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cost {
    /// Floating-point operations of a token, forward and backward, in which activations are multiplied with each
    /// other, and not with weights.
    pub(crate) mixing: u64,
    /// Elements that a token's element-wise passes read and write, forward and backward.
    pub(crate) elements: u64,
    /// Numbers that are kept per token until the backward. An operation keeps its inputs, and tensors that
    /// several operations keep are stored once. The input of a part of a block is counted with its norm.
    pub(crate) kept: u64,
    /// The results of normalisations among the numbers in `kept` that only matrix products keep, so that a
    /// backward may compute them again.
    pub(crate) norms: u64,
    /// The same for the activation of the feed-forward layer.
    pub(crate) feed_forward: u64,
    /// How many more numbers devices other than the processor keep per token; negative if they keep fewer.
    pub(crate) kept_on_devices: i64,
}

/// The numbers per token of hidden states that a model keeps. Every tensor rank keeps those of its tokens, while the ranks
/// divide all other numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HiddenKept {
    /// Of each block.
    pub block: u64,
    /// Of the last norm and the head.
    pub head: u64,
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            mixing: self.mixing + other.mixing,
            elements: self.elements + other.elements,
            kept: self.kept + other.kept,
            norms: self.norms + other.norms,
            feed_forward: self.feed_forward + other.feed_forward,
            kept_on_devices: self.kept_on_devices + other.kept_on_devices,
        }
    }
}

impl Cost {
    /// Returns the cost of keeping these numbers.
    pub(crate) fn keeping(kept: KeptNumbers) -> Self {
        Self { kept: kept.numbers(), ..Self::default() }
    }

    /// Returns the cost of a layer that computes `count` states of each token.
    pub(crate) fn for_each_of(self, count: u64) -> Self {
        Self {
            mixing: count * self.mixing,
            elements: count * self.elements,
            kept: count * self.kept,
            norms: count * self.norms,
            feed_forward: count * self.feed_forward,
            kept_on_devices: count as i64 * self.kept_on_devices,
        }
    }

    /// Returns the layer of this cost and these counts, for rows of `tokens` tokens. It returns `outputs` numbers
    /// per token.
    pub(crate) fn layer(
        self,
        count: LayerCount,
        path: String,
        kind: &str,
        tokens: u64,
        outputs: u64,
    ) -> LayerDesc {
        let products = OPERATIONS * count.products + self.mixing;
        LayerDesc {
            path,
            kind: kind.to_owned(),
            parameters: count.parameters,
            weight: products + ELEMENT * self.elements,
            activation_bytes: tokens * FLOAT * self.kept,
            device_activation_bytes: (self.kept_on_devices != 0)
                .then(|| tokens * FLOAT * self.kept.saturating_add_signed(self.kept_on_devices)),
            output_bytes: tokens * FLOAT * outputs,
            keys_values_bytes: 0,
            norms_bytes: tokens * FLOAT * self.norms,
            feed_forward_bytes: tokens * FLOAT * self.feed_forward,
            products: tokens * products,
            mixing: tokens * self.mixing,
            copied: 0,
            trained: None,
        }
    }
}

/// The sizes and counts of a model from which its layers are described.
#[derive(Clone, Debug)]
pub(crate) struct ModelSizes {
    /// The width of the hidden states.
    pub(crate) hidden: u64,
    /// The size of the vocabulary.
    pub(crate) vocabulary: u64,
    /// The number of outputs of the head for a token.
    pub(crate) outputs: u64,
    /// The path of the head.
    pub(crate) head: &'static str,
    /// Whether the head uses the table of the embedding.
    pub(crate) is_tied: bool,
    /// The number of tokens of a row.
    pub(crate) tokens: u64,
    /// The counts of the layers.
    pub(crate) counts: Vec<LayerCount>,
}

impl ModelSizes {
    /// Returns the layer of the token embeddings at `path`.
    pub(crate) fn embedding(&self, path: &str) -> LayerDesc {
        let cost = Cost { elements: TABLE_PASSES * self.hidden, ..Cost::default() };
        let layer = cost.layer(self.count(0), path.to_owned(), EMBEDDING, self.tokens, self.hidden);
        LayerDesc { activation_bytes: self.tokens * TOKEN_ID, ..layer }
    }

    /// Returns the layer of a block, which has this index among the blocks.
    pub(crate) fn block(&self, index: usize, path: String, kind: &str, cost: Cost) -> LayerDesc {
        cost.layer(self.count(1 + index), path, kind, self.tokens, self.hidden)
    }

    /// Returns the counts of a layer; none if the configuration does not describe a model.
    pub(crate) fn count(&self, layer: usize) -> LayerCount {
        self.counts.get(layer).copied().unwrap_or_default()
    }

    /// Returns the cost of the last norm and the head.
    pub(crate) fn head_cost(&self) -> Cost {
        let logits = Cost {
            elements: LOSS_PASSES * self.outputs,
            // The logits with a normaliser, which the loss keeps.
            kept: self.outputs + 1,
            ..Cost::default()
        };
        norm(self.hidden) + logits
    }

    /// Returns the layer of the last norm and the head with this number of predictions. In most families, its cost is
    /// [`ModelSizes::head_cost`].
    pub(crate) fn head(&self, predictions: u64, cost: Cost) -> LayerDesc {
        let count = self.counts.last().copied().unwrap_or_default();
        let outputs = predictions * self.outputs;
        let layer = cost.layer(count, self.head.to_owned(), HEAD, self.tokens, outputs);
        LayerDesc { copied: if self.is_tied { self.table() } else { 0 }, ..layer }
    }

    /// Returns the number of elements of the table of the token embeddings.
    pub(crate) fn table(&self) -> u64 {
        self.vocabulary * self.hidden
    }
}

/// Returns a layer for rows of `tokens` tokens with the work that is left if its matrices are frozen. Each
/// product with a matrix has two gradients of the same size; a frozen matrix needs none of its own. Without
/// `has_backward`, nothing needs the gradients of the layer's inputs either, so the forward is left: a third.
pub(crate) fn frozen(layer: LayerDesc, tokens: u64, has_backward: bool) -> LayerDesc {
    if has_backward {
        let unused = (layer.products - layer.mixing) / 3;
        let weight = layer.weight.saturating_sub(unused / tokens.max(1));
        LayerDesc { weight, products: layer.products - unused, ..layer }
    } else {
        let [weight, products, mixing] = [layer.weight, layer.products, layer.mixing].map(|work| work / 3);
        LayerDesc { weight, products, mixing, ..layer }
    }
}

/// Element-wise passes over the matrix of a layer whose columns have magnitudes: the product of the adapter
/// is scaled and added, and the norms of the columns are computed.
const MATRIX_PASSES: u64 = 6;
/// Element-wise passes of outputs that are multiplied with magnitudes, forward and backward.
const MAGNITUDE_PASSES: u64 = 10;

/// Returns the work for each token of the magnitudes of an adapter whose matrices have the inner size `rank`,
/// for rows of `tokens` tokens. Each forward computes the norms of the columns of a matrix once.
pub(crate) fn magnitudes(inputs: u64, outputs: u64, rank: u64, tokens: u64) -> u64 {
    let matrix = inputs * outputs * (2 * rank + ELEMENT * MATRIX_PASSES);
    matrix / tokens.max(1) + ELEMENT * MAGNITUDE_PASSES * outputs
}

/// Returns the cost of a norm, which keeps its input, its output and a scale.
pub(crate) fn norm(width: u64) -> Cost {
    Cost { elements: NORM_PASSES * width, ..Cost::keeping(kept::norm(width)) }
}

/// Returns the cost of a norm whose result is the input of matrix products, and of nothing else.
pub(crate) fn norm_of_products(width: u64) -> Cost {
    Cost { norms: width, ..norm(width) }
}

/// Returns the cost of a norm of this form in addition to [`norm`]: a layer normalisation has a bias, and
/// also keeps the elements less their mean.
pub(crate) fn centring(width: u64, form: NormForm) -> Cost {
    let width = if form.centres { width } else { 0 };
    Cost { elements: BIAS_PASSES * width, kept: width, ..Cost::default() }
}

/// Returns the cost of a feed-forward layer without a gate.
pub(crate) fn ungated(inner: u64) -> Cost {
    Cost { elements: GATE_PASSES * inner, ..Cost::keeping(Dense { inner, gated: false }.kept()) }
}

/// Returns the cost of a feed-forward layer with a gate, whose activation is SwiGLU.
pub(crate) fn gated(inner: u64) -> Cost {
    let kept = Dense { inner, gated: true }.kept();
    Cost { elements: GATE_PASSES * inner, feed_forward: inner, ..Cost::keeping(kept) }
}

/// Returns the cost of an attention in which a token sees half of `seen` keys on average. Each pair of a
/// query channel and a key that a token sees takes part in three multiply-adds, once for the scores and once
/// for the values.
pub(crate) fn attention(sizes: AttentionSizes, seen: u64) -> Cost {
    let attention = sizes.shape();
    Cost { mixing: 6 * seen * attention.query_width(), ..Cost::keeping(attention.kept()) }
}

/// Returns how many more numbers devices other than the processor keep for a mixture: each chosen expert is a
/// sequence of layers there, which keeps a token's row, `width` numbers, before and after it.
pub(crate) fn mixture_on_devices(chosen: u64, width: u64) -> i64 {
    kept::expert_rows(chosen, width) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_may_keep_more_or_fewer_numbers() {
        let kept = |kept_on_devices| {
            let cost = Cost { kept: 10, kept_on_devices, ..Cost::default() };
            let layer = (cost + cost).for_each_of(3).layer(LayerCount::default(), String::new(), "", 2, 1);
            (layer.activation_bytes, layer.device_activation_bytes)
        };
        assert_eq!(kept(0), (480, None));
        assert_eq!(kept(-4), (480, Some(288)));
        assert_eq!(kept(mixture_on_devices(2, 5)), (480, Some(1440)));
    }
}
