//! Compares the throughput of Nemotron-H and Qwen3-MoE with PyTorch and transformers on the same model: in
//! f32, and in bfloat16 with PyTorch's autocast and with its bfloat16 alone. Each rank has one thread.
//!
//! The bench writes the model as a Hugging Face directory, which all sides load. They train in turn, a step
//! each, so that changes in the speed of the machine affect all. Their losses must agree: it is the same
//! training.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pipewright::tensor::Precision;
use pipewright::transport::World;
use pipewright_models::{InitialParameters, ModelConfig};
use pipewright_schedule::words::counted;
use serde_json::json;

use crate::family_models::{Family, parameters};
use crate::harness::{Figures, Outcome};
use crate::model::{Bench, Setup, blocks_of_first, random_rows};
use crate::peer_process::{HALF_TOLERANCE, PeerProcess, RATE, TOLERANCE, require_same_loss};
use crate::precision::{OF_PEER, add};

/// Size of the measurement.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The families.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "nemotron-h,qwen3-moe")]
    families: Vec<Family>,
    /// The numbers of ranks, 1 or 2; two run under 1F1B.
    #[arg(long, value_delimiter = ',', default_value = "1,2", value_parser = clap::value_parser!(u32).range(1..=2))]
    ranks: Vec<u32>,
    /// Steps of each side that count; the first two do not.
    #[arg(long, default_value_t = 7)]
    steps: usize,
    /// Minutes for each family, after which fewer steps count, but at least three.
    #[arg(long, default_value_t = 5.0, value_parser = positive)]
    minutes: f64,
    /// Microbatches of a step, of one row each.
    #[arg(long, default_value_t = 8)]
    microbatches: u32,
    /// Tokens of a row.
    #[arg(long, default_value_t = 256)]
    sequence: usize,
    /// Measure Pipewright only, without PyTorch.
    #[arg(long)]
    alone: bool,
    /// The Python that `bench/peer/setup.sh` installed PyTorch and transformers for.
    #[arg(long, default_value = "bench/.venv/bin/python")]
    python: PathBuf,
}

const WARM_UP: usize = 2;

/// Steps that count even if the time is over.
const LEAST: usize = 3;

fn positive(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(minutes) if minutes > 0.0 && minutes <= 1e6 => Ok(minutes),
        _ => Err("not a number of minutes above 0".to_owned()),
    }
}

pub(crate) fn run(options: &Options) -> Outcome {
    let mut all = Vec::new();
    for &family in &options.families {
        let scratch = tempfile::tempdir()?;
        all.extend(compare(family, options, &scratch.path().join("model"))?);
    }
    println!("tokens per second, {} tokens per microbatch, one thread per rank:", options.sequence);
    all.iter().for_each(|(name, figures)| println!("{name}\n{figures}"));
    Ok(())
}

/// Returns the figures of a family for each number of ranks, with their names. The model is written into
/// `folder`, which must not exist or must be empty.
fn compare(family: Family, options: &Options, folder: &Path) -> Outcome<Vec<(String, Figures)>> {
    let model = family.write(folder)?;
    let [active, all] = parameters(&model)?.map(|count| format!("{:.1} M", count as f64 / 1e6));
    let rows = random_rows(options.microbatches, options.sequence);
    fs::write(folder.join("tokens.json"), json!(rows).to_string())?;
    let mut compared = Vec::new();
    let mut left = Duration::from_secs_f64(60.0 * options.minutes);
    for (&ranks, others) in options.ranks.iter().zip((0..options.ranks.len() as u32).rev()) {
        let start = Instant::now();
        let share = left / (others + 1);
        let name =
            format!("{}, {active} of {all} parameters active, {}", family.name(), counted(ranks, "rank"));
        println!("{name}");
        let mut sides = Sides::start(&model, ranks, options, folder, &rows)?;
        let mut figures = Figures::default();
        for step in 1..=WARM_UP + options.steps {
            let before = start.elapsed();
            let (own, peers) = sides.step(step == 1)?;
            let mut ignored = Figures::default();
            let line = add(if step > WARM_UP { &mut figures } else { &mut ignored }, &[own], peers);
            println!("step {step}: {line}");
            let after = start.elapsed();
            // The next step takes about as long as this one.
            if step >= WARM_UP + LEAST && after + (after - before) > share {
                break;
            }
        }
        left = left.saturating_sub(start.elapsed());
        compared.push((name, figures));
    }
    Ok(compared)
}

