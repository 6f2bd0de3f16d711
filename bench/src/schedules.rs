//! Compares every schedule with the speed of one rank and with the timed simulation at its measured costs,
//! and measures the cost of splitting backwards.
//!
//! Steps of the compared runs alternate. On a shared machine the fastest step of each is the most reliable,
//! because noise only makes steps slower. A single rank has the caches, the memory bandwidth and the clock
//! rate of the machine to itself, but the ranks of a pipeline share them. So the bench also times independent
//! one-rank pipelines at the same time, one for each rank. Their loss against a single one is due to the
//! machine, and the loss of a schedule against them is due to the pipeline.
//!
//! The bound of a schedule is the makespan that the simulation predicts from the median times of each stage's
//! `F`, `B`, `I` and `W` in the measured steps, with communication that takes no time.

use std::collections::BTreeMap;

use pipewright_schedule::costs::StageCosts;
use pipewright_schedule::{Action, Costs, Event, Rank, StageIndex, simulate};

use crate::harness::{Outcome, Spread};
use crate::model::{Bench, Size, side_by_side, without_update};

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    size: Size,
    /// Steps that count, of each schedule.
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// The schedules.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1f1b,zb-h1,zbvzerobubble,dualpipev,interleaved1f1b,v-half"
    )]
    schedules: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Outcome {
    let &Options { size: Size { ranks, microbatches }, steps, .. } = options;
    println!(
        "{ranks} ranks, {microbatches} microbatches, one thread per rank; speeds against {ranks} x one rank"
    );
    println!("a step of I and W over one of B, one rank: {}", split_cost(microbatches, steps)?);
    for schedule in &options.schedules {
        println!("{schedule}");
        against(schedule, ranks, microbatches, steps)?;
    }
    Ok(())
}

/// The times of steps of a schedule and of one-rank pipelines, in seconds. Each turn has the same index in
/// all lists.
#[derive(Default)]
struct Turns {
    /// A step of the schedule.
    walls: Vec<f64>,
    /// The same without the optimizer.
    programs: Vec<f64>,
    /// A step of a single rank without others.
    alone: Vec<f64>,
    /// The computation time of that rank, without the optimizer.
    alone_busy: Vec<f64>,
    /// A step of one rank while other one-rank pipelines run.
    beside: Vec<f64>,
    /// The events of the schedule's ranks in all turns.
    events: Vec<Event>,
}

/// Compares a schedule with a single rank, with simultaneous one-rank pipelines, and with its own bound.
fn against(schedule: &str, ranks: u32, microbatches: u32, steps: usize) -> Outcome {
    let mut bench = Bench::new(schedule, ranks, microbatches)?;
    let turns = take_turns(&mut bench, ranks, microbatches, steps)?;
    let costs = costs(&turns.events, bench.program().placement().stages());
    let predicted = simulate::timed(bench.program().as_program(), &costs)?;
    let bound = predicted.timeline().makespan();
    let busy: f64 = (0..ranks).map(|rank| predicted.timeline().busy(Rank::new(rank))).sum();

    let Turns { walls, programs, alone, alone_busy, beside, .. } = &turns;
    let count = f64::from(ranks);
    let fastest = |times: &[f64]| times.iter().copied().fold(f64::INFINITY, f64::min);
    let side_by_side = format!("{ranks} one-rank pipelines side by side");
    println!("  tokens per second: {}", spread(walls, |wall| bench.tokens as f64 / wall));
    println!("  of {ranks} x one rank: {}", ratios(alone, walls, count));
    println!("  of {ranks} x one rank, fastest steps: {:.3}", fastest(alone) / fastest(walls) / count);
    println!("  {side_by_side}, of {ranks} x one rank: {}", ratios(alone, beside, 1.0));
    println!("  of {side_by_side}: {}", ratios(beside, walls, count));
    println!("  of {side_by_side}, fastest steps: {:.3}", fastest(beside) / fastest(walls) / count);
    println!("  of its own bound: {}", spread(programs, |program| bound / program));
    println!("  share of the ranks' time that its bound fills: {:.3}", busy / bound / count);
    println!(
        "  computation of its ranks over the computation of one rank: {}",
        spread(alone_busy, |alone| busy / alone)
    );
    Ok(())
}

