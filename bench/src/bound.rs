//! Compares the time of a pipelined step with the lower bound of its schedule.
//!
//! 1F1B with `m` microbatches on `p` ranks takes at least `m + p - 1` times as long as a forward and a
//! backward of its slowest stage, if messages follow whole actions, as they do here. The ratio of the step
//! without the optimizer to that bound is the overhead of the runtime.

use std::error::Error;
use std::time::Duration;

use pipewright::transport::World;
use pipewright_schedule::Rank;

use crate::model::{Bench, Setup, Size};
use crate::statistics::Spread;

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    size: Size,
    /// Steps that count.
    #[arg(long, default_value_t = 10)]
    steps: usize,
}

pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let &Options { size: Size { ranks, microbatches }, steps } = options;
    let setup = Setup { send_early: false, ..Setup::new("1f1b", ranks, microbatches) };
    let mut pipelined = Bench::over(World::local(ranks), &setup)?;
    let mut single = Bench::new("gpipe", 1, microbatches)?;
    pipelined.steps(2, 0)?;
    single.steps(1, 0)?;
    let (mut to_bound, mut speedup, mut rate) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..steps {
        let report = pipelined.step()?;
        let busy = (0..ranks).map(|rank| report.timeline.busy(Rank::new(rank)));
        let slowest = busy.fold(0.0, f64::max) / f64::from(microbatches);
        let bound = f64::from(microbatches + ranks - 1) * slowest;
        let update = report.update.iter().max().map_or(0.0, Duration::as_secs_f64);
        to_bound.push((report.wall.as_secs_f64() - update) / bound);
        rate.push(pipelined.tokens as f64 / report.wall.as_secs_f64());
        speedup.push(single.step()?.wall.as_secs_f64() / report.wall.as_secs_f64());
    }
    println!("1f1b, {ranks} ranks, {microbatches} microbatches, one thread per rank");
    println!("  step without optimizer / ((m + p - 1) x slowest stage): {}", Spread::new(to_bound));
    println!("  tokens per second: {}", Spread::new(rate));
    println!("  speed against one rank: {}", Spread::new(speedup));
    Ok(())
}