/// The pipelines and processes that train the same model.
struct Sides {
    /// In single precision and in bfloat16.
    own: [Bench; 2],
    /// In the order of [`OF_PEER`]; none if Pipewright is measured alone.
    peers: Vec<PeerProcess>,
}

impl Sides {
    fn start(
        model: &ModelConfig,
        ranks: u32,
        options: &Options,
        folder: &Path,
        rows: &[Vec<i32>],
    ) -> Outcome<Self> {
        let cut = if ranks == 2 { Some(blocks_of_first(model, options.sequence)?) } else { None };
        let start = |precision| {
            let setup = Setup {
                sequence: options.sequence,
                precision,
                ..Setup::new("1f1b", ranks, options.microbatches)
            };
            let initial = InitialParameters::Directory { path: folder.to_owned(), seed: 0 };
            let bench = Bench::of_model(World::local(ranks), &setup, model.clone(), initial)?;
            Outcome::Ok(bench.on_rows(rows).with_rate(RATE))
        };
        let own = [start(Precision::F32)?, start(Precision::Bf16)?];
        let of_peer: &[&str] = if options.alone { &[] } else { &OF_PEER };
        let peers: Result<Vec<_>, _> = of_peer
            .iter()
            .map(|precision| {
                PeerProcess::start(&options.python, folder, &[format!("--precision={precision}")], cut)
            })
            .collect();
        let peers = peers?;
        for peer in &peers {
            if peer.settings["parameters"] != json!(parameters(model)?[1]) {
                return Err(format!("PyTorch has another model: {}", peer.settings).into());
            }
            println!("PyTorch's settings {}", peer.settings);
        }
        Ok(Self { own, peers })
    }

    /// Trains a step on each side. Returns the tokens per second of Pipewright in both precisions, and of PyTorch.
    /// PyTorch's bfloat16 alone has the loss of the others in the first step only: the rounding of its parameters loses most updates at this rate.
    fn step(&mut self, is_first: bool) -> Outcome<([f64; 2], Option<[f64; 3]>)> {
        let tokens = self.own[0].tokens as f64;
        let (mut own, mut losses) = ([0.0; 2], [0.0; 2]);
        for ((bench, rate), loss) in self.own.iter_mut().zip(&mut own).zip(&mut losses) {
            let step = bench.step()?;
            (*rate, *loss) = (tokens / step.wall.as_secs_f64(), step.loss());
        }
        let [single, half] = losses;
        require_same_loss(half, single, HALF_TOLERANCE)?;
        let mut rates = Vec::new();
        for (peer, precision) in self.peers.iter_mut().zip(OF_PEER) {
            let step = peer.step()?;
            let tolerance = if precision == "f32" { TOLERANCE } else { HALF_TOLERANCE };
            if precision != "bf16" || is_first {
                require_same_loss(single, step.loss, tolerance)?;
            }
            rates.push(tokens / step.seconds);
        }
        Ok((own, rates.try_into().ok()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::parsed;

    #[test]
    fn options_have_defaults_and_limits() {
        let options: Options = parsed(&[]).expect("all have defaults");
        assert_eq!((options.ranks, options.alone), (vec![1, 2], false));
        assert!(parsed::<Options>(&["--ranks", "3"]).is_err());
        assert!(parsed::<Options>(&["--minutes", "0"]).is_err());
    }

    #[test]
    fn a_cut_counts_blocks() {
        for (family, blocks) in [(Family::NemotronH, 7), (Family::Qwen3Moe, 4)] {
            assert_eq!(blocks_of_first(&family.config(), 256).expect("there are enough layers"), blocks);
        }
    }
}
