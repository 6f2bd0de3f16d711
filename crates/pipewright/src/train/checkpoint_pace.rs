//! The number of steps between two checkpoints, chosen from what a checkpoint adds to the steps of the run
//! and the time between failures that is expected ([`best_interval`]).
//!
//! A checkpoint is written while training continues, so its duration says little about its cost. It adds the
//! time in which the run waits for it, and makes the steps slower during which it is written. The pace
//! measures both, and compares these steps with the median of the others. It reads no clock: the caller
//! measures.
//!
//! Each process of a run measures other times. With [`Pipeline::announce`], all of them follow the choice of
//! one.
//!
//! [`Pipeline::announce`]: crate::pipeline::Pipeline::announce

use std::collections::VecDeque;
use std::time::Duration;

use pipewright_schedule::checkpoint_interval::best_interval;

/// The number of a process's first steps that are not used: caches and memory are still cold.
const WARM_UP: usize = 1;
/// The steps until the first checkpoint, whose cost is not known: the first step, and enough others to
/// compare with.
const FIRST: u64 = 4;
/// The latest steps without a checkpoint whose median is compared with.
const STEPS: usize = 16;
/// The latest checkpoints whose medians count. One slow checkpoint does not change a median.
const CHECKPOINTS: usize = 5;
/// The ratio by which another interval must differ from the chosen one to replace it.
const CHANGE: f64 = 1.2;

/// Measures checkpoints, and chooses the steps between two of them.
#[derive(Debug)]
pub struct CheckpointPace {
    between_failures: Duration,
    steps_seen: usize,
    /// Seconds of the latest steps during which no checkpoint was written.
    quiet: VecDeque<f64>,
    writing: Option<Writing>,
    /// The seconds that the latest checkpoints added.
    costs: VecDeque<f64>,
    /// The steps during which each of them was written.
    durations: VecDeque<f64>,
    choice: Option<CheckpointChoice>,
}

/// A checkpoint that is being written.
#[derive(Debug)]
struct Writing {
    /// The seconds for which the run waited for it.
    waited: f64,
    /// The seconds by which the steps were slower so far; below 0 if they were faster.
    slower: f64,
    steps: u64,
}

/// A chosen interval with its reasons.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CheckpointChoice {
    /// The number of steps between two checkpoints, above `written_in`.
    pub steps: u64,
    /// The time that a checkpoint adds to the run.
    pub cost: Duration,
    /// The time of a step without a checkpoint.
    pub step: Duration,
    /// The number of steps during which a checkpoint is written.
    pub written_in: u64,
    /// The time between two failures that is expected.
    pub between_failures: Duration,
}

impl CheckpointPace {
    /// Starts to measure. `between_failures` is the mean time between two failures of the whole run, above 0.
    pub fn new(between_failures: Duration) -> Self {
        Self {
            between_failures,
            steps_seen: 0,
            quiet: VecDeque::new(),
            writing: None,
            costs: VecDeque::new(),
            durations: VecDeque::new(),
            choice: None,
        }
    }

    /// Records the wall time of a step, before the outcome of a checkpoint that was written during it.
    pub fn step(&mut self, wall: Duration) {
        let seconds = wall.as_secs_f64();
        self.steps_seen += 1;
        if let Some(writing) = &mut self.writing {
            writing.steps += 1;
            writing.slower += median(&self.quiet).map_or(0.0, |quiet| seconds - quiet);
        } else if self.steps_seen > WARM_UP {
            push(&mut self.quiet, seconds, STEPS);
        }
    }

    /// Records that a checkpoint was requested, for which the run waited so long.
    pub fn begin(&mut self, waited: Duration) {
        self.writing = Some(Writing { waited: waited.as_secs_f64(), slower: 0.0, steps: 0 });
    }

    /// Records that the checkpoint is complete, and chooses again.
    pub fn complete(&mut self) {
        let Some(Writing { waited, slower, steps }) = self.writing.take() else { return };
        // The steps may be faster than the median, which does not make the wait shorter.
        push(&mut self.costs, waited + slower.max(0.0), CHECKPOINTS);
        push(&mut self.durations, steps as f64, CHECKPOINTS);
        let medians = [&self.quiet, &self.costs, &self.durations].map(median);
        if let [Some(step), Some(cost), Some(written_in)] = medians {
            self.choose(step, cost, written_in as u64);
        }
    }

    fn choose(&mut self, step: f64, cost: f64, written_in: u64) {
        let best = best_interval(cost, self.between_failures.as_secs_f64()) / step;
        // At least one step without a checkpoint comes between two of them. Otherwise no step could correct
        // the median.
        let least = written_in + 1;
        // The conversion of a float to an integer saturates.
        let steps = (best.round() as u64).max(least);
        let is_near = |chosen: u64| {
            let ratio = steps as f64 / chosen as f64;
            chosen >= least && (1.0 / CHANGE..=CHANGE).contains(&ratio)
        };
        if self.choice.is_none_or(|choice| !is_near(choice.steps)) {
            let [cost, step] = [cost, step].map(Duration::from_secs_f64);
            let between_failures = self.between_failures;
            self.choice = Some(CheckpointChoice { steps, cost, step, written_in, between_failures });
        }
    }

    /// Returns the steps between two checkpoints.
    pub fn interval(&self) -> u64 {
        self.choice.map_or(FIRST, |choice| choice.steps)
    }

