//! The costs of a slice: the share of a microbatch's costs that one of its slices takes.
//!
//! If slices have equal length, each takes an equal share of the times, the messages and the activations of
//! its microbatch, except that its time for attention grows with the keys before it. Of `k` slices with `n`
//! tokens each, the tokens of slice `s` attend to `s n` keys of earlier slices and, in the mean, to `n / 2`
//! keys of their own slice. So slice `s` has the share `(2 s + 1) / k^2` of the attention of a causal model.

use crate::action::Action;
use crate::costs::{Costs, RecomputeSizes, StageCosts, StageSizes};
use crate::ids::Slice;
use crate::slices::Slices;

impl Costs {
    /// Returns the costs of the stage of `part` for its microbatch, or for its slice.
    pub(crate) fn of_part(&self, part: Action, slices: Slices) -> StageCosts {
        let costs = *self.stage(part.stage());
        match part.microbatch() {
            Some(number) if !slices.is_one() => {
                costs.for_slice(slices, slices.place(number).1, self.attention)
            }
            _ => costs,
        }
    }
}

impl StageCosts {
    /// Returns the times of one of `slices` slices of equal length. `attention` is the share of `F` and `I`
    /// in which tokens attend to keys. `B` takes its share of `I` and `W` together, and collectives do not
    /// change.
    pub fn for_slice(self, slices: Slices, slice: Slice, attention: f64) -> Self {
        if slices.is_one() {
            return self;
        }
        let count = f64::from(slices.get());
        let attention_share = (2.0 * f64::from(slice.get()) + 1.0) / count;
        let factor = (1.0 - attention + attention * attention_share) / count;
        let (input_backward, weight_backward) = (self.input_backward * factor, self.weight_backward / count);
        let halves = self.input_backward + self.weight_backward;
        let backward_share = if halves > 0.0 { (input_backward + weight_backward) / halves } else { factor };
        Self {
            forward: self.forward * factor,
            input_backward,
            weight_backward,
            backward: self.backward * backward_share,
            recompute: self.recompute.map(|seconds| seconds * factor),
            exchanges: self.exchanges.map(|exchanges| exchanges.share(slices.get())),
            ..self
        }
    }
}

impl StageSizes {
    /// Returns the bytes of one of `slices` slices, rounded up. The gradients of the weights do not change.
    pub(crate) fn for_slice(self, slices: Slices) -> Self {
        if slices.is_one() {
            return Self { keys_values: 0, ..self };
        }
        let sliced = |sizes: RecomputeSizes| RecomputeSizes {
            kept: slices.share(sizes.kept),
            recomputed: slices.share(sizes.recomputed),
        };
        Self {
            output: slices.share(self.output),
            activation: slices.share(self.activation),
            stash: slices.share(self.stash),
            recompute: self.recompute.map(sliced),
            keys_values: slices.share(self.keys_values),
            parts: slices.share(self.parts),
            offload: slices.share(self.offload),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::{Exchanges, StageExchanges};

    const STAGE: StageCosts = StageCosts {
        forward: 8.0,
        input_backward: 12.0,
        weight_backward: 4.0,
        backward: 16.0,
        recompute: Some(4.0),
        unshard: 3.0,
        reduce_grad: 5.0,
        offload: None,
        reload: None,
        exchanges: StageExchanges {
            forward: Exchanges::new(2, 2.0),
            backward: Exchanges::new(4, 8.0),
            recompute: None,
        },
    };

    fn for_slice(slice: u32, attention: f64) -> [f64; 5] {
        let slices = Slices::new(4).expect("4 is not 0");
        let costs = STAGE.for_slice(slices, Slice::new(slice), attention);
        assert_eq!((costs.unshard, costs.reduce_grad), (3.0, 5.0));
        let StageExchanges { forward, backward, recompute } = costs.exchanges;
        assert_eq!([forward, backward], [Exchanges::new(2, 0.5), Exchanges::new(4, 2.0)]);
        assert_eq!(recompute, None);
        [
            costs.forward,
            costs.input_backward,
            costs.weight_backward,
            costs.backward,
            costs.recompute.unwrap_or(0.0),
        ]
    }

    #[test]
    fn attention_grows_with_the_keys() {
        assert_eq!(for_slice(3, 0.0), [2.0, 3.0, 1.0, 4.0, 1.0]);
        // The first slice has a sixteenth of the attention, and the last one seven sixteenths.
        assert_eq!(for_slice(0, 1.0), [0.5, 0.75, 1.0, 1.75, 0.25]);
        assert_eq!(for_slice(3, 1.0), [3.5, 5.25, 1.0, 6.25, 1.75]);
        assert_eq!(for_slice(3, 0.5), [2.75, 4.125, 1.0, 5.125, 1.375]);
    }

    #[test]
    fn slices_have_the_costs_of_their_microbatch() {
        for attention in [0.0, 0.25, 1.0] {
            let sums = (0..4)
                .map(|slice| for_slice(slice, attention))
                .fold([0.0; 5], |sums, costs| [0, 1, 2, 3, 4].map(|at| sums[at] + costs[at]));
            assert_eq!(sums, [8.0, 12.0, 4.0, 16.0, 4.0]);
        }
    }

    #[test]
    fn a_backward_may_differ_from_its_halves() {
        let slices = Slices::new(2).expect("2 is not 0");
        let other = StageCosts { backward: 8.0, ..STAGE };
        assert_eq!(other.for_slice(slices, Slice::new(1), 1.0).backward, 8.0 * 11.0 / 16.0);
        let free = StageCosts { backward: 8.0, ..StageCosts::new(0.0, 0.0, 0.0) };
        assert_eq!(free.for_slice(slices, Slice::new(1), 0.0).backward, 4.0);
    }
}
