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

use crate::harness::{Figures, Outcome, Spread};
use crate::model::{Bench, Setup};
use crate::peer;

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
            let own = pipelines.turn(options.steps)?;
            let peer = options.peer.then(|| peer_rates(&options.python, ranks, options)).transpose()?;
            let line = add(&mut figures, &own, peer);
            println!("{}, turn {turn}: {line}", counted(ranks.get(), "rank"));
        }
        all.push((ranks, figures));
    }
    println!("tokens per second, {} microbatches, one thread per rank:", options.microbatches);
    all.iter().for_each(|(ranks, figures)| println!("{}\n{figures}", counted(ranks.get(), "rank")));
    Ok(())
}

/// The values of `--precision` of PyTorch's side: the first is compared with single precision, and the faster of the
/// others with bfloat16.
pub(crate) const OF_PEER: [&str; 3] = ["f32", "autocast", "bf16"];

/// Adds the rates of pairs of steps in single precision and in bfloat16, and PyTorch's after them, in tokens per second.
/// Returns a line about their medians.
pub(crate) fn add(figures: &mut Figures, own: &[[f64; 2]], peer: Option<[f64; 3]>) -> String {
    for [single, half] in own {
        figures.add_with(0, "f32", *single);
        figures.add_with(0, "bf16", *half);
        figures.add_with(2, "time of a bf16 step over an f32 step", single / half);
    }
    let [single, half] = [0, 1].map(|i| Spread::new(own.iter().map(|pair| pair[i]).collect()).median());
    let line = format!("f32 {single:.0}, bf16 {half:.0}");
    let Some(peer) = peer else { return line };
    let mut rates = Vec::new();
    for (name, rate) in OF_PEER.into_iter().zip(peer) {
        figures.add_with(0, &format!("PyTorch {name}"), rate);
        rates.push(format!("{name} {rate:.0}"));
    }
    figures.add_with(2, "f32 over PyTorch f32", single / peer[0]);
    figures.add_with(2, "bf16 over the faster of autocast and bf16", half / peer[1].max(peer[2]));
    format!("{line}; PyTorch {}", rates.join(", "))
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
    fn figures_are_ratios_of_the_same_turn() {
        let mut figures = Figures::default();
        let own = [[100.0, 200.0], [110.0, 220.0], [90.0, 150.0]];
        assert_eq!(add(&mut figures, &own, None), "f32 100, bf16 200");
        let text = figures.to_string();
        assert!(text.contains("0.50 (min 0.50, max 0.60, n 3)") && !text.contains("PyTorch"), "{text}");
        let line = add(&mut figures, &own, Some([80.0, 125.0, 160.0]));
        assert_eq!(line, "f32 100, bf16 200; PyTorch f32 80, autocast 125, bf16 160");
        let text = figures.to_string();
        assert_eq!(text.matches("  1.25 (min 1.25, max 1.25, n 1)").count(), 2, "{text}");
    }

    #[test]
    fn the_other_side_has_the_same_sizes() {
        let arguments = peer_arguments(NonZeroU32::MIN, 6, 3, "autocast");
        let expected = ["--ranks=1", "--microbatches=6", "--warmup=2", "--steps=3", "--precision=autocast"];
        assert_eq!(arguments, expected);
    }
}
