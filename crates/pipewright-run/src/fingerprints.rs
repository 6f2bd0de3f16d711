//! The fingerprints of a run: the lines of its metrics, and the first difference between two runs.

use std::path::Path;
use std::sync::Arc;

use pipewright::bounded_file::read_regular;
use pipewright::checkpoint::{Digest, Fingerprint};
use pipewright_schedule::words::counted;
use serde::{Deserialize, Serialize};

use crate::error::RunError;
use crate::run_folder::{LARGEST, METRICS};
use crate::run_record::{read_error, require_run};

/// The state after a step, as a line of the metrics has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepFingerprint {
    /// The name of the event.
    pub event: FingerprintEvent,
    /// The number of the step.
    pub step: u64,
    /// The hash of the whole state.
    pub root: Digest,
    /// The hash of each trained parameter with its optimizer state, in the order of the model.
    pub parameters: Fingerprint,
    /// The parameters that differ between replicas.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unlike_replicas: Vec<Arc<str>>,
}

/// The name of the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FingerprintEvent {
    /// The state after a step was hashed.
    Fingerprint,
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
    pub(crate) fn new(step: u64, parameters: Fingerprint, unlike_replicas: Vec<Arc<str>>) -> Self {
        let (event, root) = (FingerprintEvent::Fingerprint, parameters.root());
        Self { event, step, root, parameters, unlike_replicas }
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
/// When the folder is not one of a run, its metrics cannot be read, or it has no fingerprints.
pub fn fingerprints(run: &Path) -> Result<Vec<StepFingerprint>, RunError> {
    require_run(run)?;
    let path = run.join(METRICS);
    let text = read_regular(&path, LARGEST).map_err(read_error(&path))?;
    let text = String::from_utf8_lossy(&text);
    let lines = (1..).zip(text.lines()).filter(|(_, line)| line.contains("\"event\":\"fingerprint\""));
    let read = |(number, line): (usize, &str)| {
        serde_json::from_str(line).map_err(|error| {
            RunError::input(format!("{}:{number}: not a fingerprint: {error}", path.display()))
        })
    };
    let found = lines.map(read).collect::<Result<Vec<StepFingerprint>, _>>()?;
    if let Some(forged) = found.iter().find(|found| found.root != found.parameters.root()) {
        return Err(RunError::input(format!(
            "{}: the root of step {} is not the hash of its parameters: the line was changed",
            path.display(),
            forged.step
        )));
    }
    if found.is_empty() {
        return Err(RunError::input(format!(
            "{}: the run has no fingerprints: train it with run.fingerprint_every = 1",
            run.display()
        )));
    }
    Ok(found)
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
