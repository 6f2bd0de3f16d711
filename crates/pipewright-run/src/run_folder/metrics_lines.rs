//! The lines of the metrics when a run resumes: the lines that stay, the sentences about the others, and the results of
//! an evaluation that are added to the line of a step.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use pipewright::bounded_file::{open_regular_with, read_regular};
use pipewright::train::{Metrics, Sample, SourceLoss};
use pipewright_schedule::words::counted;
use pipewright_system::lock_file::LockFile;
use serde::Serialize;
use serde_json::Value;

use crate::run_folder::error::{RunFolderError, write_error};
use crate::run_folder::lock::locked;
use crate::run_folder::paths::{LARGEST, METRICS};

/// A complete line of the metrics: the figures of a step, or an event between two steps.
pub(super) struct Line {
    pub(super) step: u64,
    is_event: bool,
    figures: Value,
}

impl Line {
    /// Reads a line with its end; `None` if it is broken.
    pub(super) fn read(line: &[u8]) -> Option<Self> {
        let figures: Value = serde_json::from_slice(line).ok().filter(|_| line.ends_with(b"\n"))?;
        Some(Self { step: figures.get("step")?.as_u64()?, is_event: figures.get("event").is_some(), figures })
    }
}

/// Returns the losses of the steps up to `done` of the run in a folder, as far as its metrics have them.
pub fn losses(run: &Path, done: u64) -> Vec<f64> {
    let metrics = read(run).unwrap_or_default();
    let lines = metrics.split_inclusive(|byte| *byte == b'\n').map_while(Line::read);
    lines.take_while(|line| line.step <= done).filter_map(|line| line.figures.get("loss")?.as_f64()).collect()
}

/// The lines of the metrics of a run that resumes after a step.
#[derive(Debug, Default)]
pub(super) struct MetricsLines {
    /// The lines that stay.
    pub(super) kept: Vec<u8>,
    /// The lines that do not stay.
    pub(super) dropped: Vec<u8>,
    /// The lines that do not stay because they are of later steps.
    later: usize,
    /// The first and the last step of these lines.
    later_steps: Option<(u64, u64)>,
    /// The lines that do not stay because they are broken. A process that was killed may have left a part of one.
    broken: usize,
    /// The first and the last step of each range of steps that the run has taken, without a line.
    missing: Vec<(u64, u64)>,
    /// The time that the run has taken.
    pub(super) elapsed: Duration,
}

impl MetricsLines {
    /// Sorts the lines of a run that resumes after step `done`.
    pub(super) fn of(metrics: &[u8], done: u64) -> Self {
        let (mut lines, mut steps) = (Self::default(), BTreeSet::new());
        for line in metrics.split_inclusive(|byte| *byte == b'\n') {
            let Some(Line { step, is_event, figures }) = Line::read(line) else {
                lines.broken += usize::from(!line.trim_ascii().is_empty());
                lines.dropped.extend(line);
                continue;
            };
            if step > done {
                lines.later += 1;
                let (first, last) = lines.later_steps.unwrap_or((step, step));
                lines.later_steps = Some((first.min(step), last.max(step)));
                lines.dropped.extend(line);
                continue;
            }
            lines.kept.extend(line);
            if !is_event {
                steps.insert(step);
                let elapsed = figures.get("elapsed_s").and_then(Value::as_f64).unwrap_or_default();
                lines.elapsed = Duration::try_from_secs_f64(elapsed).unwrap_or_default();
            }
        }
        lines.missing = missing(&steps, done);
        lines
    }

