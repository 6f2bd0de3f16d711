//! The shapes of linear attention: a state for each head takes the place of keys and values.

use crate::matrix::{Division, Matrix};

/// Linear attention with a state of `key_size` times `value_size` numbers for each head of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delta {
    /// The heads of queries, and of keys.
    pub key_heads: u64,
    /// The heads of values, each with a state.
    pub value_heads: u64,
    /// The width of a head of queries or keys.
    pub key_size: u64,
    /// The width of a head of values.
    pub value_size: u64,
    /// The width of the convolution of queries, keys and values; 0 without it.
    pub convolution: u64,
    /// How the state decays.
    pub decay: StateDecay,
    /// The tokens of a chunk of the scan.
    pub chunk: u64,
}

/// How the state of linear attention decays, and whether a delta rule removes its value for a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateDecay {
    /// By a constant of each head, without a delta rule (lightning attention, arXiv 2501.08313).
    Fixed,
    /// By a number of each head and token (Gated DeltaNet, arXiv 2412.06464).
    Head,
    /// By a number of each channel of the keys (Kimi Delta Attention, arXiv 2510.26692).
    Channel {
        /// The width between the two products that make these numbers, and between the two that make the gate of
        /// the outputs; `None` if one product makes each.
        rank: Option<u64>,
    },
}

impl Delta {
    /// Returns the width of all queries, which is also the width of all keys.
    pub fn key_width(&self) -> u64 {
        self.key_heads * self.key_size
    }

    /// Returns the width of all values, of their gate, and of the output.
    pub fn value_width(&self) -> u64 {
        self.value_heads * self.value_size
    }

    /// Returns the width of queries, keys and values.
    pub fn mixed(&self) -> u64 {
        2 * self.key_width() + self.value_width()
    }

    /// Returns whether a delta rule updates the state, with a strength of each head and token.
    pub fn has_rule(&self) -> bool {
        self.decay != StateDecay::Fixed
    }

    /// Returns the numbers of a token that the scan reads: queries, keys, values, decays and strengths.
    pub fn scanned(&self) -> u64 {
        self.mixed()
            + match self.decay {
                StateDecay::Fixed => 0,
                StateDecay::Head => 2 * self.value_heads,
                StateDecay::Channel { .. } => self.key_width() + self.value_heads,
            }
    }

    /// Returns the results of the products before the scan: what it reads, and the gate of its outputs.
    pub fn projected(&self) -> u64 {
        self.scanned() + self.value_width()
    }

    pub(crate) fn matrices(&self, hidden: u64) -> Vec<Matrix> {
        let matrix = |input, output, division| Matrix { input, output, division, of_experts: None };
        let back = matrix(self.value_width(), hidden, Division::Rows);
        let StateDecay::Channel { rank: Some(rank) } = self.decay else {
            return vec![matrix(hidden, self.projected(), Division::Columns), back];
        };
        vec![
            matrix(hidden, self.mixed() + self.value_heads, Division::Columns),
            matrix(hidden, 2 * rank, Division::Whole),
            matrix(rank, self.key_width(), Division::Columns),
            matrix(rank, self.value_width(), Division::Columns),
            back,
        ]
    }

    /// The parameters that are not in matrices: the convolution, the norm of the outputs, and for each decay a
    /// bias and for each head a rate. The norm of lightning attention spans all heads.
    pub(crate) fn other_parameters(&self) -> u64 {
        let decays = match self.decay {
            StateDecay::Fixed => return self.mixed() * self.convolution + self.value_width(),
            StateDecay::Head => self.value_heads,
            StateDecay::Channel { .. } => self.key_width(),
        };
        self.mixed() * self.convolution + self.value_size + decays + self.value_heads
    }

    /// Returns the operations of a token in a forward of the scan, in chunks of `chunk` tokens. A token meets half of
    /// the tokens of its chunk.
    ///
    /// Without a delta rule these are scores of queries and keys, their product with the values, and an update and a
    /// reading of the state. The rule adds scores of keys and keys, the inverse of this triangle (a third of
    /// `chunk` squared), its product with keys and values, and the reading of the state for the keys
    /// (the chunks of arXiv 2412.06464, section 3.3, and of arXiv 2510.26692, section 3.2).
    pub(crate) fn scan_operations(&self, chunk: f64) -> f64 {
        let (key, value) = (self.key_size as f64, self.value_size as f64);
        let plain = chunk * (key + value) + 4.0 * key * value;
        let rule = chunk * (2.0 * key + value) + chunk * chunk / 3.0 + 2.0 * key * value;
        self.value_heads as f64 * if self.has_rule() { plain + rule } else { plain }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A head with a state of 128 times 128 numbers, in chunks of 48 tokens.
    #[test]
    fn a_scan_has_the_operations_of_its_products() {
        let check = |decay, expected: f64| {
            let delta = Delta {
                key_heads: 1,
                value_heads: 1,
                key_size: 128,
                value_size: 128,
                convolution: 0,
                decay,
                chunk: 48,
            };
            assert_eq!(delta.scan_operations(48.0), expected);
        };
        let (state, pair) = (2.0 * 128.0 * 128.0, 2.0 * 128.0 * 24.0);
        check(StateDecay::Fixed, 2.0 * pair + 2.0 * state);
        // Each token meets 24 others on average in five products, and the state in three.
        let rule = 5.0 * pair + 3.0 * state + 48.0 * 48.0 / 3.0;
        check(StateDecay::Head, rule);
        check(StateDecay::Channel { rank: None }, rule);
    }
}
