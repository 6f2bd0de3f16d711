//! [`audit`]: computes one stage of one step of a run again, and compares its state with the recorded fingerprint.
//!
//! The audit starts from the checkpoint before the step and the configuration of the run, on the processor of one machine. It
//! cuts the model as the run does, but gives each stage its own rank, and replays these ranks one at a time, or
//! those that compute a stage together ([`StepReplay`](pipewright::pipeline::StepReplay)), so that one stage is in memory. The bits do not depend on where stages
//! are, or on the order of their computations, so a run on other ranks, under another schedule, or with other numbers of threads has the same.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use pipewright::batch::{Batch, SplitRule};
use pipewright::checkpoint::{Checkpoint, CheckpointFolder, Fingerprint};
use pipewright::train::StepSizes;
use pipewright_schedule::StageIndex;
use pipewright_schedule::words::counted;

use crate::error::RunError;
use crate::fingerprints::{StepFingerprint, for_each_fingerprint};
use crate::resume::Resumption;
use crate::run_folder::checkpoints_of;
use crate::run_record::metrics;
use crate::settings::Loaded;
use crate::settings::mesh::MeshSettings;
use crate::training::exact::uses_amx;
use crate::training::identity::{describe, require_same};
use crate::training::launch::failure;
use crate::training::model::read_model;
use crate::training::prepare::{Prepared, prepare, prepare_settings};
use crate::training::rate_change::rates;
use crate::training::step_replay::replay;

/// The result of an audit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Audit {
    /// The number of the step.
    pub step: u64,
    /// The stage.
    pub stage: u32,
    /// The number of its parameters that were compared.
    pub parameters: usize,
    /// The differences from the record, in the order in which they were found. Later findings may follow from earlier ones.
    pub findings: Vec<Finding>,
    /// The claims that were not compared because the run has no record of them.
    pub uncompared: Vec<String>,
}

/// A part of a run that is not as recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The number of the step.
    pub step: u64,
    /// The stage; `None` if the data of the step is meant.
    pub stage: Option<u32>,
    /// A sentence about it.
    pub sentence: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.stage {
            Some(stage) => write!(f, "step {}, stage {stage}: {}", self.step, self.sentence),
            None => write!(f, "step {}: {}", self.step, self.sentence),
        }
    }
}

/// Computes a stage of a step of the run in a folder again.
///
/// # Errors
/// When the run has no fingerprint of the step or no checkpoint before it, when one stage at a time cannot compute its step
/// or this processor adds products in another order,
/// or when the checkpoint has another model or other data.
pub fn audit(run: &Path, step: u64, stage: u32) -> Result<Audit, RunError> {
    let records = Records::read(run, step)?;
    let checkpoint = checkpoint_before(run, step, &records.steps)?;
    let prepared = prepared(run, checkpoint.as_deref())?;
    require_auditable(&prepared, stage, &records.of_step)?;
    let done = step - 1;
    let (mut findings, mut uncompared) = (Vec::new(), Vec::new());
    let (batches, continues) = batches_of(&prepared, checkpoint.as_deref(), done)?;
    if let Some(sentence) = continues {
        findings.push(Finding { step, stage: None, sentence });
    }
    let learning_rate = rates(&prepared.settings).at(done);
    let mut replay = replay(&prepared, checkpoint.as_ref(), batches, learning_rate)?;
    let found = replay.stage(StageIndex::new(stage)).map_err(|error| failure(&error))?;
    if let Some(before) = &records.before {
        for (index, state) in replay.states_before() {
            let changed = unlike(&state, before);
            let sentence =
                changed.map(|what| format!("its checkpoint is not the state of the fingerprint: {what}"));
            findings.extend(sentence.map(|sentence| Finding {
                step: done,
                stage: Some(index.get()),
                sentence,
            }));
        }
    } else if checkpoint.is_some() {
        uncompared.push(format!("the checkpoint of step {done} (the step has no fingerprint)"));
    }
    let of_stage = |sentence| Finding { step, stage: Some(stage), sentence };
    findings.extend(unlike(&found.fingerprint, &records.of_step).map(of_stage));
    let norm = metrics(run)?.into_iter().find(|line| line.step == step).and_then(|line| line.grad_norm);
    let unlike_norm = norm.and_then(|norm| unlike_norm(norm, found.gradient_norm));
    findings.extend(unlike_norm.map(|sentence| Finding { step, stage: None, sentence }));
    uncompared.extend(norm.is_none().then(|| "the gradient norm (the metrics do not have it)".to_owned()));
    let parameters = found.fingerprint.parameters().count();
    Ok(Audit { step, stage, parameters, findings, uncompared })
}

