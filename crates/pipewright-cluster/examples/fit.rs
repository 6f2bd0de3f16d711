//! Fits the constants of each machine of a file of published runs, and predicts each source, and each run,
//! with constants that were fitted without it: `cargo run --example fit -- FILE.toml`.
//!
//! The fit minimises the squared logarithms of predicted over measured times, plus a penalty for each
//! constant that leaves its expected value. A deviation of one tolerance costs as much as an error of 3% in
//! one row. So a constant that the rows do not determine stays where microbenchmarks put it, and a row alone
//! moves no constant far. The constants belong to the machine: all its rows share them.

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::collections::BTreeSet;
use std::error::Error;

use pipewright_cluster::machine::Constants;
use pipewright_cluster::pipeline::Programs;
use pipewright_cluster::predict::{PredictError, predict};
use pipewright_cluster::published::{self, Run};
use pipewright_cluster::setting::Setting;

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

/// The squared error that a deviation of one tolerance costs.
const PENALTY: f64 = 0.03 * 0.03;
/// Rounds of the search. Each tries both directions of every constant, and halves the steps if none helps.
const ROUNDS: u32 = 40;

/// An expected value of a constant and how far it may be wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Expected {
    /// The value.
    value: f64,
    /// The tolerance; 0 for a constant that is not fitted.
    tolerance: f64,
}

/// Returns the constants that fit `runs` best. The constants of the runs' machines are ignored.
///
/// # Errors
/// When a run cannot be predicted.
fn calibrate(runs: &[&Run], expected: &[Expected; 7]) -> Result<Constants, PredictError> {
    let mut programs = Programs::default();
    let mut best = expected.map(|expected| expected.value);
    let mut loss = loss(runs, best, expected, &mut programs)?;
    let mut step = 0.5;
    for _ in 0..ROUNDS {
        let before = loss;
        for index in 0..best.len() {
            for direction in [step, -step] {
                let range = Constants::RANGES[index];
                let mut tried = best;
                tried[index] += direction * expected[index].tolerance;
                tried[index] = tried[index].clamp(range.least, range.most);
                let tried_loss = self::loss(runs, tried, expected, &mut programs)?;
                if tried_loss < loss {
                    (best, loss) = (tried, tried_loss);
                }
            }
        }
        if loss >= before {
            step /= 2.0;
        }
        if step < 0.02 {
            break;
        }
    }
    Ok(Constants::from_array(best))
}

fn loss(
    runs: &[&Run],
    constants: [f64; 7],
    expected: &[Expected; 7],
    programs: &mut Programs,
) -> Result<f64, PredictError> {
    let mut sum = 0.0;
    for run in runs {
        sum += error(run, Constants::from_array(constants), programs)?.ln_1p().powi(2);
    }
    let fitted = constants.iter().zip(expected).filter(|(_, expected)| expected.tolerance > 0.0);
    let deviation = fitted.map(|(value, expected)| ((value - expected.value) / expected.tolerance).powi(2));
    Ok(sum + PENALTY * deviation.sum::<f64>())
}

/// Returns the predicted over the measured time of a run, minus 1, with these constants of its machine.
///
/// # Errors
/// When the run cannot be predicted.
fn error(run: &Run, constants: Constants, programs: &mut Programs) -> Result<f64, PredictError> {
    let mut machine = run.machine.clone();
    machine.constants = constants;
    let setting = Setting { model: &run.model, layout: &run.layout, machine: &machine };
    Ok(predict(&setting, programs)?.seconds / run.step_seconds - 1.0)
}
