//! Compares a training step in bfloat16 with one in single precision, and both with PyTorch in f32, under autocast and
//! in bfloat16 alone.
//!
//! A step in single precision and one in bfloat16 alternate, in pipelines of one process. PyTorch runs after each turn of
//! them, so that changes in the speed of the machine affect all.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use pipewright::tensor::Precision;
use pipewright::transport::World;
use pipewright_schedule::words::counted;

use crate::harness::Outcome;
use crate::model::{Bench, Setup};
use crate::peer;
use crate::precision_figures::{Figures, OF_PEER};

/// Size of the measurement.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The numbers of ranks, with one thread each; several run under 1F1B.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    ranks: Vec<NonZeroU32>,
    /// Microbatches of a step.
    #[arg(long, default_value_t = 8)]
    microbatches: u32,
    /// Turns.
    #[arg(long, default_value_t = 3)]
    turns: usize,
    /// Steps that count in each precision and turn; two steps of each before them do not.
    #[arg(long, default_value_t = 4)]
    steps: usize,
    /// Measure PyTorch in each turn too.
    #[arg(long)]
    peer: bool,
    /// The Python that `bench/peer/setup.sh` installed PyTorch for.
    #[arg(long, default_value = "bench/.venv/bin/python")]
    python: PathBuf,
}

const WARM_UP: usize = 2;

pub(crate) fn run(options: &Options) -> Outcome {
    let mut all = Vec::new();
    for &ranks in &options.ranks {
        let mut pipelines = Pipelines::start(ranks, options.microbatches)?;
        let mut figures = Figures::default();
        for turn in 1..=options.turns {
            figures.add(&pipelines.turn(options.steps)?);
            if options.peer {
                figures.peer.push(peer_rates(&options.python, ranks, options)?);
            }
            println!("{}, turn {turn}: {}", counted(ranks.get(), "rank"), figures.latest());
        }
        all.push((ranks, figures));
    }
    println!("tokens per second, {} microbatches, one thread per rank:", options.microbatches);
    all.iter().for_each(|(ranks, figures)| println!("{}\n{figures}", counted(ranks.get(), "rank")));
    Ok(())
}

/// Pipelines of the bench model: in single precision, and in bfloat16.
struct Pipelines([Bench; 2]);

impl Pipelines {
    fn start(ranks: NonZeroU32, microbatches: u32) -> Outcome<Self> {
        let start = |precision| {
            let setup = Setup { precision, ..Setup::new("1f1b", ranks.get(), microbatches) };
            Bench::over(World::local(ranks.get()), &setup)
        };
        Ok(Self([start(Precision::F32)?, start(Precision::Bf16)?]))
    }

    /// Returns the rates of steps that alternate, in tokens per second.
    fn turn(&mut self, steps: usize) -> Outcome<Vec<[f64; 2]>> {
        let mut rates = Vec::new();
        for step in 0..WARM_UP + steps {
            let mut pair = [0.0; 2];
            for (rate, bench) in pair.iter_mut().zip(&mut self.0) {
                *rate = bench.tokens as f64 / bench.step()?.wall.as_secs_f64();
            }
            if step >= WARM_UP {
                rates.push(pair);
            }
        }
        Ok(rates)
    }
}

/// Returns PyTorch's rates, in the order of [`OF_PEER`].
fn peer_rates(python: &Path, ranks: NonZeroU32, options: &Options) -> Outcome<[f64; 3]> {
    let mut rates = [0.0; 3];
    for (rate, precision) in rates.iter_mut().zip(OF_PEER) {
        *rate = peer::rate(python, &peer_arguments(ranks, options.microbatches, options.steps, precision))?;
    }
    Ok(rates)
}

fn peer_arguments(ranks: NonZeroU32, microbatches: u32, steps: usize, precision: &str) -> Vec<String> {
    let numbers = [
        ("ranks", u64::from(ranks.get())),
        ("microbatches", microbatches.into()),
        ("warmup", WARM_UP as u64),
        ("steps", steps.max(1) as u64),
    ];
    let numbers = numbers.into_iter().map(|(name, number)| format!("--{name}={number}"));
    numbers.chain([format!("--precision={precision}")]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::parsed;

    #[test]
    fn options_have_defaults_and_limits() {
        let options: Options = parsed(&[]).expect("all have defaults");
        assert_eq!(options.ranks.iter().map(|ranks| ranks.get()).collect::<Vec<_>>(), [1, 2]);
        assert!(!options.peer);
        let options: Options = parsed(&["--ranks", "4", "--peer", "--turns", "1"]).expect("they are valid");
        assert_eq!((options.ranks[0].get(), options.peer, options.turns), (4, true, 1));
        assert!(parsed::<Options>(&["--ranks", "0"]).is_err());
    }

    #[test]
    fn the_other_side_has_the_same_sizes() {
        let arguments = peer_arguments(NonZeroU32::MIN, 6, 3, "autocast");
        let expected = ["--ranks=1", "--microbatches=6", "--warmup=2", "--steps=3", "--precision=autocast"];
        assert_eq!(arguments, expected);
    }
}