    /// Returns a sentence about the lines that do not stay, which are in the file `aside`.
    pub(super) fn moved_to(&self, done: u64, aside: &Path) -> Option<String> {
        let aside = aside.display();
        let broken = (self.broken > 0).then(|| counted(self.broken, "broken line"));
        match (self.later_steps, broken) {
            (Some(steps), broken) => {
                let (lines, steps) = (counted(self.later, "line"), range(steps));
                let broken = broken.map(|broken| format!(", and {broken}")).unwrap_or_default();
                Some(format!(
                    "moved the metrics of steps after {done} to {aside}: {lines} of {steps}{broken}"
                ))
            }
            (None, Some(broken)) => Some(format!("moved {broken} of the metrics to {aside}")),
            (None, None) => None,
        }
    }

    /// Returns a warning if steps that the run has taken have no line.
    pub(super) fn lost(&self, metrics: &Path) -> Option<String> {
        let missing: Vec<String> = self.missing.iter().map(|&steps| range(steps)).collect();
        (!missing.is_empty()).then(|| {
            format!(
                "warning: {}: the metrics of {} are lost, for example because the machine stopped before it had \
                 written them: reports and curves lack these steps, and the run continues without them",
                metrics.display(),
                missing.join(", ")
            )
        })
    }
}

/// Returns the ranges of the steps up to `done` that are not among these.
fn missing(steps: &BTreeSet<u64>, done: u64) -> Vec<(u64, u64)> {
    let ends = steps.iter().copied().chain([done.saturating_add(1)]);
    let mut next = 1;
    let mut missing = Vec::new();
    for step in ends {
        if step > next {
            missing.push((next, step - 1));
        }
        next = step + 1;
    }
    missing
}

fn range((first, last): (u64, u64)) -> String {
    if first == last { format!("step {first}") } else { format!("steps {first} to {last}") }
}

/// The results of an evaluation, named and ordered as in [`Metrics`].
#[derive(Serialize)]
struct Results<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    validation_loss: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    validation_perplexity: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    validation_accuracy: Option<f64>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    validation_sources: &'a [SourceLoss],
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    samples: &'a [Sample],
}

/// Returns the metrics with the results of an evaluation in the line of its step; `None` if that step has no line,
/// or its line has such results.
pub(super) fn with_evaluation(text: &str, evaluated: &Metrics) -> Option<String> {
    /// The member after the results in the line of a step. A quotation mark inside a text has a backslash.
    const NEXT: &str = ",\"bubble_per_rank\":";
    let mut start = text.len();
    let (line, Line { figures, .. }) = text.split_inclusive('\n').rev().find_map(|text| {
        start -= text.len();
        let line =
            Line::read(text.as_bytes()).filter(|line| line.step == evaluated.step && !line.is_event)?;
        Some((text, line))
    })?;
    if figures.get("validation_loss").is_some() || figures.get("samples").is_some() {
        return None;
    }
    let results = Results {
        validation_loss: evaluated.validation_loss,
        validation_perplexity: evaluated.validation_perplexity,
        validation_accuracy: evaluated.validation_accuracy,
        validation_sources: &evaluated.validation_sources,
        samples: &evaluated.samples,
    };
    let results = serde_json::to_string(&results).expect("figures can be written as JSON");
    let results = results.strip_prefix('{')?.strip_suffix('}').filter(|results| !results.is_empty())?;
    let at = start + line.find(NEXT).or_else(|| line.rfind('}'))?;
    Some(format!("{},{results}{}", &text[..at], &text[at..]))
}

/// Returns the metrics of a run.
pub(super) fn read(run: &Path) -> Result<Vec<u8>, RunFolderError> {
    let path = run.join(METRICS);
    read_regular(&path, LARGEST).map_err(write_error(&path))
}

/// Replaces the metrics in one step, so that neither a reader nor a kill finds a part of them. Returns the locked
/// file, open for appending.
pub(super) fn replace(run: &Path, text: &[u8]) -> Result<LockFile, RunFolderError> {
    let (path, draft) = (run.join(METRICS), run.join(format!(".{METRICS}")));
    let written = write_locked(&draft, text);
    let renamed = written.and_then(|file| {
        fs::rename(&draft, &path).map_err(write_error(&path))?;
        Ok(file)
    });
    renamed.inspect_err(|_| {
        // Best effort: the file may not exist.
        let _ = fs::remove_file(&draft);
    })
}

