//! Plans for unlike ranks: against every order, cut and subset of small clusters, and over random clusters. Times
//! come from a simulation of its own, which shares nothing with the planner.

use std::collections::HashMap;

use pipewright_schedule::action::Action;
use pipewright_schedule::plan::{Plan, PlanChoice, PlanError, PlanReport, PlanRequest, plan, predict};
use pipewright_schedule::profile::{LinkProfile, PairProfile, Profile, RankProfile};
use pipewright_schedule::{Microbatch, Rank, Schedule, ScheduleSpec, generate};

use crate::instances::{self, Instance, Numbers, block};
use crate::trying::every_cut;

fn request(instance: &Instance, effort: u64) -> PlanRequest {
    PlanRequest {
        ranks: instance.ranks,
        microbatches: instance.microbatches,
        effort,
        ..PlanRequest::default()
    }
}

/// What a rank computes, in order: the kind (`F`, `I` or `W`), the stage and the microbatch.
pub(crate) type Row = Vec<(char, usize, usize)>;

/// The layers and the machine of each stage.
pub(crate) struct Stages<'a> {
    pub(crate) profile: &'a Profile,
    pub(crate) starts: Vec<usize>,
    pub(crate) machines: Vec<usize>,
    /// The size of a microbatch relative to the profile.
    pub(crate) scale: f64,
}

impl Stages<'_> {
    fn takes(&self, kind: char, stage: usize) -> f64 {
        let layers = &self.profile.layers[self.starts[stage]..self.starts[stage + 1]];
        let seconds = layers.iter().map(|layer| {
            let own = self.profile.ranks.get(self.machines[stage]).cloned().unwrap_or_default();
            let speed = own.speeds.get(&layer.kind).copied().unwrap_or(own.speed);
            let time = match kind {
                'F' => layer.forward_s,
                'I' => layer.input_backward_s,
                _ => layer.weight_backward_s,
            };
            time * self.scale / speed
        });
        seconds.sum()
    }

    fn link(&self, from: usize, to: usize) -> LinkProfile {
        let pairs = &self.profile.pairs;
        let find = |from: usize, to: usize| {
            pairs.iter().find(|pair| (pair.from as usize, pair.to as usize) == (from, to))
        };
        let pair = find(from, to).or_else(|| find(to, from));
        pair.map_or(self.profile.link, |pair| LinkProfile::new(pair.latency_s, pair.bytes_per_s))
    }

    /// Returns the time of the optimizer of the slowest machine.
    fn optimizer(&self) -> f64 {
        let mut times: HashMap<usize, f64> = HashMap::new();
        for (stage, &machine) in self.machines.iter().enumerate() {
            for layer in &self.profile.layers[self.starts[stage]..self.starts[stage + 1]] {
                let own = self.profile.ranks.get(machine).cloned().unwrap_or_default();
                let speed = own.speeds.get(&layer.kind).copied().unwrap_or(own.speed);
                *times.entry(machine).or_default() += layer.optimizer_s / speed;
            }
        }
        times.into_values().fold(0.0, f64::max)
    }

    /// Returns the time of a step: each rank computes its row in order, and each link sends one message at a time.
    pub(crate) fn step(&self, rows: &[Row]) -> f64 {
        let last = self.machines.len() - 1;
        let mut arrived: HashMap<(char, usize, usize), f64> = HashMap::new();
        let mut links: HashMap<(usize, usize), f64> = HashMap::new();
        let mut next = vec![(0usize, 0.0f64); rows.len()];
        while next.iter().zip(rows).any(|((at, _), row)| *at < row.len()) {
            let mut is_stuck = true;
            for (rank, row) in rows.iter().enumerate() {
                let (at, free) = next[rank];
                let Some(&(kind, stage, microbatch)) = row.get(at) else { continue };
                let needs = match kind {
                    'F' if stage == 0 => Some(0.0),
                    'I' if stage == last => Some(0.0),
                    'W' => Some(0.0),
                    _ => arrived.get(&(kind, stage, microbatch)).copied(),
                };
                let Some(since) = needs else { continue };
                is_stuck = false;
                let end = free.max(since) + self.takes(kind, stage);
                next[rank] = (at + 1, end);
                let target = match kind {
                    'F' if stage < last => Some((stage + 1, stage)),
                    'I' if stage > 0 => Some((stage - 1, stage - 1)),
                    _ => None,
                };
                if let Some((target, boundary)) = target {
                    let (from, to) = (self.machines[stage], self.machines[target]);
                    let bytes =
                        self.profile.layers[self.starts[boundary + 1] - 1].output_bytes as f64 * self.scale;
                    let mut arrival = end;
                    if from != to {
                        let link = self.link(from, to);
                        let free = links.entry((from, to)).or_default();
                        *free = free.max(end) + bytes / link.bytes_per_s;
                        arrival = *free + link.latency_s;
                    }
                    arrived.insert((kind, target, microbatch), arrival);
                }
            }
            assert!(!is_stuck, "the ranks wait for each other");
        }
        next.into_iter().map(|(_, end)| end).fold(0.0, f64::max) + self.optimizer()
    }
}

