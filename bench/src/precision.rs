//! Compares a training step in bfloat16 with one in single precision, and both with PyTorch in f32, under autocast and
//! in bfloat16 alone.
//!
//! A step in single precision and one in bfloat16 alternate, in pipelines of one process. PyTorch runs after each turn of
//! them, so that changes in the speed of the machine affect all.

use std::error::Error;
use std::fmt;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use pipewright::tensor::Precision;
use pipewright::transport::World;
use pipewright_schedule::words::counted;

use crate::model::{Bench, Setup};
use crate::peer;
use crate::statistics::Spread;

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

/// The values of `--precision` of PyTorch's side: the first is compared with single precision, and the faster of the
/// others with bfloat16.
const OF_PEER: [&str; 3] = ["f32", "autocast", "bf16"];

pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
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
    fn start(ranks: NonZeroU32, microbatches: u32) -> Result<Self, Box<dyn Error>> {
        let start = |precision| {
            let setup = Setup { precision, ..Setup::new("1f1b", ranks.get(), microbatches) };
            Bench::over(World::local(ranks.get()), &setup)
        };
        Ok(Self([start(Precision::F32)?, start(Precision::Bf16)?]))
    }

    /// Returns the rates of steps that alternate, in tokens per second.
    fn turn(&mut self, steps: usize) -> Result<Vec<[f64; 2]>, Box<dyn Error>> {
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
fn peer_rates(python: &Path, ranks: NonZeroU32, options: &Options) -> Result<[f64; 3], Box<dyn Error>> {
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

/// The rates of all turns, in tokens per second.
#[derive(Default)]
struct Figures {
    /// Of each pair of steps: in single precision and in bfloat16.
    own: Vec<[f64; 2]>,
    /// The median rates of each turn.
    own_medians: Vec<[f64; 2]>,
    /// PyTorch's rates of each turn.
    peer: Vec<[f64; 3]>,
}

impl Figures {
    /// Adds the steps of a turn.
    fn add(&mut self, rates: &[[f64; 2]]) {
        self.own.extend_from_slice(rates);
        self.own_medians
            .push([0, 1].map(|i| Spread::new(rates.iter().map(|pair| pair[i]).collect()).median()));
    }

    /// Returns a line about the last turn.
    fn latest(&self) -> String {
        let own = self.own_medians.last().map(|[single, half]| format!("f32 {single:.0}, bf16 {half:.0}"));
        let peer = self.peer.last().map(|rates| {
            let rates = OF_PEER.iter().zip(rates).map(|(name, rate)| format!("{name} {rate:.0}"));
            format!("PyTorch {}", rates.collect::<Vec<_>>().join(", "))
        });
        own.into_iter().chain(peer).collect::<Vec<_>>().join("; ")
    }

    /// Returns the time of a step in bfloat16 as a share of the time of the step in single precision before it.
    fn shares(&self) -> Spread {
        Spread::new(self.own.iter().map(|[single, half]| single / half).collect())
    }

    /// Returns the ratios of each turn to PyTorch: in single precision, and of bfloat16 to the faster of PyTorch's two.
    fn ratios(&self) -> [Spread; 2] {
        let turns = || self.own_medians.iter().zip(&self.peer);
        [
            Spread::new(turns().map(|(own, peer)| own[0] / peer[0]).collect()),
            Spread::new(turns().map(|(own, peer)| own[1] / peer[1].max(peer[2])).collect()),
        ]
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |name: &str, spread: Spread| writeln!(f, "  {name:<44} {spread:.0}");
        for (i, name) in ["f32", "bf16"].into_iter().enumerate() {
            line(name, Spread::new(self.own.iter().map(|pair| pair[i]).collect()))?;
        }
        if !self.peer.is_empty() {
            for (i, name) in OF_PEER.into_iter().enumerate() {
                line(
                    &format!("PyTorch {name}"),
                    Spread::new(self.peer.iter().map(|rates| rates[i]).collect()),
                )?;
            }
        }
        writeln!(f, "  {:<44} {:.2}", "time of a bf16 step over an f32 step", self.shares())?;
        if !self.peer.is_empty() {
            let [single, half] = self.ratios();
            writeln!(f, "  {:<44} {single:.2}", "f32 over PyTorch f32")?;
            writeln!(f, "  {:<44} {half:.2}", "bf16 over the faster of autocast and bf16")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Arguments {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn options_have_defaults_and_limits() {
        let parse = |arguments: &[&str]| Arguments::try_parse_from([&["precision"], arguments].concat());
        let options = parse(&[]).expect("all have defaults").options;
        assert_eq!(options.ranks.iter().map(|ranks| ranks.get()).collect::<Vec<_>>(), [1, 2]);
        assert!(!options.peer);
        let options = parse(&["--ranks", "4", "--peer", "--turns", "1"]).expect("they are valid").options;
        assert_eq!((options.ranks[0].get(), options.peer, options.turns), (4, true, 1));
        assert!(parse(&["--ranks", "0"]).is_err());
    }

    #[test]
    fn the_other_side_has_the_same_sizes() {
        let arguments = peer_arguments(NonZeroU32::MIN, 6, 3, "autocast");
        let expected = ["--ranks=1", "--microbatches=6", "--warmup=2", "--steps=3", "--precision=autocast"];
        assert_eq!(arguments, expected);
    }

    #[test]
    fn figures_are_ratios_of_the_same_turn() {
        let mut figures = Figures::default();
        figures.add(&[[100.0, 200.0], [110.0, 220.0], [90.0, 150.0]]);
        assert_eq!(figures.shares().median(), 0.5);
        assert_eq!(figures.latest(), "f32 100, bf16 200");
        let text = figures.to_string();
        assert!(text.contains("time of a bf16 step over an f32 step") && !text.contains("PyTorch"), "{text}");
        figures.peer.push([80.0, 125.0, 160.0]);
        assert_eq!(figures.latest(), "f32 100, bf16 200; PyTorch f32 80, autocast 125, bf16 160");
        let [single, half] = figures.ratios();
        assert_eq!([single.median(), half.median()], [1.25, 1.25]);
        let text = figures.to_string();
        let line = format!("  {:<44} 125 (min 125, max 125, n 1)", "PyTorch autocast");
        assert!(text.lines().any(|found| found == line), "{text}");
    }
}
