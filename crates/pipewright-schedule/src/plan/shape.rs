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

impl Shape {
    /// Returns all divisions of a request.
    pub(super) fn all(profile: &Profile, request: &PlanRequest) -> Vec<Self> {
        let mut shapes = Vec::new();
        for rows in 1..=request.microbatches {
            let may = rows == 1 || request.larger_microbatches;
            if !may || !request.microbatches.is_multiple_of(rows) {
                continue;
            }
            let microbatch_rows = request.microbatch_rows.saturating_mul(rows);
            let layers = Layers::of(profile, microbatch_rows);
            for data_parallel in 1..=request.ranks {
                let wanted = request.data_parallel.is_none_or(|wanted| wanted == data_parallel);
                let microbatches = request.microbatches / rows;
                let divides =
                    request.ranks.is_multiple_of(data_parallel) && microbatches.is_multiple_of(data_parallel);
                let ranks = request.ranks / data_parallel;
                if !wanted || !divides || ranks as usize > layers.count() {
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
