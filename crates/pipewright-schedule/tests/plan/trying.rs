//! The best named schedule by trying every one: all settings, all cuts and all choices of recomputation. It
//! shares no search with the planner, so it judges the planner's plans.

use pipewright_schedule::generate::{PerStage, Setting, catalogue};
use pipewright_schedule::mesh::Mesh;
use pipewright_schedule::plan::{PlanChoice, choice_costs, predict};
use pipewright_schedule::recompute::StageRecompute;
use pipewright_schedule::{ScheduleSpec, generate};

use crate::instances::Instance;

/// Returns the choice of the first `layers` of the `count` layers of a stage.
pub(crate) fn first_layers(layers: usize, count: usize) -> Option<StageRecompute> {
    if layers == count { Some(StageRecompute::WHOLE) } else { StageRecompute::first(layers as u32) }
}

/// Returns every choice of what the stages of a cut recompute: all or nothing, or with `in_part` any number of
/// their layers.
fn every_recompute(boundaries: &[usize], layers: usize, in_part: bool) -> Vec<Vec<Option<StageRecompute>>> {
    let starts: Vec<usize> = [0].iter().chain(boundaries).chain([&layers]).copied().collect();
    let mut choices = vec![Vec::new()];
    for range in starts.windows(2) {
        let count = if in_part { range[1] - range[0] } else { 1 };
        let longer = |choice: &Vec<_>| {
            let choice = choice.clone();
            (0..=count).map(move |layers| [choice.as_slice(), &[first_layers(layers, count)]].concat())
        };
        choices = choices.iter().flat_map(longer).collect();
    }
    choices
}

/// Returns all boundaries of `stages` stages, by counting in binary.
pub(crate) fn every_cut(layers: usize, stages: usize) -> Vec<Vec<usize>> {
    let cuts = (0u32..1 << (layers - 1)).filter(|bits| bits.count_ones() as usize == stages - 1);
    cuts.map(|bits| (1..layers).filter(|layer| bits >> (layer - 1) & 1 == 1).collect()).collect()
}

/// Returns every named schedule of a size with every setting that the planner tries, as a function of the
/// costs.
pub(crate) fn every_spec(instance: &Instance) -> Vec<(&'static str, bool, ScheduleSpec)> {
    let mut specs = Vec::new();
    let (ranks, microbatches) = (instance.ranks, instance.microbatches);
    for generator in catalogue().iter().filter(|generator| generator.trains) {
        let has = |setting| generator.settings.contains(&setting);
        for chunks in 1..=4 {
            let plain = ScheduleSpec {
                ranks,
                microbatches,
                stages_per_rank: Some(chunks),
                ..ScheduleSpec::default()
            };
            let mut all = vec![plain.clone()];
            if has(Setting::WideWarmup) {
                all.push(ScheduleSpec { wide_warmup: true, ..plain.clone() });
            }
            if has(Setting::GroupSize) {
                all.extend((1..ranks).map(|group| ScheduleSpec { group_size: Some(group), ..plain.clone() }));
            }
            if has(Setting::MemoryLimit) {
                let limits = [2 * ranks, microbatches].into_iter().filter(|&limit| limit > ranks);
                let limited =
                    |limit| ScheduleSpec { memory_limit: Some(PerStage::Same(limit)), ..plain.clone() };
                all.extend(limits.map(limited));
            }
            specs.extend(all.into_iter().map(|spec| (generator.name, has(Setting::Costs), spec)));
        }
    }
    specs
}

/// Returns the time of the best named schedule over all cuts and all choices of recomputation. `size` has the
/// number of replicas, each of which has the ranks and microbatches of `instance`, the rows of a microbatch
/// and the parts of the head. With `in_part`, stages may recompute parts of their layers.
pub(crate) fn by_trying(instance: &Instance, memory: Option<u64>, size: &PlanChoice, in_part: bool) -> f64 {
    let layers = instance.profile.layers.len() - 1 + size.head_parts.unwrap_or(1) as usize;
    let mut best = f64::INFINITY;
    for (name, is_made_to_measure, spec) in every_spec(instance) {
        let stages = (spec.ranks * spec.stages_per_rank.unwrap_or(1)) as usize;
        if stages > layers {
            continue;
        }
        let plain = generate(name, &spec);
        for boundaries in every_cut(layers, stages) {
            let mut choices = every_recompute(&boundaries, layers, in_part);
            choices.truncate(if memory.is_some() { choices.len() } else { 1 });
            let schedule = if is_made_to_measure {
                let recompute = vec![None; stages];
                let choice = PlanChoice { boundaries: boundaries.clone(), recompute, ..size.clone() };
                let Ok(plain) = &plain else { continue };
                let costs = choice_costs(&instance.profile, plain.placement(), &choice).expect("a cut");
                generate(name, &ScheduleSpec { costs: Some(costs), ..spec.clone() })
            } else {
                plain.clone()
            };
            let Ok(schedule) = schedule else { continue };
            for recompute in choices {
                let choice = PlanChoice { boundaries: boundaries.clone(), recompute, ..size.clone() };
                let prediction = predict(&instance.profile, &schedule, &choice).expect("a sound schedule");
                if memory.is_none_or(|memory| prediction.peak_bytes.iter().all(|&peak| peak <= memory)) {
                    best = best.min(prediction.step_s());
                }
            }
        }
    }
    best
}

/// Returns the time of the best named schedule over all numbers of replicas and sizes of microbatches too,
/// and its number of replicas.
pub(crate) fn by_trying_all_sizes(instance: &Instance, memory: Option<u64>, in_part: bool) -> (f64, u32) {
    let Instance { profile, ranks, microbatches, .. } = instance;
    let mut best = (f64::INFINITY, 1);
    for data_parallel in (1..=*ranks).filter(|replicas| ranks.is_multiple_of(*replicas)) {
        for rows in (1..=*microbatches).filter(|rows| microbatches.is_multiple_of(rows * data_parallel)) {
            let ranks = ranks / data_parallel;
            let replica = Instance {
                what: instance.what,
                profile: profile.clone(),
                ranks,
                microbatches: microbatches / (rows * data_parallel),
            };
            let mesh = Mesh { data: data_parallel, ..Mesh::default() };
            let size = PlanChoice { mesh, microbatch_rows: rows, ..PlanChoice::default() };
            let time = by_trying(&replica, memory, &size, in_part);
            if time < best.0 {
                best = (time, data_parallel);
            }
        }
    }
    best
}
