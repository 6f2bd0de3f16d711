//! The numbers of a token that operations keep for their backward, one function for each kind of operation.
//!
//! Training and predictions for clusters count the same tensors with these functions, each in the bytes of its
//! numbers. Tensors that several operations keep are counted once, with the operation that makes them; the
//! input of a part of a block is counted with its norm.

use crate::model::{Attention, Delta, Dense, Experts, Latent, Mamba2, StateDecay};
use crate::training::AdapterSizes;
use crate::vectors::QueryKeyNorm;

/// The numbers of a token that operations keep until their backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeptNumbers {
    /// The inputs of products with matrices, which a stack may keep in the precision of its products.
    pub inputs: u64,
    /// The elements of other tensors.
    pub others: u64,
    /// The scales of norms and the normalisers of attention, one for each norm, head or group.
    pub scales: u64,
}

impl KeptNumbers {
    /// Returns all numbers.
    pub fn numbers(&self) -> u64 {
        self.inputs + self.others + self.scales
    }
}

/// Returns what a norm of this width keeps: its input, and its output, which is the input of a product.
pub fn norm(width: u64) -> KeptNumbers {
    KeptNumbers { inputs: width, others: width, scales: 1 }
}

impl Attention {
    /// Returns what attention keeps: queries, keys, values, and its output with a normaliser for each head.
    /// Scores are not kept. A gate keeps itself and the output that it multiplies.
    pub fn kept(&self) -> KeptNumbers {
        let queries = self.query_width();
        let multiplied = if self.gate > 0 { queries } else { 0 };
        KeptNumbers { inputs: queries, others: self.projected() + multiplied, scales: self.heads }
    }

    /// Returns what the norms of queries and keys keep: their inputs and scales.
    pub fn norms_kept(&self, norm: QueryKeyNorm) -> KeptNumbers {
        let kept = |scales| KeptNumbers { inputs: 0, others: self.query_width() + self.key_width(), scales };
        match norm {
            QueryKeyNorm::None => KeptNumbers::default(),
            QueryKeyNorm::Head => kept(self.heads + self.key_value_heads),
            QueryKeyNorm::All => kept(2),
        }
    }
}

impl Latent {
    /// Returns what the attention keeps: queries, keys, values, and its output with a normaliser for each head.
    /// The norms of the latent vectors are not included ([`Latent::norms_kept`]).
    pub fn kept(&self) -> KeptNumbers {
        let (queries, values) =
            (self.heads * (self.plain_size + self.rotary_size), self.heads * self.value_size);
        let gated = if self.gate > 0 { self.gate + values } else { 0 };
        KeptNumbers { inputs: values, others: 2 * queries + values + gated, scales: self.heads }
    }

    /// Returns what the norms of the latent vectors keep, and the queries, the key and the weights of an indexer.
    pub fn norms_kept(&self) -> KeptNumbers {
        let KeptNumbers { inputs, others, .. } = norm(self.query_rank.unwrap_or(0) + self.key_value_rank);
        let indexer =
            self.indexer.map_or(0, |indexer| indexer.heads * (indexer.head_size + 1) + indexer.head_size);
        KeptNumbers { inputs, others: others + indexer, scales: 1 + u64::from(self.query_rank.is_some()) }
    }
}

impl Mamba2 {
    /// Returns what the mixer keeps: the projected channels, the result of the scan, and the mixed channels
    /// with the scale of each group's norm.
    pub fn kept(&self) -> KeptNumbers {
        KeptNumbers { inputs: self.inner(), others: self.projected() + self.inner(), scales: self.groups }
    }
}

impl Delta {
    /// Returns what the mixer keeps: the results of its products, the convolved channels, with a delta rule the
    /// inverse of each chunk's triangle, the result of the scan, and the gated output with a scale for each head.
    /// What [`Delta::ranks_kept`] counts is not included.
    pub fn kept(&self) -> KeptNumbers {
        let convolved = if self.convolution > 0 { self.mixed() } else { 0 };
        let inverse = if self.has_rule() { self.value_heads * self.chunk } else { 0 };
        KeptNumbers {
            inputs: self.value_width(),
            others: self.projected() + convolved + inverse + self.value_width(),
            scales: self.value_heads,
        }
    }

