//! Every schedule against the speed of one rank, and against what the timed simulation makes of its measured costs; and
//! what it costs to split a backward at all.
//!
//! A step of each is timed in turn. On a machine that others share, the fastest step of either says the most: nothing
//! makes a step faster than it is.
//!
//! The bound of a schedule is the makespan that the simulator predicts from the median time of each stage's `F`, `B`,
//! `I` and `W` in the measured steps, with communication that costs nothing.

use std::collections::BTreeMap;
use std::error::Error;
use std::time::Duration;

use pipewright_schedule::costs::StageCosts;
use pipewright_schedule::{Action, Costs, Event, StageIndex, simulate};

use crate::model::Bench;
use crate::size::Size;
use crate::statistics::Spread;

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

pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let &Options { size: Size { ranks, microbatches }, steps, .. } = options;
    println!(
        "{ranks} ranks, {microbatches} microbatches, one thread a rank; speeds against {ranks} x one rank"
    );
    println!("a step of I and W over one of B, one rank: {}", split_cost(microbatches, steps)?);
    for schedule in &options.schedules {
        let mut single = Bench::new("gpipe", 1, microbatches)?;
        let mut bench = Bench::new(schedule, ranks, microbatches)?;
        single.steps(1, 0)?;
        bench.steps(2, 0)?;
        let (mut efficiency, mut rate, mut program_times) = (Vec::new(), Vec::new(), Vec::new());
        let (mut events, mut best, mut best_alone) = (Vec::new(), f64::INFINITY, f64::INFINITY);
        for _ in 0..steps {
            let alone = single.step()?.wall.as_secs_f64();
            let report = bench.step()?;
            let wall = report.wall.as_secs_f64();
            efficiency.push(alone / wall / f64::from(ranks));
            (best, best_alone) = (best.min(wall), best_alone.min(alone));
            rate.push(bench.tokens as f64 / wall);
            let update = report.update.iter().max().map_or(0.0, Duration::as_secs_f64);
            program_times.push(wall - update);
            events.extend_from_slice(report.timeline.events());
        }
        let costs = costs(&events, bench.program().placement().stages());
        let bound = simulate::timed(bench.program().as_program(), &costs)?.timeline().makespan();
        println!("{schedule}");
        println!("  tokens a second: {}", Spread::new(rate));
        println!("  of {ranks} x one rank: {}", Spread::new(efficiency));
        println!("  of {ranks} x one rank, fastest steps: {:.3}", best_alone / best / f64::from(ranks));
        println!(
            "  of its own bound: {}",
            Spread::new(program_times.iter().map(|time| bound / time).collect())
        );
    }
    Ok(())
}

/// What splitting every backward costs: one rank's step with `I` and `W` over its step with `B`, in turn.
fn split_cost(microbatches: u32, steps: usize) -> Result<Spread, Box<dyn Error>> {
    let row = |cells: fn(u32) -> String| (0..microbatches).map(cells).collect::<Vec<_>>().join(",") + "\n";
    let (whole, split) = (row(|m| format!("0F{m},0B{m}")), row(|m| format!("0F{m},0I{m},0W{m}")));
    let (mut whole, mut split) = (Bench::new(&whole, 1, microbatches)?, Bench::new(&split, 1, microbatches)?);
    whole.steps(2, 0)?;
    split.steps(2, 0)?;
    let ratio = |_| {
        let whole = whole.step()?.wall.as_secs_f64();
        Ok(split.step()?.wall.as_secs_f64() / whole)
    };
    Ok(Spread::new((0..steps).map(ratio).collect::<Result<_, Box<dyn Error>>>()?))
}

/// The median time of each stage's actions. A stage that a schedule never asks for an action costs nothing in it.
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
        // A backward that is only ever overlapped has no time of its own.
        let backward = if backward > 0.0 { backward } else { input_backward + weight_backward };
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