fn take_turns(bench: &mut Bench, ranks: u32, microbatches: u32, steps: usize) -> Outcome<Turns> {
    let single = |_| Bench::new("gpipe", 1, microbatches);
    let mut singles = (0..ranks).map(single).collect::<Result<Vec<_>, _>>()?;
    bench.steps(2, 0)?;
    side_by_side(&mut singles)?;
    let mut turns = Turns::default();
    for turn in 0..steps {
        let one = turn % singles.len();
        let (alone, report) = (singles[one].step()?, bench.step()?);
        turns.walls.push(report.wall.as_secs_f64());
        turns.programs.push(without_update(&report));
        turns.alone.push(alone.wall.as_secs_f64());
        turns.alone_busy.push(alone.timeline.busy(Rank::new(0)));
        let beside = side_by_side(&mut singles)?;
        let walls: f64 = beside.iter().map(|report| report.wall.as_secs_f64()).sum();
        turns.beside.push(walls / beside.len() as f64);
        turns.events.extend_from_slice(report.timeline.events());
    }
    Ok(turns)
}

/// Returns the ratios of `of` to `to` in each turn, divided by `scale`.
fn ratios(of: &[f64], to: &[f64], scale: f64) -> Spread {
    Spread::new(of.iter().zip(to).map(|(of, to)| of / to / scale).collect())
}

fn spread(values: &[f64], figure: impl Fn(f64) -> f64) -> Spread {
    Spread::new(values.iter().copied().map(figure).collect())
}

/// Measures the cost of splitting backwards: the time of a step with `I` and `W` on one rank, relative to a
/// step with `B`.
fn split_cost(microbatches: u32, steps: usize) -> Outcome<Spread> {
    let row = |cells: fn(u32) -> String| (0..microbatches).map(cells).collect::<Vec<_>>().join(",") + "\n";
    let (whole, split) = (row(|m| format!("0F{m},0B{m}")), row(|m| format!("0F{m},0I{m},0W{m}")));
    let (mut whole, mut split) = (Bench::new(&whole, 1, microbatches)?, Bench::new(&split, 1, microbatches)?);
    whole.steps(2, 0)?;
    split.steps(2, 0)?;
    let ratio = |_| {
        let whole = whole.step()?.wall.as_secs_f64();
        Ok(split.step()?.wall.as_secs_f64() / whole)
    };
    Ok(Spread::new((0..steps).map(ratio).collect::<Outcome<_>>()?))
}

/// Returns the median times of each stage's actions. Kinds of actions that the schedule does not have take no
/// time.
fn costs(events: &[Event], stages: u32) -> Costs {
    let mut times: BTreeMap<(StageIndex, Kind), Vec<f64>> = BTreeMap::new();
    for event in events {
        if let Some((kind, stage)) = kind(event.action) {
            times.entry((stage, kind)).or_default().push(event.end - event.start);
        }
    }
    let mut of = |stage, kind| times.remove(&(stage, kind)).map_or(0.0, |times| Spread::new(times).median());
    let stages = (0..stages).map(StageIndex::new).map(|stage| {
        let (forward, input_backward) = (of(stage, Kind::Forward), of(stage, Kind::Input));
        let (weight_backward, backward) = (of(stage, Kind::Weight), of(stage, Kind::Both));
        StageCosts { backward, ..StageCosts::new(forward, input_backward, weight_backward) }
    });
    Costs { stages: stages.collect(), ..Costs::default() }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Forward,
    Input,
    Weight,
    Both,
}

fn kind(action: Action) -> Option<(Kind, StageIndex)> {
    match action {
        Action::Forward { stage, .. } => Some((Kind::Forward, stage)),
        Action::InputBackward { stage, .. } => Some((Kind::Input, stage)),
        Action::WeightBackward { stage, .. } => Some((Kind::Weight, stage)),
        Action::Backward { stage, .. } => Some((Kind::Both, stage)),
        _ => None,
    }
}
