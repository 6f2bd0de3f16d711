//! Measures the cost of copies of the state in memory: steps during which a copy is written, over steps
//! without, in turn.
//!
//! On one machine, the ranks are threads, and the copies stay there. With a neighbour, two processes over MPI
//! stand for two hosts: each has a folder of its own, and sends its part to the other one. A copy is written
//! and sent while a step computes, and that step waits for it at its end, as in `train`. If no processor is
//! idle, the copy takes its time from the ranks, so the ratio falls with the number of tokens per step and
//! rises with the bytes of the state.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use pipewright::checkpoint::{CheckpointWriter, CopyExchange, CopyFolder, CopyPart, CopyTarget};
use pipewright::ids::WorldRank;
use pipewright::transport::World;
use pipewright_models::decoder::DecoderConfig;
use pipewright_models::llama::LlamaConfig;
use pipewright_models::{InitialParameters, ModelConfig};
use serde::{Deserialize, Serialize};

use crate::checkpoints::save;
use crate::harness::{Outcome, PATIENCE, as_process, in_processes};
use crate::model::{Bench, SEED, Setup, VOCABULARY};
use crate::pairs::Pairs;

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Microbatches of a step, each of 256 tokens.
    #[arg(long, default_value_t = 128)]
    microbatches: u32,
    /// The width of the model, which has 4 layers.
    #[arg(long, default_value_t = 256)]
    width: usize,
    /// Pairs of steps that count: one with a copy, and one without.
    #[arg(long, default_value_t = 24)]
    rounds: usize,
    /// The folder of the copies.
    #[arg(long, default_value = "/dev/shm")]
    folder: PathBuf,
    /// Run as one of the processes.
    #[arg(long, hide = true)]
    child: bool,
}

const RANKS: u32 = 2;

/// The steps, and the bytes of a copy that the first process writes of its own state.
#[derive(Serialize, Deserialize)]
struct Measured {
    pairs: Pairs,
    bytes: u64,
}

pub(crate) fn run(options: &Options) -> Outcome {
    if options.child {
        return as_process(|world| {
            let rank = world.own_ranks().next().unwrap_or_default();
            in_scratch(options, &rank.to_string(), |folder| measure(world, folder, Some(rank), options))
        });
    }
    print(
        "machine",
        &in_scratch(options, "threads", |folder| measure(World::local(RANKS), folder, None, options))?,
    );
    let arguments = [
        "copies".to_owned(),
        "--child".to_owned(),
        format!("--microbatches={}", options.microbatches),
        format!("--width={}", options.width),
        format!("--rounds={}", options.rounds),
        format!("--folder={}", options.folder.display()),
    ];
    print("neighbour", &in_processes(&arguments)?);
    Ok(())
}

fn print(name: &str, Measured { pairs, bytes }: &Measured) {
    println!(
        "{name}: steps with a copy over steps without, in the first process, which writes {bytes} bytes of its own state in \
         each copy:\n{pairs}"
    );
}

/// Calls `measure` with a new folder, which is removed afterwards.
fn in_scratch(
    options: &Options,
    name: &str,
    measure: impl FnOnce(&Path) -> Outcome<Measured>,
) -> Outcome<Measured> {
    let folder = options.folder.join(format!("pipewright-bench-{}-{name}", std::process::id()));
    let outcome = measure(&folder);
    CopyFolder::remove(&folder)?;
    outcome
}

/// Measures the steps of this process. `process` is its rank if it is one of two.
fn measure(world: World, folder: &Path, process: Option<WorldRank>, options: &Options) -> Outcome<Measured> {
    let copies = CopyFolder::create(folder)?;
    let start = |channel| CopyExchange::start(channel, copies.clone(), PATIENCE);
    let exchange = world.byte_channel().map(start).transpose()?.map(Arc::new);
    let other = process.map(|rank| WorldRank::new(1 - rank.get()));
    let (series, neighbour) = ("bench".to_owned(), exchange.clone().zip(other));
    let target = CopyTarget { folder: copies.clone(), files: RANKS, series, neighbour };
    let mut writer = CheckpointWriter::copy(target, PATIENCE)?;
    let model = DecoderConfig {
        hidden_size: options.width,
        intermediate_size: options.width * 11 / 4,
        num_hidden_layers: 4,
        ..DecoderConfig::new(VOCABULARY, 4)
    };
    let model = ModelConfig::Llama(LlamaConfig::from(model));
    let setup = Setup::new("1f1b", RANKS, options.microbatches);
    let mut bench = Bench::of_model(world, &setup, model, InitialParameters::Seed(SEED))?;
    let mut step = 0;
    let pairs = Pairs::measure(options.rounds, |has_copy| {
        if has_copy {
            step += 1;
            save(&mut bench, &mut writer, step)?;
        }
        bench.step()?;
        writer.wait()?;
        Ok(())
    })?;
    // The part of the other process may still arrive.
    let own: Vec<CopyPart> = copies.parts()?.into_iter().filter(CopyPart::is_own).collect();
    let newest = own.iter().map(CopyPart::step).max();
    let bytes = own.iter().filter(|part| Some(part.step()) == newest).map(CopyPart::bytes).sum();
    // The other process may still send.
    bench.step()?;
    drop((writer, exchange));
    Ok(Measured { pairs, bytes })
}