fn write_locked(draft: &Path, text: &[u8]) -> Result<LockFile, RunFolderError> {
    let opened = open_regular_with(draft, File::options().append(true).create(true));
    let mut file = locked(opened.map_err(write_error(draft))?, draft)?;
    let written = file.set_len(0).and_then(|()| file.write_all(text)).and_then(|()| file.sync_all());
    written.map_err(write_error(draft))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, done: u64, kept: &str, moved: Option<&str>, lost: Option<&str>) {
        let lines = MetricsLines::of(text.as_bytes(), done);
        assert_eq!(String::from_utf8_lossy(&lines.kept), kept, "{text}");
        assert_eq!(lines.kept.len() + lines.dropped.len(), text.len(), "no line is lost");
        assert_eq!(lines.moved_to(done, Path::new("aside")).as_deref(), moved, "{text}");
        let warning = lines.lost(Path::new("m")).unwrap_or_default();
        let expected = lost.map(|steps| format!("warning: m: the metrics of {steps} are lost, "));
        assert!(warning.starts_with(expected.as_deref().unwrap_or_default()), "{warning}");
        assert_eq!(warning.is_empty(), lost.is_none(), "{warning}");
    }

    #[test]
    fn lines_that_do_not_stay_and_lines_that_are_lost_are_named() {
        const LINES: &str = "{\"step\":1}\n{\"step\":2}\n{\"event\":\"restart\",\"step\":2}\n{\"step\":3}\n";
        let two = &LINES[..LINES.rfind("{\"step\":3}").expect("the last line")];
        check(LINES, 3, LINES, None, None);
        let one_line = "moved the metrics of steps after 2 to aside: 1 line of step 3";
        check(LINES, 2, two, Some(one_line), None);
        check(
            LINES,
            0,
            "",
            Some("moved the metrics of steps after 0 to aside: 4 lines of steps 1 to 3"),
            None,
        );
        check(&format!("{LINES}{{\"st"), 3, LINES, Some("moved 1 broken line of the metrics to aside"), None);
        check(
            &format!("{LINES}{{\"st"),
            2,
            two,
            Some("moved the metrics of steps after 2 to aside: 1 line of step 3, and 1 broken line"),
            None,
        );
        check(LINES, 5, LINES, None, Some("steps 4 to 5"));
        check("", 1, "", None, Some("step 1"));
        // A torn line contains the next one.
        let torn = "{\"step\":1}\n{\"st{\"step\":3}\n{\"step\":4}\n";
        let rest = "{\"step\":1}\n{\"step\":4}\n";
        check(
            torn,
            6,
            rest,
            Some("moved 1 broken line of the metrics to aside"),
            Some("steps 2 to 3, steps 5 to 6"),
        );
    }

    #[test]
    fn the_results_of_an_evaluation_stand_where_the_step_would_have_them() {
        let of_step = Metrics { step: 2, bubble_per_rank: vec![0.5], ..Metrics::default() };
        let evaluated = Metrics {
            validation_loss: Some(2.5),
            samples: vec![Sample { prompt: "a \"".to_owned(), text: ",\"bubble_per_rank\":".to_owned() }],
            ..of_step.clone()
        };
        let line = |metrics: &Metrics| serde_json::to_string(metrics).expect("an object") + "\n";
        let around = |line: String| format!("{{\"step\":1}}\n{line}{{\"event\":\"slow_rank\",\"step\":2}}\n");
        let (before, after) = (around(line(&of_step)), around(line(&evaluated)));
        assert_eq!(with_evaluation(&before, &evaluated).as_ref(), Some(&after));
        assert_eq!(with_evaluation(&after, &evaluated), None, "the line has them");
        assert_eq!(with_evaluation("{\"step\":1}\n", &evaluated), None, "the line is lost");
    }
}