    /// Returns the choice, after the first checkpoint.
    pub fn choice(&self) -> Option<CheckpointChoice> {
        self.choice
    }
}

fn push(values: &mut VecDeque<f64>, value: f64, most: usize) {
    values.push_back(value);
    if values.len() > most {
        values.pop_front();
    }
}

/// Returns the median; the larger of the two in the middle if their number is even.
fn median(values: &VecDeque<f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.iter().copied().collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    /// Takes steps of 100 ms until the next checkpoint, which waits 40 ms, and makes the next steps slower.
    fn checkpoint(pace: &mut CheckpointPace, steps: u64, slower: &[u64]) {
        (0..steps).for_each(|_| pace.step(ms(100)));
        pace.begin(ms(40));
        slower.iter().for_each(|&more| pace.step(ms(100 + more)));
        pace.complete();
    }

    fn paced() -> CheckpointPace {
        CheckpointPace::new(HOUR)
    }

    #[test]
    fn the_cost_is_what_a_checkpoint_adds() {
        let mut pace = paced();
        pace.step(ms(5000));
        assert_eq!((pace.interval(), pace.choice()), (FIRST, None));
        checkpoint(&mut pace, 3, &[50, 10]);
        let choice = pace.choice().expect("a choice");
        // Two slower steps, and the wait of 40 ms; the first step of 5 s does not count.
        assert_eq!((choice.cost, choice.step, choice.written_in), (ms(100), ms(100), 2));
        let best = best_interval(0.1, 3600.0) / 0.1;
        assert_eq!((choice.steps, pace.interval()), (best.round() as u64, 268));
    }

    #[test]
    fn the_choice_follows_the_median_of_the_costs() {
        let mut pace = paced();
        (0..3).for_each(|_| checkpoint(&mut pace, 20, &[60]));
        assert_eq!(pace.interval(), 268);
        checkpoint(&mut pace, 20, &[90_000]);
        assert_eq!(pace.interval(), 268, "one slow checkpoint changes nothing");
        (0..4).for_each(|_| checkpoint(&mut pace, 20, &[860]));
        let expected = best_interval(0.9, 3600.0) / 0.1;
        assert_eq!(pace.interval(), expected.round() as u64);
        (0..4).for_each(|_| checkpoint(&mut pace, 20, &[870]));
        assert_eq!(pace.interval(), expected.round() as u64, "a small change changes nothing");
    }

    /// The interval is at least one step longer than a checkpoint is written, also if a checkpoint costs
    /// nothing.
    #[test]
    fn the_interval_has_a_least_number_of_steps() {
        let free = |slower: &[u64]| {
            let mut pace = paced();
            (0..5).for_each(|_| pace.step(ms(100)));
            pace.begin(Duration::ZERO);
            slower.iter().for_each(|&more| pace.step(ms(100 + more)));
            pace.complete();
            pace.interval()
        };
        assert_eq!(free(&[]), 1);
        assert_eq!(free(&[0]), 2);
        assert_eq!(free(&[0; 7]), 8);
        let mut pace = paced();
        pace.step(ms(100));
        for (written_in, expected) in [(9, 10), (10, 11), (4, 11), (6, 11), (6, 7)] {
            pace.step(ms(100));
            pace.begin(Duration::ZERO);
            (0..written_in).for_each(|_| pace.step(ms(100)));
            pace.complete();
            assert_eq!(pace.interval(), expected, "written during {written_in} steps");
        }
    }

    /// The first steps are slower than all later ones, as if caches were cold for longer than a step.
    #[test]
    fn slow_first_steps_do_not_make_checkpoints_free() {
        let mut pace = paced();
        (0..4).for_each(|_| pace.step(ms(150)));
        let mut checkpoint = |quiet: u64| {
            (0..quiet).for_each(|_| pace.step(ms(100)));
            pace.begin(ms(10));
            pace.step(ms(100));
            pace.complete();
            pace.choice().map(|choice| (choice.cost, choice.steps))
        };
        let interval = |step: f64| (best_interval(0.01, 3600.0) / step).round() as u64;
        assert_eq!(checkpoint(0), Some((ms(10), interval(0.15))));
        // The next interval has steps enough for a median without the first ones.
        assert_eq!(checkpoint(interval(0.15)), Some((ms(10), interval(0.1))));
    }

    /// A checkpoint costs much more than the time between failures: the interval is that time.
    #[test]
    fn extreme_costs_have_a_choice() {
        let mut pace = CheckpointPace::new(Duration::from_secs(1));
        checkpoint(&mut pace, 4, &[1_000_000]);
        assert_eq!(pace.interval(), 10);
        let mut pace = CheckpointPace::new(Duration::MAX);
        checkpoint(&mut pace, 4, &[100]);
        assert!(pace.interval() > 1 << 33);
        let mut pace = CheckpointPace::new(HOUR);
        (0..4).for_each(|_| pace.step(Duration::ZERO));
        pace.begin(Duration::ZERO);
        pace.complete();
        assert_eq!(pace.interval(), 1);
    }

    #[test]
    fn a_checkpoint_without_a_beginning_changes_nothing() {
        let mut pace = paced();
        pace.step(ms(1));
        pace.complete();
        assert_eq!(pace.choice(), None);
    }
}