/// Returns the rows of a schedule. A backward is two computations, so that its gradient is sent after the first
/// one.
pub(crate) fn rows_of(schedule: &Schedule) -> Vec<Row> {
    let row = |row: &Vec<Option<Action>>| {
        let parts = row.iter().flatten().flat_map(|action| action.parts());
        let computations = parts.flat_map(|part| {
            let stage = part.stage();
            let at = |kind: char| (kind, stage.index(), part.microbatch().map_or(0, Microbatch::index));
            match part {
                Action::Forward { .. } => vec![at('F')],
                Action::InputBackward { .. } => vec![at('I')],
                Action::WeightBackward { .. } => vec![at('W')],
                _ => vec![at('I'), at('W')],
            }
        });
        computations.collect()
    };
    schedule.rows().iter().map(row).collect()
}

/// Checks the plan of a cluster: its time, its memory, its machines and its bound.
fn check_plan(instance: &Instance, report: &PlanReport) {
    let Instance { profile, ranks, .. } = instance;
    let best = &report.plans[0];
    assert!(report.lower_bound_s <= best.step_s, "{} above {}", report.lower_bound_s, best.step_s);
    assert!(best.machines.is_sorted_by(|one, other| one < other), "{:?}", best.machines);
    assert_eq!(best.machines.len(), best.schedule.ranks() as usize);
    for (rank, &peak) in best.machines.iter().zip(&best.peak_bytes) {
        let memory = profile.ranks.get(rank.index()).and_then(|rank| rank.memory_bytes);
        assert!(memory.is_none_or(|memory| peak <= memory), "rank {rank} holds {peak} of {memory:?}");
    }
    if !best.recomputes() {
        let found = simulated(profile, best);
        assert!((found - best.step_s).abs() <= 1e-9 * found, "{} instead of {found}", best.step_s);
    }
    let choice = PlanChoice {
        boundaries: best.boundaries.clone(),
        recompute: best.recompute.clone(),
        microbatch_rows: best.microbatch_rows,
        ..PlanChoice::default()
    };
    let prediction = predict(&best.used_ranks_of(profile), &best.schedule, &choice).expect("a plan");
    assert_eq!(prediction.step_s(), best.step_s);
    assert_eq!(report.machines.len(), *ranks as usize);
    for (machine, used) in report.machines.iter().enumerate() {
        assert_eq!(used.machine.index(), machine);
        let rank = best.machines.iter().position(|it| it.index() == machine);
        assert_eq!(used.rank.map(Rank::index), rank);
        assert_eq!(used.stages.is_empty(), rank.is_none());
        assert!(used.step_if_twice_as_fast_s <= best.step_s);
        assert!((used.busy_s + used.idle_s - best.step_s).abs() < 1e-9 * best.step_s);
    }
    let layers: usize =
        report.machines.iter().flat_map(|used| &used.stages).map(|(_, layers)| layers.len()).sum();
    assert_eq!(layers, profile.layers.len());
}

/// Returns the time of a plan.
fn simulated(profile: &Profile, plan: &Plan) -> f64 {
    let placement = plan.schedule.placement();
    let starts = [0].into_iter().chain(plan.boundaries.iter().copied()).chain([profile.layers.len()]);
    let machine = |stage| plan.machines[placement.rank_of(stage).index()].index();
    let stages = Stages {
        profile,
        starts: starts.collect(),
        machines: placement.all_stages().map(machine).collect(),
        scale: f64::from(plan.microbatch_rows) / f64::from(profile.rows),
    };
    stages.step(&rows_of(&plan.schedule))
}

/// Returns all orders of `count` numbers below `ranks`.
fn orders(ranks: usize, count: usize) -> Vec<Vec<usize>> {
    let mut orders = vec![Vec::new()];
    for _ in 0..count {
        let longer = |order: &Vec<usize>| {
            let order = order.clone();
            (0..ranks).filter(move |rank| !order.contains(rank)).collect::<Vec<_>>()
        };
        let extended = orders
            .iter()
            .flat_map(|order| longer(order).into_iter().map(|rank| [order.as_slice(), &[rank]].concat()));
        orders = extended.collect();
    }
    orders
}

