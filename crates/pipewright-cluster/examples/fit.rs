//! Fits the constants of each machine of a file of published runs, and predicts each source, and each run,
//! with constants that were fitted without it: `cargo run --example fit -- FILE.toml`.

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::collections::BTreeSet;
use std::error::Error;

use pipewright_cluster::calibrate::{Expected, calibrate, error};
use pipewright_cluster::machine::Constants;
use pipewright_cluster::pipeline::Programs;
use pipewright_cluster::published::{self, Run};

/// The values that microbenchmarks measure (large products of cuBLAS and Transformer Engine, FlashAttention,
/// STREAM, nccl-tests), with their tolerances. The time between kernels is not fitted.
fn expected(machine: &str) -> [Expected; 7] {
    let usual = Constants::EXPECTED;
    let (constants, tolerances) = if machine.contains("A100") {
        let constants = Constants { product: 0.78, product_fp8: 0.6, attention: 0.55, ..usual };
        (constants, [0.04, 0.0, 0.0, 0.05, 0.06, 0.0, 0.0])
    } else if machine.contains("500 W") {
        // Less power and memory of an older kind; PyTorch's own attention (FlashAttention 2); no overlap.
        let constants = Constants { product: 0.52, product_fp8: 0.46, attention: 0.36, ..usual };
        (constants, [0.06, 0.06, 0.05, 0.05, 0.06, 0.0, 0.0])
    } else {
        // NeMo's runs hide a part of the tensor group's communication behind products.
        (Constants { hidden: 0.4, ..usual }, [0.05, 0.05, 0.07, 0.05, 0.06, 0.2, 0.0])
    };
    let values = constants.to_array();
    std::array::from_fn(|index| Expected { value: values[index], tolerance: tolerances[index] })
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
