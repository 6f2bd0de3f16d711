//! Measures the planner: proved gaps and times over random models, and gains over interleaved 1F1B.
//!
//! ```text
//! cargo run --release -p pipewright-schedule --example plans            # 200 random models
//! cargo run --release -p pipewright-schedule --example plans -- 20 each # 20 of them, each on a line
//! cargo run --release -p pipewright-schedule --example plans -- 20 cuts # and compares with the best cuts of all
//! schedules cargo run --release -p pipewright-schedule --example plans -- 200 parts # and cuts the heads of
//! heterogeneous models
//! cargo run --release -p pipewright-schedule --example plans -- 200 unlike # 200 clusters of unlike ranks; with
//! `from 100`, from this seed on
//! ```

#[path = "../tests/plan/instances.rs"]
mod instances;

use std::error::Error;
use std::io::Write;
use std::ops::Range;
use std::sync::OnceLock;
use std::time::Instant;

use instances::Instance;
use pipewright_schedule::action::Action;
use pipewright_schedule::generate::catalogue;
use pipewright_schedule::partition::{Method, partition};
use pipewright_schedule::plan::{
    Plan, PlanChoice, PlanReport, PlanRequest, SEARCHED, best_cut, choice_costs, plan, predict,
};
use pipewright_schedule::timeline::Event;
use pipewright_schedule::{Rank, ScheduleSpec, generate};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let count: u64 = arguments.first().map_or(Ok(200), |text| text.parse())?;
    let has = |word: &str| arguments.iter().skip(1).any(|text| text == word);
    let [each, cuts, parts, unlike] = ["each", "cuts", "parts", "unlike"].map(has);
    let mut out = std::io::stdout().lock();
    if unlike {
        let first = arguments.iter().position(|text| text == "from").and_then(|at| arguments.get(at + 1));
        let first: u64 = first.map_or(Ok(0), |text| text.parse())?;
        return unlike_clusters(first..first + count, each, &mut out);
    }

    let (mut gaps, mut times) = (Vec::new(), Vec::new());
    let mut worse = 0;
    for seed in 0..count {
        let instance = instances::random(seed);
        let (report, seconds) = planned(&instance, None, &[])?;
        let named = report.outcomes.iter().filter(|it| it.name != SEARCHED).count();
        let best_named = if cuts { best_cuts(&instance) } else { best_even_or_optimal(&instance)? };
        worse += usize::from(report.plans[0].step_s > best_named * (1.0 + 1e-9));
        gaps.push(report.gap());
        times.push(seconds);
        if each {
            let best = &report.plans[0];
            writeln!(
                out,
                "{seed:3} {:7} {:3} layers {:2} ranks {:2} microbatches: gap {:5.2}%  {} x{}  {seconds:.2} s  {} plans, \
                 {named} schedules, {:.3} of the best named",
                instance.what,
                instance.profile.layers.len(),
                instance.ranks,
                instance.microbatches,
                100.0 * report.gap(),
                best.name,
                best.schedule.placement().stages() / best.schedule.ranks(),
                report.simulated,
                best.step_s / best_named,
            )?;
        }
    }
    let (median, ninth, most) = spread(&mut gaps);
    writeln!(
        out,
        "{count} random models: gap {:.2}% median, {:.2}% 90th percentile, {:.2}% at most",
        100.0 * median,
        100.0 * ninth,
        100.0 * most
    )?;
    let (median, ninth, most) = spread(&mut times);
    writeln!(out, "time {median:.2} s median, {ninth:.2} s 90th percentile, {most:.2} s at most")?;
    let cut = if cuts { "its best cut" } else { "an even or optimal cut" };
    writeln!(out, "{worse} plans are worse than a named schedule with {cut}")?;
    gains(count.div_ceil(4), each, parts, &mut out)?;

    let deep = instances::deep();
    let (report, seconds) =
        planned(&deep, deep.profile.device.as_ref().and_then(|device| device.memory_bytes), &[])?;
    let best = &report.plans[0];
    writeln!(
        out,
        "126 layers, 64 ranks, limited memory: gap {:.2}%, {}, {seconds:.2} s",
        100.0 * report.gap(),
        best.name
    )?;
    cluster(&mut out)
}

