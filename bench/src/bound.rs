//! Compares the time of a pipelined step with the lower bound of its schedule.
//!
//! 1F1B with `m` microbatches on `p` ranks takes at least `m + p - 1` times as long as a forward and a
//! backward of its slowest stage, if messages follow whole actions, as they do here. The ratio of the step
//! without the optimizer to that bound is the overhead of the runtime.

use pipewright::transport::World;
use pipewright_schedule::Rank;

use crate::harness::{Figures, Outcome};
use crate::model::{Bench, Setup, Size, without_update};

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    size: Size,
    /// Steps that count.
    #[arg(long, default_value_t = 10)]
    steps: usize,
}

pub(crate) fn run(options: &Options) -> Outcome {
    let &Options { size: Size { ranks, microbatches }, steps } = options;
    let setup = Setup { send_early: false, ..Setup::new("1f1b", ranks, microbatches) };
    let mut pipelined = Bench::over(World::local(ranks), &setup)?;
    let mut single = Bench::new("gpipe", 1, microbatches)?;
    pipelined.steps(2, 0)?;
    single.steps(1, 0)?;
    let mut figures = Figures::default();
    for _ in 0..steps {
        let report = pipelined.step()?;
        let busy = (0..ranks).map(|rank| report.timeline.busy(Rank::new(rank)));
        let slowest = busy.fold(0.0, f64::max) / f64::from(microbatches);
        let bound = f64::from(microbatches + ranks - 1) * slowest;
        let wall = report.wall.as_secs_f64();
        figures
            .add("step without optimizer / ((m + p - 1) x slowest stage)", without_update(&report) / bound);
        figures.add("tokens per second", pipelined.tokens as f64 / wall);
        figures.add("speed against one rank", single.step()?.wall.as_secs_f64() / wall);
    }
    println!("1f1b, {ranks} ranks, {microbatches} microbatches, one thread per rank");
    print!("{figures}");
    Ok(())
}
