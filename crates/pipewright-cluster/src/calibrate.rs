//! Fits the constants of a machine to published runs.
//!
//! The fit minimises the squared logarithms of predicted over measured times, plus a penalty for each
//! constant that leaves its expected value. A deviation of one tolerance costs as much as an error of 3% in
//! one row. So a constant that the rows do not determine stays where microbenchmarks put it, and a row alone
//! moves no constant far. The constants belong to the machine: all its rows share them.

use crate::machine::Constants;
use crate::pipeline::Programs;
use crate::predict::{PredictError, predict};
use crate::published::Run;
use crate::setting::Setting;

/// The squared error that a deviation of one tolerance costs.
const PENALTY: f64 = 0.03 * 0.03;
/// Rounds of the search. Each tries both directions of every constant, and halves the steps if none helps.
const ROUNDS: u32 = 40;

/// An expected value of a constant and how far it may be wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Expected {
    /// The value.
    pub value: f64,
    /// The tolerance; 0 for a constant that is not fitted.
    pub tolerance: f64,
}

/// Returns the constants that fit `runs` best. The constants of the runs' machines are ignored.
///
/// # Errors
/// When a run cannot be predicted.
pub fn calibrate(runs: &[&Run], expected: &[Expected; 7]) -> Result<Constants, PredictError> {
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
pub fn error(run: &Run, constants: Constants, programs: &mut Programs) -> Result<f64, PredictError> {
    let mut machine = run.machine.clone();
    machine.constants = constants;
    let setting = Setting { model: &run.model, layout: &run.layout, machine: &machine };
    Ok(predict(&setting, programs)?.seconds / run.step_seconds - 1.0)
}