    /// Returns the tensors between the two products of decays and of gates, which is whole on each rank.
    pub fn ranks_kept(&self) -> KeptNumbers {
        match self.decay {
            StateDecay::Channel { rank: Some(rank) } => {
                KeptNumbers { inputs: 2 * rank, ..KeptNumbers::default() }
            }
            StateDecay::Fixed | StateDecay::Head | StateDecay::Channel { rank: None } => {
                KeptNumbers::default()
            }
        }
    }
}

impl Dense {
    /// Returns what the part keeps: the results of the products into the inner width, and what the product
    /// back multiplies.
    pub fn kept(&self) -> KeptNumbers {
        KeptNumbers { inputs: self.inner, others: self.up_products() * self.inner, scales: 0 }
    }
}

impl Experts {
    /// Returns what the experts of a token and the shared expert keep. The rows that experts receive and
    /// return are not included, and neither is the router.
    pub fn kept(&self) -> KeptNumbers {
        Dense { inner: self.per_token * self.expert.inner + self.shared_inner, ..self.expert }.kept()
    }
}

/// Returns the numbers of the rows of a token, each of this width, that its experts receive and return.
pub fn expert_rows(per_token: u64, width: u64) -> u64 {
    2 * per_token * width
}

impl AdapterSizes {
    /// Returns the numbers, in single precision, that the adapter of a layer of these widths of input and
    /// output keeps of a token: the result of its first matrix, and with magnitudes the outputs that these
    /// multiply. With dropout it keeps its input with dropped elements, and the mask. `copies_input` says
    /// whether the base keeps the layer's input in half precision, and no other adapter has the copy in single
    /// precision that this adapter needs.
    pub fn kept(&self, [input, output]: [f64; 2], copies_input: bool) -> f64 {
        let copies = match (self.has_dropout, self.has_magnitudes && copies_input) {
            (false, _) => f64::from(u8::from(copies_input)),
            (true, false) => 2.0,
            // The base computes with the dropped input too, in half precision.
            (true, true) => 2.5,
        };
        let multiplied = if self.has_magnitudes { output } else { 0.0 };
        self.rank as f64 + copies * input + multiplied
    }

    /// Returns the numbers of a token that the adapter of a layer keeps for the gradients of its matrices: of
    /// the layer's input, unless another adapter keeps it, and of the output's gradient; and of the product
    /// between its matrices and the gradient of that.
    pub fn stash(&self, [input, output]: [f64; 2], shares_input: bool) -> [f64; 2] {
        [output + if shares_input { 0.0 } else { input }, 2.0 * self.rank as f64]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_numbers_are_those_of_the_tensors() {
        let attention =
            Attention { heads: 4, key_value_heads: 2, head_size: 8, window: None, rotary_size: 8, gate: 0 };
        assert_eq!(attention.kept(), KeptNumbers { inputs: 32, others: 32 + 2 * 16, scales: 4 });
        let gated = Dense { inner: 10, gated: true };
        assert_eq!((gated.kept().numbers(), Dense { gated: false, ..gated }.kept().numbers()), (30, 20));
        let experts = Experts {
            count: 8,
            per_token: 3,
            expert: gated,
            shared_inner: 5,
            groups: 1,
            groups_per_token: 1,
        };
        assert_eq!(experts.kept().numbers(), 3 * (3 * 10 + 5));
        assert_eq!(norm(7).numbers(), 2 * 7 + 1);
        let gated = Attention { gate: 32, ..attention };
        assert_eq!(gated.kept().others, attention.kept().others + 32 + 32);
    }

    #[test]
    fn adapters_keep_what_their_settings_need() {
        let kept = |has_magnitudes, has_dropout, copies_input| {
            AdapterSizes { rank: 3, has_magnitudes, has_dropout }.kept([8.0, 5.0], copies_input)
        };
        assert_eq!([kept(false, false, false), kept(false, false, true)], [3.0, 3.0 + 8.0]);
        assert_eq!([kept(false, true, false), kept(false, true, true)], [3.0 + 16.0; 2]);
        assert_eq!([kept(true, true, false), kept(true, true, true)], [3.0 + 16.0 + 5.0, 3.0 + 20.0 + 5.0]);
    }
}
