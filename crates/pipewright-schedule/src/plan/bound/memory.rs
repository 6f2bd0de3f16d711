//! The bound from limited memory, with the best recomputation of any layers of any microbatches.
//!
//! Consider a layer and a microbatch. The layer keeps its activations for at least one of two times:
//!
//! - if it is not computed again, from its forward to its input backward. The microbatch passes all later
//!   layers and comes back meanwhile, so that is at least `F + I` of the layer and the layers after it;
//! - if it is computed again, during its second forward and its input backward. This costs the time of the
//!   second forward.
//!
//! The bytes that all ranks hold at any moment are at most their memory without parameters and optimizer
//! state. So the sum of bytes times time over layers and microbatches is at most that memory times the time of
//! the step. To keep to it, some share of each layer's microbatches is computed again. The shares that cost the
//! least time follow as in a fractional knapsack: the layers that save the most bytes times time for the time
//! of their second forward come first. A time is too short if the ranks together, after their fill, have less
//! time than the work and these second forwards.
//!
//! A layer may also compute parts again in its input backward, and not keep their results. That saves their
//! bytes from the forward to the input backward and costs their time. A layer that is computed again saves the
//! rest of its bytes in addition, and costs the rest of its time. Whatever is computed again of a layer then
//! costs no more here than in a plan, and saves no less.
//!
//! A recomputed stage also keeps its input, and its layers keep their activations until the whole stage has
//! run; the bound leaves both out. Tensors that two layers share count once.

use crate::plan::bound::bisect::bisect;
use crate::plan::rank_times::Step;
use crate::plan::tuning::bound::ACCURACY;
use crate::recompute::LayerPart;

/// A layer, or a part of one, that may be computed again, for one microbatch.
#[derive(Clone, Copy)]
struct Item {
    /// The bytes times time that this saves.
    saved: f64,
    /// The time of the second forward.
    takes: f64,
}

/// Returns a lower bound on the time of a step whose ranks together have `memory` bytes; 0 if they do not have room
/// for the parameters.
pub(super) fn bound(step: Step<'_>, memory: u128) -> f64 {
    let layers = step.layers;
    // Parts that replicas hold together are rounded up by rank, so they are left out.
    let state: u128 = if layers.sharding.shards > 1 {
        0
    } else {
        layers.list.iter().map(|layer| u128::from(layer.state.total())).sum()
    };
    let room = memory.saturating_sub(state) as f64;
    if room <= 0.0 {
        return 0.0;
    }
    let (end, fastest) = (layers.count(), step.fastest());
    let mut held = 0.0;
    let mut items = Vec::with_capacity(end);
    for (index, layer) in layers.list.iter().enumerate() {
        let bytes = layer.activation.saturating_sub(layer.shared) as f64;
        let whole = (layers.forward(index..end) + layers.input(index..end)) / fastest;
        held += bytes * whole;
        let (mut left, mut takes) = (bytes, layer.recompute);
        for part in LayerPart::ALL {
            let cost = layer.cost_of(part.into());
            let saved = left.min(cost.bytes as f64);
            let cost = cost.takes.min(takes);
            items.push(Item { saved: saved * whole, takes: cost });
            (left, takes) = (left - saved, takes - cost);
        }
        items.push(Item { saved: left * (whole - layer.recompute / fastest - layer.input / fastest), takes });
    }
    items.retain(|item| item.saved > 0.0);
    // Products instead of quotients, because a second forward may take no time.
    items.sort_by(|one, other| (one.takes * other.saved).total_cmp(&(other.takes * one.saved)));
    let work = layers.work(0..end);
    bisect(step.path() / fastest, ACCURACY, |time| {
        let lacking = held - room * time / step.microbatches;
        again(&items, lacking).is_some_and(|again| step.has_time(time, work + again))
    })
}

/// Returns the least time of second forwards of a microbatch that saves `lacking`; `None` if all of them do
/// not.
fn again(items: &[Item], mut lacking: f64) -> Option<f64> {
    let mut takes = 0.0;
    for item in items {
        if lacking <= 0.0 {
            break;
        }
        takes += item.takes * (lacking / item.saved).min(1.0);
        lacking -= item.saved;
    }
    (lacking <= 0.0).then_some(takes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::bound::equal_layers;

    /// Checks the bound for equal layers with 10 bytes of activations and `F = I = W = 1`.
    fn check(layers: usize, ranks: u32, microbatches: u32, memory: u64, expected: f64) {
        let mut layers = equal_layers(layers, ranks);
        layers.list.iter_mut().for_each(|layer| layer.activation = 10);
        let step = Step::of(&layers, ranks, microbatches);
        let found = bound(step, u128::from(memory) * u128::from(ranks));
        // The bisection ends below the bound.
        assert!((expected * 0.999..=expected).contains(&found), "{found} instead of {expected}");
    }

    #[test]
    fn little_memory_costs_second_forwards() {
        // Each microbatch holds 10 bytes for 2 + 4 units of time, and all of them run one after another.
        check(2, 1, 10, 20, 60.0);
        check(2, 1, 10, 10, 60.0);
        // In 9 bytes, a step of the time T has room for 9 T / 10 bytes times time per microbatch. If a share x
        // of the first layer's forwards runs again, a microbatch needs 60 - 20 x of it, and T is 10 (6 + x).
        // Both are equal at x = 6 / 29.
        check(2, 1, 10, 9, 10.0 * (6.0 + (60.0 - 54.0) / (20.0 + 9.0)));
    }

    #[test]
    fn enough_memory_costs_nothing() {
        check(4, 2, 8, 1_000, 48.5);
        assert_eq!(bound(Step::of(&equal_layers(4, 2), 2, 8), 0), 0.0);
    }
}
