//! The best time between two checkpoints of a run, and the share of its time that is useful.
//!
//! A run computes for some time, writes a checkpoint, and computes again. A failure throws away what was
//! computed since the last checkpoint. Failures are independent of each other and come at a constant rate, so
//! the times between them are distributed exponentially.
//!
//! ```
//! use pipewright_schedule::checkpoint_interval::{Checkpointing, best_interval, first_order_interval};
//! // A checkpoint adds 6 seconds, and a failure comes once in 3 hours.
//! assert_eq!(first_order_interval(6.0, 10_800.0), 360.0);
//! let best = best_interval(6.0, 10_800.0);
//! assert!((best - 356.0).abs() < 0.1);
//! let run = Checkpointing { cost: 6.0, restart: 120.0, between_failures: 10_800.0 };
//! assert!(run.goodput(best) > run.goodput(0.5 * best) && run.goodput(best) > run.goodput(2.0 * best));
//! ```

/// The costs of failures and of checkpoints. All times are in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Checkpointing {
    /// The time that a checkpoint adds to a run.
    pub cost: f64,
    /// The time from a failure until the run computes again.
    pub restart: f64,
    /// The mean time between two failures.
    pub between_failures: f64,
}

impl Checkpointing {
    /// Returns the share of time that is useful if the run computes for `interval` seconds between two
    /// checkpoints. A failure may come at any time, also during a checkpoint or a restart.
    ///
    /// With the mean time between failures `M`, the cost `d`, the restart `R` and the interval `t`, the share
    /// is `t / (M e^(R/M) (e^((t+d)/M) - 1))`. The divisor is the expected time until `t + d` seconds pass
    /// without a failure, if each failure is followed by a restart that may fail too. J. T. Daly, "A higher
    /// order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems
    /// 22 (2006), doi:10.1016/j.future.2004.11.016, minimizes this time.
    pub fn goodput(&self, interval: f64) -> f64 {
        let Self { cost, restart, between_failures: mean } = *self;
        interval / (mean * (restart / mean).exp() * ((interval + cost) / mean).exp_m1())
    }
}

/// Returns the best seconds of computation between two checkpoints that each add `cost` seconds, to first
/// order: `sqrt(2 d M)`. It is right if a failure is much rarer than a checkpoint is long.
///
/// Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of
/// the ACM 17 (1974), doi:10.1145/361147.361115.
pub fn first_order_interval(cost: f64, between_failures: f64) -> f64 {
    (2.0 * cost * between_failures).sqrt()
}

/// Returns the best seconds of computation between two checkpoints that each add `cost` seconds, to a higher
/// order: `sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d` if `d < 2M`, and `M` otherwise. It does not
/// depend on the time of a restart.
///
/// Source: J. T. Daly, as for [`Checkpointing::goodput`]. The tests have the intervals in the captions of its
/// figures 3 to 5.
pub fn best_interval(cost: f64, between_failures: f64) -> f64 {
    let ratio = cost / (2.0 * between_failures);
    if ratio >= 1.0 {
        return between_failures;
    }
    let factor = 1.0 + ratio.sqrt() / 3.0 + ratio / 9.0;
    first_order_interval(cost, between_failures) * factor - cost
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that no interval is noticeably better than the best one.
    #[test]
    fn the_best_interval_has_the_largest_goodput() {
        for (cost, restart, mean) in [(1.0, 0.0, 1e6), (60.0, 300.0, 10_800.0), (600.0, 900.0, 3_600.0)] {
            let run = Checkpointing { cost, restart, between_failures: mean };
            let best = run.goodput(best_interval(cost, mean));
            let others = (1..400).map(|index| run.goodput(mean * f64::from(index) / 400.0));
            let largest = others.fold(0.0, f64::max);
            assert!(largest <= best * 1.001, "{run:?}: {largest} is above {best}");
            assert!((0.0..1.0).contains(&best), "{run:?}: {best}");
        }
    }

    /// The captions state a checkpoint of 5 minutes and the interval, in minutes, to two or three digits.
    #[test]
    fn intervals_are_those_of_dalys_figures() {
        for (mean, expected, digit) in [(24.0 * 60.0, 117.0, 1.0), (6.0 * 60.0, 57.0, 1.0), (15.0, 9.1, 0.1)]
        {
            let found = best_interval(5.0, mean);
            assert!((found - expected).abs() <= 0.5 * digit, "{mean}: {found}, not {expected}");
        }
    }

    /// A cheap checkpoint, and a failure every day.
    #[test]
    fn a_tenth_of_a_second_costs_less_than_a_fifth_of_a_percent() {
        let run = Checkpointing { cost: 0.1, restart: 0.0, between_failures: 86_400.0 };
        let lost = 1.0 - run.goodput(best_interval(run.cost, run.between_failures));
        assert!((0.001..0.002).contains(&lost), "{lost}");
    }

    #[test]
    fn extreme_costs_have_an_interval() {
        assert_eq!(best_interval(0.0, 3600.0), 0.0);
        assert_eq!(best_interval(7200.0, 3600.0), 3600.0);
        assert_eq!(best_interval(1e9, 3600.0), 3600.0);
        // At `d = 2M` the higher order is `2M (1 + 1/3 + 1/9) - 2M`: it ends at 8/9 of the other branch.
        assert!((best_interval(7199.999, 3600.0) / 3600.0 - 8.0 / 9.0).abs() < 1e-6);
    }

    /// Without failures, only the checkpoints take time.
    #[test]
    fn rare_failures_leave_the_cost_of_checkpoints() {
        let run = Checkpointing { cost: 10.0, restart: 60.0, between_failures: 1e12 };
        assert!((run.goodput(90.0) - 0.9).abs() < 1e-6);
    }
}