/// Returns the fingerprint of the state in which a run with these settings begins. One stage is in memory at a time.
///
/// # Errors
/// When the settings, the model or the data are wrong.
pub fn initial(settings: Loaded) -> Result<Fingerprint, RunError> {
    let model = read_model(&settings.settings)?;
    let scheduled = settings.scheduled().map_err(|_| {
        RunError::input(
            "`pipeline.schedule` is \"auto\": name a schedule; the initial state does not depend on it",
        )
    })?;
    let mut prepared = prepare(scheduled, Arc::new(model))?;
    // Whole parameters, on a rank that computes its stage alone.
    let mesh = prepared.settings.mesh.of_replicas(1);
    prepared.settings.mesh =
        MeshSettings { tensor_parallel: 1, sequence_parallel: false, whole_experts: false, ..mesh };
    let stages = prepared.partition.stages();
    let mut replay = replay(&prepared, None, Vec::new(), 0.0)?;
    let mut parts = Vec::new();
    for stage in 0..stages {
        parts.push(replay.state_before(StageIndex::new(stage)).map_err(|error| failure(&error))?);
    }
    Ok(Fingerprint::joined(parts))
}

/// Returns how a state differs from a recorded one; `None` if its parameters are as recorded.
fn unlike(state: &Fingerprint, recorded: &StepFingerprint) -> Option<String> {
    let known: HashMap<&str, _> = recorded.parameters.parameters().collect();
    let unlike: Vec<&str> = state
        .parameters()
        .filter(|(path, digest)| known.get(path) != Some(digest))
        .map(|(path, _)| path)
        .collect();
    let first = unlike.first()?;
    let all = counted(state.parameters().count(), "parameter");
    Some(format!("{} of {all} differ, the first `{first}`", unlike.len()))
}

/// Returns how a computed gradient norm differs from the recorded one. The reader of JSON may round a number to a
/// neighbour, so the computed one is written and read as the recorded one was.
fn unlike_norm(recorded: f64, computed: f64) -> Option<String> {
    let text = serde_json::to_string(&computed).expect("a number can be written as JSON");
    let as_read: Option<f64> = serde_json::from_str(&text).expect("JSON has the number, or null");
    (as_read.map(f64::to_bits) != Some(recorded.to_bits()))
        .then(|| format!("the recorded gradient norm is {recorded}, and the computed one {computed}"))
}

/// The fingerprints that an audit of a step needs.
struct Records {
    /// The steps that have a fingerprint.
    steps: Vec<u64>,
    of_step: StepFingerprint,
    /// The fingerprint of the step before.
    before: Option<StepFingerprint>,
}

impl Records {
    fn read(run: &Path, step: u64) -> Result<Self, RunError> {
        let (mut steps, mut of_step, mut before) = (Vec::new(), None, None);
        for_each_fingerprint(run, |record| {
            steps.push(record.step);
            if record.step == step {
                of_step = Some(record);
            } else if record.step.checked_add(1) == Some(step) {
                before = Some(record);
            }
        })?;
        let of_step = of_step.ok_or_else(|| {
            RunError::input(format!(
                "the run has no fingerprint of step {step}; it has those of steps {}",
                listed(&steps)
            ))
        })?;
        Ok(Self { steps, of_step, before })
    }
}

/// Returns the first three and the last one of a list of numbers, or all if there are few.
fn listed(numbers: &[u64]) -> String {
    let words = |numbers: &[u64]| numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    match numbers {
        [first @ .., last] if numbers.len() > 8 => format!("{}, ..., {last}", words(&first[..3])),
        _ => words(numbers),
    }
}

/// Opens the checkpoint of the step before this one; `None` before the first step. `recorded` are the steps with a fingerprint.
fn checkpoint_before(run: &Path, step: u64, recorded: &[u64]) -> Result<Option<Arc<Checkpoint>>, RunError> {
    if step == 1 {
        return Ok(None);
    }
    let all = CheckpointFolder::list(&checkpoints_of(run)).map_err(RunError::input)?;
    if let Some((_, path)) = all.iter().find(|(saved, _)| saved + 1 == step) {
        return Ok(Some(Arc::new(Checkpoint::open(path).map_err(RunError::input)?)));
    }
    let has_start = |step: u64| step == 1 || all.iter().any(|(saved, _)| saved + 1 == step);
    let steps: Vec<u64> = recorded.iter().copied().filter(|&step| has_start(step)).collect();
    let others = if steps.is_empty() {
        String::new()
    } else {
        format!("audit one of the steps {}, or ", listed(&steps))
    };
    Err(RunError::input(format!(
        "{}: an audit of step {step} needs the checkpoint of step {}, which the run does not have: {others}train with another \
         run.checkpoint_every and run.keep_checkpoints",
        run.display(),
        step.saturating_sub(1),
    )))
}

