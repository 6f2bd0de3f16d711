//! The division of ranks and rows: replicas, ranks of a pipeline, and microbatches of each replica.

use crate::plan::class::Class;
use crate::plan::layers::Layers;
use crate::plan::rank_times::Step;
use crate::plan::request::PlanRequest;
use crate::profile::Profile;

/// One division.
pub(super) struct Shape {
    pub(super) data_parallel: u32,
    /// The ranks of a pipeline.
    pub(super) ranks: u32,
    /// The microbatches of a replica.
    pub(super) microbatches: u32,
    pub(super) microbatch_rows: u32,
    pub(super) layers: Layers,
    pub(super) classes: Vec<Class>,
}

/// The most computations of a step with one stage a rank. More would take too much memory, and more time than a search
/// has.
const MOST_COMPUTATIONS: u128 = 1 << 21;

impl Shape {
    /// Returns all divisions of a request with at most [`MOST_COMPUTATIONS`].
    pub(super) fn all(profile: &Profile, request: &PlanRequest) -> Vec<Self> {
        let mut shapes = Vec::new();
        let may_group = |&rows: &u32| rows == 1 || request.larger_microbatches;
        for rows in divisors(request.microbatches).into_iter().filter(may_group) {
            let microbatch_rows = request.microbatch_rows.saturating_mul(rows);
            let layers = Layers::of(profile, microbatch_rows);
            for data_parallel in divisors(request.ranks) {
                let wanted = request.data_parallel.is_none_or(|wanted| wanted == data_parallel);
                let microbatches = request.microbatches / rows;
                let ranks = request.ranks / data_parallel;
                let computations = 3 * u128::from(ranks) * u128::from(microbatches / data_parallel);
                let fits = ranks as usize <= layers.count() && computations <= MOST_COMPUTATIONS;
                if !wanted || !microbatches.is_multiple_of(data_parallel) || !fits {
                    continue;
                }
                shapes.push(Self {
                    data_parallel,
                    ranks,
                    microbatches: microbatches / data_parallel,
                    microbatch_rows,
                    layers: layers.clone(),
                    classes: Class::all(ranks, layers.count()),
                });
            }
        }
        shapes
    }

    /// Returns the step for the bounds.
    pub(super) fn step(&self) -> Step<'_> {
        Step::of(&self.layers, self.ranks, self.microbatches)
    }
}

/// Returns the divisors of a number in ascending order.
fn divisors(number: u32) -> Vec<u32> {
    let low = (1..=number.isqrt()).filter(|&divisor| number.is_multiple_of(divisor));
    let mut divisors: Vec<u32> = low.collect();
    let high: Vec<u32> = divisors.iter().rev().map(|divisor| number / divisor).collect();
    divisors.extend(high);
    divisors.dedup();
    divisors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_ascend_and_are_different() {
        assert_eq!(divisors(1), [1]);
        assert_eq!(divisors(12), [1, 2, 3, 4, 6, 12]);
        assert_eq!(divisors(36), [1, 2, 3, 4, 6, 9, 12, 18, 36]);
        assert_eq!(divisors(u32::MAX - 4), [1, u32::MAX - 4]);
    }
}
