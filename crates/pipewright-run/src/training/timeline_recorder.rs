//! Chooses the steps of a run whose timelines are kept: the first one, steps in equal distances, and the
//! slowest so far.

use pipewright_schedule::Timeline;

use crate::run_folder::{RunFolder, RunFolderError};

/// The number of a process's first steps that do not count as slow: caches and memory are still cold.
const WARM_UP: u64 = 3;

/// The choice of steps.
#[derive(Debug)]
pub(crate) struct TimelineRecorder {
    /// The distance of regular steps; 0 keeps none.
    every: u64,
    /// The last step that does not count as slow.
    cold_until: u64,
    /// The slowest step and its seconds.
    slowest: Option<(u64, f64)>,
}

impl TimelineRecorder {
    /// Returns the choice for a run of `steps` steps whose first `done` steps are finished. About `kept`
    /// timelines are kept.
    pub(crate) fn new(done: u64, steps: u64, kept: u64) -> Self {
        let every = if kept == 0 { 0 } else { steps.div_ceil(kept).max(1) };
        Self { every, cold_until: done.saturating_add(WARM_UP), slowest: None }
    }

    /// Keeps the timeline of a step if it is chosen. The timeline of an earlier slowest step is removed.
    ///
    /// # Errors
    /// Fails if a file cannot be written or removed.
    pub(crate) fn record(
        &mut self,
        folder: &RunFolder,
        step: u64,
        timeline: &Timeline,
    ) -> Result<(), RunFolderError> {
        if self.every == 0 {
            return Ok(());
        }
        let seconds = timeline.makespan();
        let is_slowest = step > self.cold_until && self.slowest.is_none_or(|(_, slowest)| seconds > slowest);
        let replaced = if is_slowest { self.slowest.replace((step, seconds)) } else { None };
        if let Some((earlier, _)) = replaced.filter(|(earlier, _)| !self.is_regular(*earlier)) {
            folder.drop_timeline(earlier)?;
        }
        if is_slowest || self.is_regular(step) {
            folder.keep_timeline(step, &timeline.chrome_trace())?;
        }
        Ok(())
    }

    /// Keeps the timelines of these steps, unless none are kept.
    ///
    /// # Errors
    /// Fails if a file cannot be written.
    pub(crate) fn keep(
        &self,
        folder: &RunFolder,
        mut steps: impl Iterator<Item = (u64, Timeline)>,
    ) -> Result<(), RunFolderError> {
        let keep = |(step, timeline): (u64, Timeline)| folder.keep_timeline(step, &timeline.chrome_trace());
        if self.every == 0 { Ok(()) } else { steps.try_for_each(keep) }
    }

    fn is_regular(&self, step: u64) -> bool {
        step == 1 || step.is_multiple_of(self.every)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_folder::kept_timelines;
    use pipewright_schedule::{Event, Rank};

    /// Records steps that take these seconds, and returns the steps that are kept.
    fn check(kept: u64, seconds: &[f64], expected: &[u64]) {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let folder = RunFolder::create(&scratch.path().join("run"), "", &[]).expect("it takes files");
        let mut recorder = TimelineRecorder::new(0, seconds.len() as u64, kept);
        for (step, &end) in (1..).zip(seconds) {
            let action = "0F0".parse().expect("an action");
            let event = Event { rank: Rank::new(0), action, start: 0.0, end };
            recorder.record(&folder, step, &Timeline::new(1, vec![event])).expect("it takes files");
        }
        let found: Vec<u64> =
            kept_timelines(folder.path()).expect("a folder").into_iter().map(|(step, _)| step).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn regular_steps_and_the_slowest_are_kept() {
        let mut seconds = [1.0; 12];
        check(3, &seconds, &[1, 4, 8, 12]);
        seconds[1] = 9.0;
        seconds[4] = 2.0;
        seconds[6] = 3.0;
        check(3, &seconds, &[1, 4, 7, 8, 12]);
        check(0, &seconds, &[]);
        check(100, &seconds, &(1..=12).collect::<Vec<u64>>());
    }
}