/// Prints the gaps and times of plans for clusters of unlike ranks.
fn unlike_clusters(seeds: Range<u64>, each: bool, out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let (mut gaps, mut times) = (Vec::new(), Vec::new());
    for seed in seeds {
        let instance = instances::unlike(seed);
        let (report, seconds) = planned(&instance, None, &[])?;
        gaps.push(report.gap());
        times.push(seconds);
        if each {
            let best = &report.plans[0];
            let placement = best.schedule.placement();
            let speeds = best.machines.iter().map(|rank| instance.profile.ranks[rank.index()].speed);
            let stages: Vec<String> = speeds
                .zip(placement.all_ranks())
                .map(|(speed, rank)| format!("{:.2}:{}", 8.0 * speed, placement.stages_of(rank).len()))
                .collect();
            writeln!(
                out,
                "{seed:3} {:7} {:3} layers {:2} ranks {:2} microbatches: gap {:5.2}%  {} {} of {} rows  {} used: {}  \
                 {}  {seconds:.2} s",
                instance.what,
                instance.profile.layers.len(),
                instance.ranks,
                instance.microbatches,
                100.0 * report.gap(),
                best.name,
                best.schedule.microbatches(),
                best.microbatch_rows,
                best.machines.len(),
                stages.join(" "),
                lost(&instance, best)?
            )?;
        }
    }
    let (median, ninth, most) = spread(&mut gaps);
    writeln!(
        out,
        "{} clusters of unlike ranks: gap {:.2}% median, {:.2}% 90th percentile, {:.2}% at most",
        gaps.len(),
        100.0 * median,
        100.0 * ninth,
        100.0 * most
    )?;
    let (median, ninth, most) = spread(&mut times);
    writeln!(out, "time {median:.2} s median, {ninth:.2} s 90th percentile, {most:.2} s at most")?;
    Ok(())
}

/// Returns a text with the shares of the time of all ranks, by their speeds, in which a plan for unlike ranks computes
/// nothing: on ranks that it leaves out, before the first computation of a rank, from there to its first backward, from
/// there to its last computation, and after that.
fn lost(instance: &Instance, plan: &Plan) -> Result<String, Box<dyn Error>> {
    let profile = plan.used_ranks_of(&instance.profile);
    let choice = PlanChoice {
        head_parts: Some(plan.head_parts),
        boundaries: plan.boundaries.clone(),
        recompute: plan.recompute.clone(),
        mesh: plan.mesh,
        microbatch_rows: plan.microbatch_rows,
        ..PlanChoice::default()
    };
    let prediction = predict(&profile, &plan.schedule, &choice)?;
    let timeline = prediction.run.timeline();
    let end = timeline.makespan();
    let speed = |machine: usize| instance.profile.ranks[machine].speed;
    let all: f64 = (0..instance.profile.ranks.len()).map(speed).sum();
    let mut shares = [1.0, 0.0, 0.0, 0.0, 0.0];
    for (rank, machine) in (0..).map(Rank::new).zip(&plan.machines) {
        let is_work = |event: &&Event| event.action.is_compute();
        let work: Vec<&Event> = timeline.events_of(rank).iter().filter(is_work).collect();
        let is_forward = |event: &Event| matches!(event.action, Action::Forward { .. });
        let first_backward = work.iter().position(|event| !is_forward(event)).unwrap_or(work.len());
        let starts = |at: usize| work.get(at).map_or(end, |event| event.start);
        let last = work.last().map_or(0.0, |event| event.end);
        let busy = |events: &[&Event]| events.iter().map(|event| event.end - event.start).sum::<f64>();
        let (forwards, later) = work.split_at(first_backward);
        let idle = [
            starts(0),
            starts(first_backward) - starts(0) - busy(forwards),
            last - starts(first_backward) - busy(later),
            end - last,
        ];
        let weight = speed(machine.index()) / all;
        shares[0] -= weight;
        shares[1..].iter_mut().zip(idle).for_each(|(share, idle)| *share += weight * idle / end);
    }
    let [out, fill, forwards, later, after] = shares.map(|share| 100.0 * share);
    Ok(format!(
        "lost {out:.1}% left out, {fill:.1}% before work, {forwards:.1}% before backwards, {later:.1}% later, {after:.1}% at the \
         end"
    ))
}

