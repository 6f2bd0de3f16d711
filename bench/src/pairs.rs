//! [`Pairs`]: the cost of an addition to a step, from steps with it and without it in turn.
//!
//! The cost is small against the noise of a shared machine, so there are two figures. The time has what a
//! user waits for. The processor time of the process has the work alone: other programs of the machine take
//! time from it, and hardly any processor time.

use std::error::Error;
use std::fmt;
use std::fs;
use std::time::Instant;

use crate::statistics::Spread;

/// The ratios of steps with an addition to steps without it, pair by pair.
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
    pub(crate) fn measure(
        rounds: usize,
        mut step: impl FnMut(bool) -> Result<(), Box<dyn Error>>,
    ) -> Result<Self, Box<dyn Error>> {
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
fn timed(step: impl FnOnce() -> Result<(), Box<dyn Error>>) -> Result<Times, Box<dyn Error>> {
    let (began, before) = (Instant::now(), processor_seconds());
    step()?;
    let time = began.elapsed().as_secs_f64();
    let processor = processor_seconds().zip(before).map(|(after, before)| after - before);
    Ok(Times { time, processor })
}

/// Returns the processor time of the threads of this process; `None` if the system does not tell it. Threads
/// that have ended are missing, so it suits programs that keep their threads.
fn processor_seconds() -> Option<f64> {
    let nanos = fs::read_dir("/proc/self/task").ok()?.map(|task| {
        let text = fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    });
    Some(nanos.sum::<Option<u64>>()? as f64 / 1e9)
}

impl fmt::Display for Pairs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, ratios) in [("time", &self.time), ("processor time", &self.processor)] {
            let ratios = Spread::new(ratios.clone());
            let [low, high] = ratios.interval();
            writeln!(
                f,
                "  by {name:<14}  {ratios}; the true median is between {low:.3} and {high:.3} (95%)"
            )?;
        }
        write!(f, "  a step without it takes {:.3} s", Spread::new(self.seconds.clone()))
    }
}

#[cfg(test)]
mod tests {
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

    #[cfg(target_os = "linux")]
    #[test]
    fn work_takes_processor_time_and_a_pause_takes_none() {
        let times = |work: fn()| {
            timed(|| {
                work();
                Ok(())
            })
        };
        let work: fn() = || {
            let until = Instant::now() + std::time::Duration::from_millis(100);
            while Instant::now() < until {
                std::hint::black_box((0..1000_u64).sum::<u64>());
            }
        };
        let pause: fn() = || std::thread::sleep(std::time::Duration::from_millis(100));
        let [work, pause] = [work, pause].map(|step: fn()| times(step).expect("no step fails").processor);
        let [work, pause] = [work, pause].map(|seconds| seconds.expect("Linux tells it"));
        assert!(pause < work, "{pause} s and {work} s");
    }
}
