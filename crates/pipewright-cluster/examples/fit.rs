//! Fits the constants of each machine of a file of published runs, and predicts each source, and each run,
//! with constants that were fitted without it: `cargo run --example fit -- FILE.toml`.

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::collections::BTreeSet;
use std::error::Error;

use pipewright_cluster::calibrate::{Expected, calibrate, error};
use pipewright_cluster::machine::Constants;
use pipewright_cluster::pipeline::Programs;
use pipewright_cluster::published::{self, Run};

/// The values that microbenchmarks measure: large products of cuBLAS and Transformer Engine, FlashAttention, STREAM,
/// nccl-tests. The time between kernels is not fitted.
fn expected(machine: &str) -> [Expected; 7] {
    let of = |value, tolerance| Expected { value, tolerance };
    let [product, fp8, attention, hidden] = match machine {
        name if name.contains("A100") => [of(0.78, 0.04), of(0.6, 0.0), of(0.55, 0.0), of(0.0, 0.0)],
        // Less power and memory of an older kind; PyTorch's own attention (FlashAttention 2); no overlap.
        name if name.contains("500 W") => [of(0.52, 0.06), of(0.46, 0.06), of(0.36, 0.05), of(0.0, 0.0)],
        _ => [of(0.70, 0.05), of(0.58, 0.05), of(0.58, 0.07), of(0.4, 0.2)],
    };
    [product, fp8, attention, of(0.78, 0.05), of(0.75, 0.06), hidden, of(2e-6, 0.0)]
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("give a file of published runs")?;
    let published = published::read(&std::fs::read_to_string(path)?)?;
    let machines: BTreeSet<&str> = published.runs.iter().map(|run| run.machine.name.as_str()).collect();
    let mut without_row = Vec::new();
    for machine in machines {
        let runs: Vec<&Run> = published.runs.iter().filter(|run| run.machine.name == machine).collect();
        let constants = calibrate(&runs, &expected(machine))?;
        println!("{machine}");
        for (range, value) in Constants::RANGES.iter().zip(constants.to_array()) {
            println!("  {} = {value:.3e}", range.name);
        }
        let mut programs = Programs::default();
        for run in &runs {
            let others = |same: &dyn Fn(&Run) -> bool| -> Result<f64, Box<dyn Error>> {
                let kept: Vec<&Run> = runs.iter().copied().filter(|other| !same(other)).collect();
                Ok(error(run, calibrate(&kept, &expected(machine))?, &mut Programs::default())?)
            };
            let row = others(&|other| std::ptr::eq(other, *run))?;
            let source = others(&|other| other.source == run.source)?;
            let fitted = error(run, constants, &mut programs)?;
            let percent = |value: f64| format!("{:+.1}%", value * 100.0);
            println!(
                "  {}: {}; without the row {}; without its source {}",
                run.model.name,
                percent(fitted),
                percent(row),
                percent(source)
            );
            without_row.push([fitted, row, source].map(f64::abs));
        }
    }
    for (index, name) in ["fitted", "without the row", "without the source"].iter().enumerate() {
        let errors: Vec<f64> = without_row.iter().map(|errors| errors[index] * 100.0).collect();
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        println!("{name}: mean {mean:.1}%, largest {:.1}%", errors.iter().copied().fold(0.0, f64::max));
    }
    Ok(())
}