/// Prepares the run in a folder, and checks that the checkpoint is of the same model and data.
fn prepared(run: &Path, checkpoint: Option<&Checkpoint>) -> Result<Prepared, RunError> {
    let loaded = Resumption::new(run, &[])?.load()?;
    let model = read_model(&loaded.settings)?;
    let scheduled = loaded
        .scheduled()
        .map_err(|_| RunError::input("`pipeline.schedule` is \"auto\": name a schedule"))?;
    let prepared = prepare_settings(scheduled, Arc::new(model))?;
    if let Some(checkpoint) = checkpoint {
        require_same(&describe(&prepared)?, checkpoint)?;
    }
    Ok(prepared)
}

/// Refuses runs whose bits one stage at a time on this processor does not have.
fn require_auditable(prepared: &Prepared, stage: u32, of_step: &StepFingerprint) -> Result<(), RunError> {
    let Prepared { settings, partition, .. } = prepared;
    let with = if of_step.uses_amx == Some(true) { "with" } else { "without" };
    let reasons = [
        (stage >= partition.stages(), format!("the run has {}", counted(partition.stages(), "stage"))),
        (
            !settings.run.devices.are_processor(),
            "the run computes on another device than the processor (`run.device`)".to_owned(),
        ),
        (
            of_step.uses_amx.is_some_and(|used| used != uses_amx(&settings.run)),
            format!(
                "the run added the products of step {} {with} AMX, which has an order of its own: audit it on a processor {with} \
                 AMX, or train with `run.exact = \"everywhere\"`",
                of_step.step,
            ),
        ),
        (settings.preference.is_some(), "preference training needs the reference of all records".to_owned()),
    ];
    match reasons.into_iter().find(|(refused, _)| *refused) {
        Some((_, reason)) => Err(RunError::input(format!("stage {stage} cannot be audited: {reason}"))),
        None => Ok(()),
    }
}

/// Reads the batches of the step after `done` steps, and compares the checkpoint's place in the data with the
/// configuration. Returns a sentence if they differ.
fn batches_of(
    prepared: &Prepared,
    checkpoint: Option<&Checkpoint>,
    done: u64,
) -> Result<(Vec<Batch>, Option<String>), RunError> {
    let (settings, mut rows) = (&prepared.settings, prepared.rows.clone());
    let (batches, rampup_steps) = (settings.run.accumulate, settings.run.rampup_steps);
    let sizes = StepSizes { batch_rows: settings.pipeline.rows(), batches, rampup_steps };
    if let Some(checkpoint) = checkpoint {
        rows.seek(checkpoint.manifest().cursor).map_err(RunError::input)?;
    }
    let (found, expected) = (rows.tokens_seen() / rows.seq_len() as u64, sizes.rows_of(done));
    let sentence = (found != expected).then(|| {
        format!(
            "the checkpoint continues after {found} rows of the data, and the configuration takes {expected} rows in {}",
            counted(usize::try_from(done).unwrap_or(usize::MAX), "step")
        )
    });
    let microbatches = prepared.program.microbatches() / prepared.program.slices().get();
    let microbatches = microbatches * settings.mesh.data_parallel;
    let rule = SplitRule::shared(microbatches, &settings.mesh.batch_shares);
    let batches = sizes.read(&mut rows, done, &rule).map_err(|error| failure(&error))?;
    Ok((batches, sentence))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_folder::METRICS;

    #[test]
    fn long_lists_are_not_ranges() {
        assert_eq!(listed(&[1, 5, 7]), "1, 5, 7");
        let fifths: Vec<u64> = (1..=9).map(|number| 5 * number).collect();
        assert_eq!(listed(&fifths), "5, 10, 15, ..., 45");
    }

    #[test]
    fn a_norm_is_compared_as_the_metrics_give_it_back() {
        // Without the feature `float_roundtrip` of serde_json, the first number comes back with another last bit.
        for norm in [0.11738091495237067, 0.25, f64::MIN_POSITIVE] {
            let folder = tempfile::tempdir().expect("a scratch folder");
            let line = serde_json::json!({ "step": 1, "grad_norm": norm }).to_string() + "\n";
            std::fs::write(folder.path().join(METRICS), line).expect("it takes files");
            let recorded = metrics(folder.path()).expect("a line")[0].grad_norm.expect("a norm");
            assert_eq!(unlike_norm(recorded, norm), None);
            assert!(
                unlike_norm(recorded, norm * 1.001).is_some() && unlike_norm(recorded, f64::NAN).is_some()
            );
        }
    }
}
