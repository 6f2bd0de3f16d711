//! Measures the growth of peak memory with the number of microbatches: there is none under 1F1B, but there is
//! under GPipe.
//!
//! Each run is a separate process, because a peak resident size cannot be reset.

use std::fs;
use std::process::Command;

use crate::harness::Outcome;
use crate::model::Bench;

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Runs one schedule in this process and prints its peak: `SCHEDULE,MICROBATCHES`.
    #[arg(long, hide = true)]
    child: Option<String>,
}

pub(crate) fn run(options: &Options) -> Outcome {
    if let Some(child) = &options.child {
        return run_child(child, options.ranks);
    }
    for schedule in ["1f1b", "gpipe"] {
        let few = peak(schedule, 8, options.ranks)?;
        let many = peak(schedule, 64, options.ranks)?;
        println!(
            "{schedule}, {} ranks: {:.0} MiB with 8 microbatches, {:.0} MiB with 64: ratio {:.3}",
            options.ranks,
            few / 1024.0,
            many / 1024.0,
            many / few
        );
    }
    Ok(())
}

fn run_child(child: &str, ranks: u32) -> Outcome {
    let (schedule, microbatches) = child.split_once(',').ok_or("SCHEDULE,MICROBATCHES")?;
    Bench::new(schedule, ranks, microbatches.parse()?)?.steps(0, 3)?;
    let status = fs::read_to_string("/proc/self/status")?;
    let peak = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .ok_or("the system does not report the peak")?;
    println!("{}", peak.trim().trim_end_matches(" kB"));
    Ok(())
}

/// Returns the peak resident size in KiB.
fn peak(schedule: &str, microbatches: u32, ranks: u32) -> Outcome<f64> {
    let child = format!("{schedule},{microbatches}");
    let output = Command::new(std::env::current_exe()?)
        .args(["memory", "--ranks", &ranks.to_string(), "--child", &child])
        .output()?;
    let text = String::from_utf8(output.stdout)?;
    text.trim().parse().map_err(|_| format!("{child}: {text}").into())
}
