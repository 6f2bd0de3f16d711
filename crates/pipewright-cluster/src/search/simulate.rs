//! Simulates the layouts of an exploration, the fastest estimates first.

use std::ops::Range;

use crate::accuracy::Accuracy;
use crate::layout::{Layout, ShardedState};
use crate::pipeline::{PipelineError, PipelineRun, closed_form};
use crate::predict::{Prediction, RunPipeline};
use crate::search::explore::{Candidate, Exploration, Pruning, Tried, balanced};
use crate::search::found::{ClusterPlan, ClusterReport};
use crate::search::least_makespan::least_makespan;
use crate::units::Units;

/// The most layouts that are simulated to find the one that needs least memory.
const LEAST_SIMULATED: usize = 64;

/// The sizes and the schedule in which plans that are returned differ.
type Kind<'a> = (u32, u32, u32, u32, &'a str);

fn kind(layout: &Layout) -> Kind<'_> {
    (layout.tensor, layout.pipeline, layout.context, layout.expert, layout.schedule_name())
}

impl Exploration<'_> {
    /// Simulates candidates in turns: the fastest estimate of each kind, then the second one of each, and so
    /// on. Layouts that were predicted before are left out, and so are layouts that cannot be faster than the plans.
    pub(super) fn simulate(mut self) -> Result<ClusterReport, Box<Tried>> {
        let kinds = self.by_kind();
        let mut plans = Vec::from_iter(self.known.take());
        let known_s = plans.first().map_or(f64::INFINITY, |plan: &ClusterPlan| plan.prediction.seconds);
        let before = self.tried.simulations;
        let most = kinds.iter().map(Vec::len).max().unwrap_or(0);
        for turn in 0..most {
            for candidate in kinds.iter().filter_map(|kind| kind.get(turn)) {
                let slowest =
                    plans.get(self.request.plans - 1).map_or(f64::INFINITY, |plan| plan.prediction.seconds);
                let simulations = self.tried.simulations - before;
                let is_enough = simulations >= self.request.simulations && !plans.is_empty();
                // A layout of one stage takes no simulation.
                if (is_enough && candidate.layout.stages() > 1) || candidate.least > slowest {
                    continue;
                }
                for plan in self.plans_of(&candidate.layout, slowest) {
                    keep(&mut plans, plan);
                }
            }
        }
        if plans.is_empty() && self.pruning == Pruning::None {
            plans = self.simulate_least();
        }
        if plans.is_empty() {
            return Err(Box::new(self.tried));
        }
        plans.truncate(self.request.plans);
        let mut report = ClusterReport {
            accuracy: Accuracy::of(&self.request.setting(&plans[0].layout)),
            plans,
            preferred: None,
            memory_limit: self.request.memory_limit(),
            lower_bound_s: self.lower_bound_s,
            estimated: self.estimated,
            simulated: self.tried.simulations,
        };
        report.prefer_usual(&self.request.machine, known_s);
        Ok(report)
    }

    /// Simulates the layouts that need least by estimates that may be too small, and returns the plans that
    /// fit in spite of them. [`Tried::least`] is then simulated, or its estimate is exact.
    fn simulate_least(&mut self) -> Vec<ClusterPlan> {
        let mut too_large = std::mem::take(&mut self.too_large);
        too_large.sort_by(|one, other| one.missing.total_cmp(&other.missing));
        let mut plans = Vec::new();
        for candidate in too_large.iter().take(LEAST_SIMULATED) {
            if self.tried.least.as_ref().is_some_and(|least| least.missing() <= candidate.missing) {
                break;
            }
            for plan in self.plans_of(&candidate.layout, f64::INFINITY) {
                keep(&mut plans, plan);
            }
        }
        plans
    }

    /// Returns the candidates of each kind, the fastest estimates first, and the fastest kinds first.
    fn by_kind(&mut self) -> Vec<Vec<Candidate>> {
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
        let mut kinds: Vec<Vec<Candidate>> = Vec::new();
        for candidate in candidates {
            match kinds.iter_mut().find(|known| kind(&known[0].layout) == kind(&candidate.layout)) {
                Some(known) => known.push(candidate),
                None => kinds.push(vec![candidate]),
            }
        }
        kinds
    }

    /// Simulates a layout, and returns the plans that fit, unless they cannot take `slowest` seconds or fewer. After the
    /// quick exploration, which only has even cuts, it is also simulated with its blocks cut by their time.
    fn plans_of(&mut self, layout: &Layout, slowest: f64) -> Vec<ClusterPlan> {
        let placed = self.request.placed(layout);
        let units = self.units(&placed);
        let mut layouts = vec![(layout.clone(), placed.cut(&units))];
        if self.pruning == Pruning::Quick && self.request.fixed.cut.is_none() {
            layouts.extend(balanced(self.request, layout, &units));
        }
        let mut plans = Vec::new();
        for (layout, cut) in layouts {
            let is_slower = || {
                slowest.is_finite()
                    && layout.stages() > 1
                    && self.least_seconds(&layout, &units, &cut) > slowest
            };
            if self.tried.predicted.contains(&layout) || is_slower() {
                continue;
            }
            match self.predict(&layout, &units, cut) {
                Ok(prediction) if self.fits(&layout, &prediction) => {
                    plans.push(ClusterPlan::new(
                        self.request,
                        self.lower_bound_s,
                        layout.clone(),
                        prediction,
                    ));
                }
                Ok(_) => {}
                Err(error) => self.fails(&layout, error),
            }
            self.tried.predicted.insert(layout);
        }
        plans
    }

    /// Returns the seconds that a step of a layout takes at least.
    fn least_seconds(&self, layout: &Layout, units: &[Units], cut: &[Range<usize>]) -> f64 {
        let run = |costs: &_| {
            Ok(PipelineRun {
                makespan: least_makespan(layout, costs),
                activations: vec![0; layout.pipeline as usize],
                stages_of_rank: layout.stages_of_rank(),
                splits_backward: false,
            })
        };
        let placed = self.request.placed(layout);
        RunPipeline::new(&placed, units, cut.to_vec(), run)
            .map_or(0.0, |pipeline| pipeline.predict(&placed, units).seconds)
    }

    /// Predicts a layout by a simulation. Layouts that differ in their sharding only share it.
    fn predict(
        &mut self,
        layout: &Layout,
        units: &[Units],
        cut: Vec<Range<usize>>,
    ) -> Result<Prediction, PipelineError> {
        let placed = self.request.placed(layout);
        let without_sharding = Layout { sharding: ShardedState::Nothing, shards: None, ..layout.clone() };
        if let Some(pipeline) = self.tried.runs.get(&without_sharding) {
            return Ok(pipeline.predict(&placed, units));
        }
        let pipeline = RunPipeline::new(&placed, units, cut, |costs| {
            // One stage computes one microbatch after the other.
            if layout.stages() == 1 && layout.schedule.is_none() {
                return Ok(closed_form(layout, costs));
            }
            self.tried.simulations += 1;
            self.tried.programs.run(layout, costs)
        })?;
        let prediction = pipeline.predict(&placed, units);
        self.tried.runs.insert(without_sharding, pipeline);
        Ok(prediction)
    }
}

