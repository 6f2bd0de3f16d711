//! Compares a step that trains adapters alone with the step that trains the whole model, under the same
//! schedule and cut, and with PEFT and transformers on the same model. Each rank has one thread.
//!
//! The sides take steps in turn, so that changes in the speed of the machine affect all. The bench writes the
//! model as a Hugging Face directory, in which PEFT makes the adapters that both sides train. Their losses
//! must agree: it is the same training.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use pipewright::tensor::Precision;
use pipewright::transport::World;
use pipewright_models::{
    Adapter, AdapterStart, CutModel, InitialParameters, LoraConfig, LoraTargets, ModelConfig,
};
use pipewright_schedule::words::counted;
use serde_json::json;

use crate::harness::{Figures, Outcome};
use crate::model::{Bench, SEED, Setup, blocks_of_first, config, random_rows, write};
use crate::peer_process::{HALF_TOLERANCE, PeerProcess, RATE, TOLERANCE, require_same_loss};

/// Size of the measurement.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The numbers of ranks, 1 or 2; two run under the schedule.
    #[arg(long, value_delimiter = ',', default_value = "1,2", value_parser = clap::value_parser!(u32).range(1..=2))]
    ranks: Vec<u32>,
    /// The schedule of two ranks.
    #[arg(long, default_value = "1f1b")]
    schedule: String,
    /// The rank of the adapters.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    adapter_rank: u32,
    /// The names of the layers that have an adapter; all linear layers of the blocks if none is given.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    targets: Vec<String>,
    /// Steps of each side that count; the first two do not.
    #[arg(long, default_value_t = 9)]
    steps: usize,
    /// Microbatches of a step, of one row each.
    #[arg(long, default_value_t = 8)]
    microbatches: u32,
    /// Tokens of a row.
    #[arg(long, default_value_t = 256)]
    sequence: usize,
    /// Compute in bfloat16. The base of adapters is held in bfloat16; adapters, and the parameters of the
    /// whole run, in single precision.
    #[arg(long)]
    bf16: bool,
    /// Measure PEFT with transformers in turn; two ranks run under PyTorch's `Schedule1F1B`.
    #[arg(long)]
    peer: bool,
    /// The Python that `bench/peer/setup.sh` installed PEFT for.
    #[arg(long, default_value = "bench/.venv/bin/python")]
    python: PathBuf,
}

const WARM_UP: usize = 2;

pub(crate) fn run(options: &Options) -> Outcome {
    let scratch = tempfile::tempdir()?;
    let compared = compare(options, &scratch.path().join("model"))?;
    println!(
        "{} tokens per microbatch, {} per step, adapters of rank {} on {}, {}, one thread per rank:",
        options.sequence,
        counted(options.microbatches, "microbatch"),
        options.adapter_rank,
        if options.targets.is_empty() { "all linear layers".to_owned() } else { options.targets.join(", ") },
        if options.bf16 { "bf16" } else { "f32" },
    );
    compared.iter().for_each(|(ranks, figures)| println!("{}\n{figures}", counted(*ranks, "rank")));
    Ok(())
}

/// Returns the figures for each number of ranks. The model is written into `folder`, which must not exist or
/// must be empty.
fn compare(options: &Options, folder: &Path) -> Outcome<Vec<(u32, Figures)>> {
    let model = config();
    write(&model, folder)?;
    let rows = random_rows(options.microbatches, options.sequence);
    fs::write(folder.join("tokens.json"), json!(rows).to_string())?;
    let mut compared = Vec::new();
    for &ranks in &options.ranks {
        let mut sides = Sides::start(&ModelConfig::Llama(model.clone()), ranks, options, folder, &rows)?;
        let mut figures = Figures::default();
        for step in 1..=WARM_UP + options.steps {
            let times = sides.step()?;
            println!("{}, step {step}: {times}", counted(ranks, "rank"));
            if step > WARM_UP {
                add(&mut figures, sides.adapters.tokens, &times);
            }
        }
        compared.push((ranks, figures));
    }
    Ok(compared)
}

/// The pipelines, and the process that trains the same adapters.
struct Sides {
    whole: Bench,
    adapters: Bench,
    peer: Option<PeerProcess>,
    tolerance: f64,
}

