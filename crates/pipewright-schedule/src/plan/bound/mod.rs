//! Lower bounds on the time of a step over all plans of the search space. `plan/README.md` has the proofs.
//!
//! For a number of ranks and microbatches, each number of stages per rank has its own bound, and the smallest
//! one counts. `any.rs` is valid for every assignment of layers to ranks; `one.rs` is exact for one stage per
//! rank; `idle.rs` counts the idle time of all ranks with several stages per rank, and `pairs.rs` searches
//! for two stages of each rank that fit into its time. `unlike.rs` is for ranks that differ. `memory.rs` counts the second forwards that limited
//! memory forces. Most of them test whether a time is long enough, and
//! bisection finds the longest time that is proved too short. `idle.rs` raises its bound step by step.

mod any;
mod bisect;
mod idle;
mod memory;
mod one;
mod packing;
mod pairs;
mod sizes;
mod terms;
mod unlike;

use crate::plan::class::{Class, Path};
use crate::plan::rank_memory::RankMemory;
use crate::plan::rank_times::Step;
use crate::plan::tuning::ROUNDING;

/// A number of stages per rank with its bound.
struct Bounded {
    class: Class,
    bound: f64,
    /// The number of bounds for several stages per rank that are computed already.
    computed: usize,
}

/// Returns a time that no step with an arrangement of `classes` is below, without the optimizer. The rounds
/// after the first one may visit the ranks in any order, so a V has the bound of a loop.
pub(super) fn lower_bound(step: Step<'_>, classes: &[Class]) -> f64 {
    let any = any::bound(step);
    let bounded = |&class: &Class| {
        let bound = if class.chunks == 1 { one::bound(step, any).max(any) } else { any };
        Bounded { class, bound, computed: 0 }
    };
    let loops = classes.iter().filter(|class| class.path == Path::Loop);
    let mut bounds: Vec<Bounded> = loops.map(bounded).collect();
    // The bounds of rounds take longer. They are computed one at a time, each for the class that then has the
    // smallest bound. Once that class has no other bound, its bound is the result.
    loop {
        let smallest = bounds.iter_mut().min_by(|one, other| one.bound.total_cmp(&other.bound));
        let Some(Bounded { class, bound, computed }) = smallest else { return any * (1.0 - ROUNDING) };
        let of_rounds = match (class.chunks, *computed) {
            (2.., 0) => idle::bound(step, *class, *bound),
            // With more layers, the search reaches its limit before it proves anything.
            (2, 1) if step.layers.count() < 2 * class.stages() => pairs::bound(step, *class, *bound),
            _ => return *bound * (1.0 - ROUNDING),
        };
        *computed += 1;
        *bound = bound.max(of_rounds);
    }
}

/// Returns a lower bound for all arrangements, which is at most [`lower_bound`] and takes little time.
pub(super) fn simple_bound(step: Step<'_>) -> f64 {
    any::bound(step) * (1.0 - ROUNDING)
}

/// Returns a lower bound on the time of a step whose ranks together have `memory` bytes, without the optimizer,
/// whatever is recomputed.
pub(super) fn memory_bound(step: Step<'_>, memory: u128) -> f64 {
    memory::bound(step, memory) * (1.0 - ROUNDING)
}

/// Returns the bound on the time of the optimizer: the rank with the most layers to update.
pub(super) fn optimizer_bound(step: Step<'_>) -> f64 {
    let times = step.layers.list.iter().map(|layer| layer.optimizer);
    let speeds = step.optimizer_speeds();
    let longest = times.clone().fold(0.0, f64::max) / speeds.iter().copied().fold(0.0, f64::max);
    (times.sum::<f64>() / speeds.iter().sum::<f64>()).max(longest) * (1.0 - ROUNDING)
}

/// Returns a lower bound for all plans on some or all of unlike ranks, without the optimizer. With `is_exact`, it is
/// higher and takes longer.
///
/// `unlike.rs` lets each rank compute every layer at the speed of the kind that it is best at. A rank that is almost
/// as fast as the others at a small layer would then seem so at all layers. So the bound is also computed for layers that
/// take no longer than these, and that each rank computes at its mean speed.
pub(super) fn unlike_bound(step: Step<'_>, memory: Option<&RankMemory>, is_exact: bool) -> f64 {
    let at_best = unlike::bound(step, memory, is_exact);
    let (best, mean) = (step.speeds(), step.mean_speeds());
    let has_kinds = best.iter().zip(&mean).any(|(best, mean)| *best > mean * (1.0 + ROUNDING));
    let at_mean = if has_kinds {
        let layers = step.layers.at_one_speed_each(&mean);
        unlike::bound(step.with_layers(&layers), memory, is_exact)
    } else {
        0.0
    };
    at_best.max(at_mean) * (1.0 - ROUNDING)
}

/// Returns the bound from the sums over replicas: a rank begins the first of its sums after all microbatches
/// of some layer, and makes one sum after another. The sums of all ranks take at least as long as the sums of
/// equal shares of the gradients.
pub(super) fn reduction_bound(step: Step<'_>) -> f64 {
    if step.layers.network.mesh.data < 2 {
        return 0.0;
    }
    let layers = &step.layers.list;
    let gradients = layers.iter().map(|layer| layer.gradient).fold(0, u64::saturating_add);
    let work = layers.iter().map(|layer| layer.forward + layer.input + layer.weight);
    let shortest = step.microbatches * work.fold(f64::INFINITY, f64::min);
    let sums = step.layers.network.replica_sum(gradients / u64::from(step.ranks));
    (shortest + sums) * (1.0 - ROUNDING)
}

/// Returns layers whose three times are 1, on links that take no time.
#[cfg(test)]
pub(super) fn equal_layers(count: usize, ranks: u32) -> crate::plan::layers::Layers {
    use crate::mesh::Mesh;
    use crate::plan::layers::Layers;
    use crate::plan::network::Network;
    use crate::plan::request::TrainingState;
    use crate::profile::{LayerProfile, LinkProfile, Profile};

    let layer = LayerProfile {
        forward_s: 1.0,
        input_backward_s: 1.0,
        weight_backward_s: 1.0,
        ..LayerProfile::default()
    };
    let link = LinkProfile::new(0.0, f64::INFINITY);
    let profile = Profile { link, layers: vec![layer; count], ..Profile::default() };
    let mesh = Mesh { pipeline: ranks, ..Mesh::default() };
    Layers::of(&profile, 1, Network::of(&profile, mesh).expect("a mesh"), TrainingState::default())
}
