//! [`Follower`]: reads the metrics of a run while another process writes them.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use pipewright::bounded_file::{SMALL_TEXT, open_regular, read_regular_text};

use crate::error::RunError;
use crate::observer::Overview;
use crate::recovery::RESTART;
use crate::run_folder::{LARGEST, METRICS, OVERVIEW};
use crate::run_record::{MetricsLine, read_error, record_of};

/// Returns the overview of the run in a folder.
///
/// # Errors
/// Fails if the folder has no readable overview.
pub fn recorded_overview(run: &Path) -> Result<Overview, RunError> {
    let path = run.join(OVERVIEW);
    let text = read_regular_text(&path, SMALL_TEXT).map_err(|error| match error.kind() {
        ErrorKind::NotFound => RunError::input(format!(
            "{}: the run has no {OVERVIEW}, which a run writes before its first step; wait until it trains, or resume it",
            run.display()
        )),
        _ => read_error(&path)(error),
    })?;
    serde_json::from_str(&text).map_err(|error| {
        RunError::input(format!("{}: not the overview of a run: {error}; resume the run", path.display()))
    })
}

/// Reads the metrics of a run line by line, as they are written.
#[derive(Debug)]
pub struct Follower {
    run: PathBuf,
    /// The number of bytes and of lines that were read.
    bytes: u64,
    lines: usize,
    /// Whether the metrics have been read since they were created or replaced.
    has_looked: bool,
    /// The last line that was read. If the file has other bytes there, the metrics were replaced.
    last: Vec<u8>,
}

/// The records that a run has written since the last look.
#[derive(Debug)]
pub struct News {
    /// Whether these are all records of the run: at the first look, and after the run has gone back to a checkpoint.
    pub is_whole: bool,
    /// The records in their order.
    pub records: Vec<MetricsLine>,
}

impl Follower {
    /// Returns a follower of the run in a folder.
    pub fn new(run: &Path) -> Self {
        Self { run: run.to_owned(), has_looked: false, bytes: 0, lines: 0, last: Vec::new() }
    }

    /// Returns the records since the last look. A line that is being written is left for the next look.
    ///
    /// # Errors
    /// Fails if the metrics cannot be read, or if a line is broken.
    pub fn look(&mut self) -> Result<News, RunError> {
        let path = self.run.join(METRICS);
        let opened = match open_regular(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            opened => Some(opened.map_err(read_error(&path))?),
        };
        let Some(mut file) = opened else {
            let is_whole = self.bytes > 0;
            *self = Self::new(&self.run);
            return Ok(News { is_whole, records: Vec::new() });
        };
        if !self.is_at_place(&mut file).map_err(read_error(&path))? {
            *self = Self::new(&self.run);
        }
        let is_whole = !self.has_looked;
        self.has_looked = true;
        let mut text = Vec::new();
        let read =
            file.seek(SeekFrom::Start(self.bytes)).and_then(|_| file.take(LARGEST).read_to_end(&mut text));
        read.map_err(read_error(&path))?;
        let mut records = Vec::new();
        for line in text.split_inclusive(|byte| *byte == b'\n').filter(|line| line.ends_with(b"\n")) {
            self.bytes += line.len() as u64;
            self.lines += 1;
            line.clone_into(&mut self.last);
            records.extend(record_of(&path, self.lines, &String::from_utf8_lossy(line))?);
        }
        Ok(News { is_whole, records })
    }

    /// Returns whether a process writes the metrics, or `launch` is about to start the processes of the run again.
    pub fn is_under_way(&self) -> bool {
        let is_locked = |metrics: File| metrics.try_lock_shared().is_err();
        // In this order: the processes that `launch` starts must not meet this lock.
        RESTART.is_left(&self.run) || File::open(self.run.join(METRICS)).is_ok_and(is_locked)
    }

    /// Returns whether the last line that was read is still at its place.
    fn is_at_place(&self, file: &mut File) -> std::io::Result<bool> {
        let length = self.last.len();
        if file.metadata()?.len() < self.bytes {
            return Ok(false);
        }
        let mut found = vec![0; length];
        file.seek(SeekFrom::Start(self.bytes - length as u64))?;
        file.read_exact(&mut found)?;
        Ok(found == self.last)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Checks what the next look finds: whether these are all records, and their steps, negative for events.
    fn check(follower: &mut Follower, is_whole: bool, steps: &[i64]) {
        let news = follower.look().expect("metrics");
        let step = |record: &MetricsLine| match record {
            MetricsLine::Step(step) => step.step.cast_signed(),
            MetricsLine::Event(event) => -event.step().cast_signed(),
        };
        let found: Vec<i64> = news.records.iter().map(step).collect();
        assert_eq!((news.is_whole, &found[..]), (is_whole, steps));
    }

    #[test]
    fn lines_are_read_once_and_again_after_the_run_has_gone_back() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let path = folder.path().join(METRICS);
        let write = |text: &str| fs::write(&path, text).expect("the folder takes files");
        let mut follower = Follower::new(folder.path());
        check(&mut follower, false, &[]);
        let slow = "{\"event\":\"slow_rank\",\"step\":2,\"ranks\":[1],\"slowdown\":2.5}\n";
        let two = "{\"step\":1}\n{\"step\":2,\"loss\":null}\n";
        write("{\"step\"");
        check(&mut follower, true, &[]);
        check(&mut follower, false, &[]);
        write(&format!("{two}{slow}{{\"step\":3"));
        check(&mut follower, false, &[1, 2, -2]);
        check(&mut follower, false, &[]);
        write(&format!("{two}{slow}{{\"step\":3}}\n"));
        check(&mut follower, false, &[3]);
        // The run goes back to step 2, and has taken as many steps again before the next look.
        let restart = "{\"event\":\"restart\",\"step\":2,\"failed_step\":4,\"rank\":1,\"cause\":\"lost\",\"restart\":1,\"of\":3}\n";
        write(&format!("{two}{slow}{restart}{{\"step\":3,\"loss\":1}}\n"));
        check(&mut follower, true, &[1, 2, -2, -4, 3]);
        write("{\"step\":1}\n");
        check(&mut follower, true, &[1]);
        fs::remove_file(&path).expect("a file");
        check(&mut follower, true, &[]);
        check(&mut follower, false, &[]);
        write("{\"step\":1}\n\n{\"step\":}\n");
        let error = follower.look().expect_err("a broken line").to_string();
        assert!(error.contains("metrics.jsonl:3: not the metrics of a step: "), "{error}");
    }

    #[test]
    fn a_run_is_under_way_while_its_metrics_are_locked_or_a_restart_is_left() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let follower = Follower::new(folder.path());
        assert!(!follower.is_under_way());
        let metrics = File::create(folder.path().join(METRICS)).expect("a file");
        assert!(!follower.is_under_way());
        metrics.try_lock().expect("nobody else has it");
        assert!(follower.is_under_way());
        drop(metrics);
        let restart = crate::recovery::Restart::growth("b answers".to_owned(), 1, 2);
        RESTART.leave(folder.path(), &restart).expect("the folder takes files");
        assert!(follower.is_under_way());
    }

    #[test]
    fn a_folder_without_an_overview_is_refused() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let check = |expected: &str| {
            let error = recorded_overview(folder.path()).expect_err("no overview").to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(": the run has no pipewright-run.json, which a run writes before its first step; ");
        fs::write(folder.path().join(OVERVIEW), "[]").expect("a file");
        check("pipewright-run.json: not the overview of a run: ");
    }
}
