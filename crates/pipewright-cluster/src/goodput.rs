//! The useful share of the time of a training on a mesh whose GPUs fail.
//!
//! A run computes a number of steps and writes a checkpoint, and again. A failure of any GPU ends all of
//! them. The run then restarts from the newest checkpoint that is complete, and repeats the steps since.
//! Failures are independent and come at a constant rate, and a restart may fail too.
//!
//! A checkpoint stops the training for some time, and is complete after its bytes are written. If both are
//! equal, the expected share has a closed form ([`Checkpointing::goodput`]). Otherwise the write continues
//! behind the next steps, and a failure during it goes back to the checkpoint before.
//!
//! The simulation draws the time of each failure, so the same seed always gives the same figures.

use pipewright_schedule::checkpoint_interval::{Checkpointing, best_interval};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::Serialize;

/// The number of failures that are simulated. The mean of as many times between failures has a standard error
/// of 0.7%: 1 / sqrt(20,000).
const FAILURES: u32 = 20_000;

/// The failures of a mesh, and the costs of its checkpoints. All times are in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Faults {
    /// The mean time between two failures of any GPU of the mesh.
    pub between_failures: f64,
    /// The time in which a checkpoint is written.
    pub write: f64,
    /// The time for which a checkpoint stops the training, at most `write`.
    pub stall: f64,
    /// The time from a failure until the run computes again.
    pub restart: f64,
}

/// The shares of the time of a training. The first four sum to 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Goodput {
    /// The share of steps that count.
    pub useful: f64,
    /// The share in which the training stops for checkpoints.
    pub checkpoints: f64,
    /// The share of what is thrown away at failures.
    pub repeated: f64,
    /// The share of restarts.
    pub restarts: f64,
    /// The steps between two checkpoints.
    #[serde(rename = "checkpoint_every")]
    pub steps: u64,
}

impl Faults {
    /// Returns the number of steps of `step` seconds between two checkpoints at which the share is largest,
    /// by Daly's formula ([`best_interval`]). It is at least 1, and a write ends before the next one begins.
    pub fn best_steps(&self, step: f64) -> u64 {
        let least = ((self.write - self.stall) / step).ceil();
        // The conversion of a float to an integer saturates.
        (best_interval(self.stall, self.between_failures) / step).round().max(least).max(1.0) as u64
    }

    /// Returns the share that is expected if checkpoints are `steps` steps apart, each of `step` seconds, and
    /// no write continues behind the next steps.
    pub fn closed_form(&self, step: f64, steps: u64) -> f64 {
        let &Self { between_failures, write, restart, .. } = self;
        Checkpointing { cost: write, restart, between_failures }.goodput(steps as f64 * step)
    }

    /// Simulates a training whose checkpoints are `steps` steps apart, each of `step` seconds.
    pub fn simulate(&self, step: f64, steps: u64, seed: u64) -> Goodput {
        let computed = steps as f64 * step;
        // A checkpoint waits until the one before is complete.
        let cycle = (computed + self.stall).max(self.write);
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let (mut cycles, mut repeated, mut restarts) = (0.0, 0.0, 0.0);
        for _ in 0..FAILURES {
            let until_failure = exponential(&mut random, self.between_failures);
            let restart = until_failure.min(self.restart);
            let running = until_failure - restart;
            let complete = ((running - computed - self.write) / cycle).floor() + 1.0;
            let complete = complete.max(0.0);
            restarts += restart;
            cycles += complete;
            repeated += running - complete * cycle;
        }
        let time = cycles * cycle + repeated + restarts;
        Goodput {
            useful: cycles * computed / time,
            checkpoints: cycles * (cycle - computed) / time,
            repeated: repeated / time,
            restarts: restarts / time,
            steps,
        }
    }
}

/// Draws a number from the exponential distribution with this mean.
fn exponential(random: &mut impl Rng, mean: f64) -> f64 {
    // 53 random bits are a number of at least 0 and below 1.
    let uniform = (random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
    -mean * (-uniform).ln_1p()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: f64 = 10.0;

    fn faults(between_failures: f64, write: f64, restart: f64) -> Faults {
        Faults { between_failures, write, stall: write, restart }
    }

    #[test]
    fn the_simulation_agrees_with_the_closed_form() {
        for (mean, write, restart, steps) in [
            (1e6, 60.0, 300.0, 100),
            (10_800.0, 30.0, 300.0, 80),
            (3_600.0, 120.0, 600.0, 30),
            (600.0, 60.0, 300.0, 20),
            (600.0, 60.0, 0.0, 200),
        ] {
            let faults = faults(mean, write, restart);
            let (found, expected) = (faults.simulate(STEP, steps, 42), faults.closed_form(STEP, steps));
            let cost = 1.0 - expected;
            assert!(
                (found.useful - expected).abs() < 0.02 * cost.min(expected),
                "{faults:?}: {found:?}, {expected}"
            );
            let sum = found.useful + found.checkpoints + found.repeated + found.restarts;
            assert!((sum - 1.0).abs() < 1e-9, "{found:?}");
        }
    }

    #[test]
    fn a_seed_gives_the_same_figures() {
        let faults = faults(10_800.0, 30.0, 300.0);
        assert_eq!(faults.simulate(STEP, 80, 7), faults.simulate(STEP, 80, 7));
        assert_ne!(faults.simulate(STEP, 80, 7), faults.simulate(STEP, 80, 8));
    }

    #[test]
    fn the_best_steps_are_better_than_others() {
        let faults = faults(10_800.0, 30.0, 300.0);
        let best = faults.best_steps(STEP);
        let useful = |steps| faults.simulate(STEP, steps, 1).useful;
        assert!(useful(best) > useful(best / 3) && useful(best) > useful(best * 3), "{best}");
        // Steps that are longer than a failure is away.
        assert_eq!(faults.best_steps(1e9), 1);
    }

    /// A write behind the steps costs less than one that stops them, and the next one waits for it.
    #[test]
    fn a_write_behind_the_steps() {
        let behind = Faults { stall: 1.0, ..faults(10_800.0, 200.0, 300.0) };
        assert_eq!(Faults { stall: 0.0, ..behind }.best_steps(STEP), 20);
        let [found, stopped] =
            [behind, faults(10_800.0, 200.0, 300.0)].map(|faults| faults.simulate(STEP, 80, 3));
        assert!(
            found.checkpoints < stopped.checkpoints && found.useful > stopped.useful,
            "{found:?}, {stopped:?}"
        );
        let waits = behind.simulate(STEP, 2, 3);
        assert!(waits.checkpoints > 0.8, "{waits:?}");
    }

    /// No checkpoint is ever complete.
    #[test]
    fn hopeless_meshes_do_nothing_useful() {
        let found = faults(1.0, 1e6, 1e3).simulate(STEP, 1, 1);
        assert_eq!((found.useful, found.checkpoints), (0.0, 0.0));
    }
}
