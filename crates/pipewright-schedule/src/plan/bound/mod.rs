//! Lower bounds on the time of a step over all plans of the search space. `plan/README.md` has the proofs.
//!
//! For a number of ranks and microbatches, each arrangement of stages ([`Class`]) has its own bound, and the smallest
//! counts. `any.rs` holds for every assignment of layers to ranks; `one.rs` is exact for one stage a rank, `two.rs` for
//! two, and `few.rs` tries all cuts where there are few; `idle.rs` counts the idle time of all ranks with several stages a
//! rank, and `pairs.rs` searches for two stages of each rank that fit into its time. Most of them test whether a time is
//! long enough, and bisection finds the longest time that is proved too short. `few.rs` takes a minimum over cuts, and
//! `idle.rs` raises its bound step by step.

mod any;
mod few;
mod idle;
mod one;
mod pairs;
mod sizes;
mod terms;
mod two;

use crate::plan::class::{Class, MAX_CHUNKS, Path};
use crate::plan::rank_times::Step;

/// The accuracy of the bisections, as a share.
const ACCURACY: f64 = 5e-4;
/// The share that rounding errors may add to a bound.
const ROUNDING: f64 = 1e-9;

/// Returns a time that no step with an arrangement of `classes` is below, without the optimizer. If placements are
/// free, rounds may visit the ranks in any order.
pub(super) fn lower_bound(step: Step<'_>, classes: &[Class], is_free: bool) -> f64 {
    let any = any::bound(step);
    let of_class = |&class: &Class| {
        let is_fixed = !is_free || class.chunks == 1;
        let own = if is_fixed { few::bound(step, class) } else { None };
        let own = own.or_else(|| match (class.chunks, class.path) {
            (2.., _) if is_free => None,
            (1, _) => Some(one::bound(step, any)),
            (2, Path::V) => Some(two::v_bound(step, any)),
            (2, Path::Loop) => two::loop_bound(step, any),
            _ => None,
        });
        own.unwrap_or(any).max(any)
    };
    let mut bounds: Vec<f64> = classes.iter().map(of_class).collect();
    // The bounds of rounds take longer, and are the same for loops and Vs. They are computed one at a time, each for the class
    // that then has the smallest bound. Once that class has no other, its bound is the result.
    let mut computed = [0; MAX_CHUNKS as usize + 1];
    loop {
        let smallest = (0..classes.len()).min_by(|&one, &other| bounds[one].total_cmp(&bounds[other]));
        let Some(smallest) = smallest else { return any * (1.0 - ROUNDING) };
        let (class, low) = (classes[smallest], bounds[smallest]);
        let of_rounds = match (class.chunks, computed[class.chunks as usize]) {
            (2.., 0) => idle::bound(step, class, low),
            // With more layers, the search reaches its limit before it proves anything.
            (2, 1) if step.layers.count() < 2 * class.stages() => pairs::bound(step, class, low),
            _ => return low * (1.0 - ROUNDING),
        };
        computed[class.chunks as usize] += 1;
        for (bound, _) in bounds.iter_mut().zip(classes).filter(|(_, other)| other.chunks == class.chunks) {
            *bound = bound.max(of_rounds);
        }
    }
}

/// Returns a lower bound for all arrangements, which is at most [`lower_bound`] and takes little time.
pub(super) fn simple_bound(step: Step<'_>) -> f64 {
    any::bound(step) * (1.0 - ROUNDING)
}

/// Returns the bound on the time of the optimizer: the rank with the most layers to update.
pub(super) fn optimizer_bound(step: Step<'_>) -> f64 {
    let times = step.layers.list.iter().map(|layer| layer.optimizer);
    let longest = times.clone().fold(0.0, f64::max);
    (times.sum::<f64>() / f64::from(step.ranks)).max(longest) * (1.0 - ROUNDING)
}

/// Returns the bound from the sums over replicas: a rank begins the first of its sums after all microbatches of some
/// layer, and makes one sum after another. The sums of all ranks take at least as long as those of equal shares of the
/// parameters.
pub(super) fn reduction_bound(step: Step<'_>) -> f64 {
    if step.layers.network.mesh.replicas < 2 {
        return 0.0;
    }
    let layers = &step.layers.list;
    let parameters = layers.iter().map(|layer| layer.parameters).fold(0, u64::saturating_add);
    let work = layers.iter().map(|layer| layer.forward + layer.input + layer.weight);
    let shortest = step.microbatches * work.fold(f64::INFINITY, f64::min);
    let sums = step.layers.network.replica_sum(parameters / u64::from(step.ranks));
    (shortest + sums) * (1.0 - ROUNDING)
}

/// Returns the longest time that `is_enough` proves too short, within [`ACCURACY`]; at least `low`, which is a bound.
fn bisect(low: f64, mut is_enough: impl FnMut(f64) -> bool) -> f64 {
    let (mut low, mut high) = (low, low);
    while !is_enough(high) {
        low = high;
        high = high * 1.25 + f64::MIN_POSITIVE;
        if !high.is_finite() {
            return low;
        }
    }
    while high - low > ACCURACY * high {
        let middle = low + (high - low) / 2.0;
        if is_enough(middle) { high = middle } else { low = middle }
    }
    low
}

/// Returns layers whose three times are 1, on links that take no time.
#[cfg(test)]
pub(super) fn equal_layers(count: usize, ranks: u32) -> crate::plan::layers::Layers {
    use crate::plan::layers::Layers;
    use crate::plan::network::{Mesh, MeshOrder, Network};
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
    let mesh = Mesh { tensor: 1, replicas: 1, ranks, order: MeshOrder::default() };
    Layers::of(&profile, 1, Network::of(&profile, mesh).expect("a mesh"), TrainingState::default())
}
