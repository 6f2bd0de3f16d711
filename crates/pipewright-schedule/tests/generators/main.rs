//! Checks the generators against their papers and their documentation: bubbles, memory, limits, and
//! comparisons with other schedules.

mod advice;
mod timing;

use pipewright_schedule::costs::{Link, StageCosts};
use pipewright_schedule::generate::PerStage;
use pipewright_schedule::{ActionKind, Costs, Schedule, ScheduleSpec, Slices, generate};
use proptest::prelude::*;
use timing::{Timing, run};

fn spec(ranks: u32, stages_per_rank: Option<u32>, microbatches: u32) -> ScheduleSpec {
    ScheduleSpec { ranks, stages_per_rank, microbatches, ..ScheduleSpec::default() }
}

fn made(name: &str, spec: &ScheduleSpec) -> Schedule {
    generate(name, spec).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Runs a schedule in which `F`, `I` and `W` take one unit.
fn unit(name: &str, spec: &ScheduleSpec) -> Timing {
    run(&made(name, spec), |_| [1; 3], 0)
}

/// Checks the bubble in units, and the largest peak of any rank in activations of a stage.
fn check_units(name: &str, spec: &ScheduleSpec, bubble: u64, peak: u32) {
    let timing = unit(name, spec);
    let found = (timing.makespan - timing.work, timing.peaks.iter().copied().max().unwrap_or(0));
    assert_eq!(found, (bubble, peak), "{name} {spec:?}");
}

/// Checks the bubble fraction from barrier to barrier and the peak memory relative to 1F1B at 8 ranks and 32
/// microbatches, to the published digits.
fn check_published(name: &str, stages_per_rank: u32, bubble: f64, peak: f64) {
    let timing = unit(name, &spec(8, Some(stages_per_rank), 32));
    let found_peak =
        f64::from(timing.peaks.iter().copied().max().unwrap_or(0)) / f64::from(8 * stages_per_rank);
    assert!((timing.bubble() - bubble).abs() < 0.0006, "{name}: a bubble of {}", timing.bubble());
    assert!((found_peak - peak).abs() < 0.006, "{name}: a peak of {found_peak}");
}

#[test]
fn published_figures_come_out() {
    check_published("1f1b", 1, 0.179, 1.0);
    check_published("interleaved1f1b", 4, 0.052, 1.22);
    check_published("zb-h1", 1, 0.068, 1.0);
    check_published("zbvzerobubble", 2, 0.035, 1.0);
    check_published("dualpipev", 2, 0.035, 1.06);
    check_published("v-half", 2, 0.081, 0.62);
    check_published("interleaved-zb-h1", 4, 0.018, 1.0);
}

#[test]
fn documented_formulas_hold() {
    for p in 1..10u32 {
        for m in [2 * p, 3 * p, 5 * p] {
            let bubble = |ranks: u32| u64::from(ranks - 1);
            check_units("1f1b", &spec(p, None, m), 3 * bubble(p), p);
            check_units("gpipe", &spec(p, None, m), 3 * bubble(p), m);
            check_units("zb-h1", &spec(p, None, m), bubble(p), p);
            check_units("zb-h2", &spec(p, None, m), bubble(p), 2 * p - 1);
            check_units("zbvzerobubble", &spec(p, None, m), bubble(p), 2 * p);
            for v in 1..5 {
                let spec = spec(p, Some(v), m);
                check_units("loopedbfs", &spec, 3 * bubble(p), v * m);
                check_units("interleaved1f1b", &spec, 3 * bubble(p), ((v - 1) * p + 2 * p - 1).min(v * m));
                check_units("group-interleaved", &spec, 3 * bubble(p), v * p);
                check_units("interleavedzerobubble", &spec, bubble(p), v * p);
                check_units("interleaved-zb-h1", &spec, bubble(p), v * p);
                let wide = ScheduleSpec { wide_warmup: true, ..spec };
                check_units("interleaved-zb-h1", &wide, bubble(p), v * p + p - 1);
            }
        }
    }
}

#[test]
fn slices_divide_the_bubble_and_the_memory_of_the_warm_up() {
    for p in 1..10u32 {
        for m in [1, 2, p, 3 * p + 1] {
            for k in 1..7u32 {
                // A slice takes one unit for each action, and a microbatch `k` units.
                let spec = ScheduleSpec { slices: Slices::new(k), ..spec(p, None, m) };
                check_units("seq1f1b", &spec, 3 * u64::from(p - 1), (p + k - 1).min(k * m));
            }
        }
    }
}

#[test]
fn controllable_memory_is_kept() {
    for p in 3..20u32 {
        let half = if p.is_multiple_of(2) { 3 * p - 7 } else { 3 * p - 4 };
        let least = [4 * p - 7, 4 * p - 5, 4 * p - 9][p as usize % 3];
        let half = if p == 3 { 5 } else { half };
        for m in [2 * p, 3 * p + 1] {
            check_units("v-half", &spec(p, None, m), half.into(), 2 * (p / 2 + 1));
            check_units("v-min", &spec(p, None, m), least.into(), 2 * ((p + 1) / 3 + 1));
        }
    }
}

#[test]
fn dual_pipe_v_holds_one_more_than_twice_the_ranks() {
    for p in 2..10 {
        let timing = unit("dualpipev", &spec(p, None, 4 * p));
        assert!(timing.peaks.iter().all(|&peak| peak <= 2 * p + 1), "{p}: {:?}", timing.peaks);
        assert_eq!(timing.makespan - timing.work, u64::from(p - 1), "{p} ranks");
    }
}

#[test]
fn smaller_groups_hold_less() {
    let peaks: Vec<u32> = (4..=8)
        .map(|group| {
            let spec = ScheduleSpec { group_size: Some(group), ..spec(8, Some(4), 4 * group) };
            unit("group-interleaved", &spec).peaks[0]
        })
        .collect();
    assert_eq!(peaks, [20, 23, 26, 29, 32]);
}

#[test]
fn waves_help_where_microbatches_are_few() {
    let bubbles = [
        unit("1f1b", &spec(8, None, 8)),
        unit("hanayo", &spec(8, Some(2), 8)),
        unit("hanayo", &spec(8, Some(4), 8)),
    ]
    .map(|timing| (timing.bubble() * 1000.0).round());
    assert_eq!(bubbles, [467.0, 368.0, 238.0]);
    for (waves, bubble, peak) in [(1, 99.0, 23), (2, 141.0, 40)] {
        let timing = unit("hanayo", &spec(8, Some(2 * waves), 32));
        let found = ((timing.bubble() * 1000.0).round(), timing.peaks.iter().max().copied());
        assert_eq!(found, (bubble, Some(peak)));
    }
}

/// Returns the costs of a step in which the head's time on a rank is `head` tenths of the layers' time.
fn with_head(ranks: u32, head: u64) -> Vec<[u64; 3]> {
    let layers = vec![[10; 3]; ranks as usize];
    layers.into_iter().chain(vec![[head; 3]; ranks as usize]).collect()
}

/// Runs the vocabulary-parallel schedule that is made for these costs.
fn vocabulary(ranks: u32, microbatches: u32, head: u64, limit: Option<u32>) -> (Schedule, Timing) {
    let costs = with_head(ranks, head);
    let seconds = costs.iter().map(|cost| cost.map(|ticks| ticks as f64));
    let stages = seconds.map(|[forward, input, weight]| StageCosts::new(forward, input, weight)).collect();
    let spec = ScheduleSpec {
        costs: Some(Costs { stages, ..Costs::default() }),
        memory_limit: limit.map(PerStage::Same),
        ..spec(ranks, None, microbatches)
    };
    let schedule = made("vocab1f1b", &spec);
    let timing = run(&schedule, |stage| costs[stage.index()], 0);
    (schedule, timing)
}

/// Returns the largest number of microbatches between the forward and the backward of each stage.
fn in_flight(schedule: &Schedule) -> Vec<u32> {
    let stages = schedule.placement().stages() as usize;
    let (mut held, mut most) = (vec![0u32; stages], vec![0u32; stages]);
    for action in schedule.rows().iter().flatten().flatten() {
        let stage = action.stage().index();
        match action.kind() {
            ActionKind::Forward => held[stage] += 1,
            _ => held[stage] -= 1,
        }
        most[stage] = most[stage].max(held[stage]);
    }
    most
}

#[test]
fn a_part_of_the_head_on_each_rank_takes_two_more_than_the_ranks() {
    for ranks in [1, 2, 3, 4, 5, 8, 13] {
        for microbatches in [1, 2, ranks, ranks + 3, 4 * ranks, 9 * ranks + 1] {
            for head in [1, 3, 10, 25, 40] {
                let (schedule, _) = vocabulary(ranks, microbatches, head, None);
                let most = in_flight(&schedule);
                let expected = (ranks + 2).min(microbatches);
                assert!(most.iter().all(|&held| held <= expected), "{ranks} {microbatches} {head}: {most:?}");
                if head == 10 && ranks > 1 {
                    assert_eq!(most[0], expected, "{ranks} {microbatches}");
                }
            }
        }
    }
}

#[test]
fn the_work_of_a_head_in_parts_is_shared_evenly() {
    for ranks in [2, 4, 8] {
        for head in [1, 5, 10, 20, 40] {
            let (_, timing) = vocabulary(ranks, 64 * ranks, head, Some(2 * ranks));
            assert_eq!(timing.work, u64::from(64 * ranks) * 3 * (10 + head));
            assert!(timing.bubble() < 0.05, "{ranks} ranks, {head}: a bubble of {}", timing.bubble());
        }
    }
}

/// Runs the greedy schedule at these costs and limits, and checks its peaks.
fn check_greedy(ranks: u32, microbatches: u32, costs: &[[u64; 3]], hop: u64, limits: &[u32]) -> Timing {
    let stage_costs = |&[forward, inputs, weights]: &[u64; 3]| {
        StageCosts::new(forward as f64, inputs as f64, weights as f64)
    };
    let link = Link { latency: hop as f64, bandwidth: f64::INFINITY };
    let greedy = ScheduleSpec {
        costs: Some(Costs { stages: costs.iter().map(stage_costs).collect(), link, ..Costs::default() }),
        memory_limit: Some(PerStage::Each(limits.to_vec())),
        ..spec(ranks, None, microbatches)
    };
    let timing = run(&made("zb-greedy", &greedy), |stage| costs[stage.index()], hop);
    for (peak, limit) in timing.peaks.iter().zip(limits) {
        assert!(peak <= limit, "{:?} above {limits:?}", timing.peaks);
    }
    timing
}

#[test]
fn greedy_is_never_worse_than_zb_h1_at_its_memory() {
    let (ranks, microbatches) = (4, 12);
    let limits = vec![ranks; ranks as usize];
    let mut better = 0;
    for forward in [1, 2, 3, 5] {
        for inputs in [1, 2, 3, 5] {
            for weights in [0, 1, 2, 4, 7] {
                for hop in [0, 1, 4] {
                    let costs = vec![[forward, inputs, weights]; ranks as usize];
                    let greedy = check_greedy(ranks, microbatches, &costs, hop, &limits);
                    let zb_h1 = made("zb-h1", &spec(ranks, None, microbatches));
                    let zb_h1 = run(&zb_h1, |_| [forward, inputs, weights], hop);
                    assert!(greedy.makespan <= zb_h1.makespan, "{costs:?} {hop}");
                    better += u32::from(greedy.makespan < zb_h1.makespan);
                }
            }
        }
    }
    assert!(better > 60, "the rules find better orders than ZB-H1 only {better} times of 240");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn greedy_keeps_every_limit(
        stages in prop::collection::vec((prop::array::uniform3(0..20u64), 1..8u32), 1..7),
        microbatches in 1..20u32,
        hop in 0..10u64,
    ) {
        let (costs, limits): (Vec<_>, Vec<_>) = stages.into_iter().unzip();
        let ranks = costs.len() as u32;
        let greedy = check_greedy(ranks, microbatches, &costs, hop, &limits);
        // ZB-H1 needs as much memory as there are ranks.
        if limits.iter().all(|&limit| limit >= ranks.min(microbatches)) {
            let zb_h1 = made("zb-h1", &spec(ranks, None, microbatches));
            prop_assert!(greedy.makespan <= run(&zb_h1, |stage| costs[stage.index()], hop).makespan);
        }
    }
}
