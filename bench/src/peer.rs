//! Compares the throughput with PyTorch's `Schedule1F1B` or `ScheduleZBVZeroBubble` on the same model, in two
//! processes with one thread each.
//!
//! After each turn the bench times the matrix products of a step alone. Both sides need them.
//!
//! The two sides alternate, so that changes in the speed of the machine affect both.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::{Figures, Outcome, Spread};
use crate::model::{Bench, SEQUENCE};
use crate::processes;
use crate::products::ceiling;

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The schedule of both sides.
    #[arg(long, value_enum, default_value_t = PeerSchedule::OneFOneB)]
    schedule: PeerSchedule,
    /// Turns that count.
    #[arg(long, default_value_t = 5)]
    turns: usize,
    /// Steps of each turn; the first two do not count.
    #[arg(long, default_value_t = 6)]
    steps: usize,
    /// Run ours in two processes over MPI too, as PyTorch does over Gloo.
    #[arg(long)]
    processes: bool,
    /// The Python that `bench/peer/setup.sh` installed PyTorch for.
    #[arg(long, default_value = "bench/.venv/bin/python")]
    python: PathBuf,
}

/// A schedule that both sides have.
#[derive(Clone, Copy, clap::ValueEnum)]
enum PeerSchedule {
    #[value(name = "1f1b")]
    OneFOneB,
    Zbv,
}

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/peer/pipeline.py");

pub(crate) fn run(options: &Options) -> Outcome {
    let mut figures = Figures::default();
    for turn in 0..options.turns {
        let peer = peer_rate(options)?;
        let own = own_rate(options)?;
        println!("turn {}: pipewright {own:.0} tokens/s, PyTorch {peer:.0}: {:.2} x", turn + 1, own / peer);
        let ceiling = ceiling(2, 16)?;
        figures.add("pipewright, tokens per second", own);
        figures.add("PyTorch, tokens per second", peer);
        figures.add("ratio", own / peer);
        let products = ceiling.microbatches * SEQUENCE as f64;
        figures.add("matrix products alone, over PyTorch's whole step", products / peer);
        figures.add("at 10^9 operations a second, two threads", ceiling.operations / 1e9);
    }
    print!("{figures}");
    Ok(())
}

fn own_rate(options: &Options) -> Outcome<f64> {
    let schedule = match options.schedule {
        PeerSchedule::OneFOneB => "1f1b",
        PeerSchedule::Zbv => "zbvzerobubble",
    };
    if options.processes {
        return processes::rate(schedule, options.steps);
    }
    let mut bench = Bench::new(schedule, 2, 8)?;
    let reports = bench.steps(2, options.steps.saturating_sub(2).max(1))?;
    let rates = reports.iter().map(|report| bench.tokens as f64 / report.wall.as_secs_f64()).collect();
    Ok(Spread::new(rates).median())
}

fn peer_rate(options: &Options) -> Outcome<f64> {
    let steps = options.steps.saturating_sub(2).max(1).to_string();
    let schedule = match options.schedule {
        PeerSchedule::OneFOneB => "1f1b",
        PeerSchedule::Zbv => "zbv",
    };
    rate(&options.python, &["--schedule", schedule, "--warmup", "2", "--steps", &steps])
}

/// Runs PyTorch's side with these arguments, and returns its tokens per second.
pub(crate) fn rate(python: &Path, arguments: &[impl AsRef<OsStr>]) -> Outcome<f64> {
    let output = Command::new(python)
        .arg(SCRIPT)
        .args(arguments)
        .arg("--json")
        .output()
        .map_err(|error| format!("{}: {error}; run bench/peer/setup.sh first", python.display()))?;
    if !output.status.success() {
        return Err(format!("PyTorch failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    let figures: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    figures["tokens_per_second"].as_f64().ok_or_else(|| "PyTorch's figures lack tokens_per_second".into())
}
