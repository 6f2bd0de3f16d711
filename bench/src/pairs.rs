//! [`Pairs`]: the cost of an addition to a step, from steps with it and without it in turn.
//!
//! The cost is small against the noise of a shared machine, so there are two figures. The time has what a
//! user waits for. The processor time of the process has the work alone: other programs of the machine take
//! time from it, and hardly any processor time.

use std::fmt;
use std::fs;
use std::path::Path;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::harness::{Outcome, Spread};

/// The ratios of steps with an addition to steps without it, pair by pair.
#[derive(Serialize, Deserialize)]
pub(crate) struct Pairs {
    pub(crate) time: Vec<f64>,
    /// Empty if the system does not tell processor times.
    pub(crate) processor: Vec<f64>,
    /// The seconds of the steps without the addition.
    pub(crate) seconds: Vec<f64>,
}

/// The seconds of a step, and of processor time of all threads in it.
#[derive(Clone, Copy, Default)]
struct Times {
    time: f64,
    processor: Option<f64>,
}

impl Pairs {
    /// Takes `rounds` pairs of steps. `step` takes one, with the addition if its argument is true. A pair
    /// before them allocates memory that the others reuse, and does not count. Every second pair begins with
    /// the step that has the addition, so that a machine that becomes slower or faster favours neither.
    pub(crate) fn measure(rounds: usize, mut step: impl FnMut(bool) -> Outcome) -> Outcome<Self> {
        let mut pairs = Self { time: Vec::new(), processor: Vec::new(), seconds: Vec::new() };
        for round in 0..=rounds {
            let begins_with = round.is_multiple_of(2);
            let mut times = [Times::default(); 2];
            for has_addition in [begins_with, !begins_with] {
                times[usize::from(has_addition)] = timed(|| step(has_addition))?;
            }
            let [without, with] = times;
            if round > 0 {
                pairs.time.push(with.time / without.time);
                pairs.seconds.push(without.time);
                let processor = with.processor.zip(without.processor);
                pairs.processor.extend(processor.map(|(with, without)| with / without));
            }
        }
        Ok(pairs)
    }
}

/// Returns the times of a step.
fn timed(step: impl FnOnce() -> Outcome) -> Outcome<Times> {
    let (began, before) = (Instant::now(), processor_seconds());
    step()?;
    let time = began.elapsed().as_secs_f64();
    let processor = processor_seconds().zip(before).map(|(after, before)| after - before);
    Ok(Times { time, processor })
}

/// Returns the processor time of the threads of this process; `None` if the system does not tell it. Threads
/// that have ended are missing, so it suits programs that keep their threads.
fn processor_seconds() -> Option<f64> {
    let threads = fs::read_dir("/proc/self/task").ok()?.flatten();
    // A thread may end while the others are read.
    let seconds: Vec<f64> = threads.filter_map(|thread| seconds_of_thread(&thread.path())).collect();
    (!seconds.is_empty()).then(|| seconds.iter().sum())
}

/// Returns the processor time of the thread with this folder of the system; `None` if the system does not
/// tell it.
fn seconds_of_thread(folder: &Path) -> Option<f64> {
    let text = fs::read_to_string(folder.join("schedstat")).ok()?;
    let nanos: u64 = text.split_whitespace().next()?.parse().ok()?;
    Some(nanos as f64 / 1e9)
}

impl fmt::Display for Pairs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = [("time", &self.time), ("processor time", &self.processor)];
        for (name, ratios) in kinds.into_iter().filter(|(_, ratios)| !ratios.is_empty()) {
            let ratios = Spread::new(ratios.clone());
            write!(f, "  by {name:<14}  {ratios}")?;
            if let Some([low, high]) = ratios.interval() {
                write!(f, "; the true median is between {low:.3} and {high:.3} (95%)")?;
            }
            writeln!(f)?;
        }
        write!(f, "  a step without it takes {:.3} s", Spread::new(self.seconds.clone()))
    }
}

#[cfg(test)]
mod tests {
    #[cfg(target_os = "linux")]
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_kind_of_step_begins_every_second_pair() {
        let mut steps = Vec::new();
        let pairs = Pairs::measure(3, |has_addition| {
            steps.push(has_addition);
            Ok(())
        });
        let pairs = pairs.expect("no step fails");
        assert_eq!(steps, [true, false, false, true, true, false, false, true]);
        assert_eq!((pairs.time.len(), pairs.seconds.len()), (3, 3));
    }

    #[test]
    fn unknown_processor_times_are_not_printed() {
        let pairs = Pairs { time: vec![1.5], processor: Vec::new(), seconds: vec![2.0] };
        let text = pairs.to_string();
        assert!(text.contains("by time") && !text.contains("processor"), "{text}");
        assert!(!text.contains("95%"), "a single pair: {text}");
    }

    /// Other tests run in threads of the same process, so the time of this thread counts.
    #[cfg(target_os = "linux")]
    #[test]
    fn work_takes_processor_time_and_a_pause_takes_none() {
        let own = || seconds_of_thread(Path::new("/proc/thread-self")).expect("Linux tells it");
        let took = |step: fn()| {
            let before = own();
            step();
            own() - before
        };
        let work = took(|| {
            let until = Instant::now() + Duration::from_millis(100);
            while Instant::now() < until {
                std::hint::black_box((0..1000_u64).sum::<u64>());
            }
        });
        let pause = took(|| std::thread::sleep(Duration::from_millis(100)));
        assert!(pause < work, "{pause} s and {work} s");
        let before = own();
        assert!(processor_seconds().expect("Linux tells it") >= before, "this thread counts");
    }
}
