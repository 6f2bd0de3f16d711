//! How a plan uses unlike ranks, and what a faster rank or the lack of one would change.
//!
//! The changes are estimates: the best plan's layout is changed as little as possible, a walk balances it at the
//! other speeds, and rules make an order for it. The same is done without a change, and the step of the best plan
//! grows or shrinks by the ratio of the two times.

use std::ops::Range;

use crate::ids::{Rank, StageIndex};
use crate::plan::balance::balanced;
use crate::plan::explore::time_by_rules;
use crate::plan::head_parts::with_head_parts;
use crate::plan::numbers::Numbers;
use crate::plan::placed_cut::PlacedCut;
use crate::plan::predict::{PlanChoice, Prediction, predict};
use crate::plan::replica_rows::{rows_of, times_of};
use crate::plan::report::{MachineUse, Plan};
use crate::plan::request::PlanRequest;
use crate::plan::search::Search;
use crate::plan::shape::Shape;
use crate::plan::tuning;
use crate::plan::unlike_pool::{stays, walk_of};
use crate::profile::{Profile, RankProfile};

/// Returns how the best plan uses each rank of the profile.
pub(super) fn machine_uses(
    profile: &Profile,
    request: &PlanRequest,
    best: &Plan,
    keep_going: &mut dyn FnMut() -> bool,
) -> Vec<MachineUse> {
    let profile = with_head_parts(profile, Some(best.head_parts));
    let busy = busy(&profile, request, best);
    let mut change = Changes { profile: &profile, request, best, keep_going };
    let base = change.time(&profile, &best.machines, change.layout());
    let step = |time: f64| if base.is_finite() { best.step_s * time / base } else { best.step_s };
    let ranks = (0..request.ranks).map(Rank::new);
    ranks
        .map(|machine| {
            let rank = best.machines.iter().position(|&used| used == machine);
            let busy_s = rank.and_then(|rank| busy.get(rank)).copied().unwrap_or(0.0);
            let faster = change.twice_as_fast(machine, rank);
            let without = change.without(machine, rank);
            MachineUse {
                machine,
                rank: rank.map(|rank| Rank::new(rank as u32)),
                stages: rank
                    .map_or_else(Vec::new, |rank| stages_of(best, rank, profile.layer_count() as usize)),
                busy_s,
                idle_s: (best.step_s - busy_s).max(0.0),
                // The plan as it is takes no longer on a faster rank.
                step_if_twice_as_fast_s: step(faster).min(best.step_s),
                step_without_s: match rank {
                    None => Some(best.step_s),
                    Some(_) => Some(step(without)).filter(|time| time.is_finite()),
                },
            }
        })
        .collect()
}

/// Returns how the best plan with replicas uses each rank of the profile. For the estimate of a faster rank, the replicas
/// have other shares of the batch.
pub(super) fn replica_uses(
    profile: &Profile,
    request: &PlanRequest,
    best: &Plan,
    keep_going: &mut dyn FnMut() -> bool,
) -> Vec<MachineUse> {
    let profile = &*with_head_parts(profile, Some(best.head_parts));
    let ranks = best.schedule.ranks() as usize;
    let replicas: Vec<Vec<Rank>> = best.machines.chunks(ranks).map(<[Rank]>::to_vec).collect();
    let places: Vec<Rank> = (0..ranks as u32).map(Rank::new).collect();
    let rows = best.rows_of_replicas();
    let busy: Vec<f64> = replicas
        .iter()
        .zip(&rows)
        .flat_map(|(replica, &rows)| busy_of(profile, request, best, replica, rows))
        .collect();
    let mut change = Changes { profile, request, best, keep_going };
    let mut time = |profile: &Profile| {
        let times = times_of(profile);
        let merged = profile.of_replicas(&replicas, &rows_of(&times, &replicas, best.microbatch_rows));
        change.time(&merged, &places, change.layout())
    };
    let base = time(profile);
    let step = |time: f64| if base.is_finite() { best.step_s * time / base } else { best.step_s };
    let machines = (0..profile.ranks.len() as u32).map(Rank::new);
    machines
        .map(|machine| {
            let rank = best.machines.iter().position(|&used| used == machine);
            let busy_s = rank.and_then(|rank| busy.get(rank)).copied().unwrap_or(0.0);
            let faster = rank.map(|_| step(time(&with_twice_the_speed(profile, machine))));
            MachineUse {
                machine,
                rank: rank.map(|rank| Rank::new(rank as u32)),
                stages: rank.map_or_else(Vec::new, |rank| {
                    stages_of(best, rank % ranks, profile.layer_count() as usize)
                }),
                busy_s,
                idle_s: (best.step_s - busy_s).max(0.0),
                step_if_twice_as_fast_s: faster.unwrap_or(best.step_s).min(best.step_s),
                step_without_s: rank.is_none().then_some(best.step_s),
            }
        })
        .collect()
}

/// Returns the profile with a rank of twice the speed.
fn with_twice_the_speed(profile: &Profile, machine: Rank) -> Profile {
    let mut profile = profile.clone();
    let own = &mut profile.ranks[machine.index()];
    own.speed *= 2.0;
    own.speeds.values_mut().for_each(|speed| *speed *= 2.0);
    profile
}

/// Returns the time in which each rank of a plan computes; nothing if it cannot be predicted.
fn busy(profile: &Profile, request: &PlanRequest, plan: &Plan) -> Vec<f64> {
    busy_of(profile, request, plan, &plan.machines, plan.microbatch_rows)
}