/// Prints the plan of a cluster with its mesh.
fn cluster(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let Instance { profile, ranks, microbatches, .. } = instances::cluster();
    let memory = profile.device.as_ref().and_then(|device| device.memory_bytes);
    let request = PlanRequest { ranks, microbatches, memory, ..PlanRequest::default() };
    let start = seconds();
    let report = plan(&profile, &request, &mut || true)?;
    let (taken, best) = (seconds() - start, &report.plans[0]);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or(" unknown").trim();
    writeln!(
        out,
        "126 layers, 16384 ranks in nodes of 8: tensor {} x data {} x pipeline {}, {} x{}, {} rows, {:.3} s a step, \
         sums {:.3} s tensor and {:.3} s data, gap {:.2}%, {taken:.2} s, memory {peak}",
        best.mesh.tensor,
        best.mesh.data,
        best.schedule.ranks(),
        best.name,
        best.schedule.placement().stages() / best.schedule.ranks(),
        best.microbatch_rows,
        best.step_s,
        best.collectives.tensor_s,
        best.collectives.replicas_s,
        100.0 * report.gap()
    )?;
    Ok(())
}

fn planned(
    instance: &Instance,
    memory: Option<u64>,
    head_parts: &[u32],
) -> Result<(PlanReport, f64), Box<dyn Error>> {
    let request = PlanRequest {
        head_parts: head_parts.to_vec(),
        ranks: instance.ranks,
        microbatches: instance.microbatches,
        data_parallel: Some(1),
        memory,
        ..PlanRequest::default()
    };
    let start = seconds();
    let report = plan(&instance.profile, &request, &mut || true)?;
    Ok((report, seconds() - start))
}

/// Returns the time that this process has computed where the system tells it, because others may use the
/// machine; otherwise the time of the clock.
fn seconds() -> f64 {
    static START: OnceLock<Instant> = OnceLock::new();
    let text = std::fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
    let computed = text.split_whitespace().next().and_then(|nanoseconds| nanoseconds.parse::<f64>().ok());
    computed.map_or_else(|| START.get_or_init(Instant::now).elapsed().as_secs_f64(), |it| it * 1e-9)
}

/// Returns the time of a named schedule with a cut.
fn time(instance: &Instance, name: &str, chunks: u32, method: &Method) -> Option<f64> {
    let spec = ScheduleSpec {
        ranks: instance.ranks,
        stages_per_rank: Some(chunks),
        microbatches: instance.microbatches,
        ..ScheduleSpec::default()
    };
    let schedule = generate(name, &spec).ok()?;
    let stages = schedule.placement().stages();
    let weights: Vec<u64> = instance
        .profile
        .each_layer()
        .map(|layer| ((layer.forward_s + layer.input_backward_s + layer.weight_backward_s) * 1e9) as u64)
        .collect();
    let cut = partition(&weights, stages, method).ok()?;
    let choice = PlanChoice {
        boundaries: cut.ranges().skip(1).map(|range| range.start).collect(),
        recompute: vec![None; stages as usize],
        ..PlanChoice::default()
    };
    predict(&instance.profile, &schedule, &choice).ok().map(|prediction| prediction.step_s())
}

/// Returns the time of the best named schedule with an even or an optimal cut.
fn best_even_or_optimal(instance: &Instance) -> Result<f64, Box<dyn Error>> {
    let mut best = f64::INFINITY;
    for generator in catalogue().iter().filter(|generator| generator.trains) {
        for chunks in 1..=4 {
            for method in [Method::Even, Method::Optimal] {
                best = best.min(time(instance, generator.name, chunks, &method).unwrap_or(f64::INFINITY));
            }
        }
    }
    Ok(best)
}