/// Adds a plan in the order of time, unless a plan of the same kind is as fast.
pub(super) fn keep(plans: &mut Vec<ClusterPlan>, plan: ClusterPlan) {
    let seconds = |plan: &ClusterPlan| plan.prediction.seconds;
    if let Some(same) = plans.iter().position(|known| kind(&known.layout) == kind(&plan.layout)) {
        if seconds(&plans[same]) <= seconds(&plan) {
            return;
        }
        plans.remove(same);
    }
    let index = plans.partition_point(|known| seconds(known) <= seconds(&plan));
    plans.insert(index, plan);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::by_name;
    use crate::layout::{Precision, Recompute, ShardedState};
    use crate::pipeline::Programs;
    use crate::search::request::{Fixed, Request};
    use crate::search::space;
    use pipewright_shapes::reader;

    fn without_plan(request: &Request, pruning: Pruning, tried: Tried) -> Tried {
        let exploration = Exploration::of(request, &space::shapes(request), pruning, None, tried);
        *exploration.simulate().expect_err("no plan")
    }

    /// One layout, whose estimate is smaller than its simulation.
    #[test]
    fn no_layout_is_simulated_twice() {
        let model = reader::read(include_str!("../../tests/cluster/llama_405b.json")).expect("a model");
        let machine = by_name("h100").expect("a machine");
        let mut request = Request::new(model.model, machine, 64, 32, 8192, Precision::Half);
        request.memory = Some(1024.0);
        request.fixed = Fixed {
            tensor: Some(8),
            pipeline: Some(8),
            chunks: Some(2),
            microbatch: Some(1),
            schedule: Some("hanayo".to_owned()),
            recompute: Some(Recompute::None),
            sharding: Some(ShardedState::Nothing),
            sequence_parallel: Some(true),
            ..Fixed::default()
        };
        let needed = |tried: &Tried| tried.least.as_ref().expect("a simulated layout").needed();
        let least = needed(&without_plan(&request, Pruning::None, Tried::nothing()));
        request.memory = Some(0.99 * least);
        let quick = without_plan(&request, Pruning::Quick, Tried::nothing());
        assert!(quick.simulations > 0);
        // A simulation fails.
        let tried = Tried { programs: Programs::up_to(0), ..quick };
        let complete = without_plan(&request, Pruning::None, tried);
        assert_eq!(complete.failed, None);
        assert_eq!(needed(&complete), least);
    }
}