/// Returns the time of 1F1B with one stage on each rank, over all subsets and orders of the ranks and all cuts.
fn by_trying(instance: &Instance) -> f64 {
    let Instance { profile, ranks, microbatches, .. } = instance;
    let layers = profile.layers.len();
    let mut best = f64::INFINITY;
    for count in 1..=(*ranks as usize).min(layers) {
        let spec =
            ScheduleSpec { ranks: count as u32, microbatches: *microbatches, ..ScheduleSpec::default() };
        let rows = rows_of(&generate("1f1b", &spec).expect("a schedule"));
        for cut in every_cut(layers, count) {
            let starts: Vec<usize> = [0].iter().chain(&cut).chain(&[layers]).copied().collect();
            for machines in orders(*ranks as usize, count) {
                let stages = Stages { profile, starts: starts.clone(), machines, scale: 1.0 };
                best = best.min(stages.step(&rows));
            }
        }
    }
    best
}

/// Returns a cluster of 2 to 4 ranks, with speeds of kinds and links of their own for some seeds.
fn small(seed: u64) -> Instance {
    let mut numbers = Numbers(seed);
    let count = numbers.between(3, 8);
    let kinds = ["attention", "experts"];
    let layers = (0..count).map(|at| block(kinds[(at % 2) as usize], 0.3 + 2.0 * numbers.share())).collect();
    let ranks = numbers.between(2, 4) as u32;
    let mut profile = Profile { link: LinkProfile::new(1e-5, 1e9), layers, ..Profile::default() };
    profile.ranks = (0..ranks)
        .map(|_| RankProfile { speed: 8f64.powf(numbers.share()), ..RankProfile::default() })
        .collect();
    if seed % 3 == 1 {
        profile.ranks[0].speeds = [("attention".to_owned(), 0.5 + numbers.share())].into();
    }
    if seed % 3 == 2 {
        profile.pairs = vec![
            PairProfile { from: 0, to: 1, latency_s: 4e-3, bytes_per_s: 1e8 },
            PairProfile { from: 1, to: 0, latency_s: 1e-3, bytes_per_s: 1e9 },
        ];
    }
    Instance { what: "small", profile, ranks, microbatches: numbers.between(1, 8) as u32 }
}

/// A small layer that a slow rank computes quickly says nothing about its speed at all others.
#[test]
fn the_bound_knows_kinds_of_layers() {
    let (small, large) = (block("embedding", 0.01), block("decoder", 1.0));
    let slow =
        RankProfile { speed: 0.25, speeds: [("embedding".to_owned(), 1.0)].into(), ..RankProfile::default() };
    let profile = Profile {
        layers: [vec![small], vec![large; 20]].concat(),
        link: LinkProfile::new(0.0, 1e9),
        ranks: vec![RankProfile::default(), slow],
        ..Profile::default()
    };
    let request = PlanRequest { ranks: 2, microbatches: 16, effort: 1, ..PlanRequest::default() };
    let report = plan(&profile, &request, &mut || true).expect("a plan");
    let gap = report.plans[0].step_s / report.lower_bound_s;
    assert!(gap < 1.03, "{gap}");
}

#[test]
fn small_clusters_are_planned_at_least_as_well_as_by_trying() {
    let mut left_out = 0;
    for seed in 0..30 {
        let instance = small(seed);
        let best = by_trying(&instance);
        for effort in [0, PlanRequest::EFFORT / 20] {
            let request = PlanRequest { larger_microbatches: false, ..request(&instance, effort) };
            let report = plan(&instance.profile, &request, &mut || true).expect("a plan");
            check_plan(&instance, &report);
            let found = report.plans[0].step_s;
            assert!(found <= best * (1.0 + 1e-9), "seed {seed}, effort {effort}: {found} instead of {best}");
            assert!(report.lower_bound_s <= best, "seed {seed}: the bound {}", report.lower_bound_s);
            left_out += usize::from(report.plans[0].machines.len() < instance.ranks as usize);
        }
    }
    assert!(left_out > 5, "{left_out} plans leave ranks out");
}