impl Sides {
    fn start(
        model: &ModelConfig,
        ranks: u32,
        options: &Options,
        folder: &Path,
        rows: &[Vec<i32>],
    ) -> Outcome<Self> {
        let cut = (ranks == 2).then(|| blocks_of_first(model, options.sequence)).transpose()?;
        let precision = if options.bf16 { "bf16" } else { "f32" };
        let mut arguments =
            vec![format!("--precision={precision}"), format!("--adapter-rank={}", options.adapter_rank)];
        arguments.extend(options.targets.iter().map(|target| format!("--adapter-target={target}")));
        // PEFT makes the adapters, so its process starts first.
        let peer = options.peer.then(|| PeerProcess::start(&options.python, folder, &arguments, cut));
        let peer = peer.transpose()?;
        let start = match &peer {
            Some(_) => AdapterStart::Directory(folder.join("adapter")),
            None => AdapterStart::Seed(SEED),
        };
        let whole = CutModel::from(model.clone());
        let adapted = whole.clone().with_adapter(Adapter { lora: lora(options), start })?;
        if let Some(peer) = &peer {
            let trained = adapted.trained_parameters()?;
            let trained: usize = trained.iter().map(|spec| spec.shape.iter().product::<usize>()).sum();
            if peer.settings["trained"] != json!(trained) {
                return Err(format!("PEFT trains other adapters: {}", peer.settings).into());
            }
            println!("PEFT's settings {}", peer.settings);
        }
        let pipeline = |model| {
            let schedule = if ranks == 1 { "gpipe" } else { options.schedule.as_str() };
            let setup = Setup {
                sequence: options.sequence,
                precision: if options.bf16 { Precision::Bf16 } else { Precision::F32 },
                ..Setup::new(schedule, ranks, options.microbatches)
            };
            let initial = InitialParameters::Directory { path: folder.to_owned(), seed: 0 };
            let bench = Bench::of_cut(World::local(ranks), &setup, model, initial)?;
            Outcome::Ok(bench.on_rows(rows).with_rate(RATE))
        };
        let tolerance = if options.bf16 { HALF_TOLERANCE } else { TOLERANCE };
        Ok(Self { whole: pipeline(whole)?, adapters: pipeline(adapted)?, peer, tolerance })
    }

    /// Trains a step on each side.
    fn step(&mut self) -> Outcome<Times> {
        let whole = self.whole.step()?.wall.as_secs_f64();
        let adapters = self.adapters.step()?;
        let mut peer = None;
        if let Some(process) = &mut self.peer {
            let step = process.step()?;
            require_same_loss(adapters.loss(), step.loss, self.tolerance)?;
            peer = Some(step.seconds);
        }
        Ok(Times { whole, adapters: adapters.wall.as_secs_f64(), peer })
    }
}

/// Returns the adapters that PEFT makes too.
fn lora(options: &Options) -> LoraConfig {
    let rank = options.adapter_rank;
    let targets = match options.targets.as_slice() {
        [] => LoraTargets::AllLinear,
        named => LoraTargets::named(named.to_vec()),
    };
    LoraConfig { rank, alpha: f64::from(2 * rank), targets, ..LoraConfig::default() }
}

/// The seconds of a step of each side.
struct Times {
    /// The whole model is trained.
    whole: f64,
    adapters: f64,
    /// PEFT.
    peer: Option<f64>,
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "whole {:.0} ms, adapters {:.0} ms", self.whole * 1e3, self.adapters * 1e3)?;
        self.peer.map_or(Ok(()), |peer| write!(f, ", PEFT {:.0} ms", peer * 1e3))
    }
}

/// Adds the times of a step with this number of tokens.
fn add(figures: &mut Figures, tokens: usize, times: &Times) {
    let tokens = tokens as f64;
    figures.add_with(0, "tokens per second, whole model", tokens / times.whole);
    figures.add_with(0, "tokens per second, adapters", tokens / times.adapters);
    if let Some(peer) = times.peer {
        figures.add_with(0, "tokens per second, PEFT", tokens / peer);
        figures.add_with(2, "throughput over PEFT", peer / times.adapters);
    }
    figures.add("time of adapters over the whole model", times.adapters / times.whole);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::parsed;

    #[test]
    fn options_have_defaults_and_limits() {
        let options: Options = parsed(&[]).expect("all have defaults");
        assert_eq!((options.ranks, options.adapter_rank, options.peer), (vec![1, 2], 16, false));
        assert!(parsed::<Options>(&["--ranks", "3"]).is_err());
        assert!(parsed::<Options>(&["--adapter-rank", "0"]).is_err());
    }

    #[test]
    fn figures_are_ratios_of_the_same_step() {
        let times = |whole, adapters, peer| Times { whole, adapters, peer };
        let mut figures = Figures::default();
        add(&mut figures, 100, &times(2.0, 1.0, None));
        add(&mut figures, 100, &times(4.0, 3.0, None));
        let text = figures.to_string();
        assert!(text.contains("time of adapters over the whole model") && !text.contains("PEFT"), "{text}");
        assert!(text.contains("0.750 (min 0.500, max 0.750, n 2)"), "{text}");
        add(&mut figures, 100, &times(2.0, 1.0, Some(1.5)));
        let text = figures.to_string();
        assert!(text.contains("1.50 (min 1.50, max 1.50, n 1)"), "{text}");
    }

    /// One step of both own sides: the adapters have fewer parameters, and start from the same model.
    #[test]
    fn adapters_start_with_the_loss_of_the_model() {
        let scratch = tempfile::tempdir().expect("a folder");
        let folder = scratch.path().join("model");
        let options = Options {
            ranks: vec![2],
            schedule: "1f1b".to_owned(),
            adapter_rank: 2,
            targets: Vec::new(),
            steps: 1,
            microbatches: 2,
            sequence: 16,
            bf16: false,
            peer: false,
            python: PathBuf::new(),
        };
        let model = config();
        write(&model, &folder).expect("the folder is new");
        let rows = random_rows(2, 16);
        let sides = Sides::start(&ModelConfig::Llama(model), 2, &options, &folder, &rows);
        let mut sides = sides.expect("the model fits its adapters");
        let [whole, adapters] =
            [&mut sides.whole, &mut sides.adapters].map(|bench| bench.step().expect("a step").losses);
        assert_eq!(whole, adapters);
    }
}