/// Returns the same for one replica, whose microbatches have `rows` rows.
fn busy_of(profile: &Profile, request: &PlanRequest, plan: &Plan, machines: &[Rank], rows: u32) -> Vec<f64> {
    let choice = PlanChoice {
        boundaries: plan.boundaries.clone(),
        recompute: plan.recompute.clone(),
        microbatch_rows: rows,
        state: request.state,
        ..PlanChoice::default()
    };
    let predicted = predict(&profile.of_ranks(machines), &plan.schedule, &choice);
    let busy = |prediction: Prediction| {
        let timeline = prediction.run.timeline();
        plan.schedule.placement().all_ranks().map(|rank| timeline.busy(rank)).collect()
    };
    predicted.map_or_else(|_| Vec::new(), busy)
}

fn stages_of(plan: &Plan, rank: usize, layers: usize) -> Vec<(StageIndex, Range<usize>)> {
    let starts = starts_of(plan, layers);
    let own = plan.schedule.placement().stages_of(Rank::new(rank as u32)).iter();
    own.map(|&stage| (stage, starts[stage.index()]..starts[stage.index() + 1])).collect()
}

fn starts_of(plan: &Plan, layers: usize) -> Vec<usize> {
    [0].into_iter().chain(plan.boundaries.iter().copied()).chain([layers]).collect()
}

/// The data for changes of the best plan.
struct Changes<'a> {
    profile: &'a Profile,
    request: &'a PlanRequest,
    best: &'a Plan,
    keep_going: &'a mut dyn FnMut() -> bool,
}

impl Changes<'_> {
    fn layout(&self) -> PlacedCut {
        let placement = self.best.schedule.placement();
        let rank_of = placement.all_stages().map(|stage| placement.rank_of(stage).get()).collect();
        PlacedCut { starts: starts_of(self.best, self.profile.layer_count() as usize), rank_of }
    }

    /// Returns the time if a rank of the profile were twice as fast. `rank` is its number in the plan.
    fn twice_as_fast(&mut self, machine: Rank, rank: Option<usize>) -> f64 {
        let mut profile = self.profile.clone();
        profile.ranks.resize(self.request.ranks as usize, RankProfile::default());
        let profile = with_twice_the_speed(&profile, machine);
        if rank.is_some() {
            return self.time(&profile, &self.best.machines, self.layout());
        }
        // The stage with the most layers gives it one.
        let mut layout = self.layout();
        let sizes = layout.starts.windows(2).map(|range| range[1] - range[0]);
        let Some((stage, 2..)) = sizes.enumerate().max_by_key(|&(_, size)| size) else {
            return f64::INFINITY;
        };
        let mut machines = self.best.machines.clone();
        let place = machines.partition_point(|&used| used < machine);
        machines.insert(place, machine);
        for rank in layout.rank_of.iter_mut().filter(|rank| **rank as usize >= place) {
            *rank += 1;
        }
        layout.starts.insert(stage + 1, layout.starts[stage + 1] - 1);
        layout.rank_of.insert(stage + 1, place as u32);
        self.time(&profile, &machines, layout)
    }

    /// Returns the time without a rank of the plan: its neighbours get its layers.
    fn without(&mut self, machine: Rank, rank: Option<usize>) -> f64 {
        let Some(rank) = rank.map(|rank| rank as u32).filter(|_| self.best.machines.len() > 1) else {
            return f64::INFINITY;
        };
        let PlacedCut { mut starts, mut rank_of } = self.layout();
        for stage in (0..rank_of.len()).rev().filter(|&stage| rank_of[stage] == rank).collect::<Vec<_>>() {
            // The stage before it gets the layers; of the first stage, the next one.
            starts.remove(stage.max(1));
            rank_of.remove(stage);
        }
        rank_of.iter_mut().filter(|other| **other > rank).for_each(|other| *other -= 1);
        if rank_of.is_empty() {
            return f64::INFINITY;
        }
        starts[0] = 0;
        let machines: Vec<Rank> =
            self.best.machines.iter().copied().filter(|&used| used != machine).collect();
        let profile = self.profile;
        self.time(profile, &machines, PlacedCut { starts, rank_of })
    }

    /// Returns the time of a step of a balanced layout on some ranks of a profile; infinity if there is none.
    fn time(&mut self, profile: &Profile, machines: &[Rank], layout: PlacedCut) -> f64 {
        let replicas = self.request.data_parallel.unwrap_or(1);
        let ranks = machines.len() as u32 * replicas;
        let request = PlanRequest { ranks, effort: u64::MAX, ..self.request.clone() };
        let shapes = Shape::of_profile(&profile.of_ranks(machines), &request, machines);
        let rows = self.best.microbatch_rows;
        let Some(at) = shapes.iter().position(|shape| shape.microbatch_rows == rows) else {
            return f64::INFINITY;
        };
        let shape = &shapes[at];
        let mut search = Search::new(&request, &shapes, &mut *self.keep_going);
        let steps = tuning::unlike::ESTIMATE_STEPS * layout.rank_of.len();
        let walk = walk_of(shape, stays(shape)[0], steps);
        let layout = balanced(walk, layout, &mut Numbers(1), &mut 0);
        time_by_rules(&mut search, at, &layout)
    }
}