/// Plans clusters and checks their gaps: the median and the 90th percentile, in percent.
fn check_gaps(seeds: std::ops::Range<u64>, effort: u64, expected: [f64; 2]) {
    let mut gaps = Vec::new();
    for seed in seeds {
        let instance = instances::unlike(seed);
        let report = plan(&instance.profile, &request(&instance, effort), &mut || true).expect("a plan");
        check_plan(&instance, &report);
        gaps.push(100.0 * report.gap());
    }
    gaps.sort_by(f64::total_cmp);
    let found = [gaps[gaps.len() / 2], gaps[gaps.len() * 9 / 10]];
    assert!(found[0] <= expected[0] && found[1] <= expected[1], "{found:?} above {expected:?}");
}

#[test]
fn random_clusters_have_small_gaps() {
    check_gaps(0..12, PlanRequest::EFFORT / 10, [4.0, 15.0]);
}

#[test]
#[ignore = "takes several minutes"]
fn two_hundred_clusters_have_small_gaps() {
    check_gaps(0..200, PlanRequest::EFFORT, [3.1, 12.5]);
}

/// Returns the plan of ranks with these speeds for a model of equal layers.
pub(crate) fn planned(
    speeds: &[f64],
    layers: u32,
    change: impl FnOnce(&mut Profile, &mut PlanRequest),
) -> Result<PlanReport, PlanError> {
    let ranks = speeds.iter().map(|&speed| RankProfile { speed, ..RankProfile::default() }).collect();
    let layers = vec![pipewright_schedule::profile::LayerProfile { count: layers, ..block("layer", 1.0) }];
    let mut profile = Profile { ranks, layers, link: LinkProfile::new(1e-6, 1e12), ..Profile::default() };
    let mut request = PlanRequest {
        ranks: speeds.len() as u32,
        microbatches: 16,
        effort: PlanRequest::EFFORT / 20,
        ..PlanRequest::default()
    };
    change(&mut profile, &mut request);
    plan(&profile, &request, &mut || true)
}

#[test]
fn a_fast_rank_gets_more_layers() {
    let report = planned(&[3.0, 1.0], 16, |_, _| {}).expect("a plan");
    let layers =
        |rank: usize| report.machines[rank].stages.iter().map(|(_, layers)| layers.len()).sum::<usize>();
    assert_eq!((layers(0), layers(1)), (12, 4));
    // Most of the time is on the fast rank.
    let uses = &report.machines;
    assert!(uses[0].step_if_twice_as_fast_s < uses[1].step_if_twice_as_fast_s, "{uses:?}");
    assert!(uses[0].step_without_s > uses[1].step_without_s, "{uses:?}");
}

#[test]
fn a_rank_that_only_slows_the_others_is_left_out() {
    let report = planned(&[1.0, 0.01, 1.0], 8, |_, _| {}).expect("a plan");
    assert_eq!(report.plans[0].machines, [0, 2].map(Rank::new));
    assert_eq!(report.machines[1].rank, None);
    assert_eq!(report.machines[1].step_without_s, Some(report.plans[0].step_s));
    // The memory of the others is too small without it.
    let report = planned(&[1.0, 0.01, 1.0], 8, |profile, _| {
        for rank in &mut profile.ranks {
            rank.memory_bytes = Some(70_000_000);
        }
    });
    assert_eq!(report.expect("a plan").plans[0].machines.len(), 3);
}

#[test]
fn equal_ranks_are_planned_as_before() {
    let speeds = [2.0; 4];
    let plain = planned(&speeds, 16, |profile, _| {
        *profile = profile.at_speed_of(&profile.ranks[0].clone());
    });
    let equal = planned(&speeds, 16, |_, _| {});
    assert_eq!(equal, plain);
    assert!(equal.expect("a plan").machines.is_empty());
}

#[test]
fn requests_that_are_not_planned_for_unlike_ranks_are_refused() {
    let check = |change: fn(&mut Profile, &mut PlanRequest), expected: &str| {
        let error = planned(&[1.0, 2.0], 8, change).expect_err("an error").to_string();
        assert!(error.contains(expected), "{error}");
    };
    check(|_, request| request.tensor_parallel = Some(2), "2 tensor-parallel ranks were asked for");
    check(
        |_, request| request.ranks = 3,
        "`rank` of the profile is 2 sections, where one [[rank]] for each of 3 ranks",
    );
    check(
        |_, request| request.system = Some(pipewright_schedule::plan::System::Megatron),
        "a plan for another system has equal ones",
    );
    check(
        |profile, _| profile.ranks.iter_mut().for_each(|rank| rank.memory_bytes = Some(1_000)),
        "use more ranks or more memory",
    );
}
