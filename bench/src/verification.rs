//! Measures the cost of the checksums of verified steps (`run.verify`): a step of a pipeline that verifies
//! suspicious steps over a step of one that does not, in turn. No step is suspicious, so none is repeated.

use pipewright::transport::World;
use pipewright::verification::Verify;

use crate::harness::Outcome;
use crate::model::{Bench, Setup};
use crate::pairs::Pairs;

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Ranks of a pipeline.
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Microbatches of a step, each of 256 tokens.
    #[arg(long, default_value_t = 8)]
    microbatches: u32,
    /// Pairs of steps that count.
    #[arg(long, default_value_t = 60)]
    rounds: usize,
}

pub(crate) fn run(options: &Options) -> Outcome {
    let &Options { ranks, microbatches, rounds } = options;
    let start = |verify| {
        let setup = Setup { verify, ..Setup::new("1f1b", ranks, microbatches) };
        Bench::over(World::local(ranks), &setup)
    };
    let (mut verified, mut plain) = (start(Verify::OnSuspicion)?, start(Verify::Off)?);
    let pairs = Pairs::measure(rounds, |has_checksums| {
        let step = if has_checksums { verified.step()? } else { plain.step()? };
        if step.verification.is_some() {
            return Err("a step was suspicious, and was computed again".into());
        }
        Ok(())
    })?;
    println!("steps with checksums over steps without:\n{pairs}");
    Ok(())
}
