//! The fingerprints of a run: the lines of `fingerprints.jsonl` in its folder, and the first difference between two runs.
//!
//! They have a file of their own, because a line may have more than a megabyte, and the metrics are read as a whole.

use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::Path;
use std::sync::Arc;

use pipewright::bounded_file::open_regular;
use pipewright::checkpoint::{Digest, Fingerprint};
use pipewright_schedule::words::counted;
use serde::{Deserialize, Serialize};

use crate::error::RunError;
use crate::run_folder::{FINGERPRINTS, LARGEST};
use crate::run_record::{read_error, require_run};

/// The state after a step, as a line of the file has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepFingerprint {
    /// The number of the step.
    pub step: u64,
    /// The hash of the whole state.
    pub root: Digest,
    /// The hash of each trained parameter with its optimizer state, in the order of the model.
    pub parameters: Fingerprint,
    /// The parameters that differ between replicas.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unlike_replicas: Vec<Arc<str>>,
    /// Whether the run added products in the order of AMX, if the line says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uses_amx: Option<bool>,
}

/// The first step in which the fingerprints of two runs differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirstDifference {
    /// The number of the step.
    pub step: u64,
    /// The parameters that differ, in the order of the model.
    pub parameters: Vec<String>,
    /// The last step before it with equal fingerprints, if there is one.
    pub last_equal: Option<u64>,
}

impl StepFingerprint {
    pub(crate) fn new(step: u64, parameters: Fingerprint) -> Self {
        Self { step, root: parameters.root(), parameters, unlike_replicas: Vec::new(), uses_amx: None }
    }

    /// Returns a warning if replicas have different parameters.
    pub fn warning(&self) -> Option<String> {
        let first = self.unlike_replicas.first()?;
        Some(format!(
            "warning: after step {} replicas have different values of {}, the first `{first}`: a processor or a memory was \
             wrong; start again from an earlier checkpoint",
            self.step,
            counted(self.unlike_replicas.len(), "parameter")
        ))
    }
}

/// Returns the fingerprints of a run, in the order of the steps.
///
/// # Errors
/// When the folder is not one of a run, the file cannot be read, or the run has no fingerprints.
pub fn fingerprints(run: &Path) -> Result<Vec<StepFingerprint>, RunError> {
    let mut all = Vec::new();
    for_each_fingerprint(run, |fingerprint| all.push(fingerprint))?;
    Ok(all)
}

/// Reads the fingerprints of a run in the order of the steps, one at a time. A last line without a line end is being written,
/// so it is left out if it is incomplete.
pub(crate) fn for_each_fingerprint(
    run: &Path,
    mut visit: impl FnMut(StepFingerprint),
) -> Result<(), RunError> {
    require_run(run)?;
    let path = run.join(FINGERPRINTS);
    let mut file = match open_regular(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(without_fingerprints(run)),
        opened => BufReader::new(opened.map_err(read_error(&path))?),
    };
    let (mut text, mut is_empty) = (Vec::new(), true);
    for line in 1u64.. {
        text.clear();
        file.by_ref().take(LARGEST).read_until(b'\n', &mut text).map_err(read_error(&path))?;
        let found: StepFingerprint = match serde_json::from_slice(&text) {
            Ok(found) => found,
            // The end of the file, or an incomplete line.
            Err(_) if !text.ends_with(b"\n") => break,
            Err(error) => {
                let error = format!("{}:{line}: not a fingerprint: {error}", path.display());
                return Err(RunError::input(error));
            }
        };
        if found.root != found.parameters.root() {
            return Err(RunError::input(format!(
                "{}: the root of step {} is not the hash of its parameters: the line was changed",
                path.display(),
                found.step
            )));
        }
        is_empty = false;
        visit(found);
    }
    if is_empty { Err(without_fingerprints(run)) } else { Ok(()) }
}

fn without_fingerprints(run: &Path) -> RunError {
    RunError::input(format!(
        "{}: the run has no fingerprints: train it with run.fingerprint_every = 1",
        run.display()
    ))
}

/// Returns the first step in which two runs differ, of the steps that both have.
///
/// # Errors
/// When the runs have no step in common.
pub fn first_difference(
    one: &[StepFingerprint],
    other: &[StepFingerprint],
) -> Result<Option<FirstDifference>, RunError> {
    let mut last_equal = None;
    for own in one {
        let Some(found) = other.iter().find(|found| found.step == own.step) else { continue };
        let parameters = own.parameters.differences(&found.parameters);
        if !parameters.is_empty() {
            let parameters = parameters.into_iter().map(str::to_owned).collect();
            return Ok(Some(FirstDifference { step: own.step, parameters, last_equal }));
        }
        last_equal = Some(own.step);
    }
    if last_equal.is_none() {
        return Err(RunError::input(
            "the two runs have no step with a fingerprint in common: train both with the same run.fingerprint_every",
        ));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::run_folder::METRICS;

    #[test]
    fn a_line_that_is_being_written_is_left_out_and_a_broken_one_is_named() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        fs::write(folder.path().join(METRICS), "").expect("it takes files");
        let line = |step| {
            let found = StepFingerprint::new(step, Fingerprint::default());
            serde_json::to_string(&found).expect("a line")
        };
        let read = |text: &str| {
            fs::write(folder.path().join(FINGERPRINTS), text).expect("it takes files");
            let steps =
                |found: Vec<StepFingerprint>| found.iter().map(|found| found.step).collect::<Vec<_>>();
            fingerprints(folder.path()).map(steps).map_err(|error| error.text())
        };
        let (one, two) = (line(1), line(2));
        assert_eq!(read(&format!("{one}\n{}", &two[..two.len() / 2])).as_deref(), Ok(&[1][..]));
        assert_eq!(read(&format!("{one}\n{two}")).as_deref(), Ok(&[1, 2][..]));
        let broken = read(&format!("{one}\n{}\n{two}\n", &two[..two.len() / 2])).expect_err("a broken line");
        assert!(broken.contains("fingerprints.jsonl:2: not a fingerprint"), "{broken}");
        for text in ["", &two[..9]] {
            let none = read(text).expect_err("no whole line");
            assert!(none.contains("the run has no fingerprints"), "{none}");
        }
    }
}