/// Returns the time of the best named schedule with the best cut that is found for it.
fn best_cuts(instance: &Instance) -> f64 {
    let mut best = f64::INFINITY;
    let (ranks, microbatches) = (instance.ranks, instance.microbatches);
    for generator in catalogue().iter().filter(|generator| generator.trains) {
        for chunks in 1..=4 {
            let spec = ScheduleSpec {
                ranks,
                stages_per_rank: Some(chunks),
                microbatches,
                ..ScheduleSpec::default()
            };
            let Ok(schedule) = generate(generator.name, &spec) else { continue };
            let recompute = vec![None; schedule.placement().stages() as usize];
            let choice = PlanChoice { recompute, ..PlanChoice::default() };
            let Ok(boundaries) = best_cut(&instance.profile, &schedule, &choice) else { continue };
            let choice = PlanChoice { boundaries, ..choice };
            let Ok(costs) = choice_costs(&instance.profile, schedule.placement(), &choice) else { continue };
            let Ok(schedule) = generate(generator.name, &ScheduleSpec { costs: Some(costs), ..spec }) else {
                continue;
            };
            let found = predict(&instance.profile, &schedule, &choice);
            best = found.map_or(best, |prediction| best.min(prediction.step_s()));
        }
    }
    best
}

/// Prints the mean gain over interleaved 1F1B with an even split and two stages per rank, and the mean of the
/// largest gains that the bounds allow, for each kind of model. With `parts`, heads may be cut into as many
/// parts as there are ranks, or twice as many.
fn gains(count: u64, each: bool, parts: bool, out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let mut times = Vec::new();
    let mut gains: Vec<(&str, f64, f64)> = Vec::new();
    for seed in 0..count {
        let instance = instances::heterogeneous(seed);
        let usual = time(&instance, "interleaved1f1b", 2, &Method::Even);
        let Some(usual) = usual else { continue };
        let may_cut = parts && instance.what == "head";
        let head_parts: &[u32] = if may_cut { &[1, instance.ranks, 2 * instance.ranks] } else { &[] };
        let (report, seconds) = planned(&instance, None, head_parts)?;
        times.push(seconds);
        let (gain, most) = (usual / report.plans[0].step_s, usual / report.lower_bound_s);
        if each {
            writeln!(
                out,
                "{:8} {} layers, {} ranks: {gain:.2} times as fast, at most {most:.2}, head in {} parts, {}, {seconds:.2} s",
                instance.what,
                instance.profile.layers.len(),
                instance.ranks,
                report.plans[0].head_parts,
                report.plans[0].name,
            )?;
        }
        gains.push((instance.what, gain, most));
    }
    let mut kinds: Vec<&str> = gains.iter().map(|&(what, ..)| what).collect();
    kinds.sort_unstable();
    kinds.dedup();
    for kind in kinds {
        let of_kind: Vec<_> = gains.iter().filter(|(what, ..)| *what == kind).collect();
        let (gain, most) = (mean(of_kind.iter().map(|it| it.1)), mean(of_kind.iter().map(|it| it.2)));
        writeln!(out, "{} of kind {kind}: {gain:.2} times as fast, at most {most:.2}", of_kind.len())?;
    }
    let (gain, most) = (mean(gains.iter().map(|it| it.1)), mean(gains.iter().map(|it| it.2)));
    writeln!(
        out,
        "{} heterogeneous models: {gain:.3} times as fast as interleaved 1F1B with an even split, at most {most:.3}; {:.2} s at \
         most",
        gains.len(),
        spread(&mut times).2
    )?;
    Ok(())
}

/// Returns the mean; 0 without values.
fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len().max(1);
    values.sum::<f64>() / count as f64
}

/// Returns the median, the 90th percentile, and the largest value.
fn spread(values: &mut [f64]) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    let at = |share: f64| values.get(((values.len() as f64 * share) as usize).min(values.len() - 1)).copied();
    (at(0.5).unwrap_or(0.0), at(0.9).unwrap_or(0.0), at(1.0).unwrap_or(0.0))
}
