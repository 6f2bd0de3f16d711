//! The `[run]` section: the number of steps, the seed, the device, and the folder of the results.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use pipewright::tensor::Precision;
use pipewright::verification::Verify;
use pipewright_models::TrainingForm;
use serde::Serialize;

use crate::settings::checkpoints::{self, CheckpointEvery, Copies, FailureEvery};
use crate::settings::devices::{self, DeviceSettings};
use crate::settings::document::Document;
use crate::settings::keys::{Key, find};
use crate::settings::paths::Surroundings;
use crate::settings::replan::Replan;
use crate::settings::section::Section;

/// The longest deadline in seconds, about three years. A longer one is a mistake, and adding it to an instant
/// could overflow.
const LONGEST_DEADLINE: f64 = 1e8;

/// The number of steps of a run whose data is not open and whose length is a number of passes over it.
pub const UNKNOWN_STEPS: u64 = u64::MAX;

fn is_unknown(steps: &u64) -> bool {
    *steps == UNKNOWN_STEPS
}

/// The processors on which a run has the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Exact {
    /// Processors of one model.
    Processor,
    /// All processors.
    Everywhere,
}

impl Exact {
    /// The words of the configuration.
    pub const NAMED: [(&str, Self); 2] = [("processor", Self::Processor), ("everywhere", Self::Everywhere)];
}

/// The length of the training and the folder of the results.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunSettings {
    /// The number of optimizer steps. If `epochs` is given, it is unknown until the data is open, and then
    /// [`UNKNOWN_STEPS`].
    #[serde(skip_serializing_if = "is_unknown")]
    pub steps: u64,
    /// The passes over the training data from which the number of steps follows; `None` once it is known.
    pub epochs: Option<f64>,
    /// The seed of the initial parameters and of the order of the data.
    pub seed: u64,
    /// The absolute folder of the results.
    pub out: PathBuf,
    /// The steps between two checkpoints.
    pub checkpoint_every: CheckpointEvery,
    /// The expected time between two failures of the run, if it is given.
    pub failure_every: Option<FailureEvery>,
    /// The number of newest checkpoints that are kept.
    pub keep_checkpoints: u32,
    /// How long a rank waits for another before the run fails.
    pub deadline_seconds: f64,
    /// How often the run continues from its newest checkpoint after a fault.
    pub restarts: u64,
    /// Whether `launch` replaces the host of a slow rank by a spare one.
    pub replace_slow: bool,
    /// Whether layers move to other ranks when ranks have become slower or faster.
    pub replan: Replan,
    /// Whether suspicious steps are computed again.
    pub verify: Verify,
    /// Whether `launch` leaves out the host of a rank that has computed wrong bits.
    pub replace_wrong: bool,
    /// Whether `launch` lets the run grow again to its configured mesh when lost hosts answer.
    pub grow: bool,
    /// The number of steps between two copies of the state in memory; 0: none.
    pub copy_every: u64,
    /// Whose memory has the copies.
    pub copies: Copies,
    /// The absolute folder of the copies, in the memory of each machine.
    pub copy_folder: PathBuf,
    /// The devices of the ranks.
    #[serde(flatten)]
    pub devices: DeviceSettings,
    /// The element type in which the ranks compute.
    pub precision: Precision,
    /// The processors on which the run has the same bits.
    pub exact: Exact,
    /// The loss scale of the first step, if the precision is f16.
    pub loss_scale: u64,
    /// The number of updates after which the loss scale is doubled.
    pub loss_scale_interval: u32,
    /// The number of steps, spread over the run, whose timelines are kept; 0 keeps only the last step's
    /// timeline.
    pub timelines: u64,
    /// Whether the metrics are also written as TensorBoard event files.
    pub tensorboard: bool,
    /// The wall time of a step that the plan of these settings predicts, in milliseconds.
    pub planned_step_ms: Option<f64>,
    /// The part of the probability of a target that all token ids share in the training loss.
    pub label_smoothing: f64,
    /// The strength of the noise on the embeddings in training; 0: none.
    pub neftune_alpha: f64,
    /// The number of batches whose gradients are summed before an update.
    pub accumulate: NonZeroU32,
    /// The steps in which the number of batches of a step rises from 1 to `accumulate`.
    pub rampup_steps: u64,
    /// The number of steps between two fingerprints of the state; 0: none.
    pub fingerprint_every: u64,
    /// The number of steps between two evaluations; 0: none.
    pub eval_every: u64,
    /// The number of batches of an evaluation; 0: all.
    pub eval_batches: u32,
    /// The number of evaluations without a lower loss after which the run ends; 0: it does not.
    pub patience: u64,
    /// The prompts that the model continues with each evaluation.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sample_prompts: Vec<String>,
    /// The number of tokens after each prompt.
    pub sample_tokens: u32,
}

impl RunSettings {
    /// Returns what training changes in the model.
    pub fn training_form(&self) -> TrainingForm {
        let &Self { label_smoothing, neftune_alpha, .. } = self;
        TrainingForm { label_smoothing, neftune_alpha }
    }

    /// Returns how long a rank waits for another before the run fails.
    pub fn deadline(&self) -> Duration {
        Duration::from_secs_f64(self.deadline_seconds)
    }
}

/// Reads the section.
pub(super) fn read(document: &mut Document, surroundings: &Surroundings) -> RunSettings {
    let is_changed = changes_steps(document);
    let mut section = Section::new(document, surroundings, "run");
    let (steps, epochs) = read_length(&mut section);
    let checkpoint_every = checkpoints::read_every(&mut section);
    RunSettings {
        steps,
        epochs,
        seed: section.whole("seed"),
        out: section.folder("out"),
        checkpoint_every,
        failure_every: checkpoints::read_failure_every(&mut section, checkpoint_every),
        keep_checkpoints: section.count("keep_checkpoints"),
        deadline_seconds: read_deadline(&mut section),
        restarts: section.whole("restarts"),
        replace_slow: section.flag("replace_slow"),
        replan: section.word("replan", &Replan::NAMED),
        verify: section.word("verify", &Verify::NAMED),
        replace_wrong: section.flag("replace_wrong"),
        grow: section.flag("grow"),
        copy_every: section.whole("copy_every"),
        copies: section.word("copies", &Copies::NAMED),
        copy_folder: section.folder("copy_folder"),
        devices: devices::read(&mut section),
        precision: section.word("precision", &Precision::NAMED),
        exact: section.word("exact", &Exact::NAMED),
        loss_scale: read_loss_scale(&mut section),
        loss_scale_interval: section.count("loss_scale_interval"),
        timelines: section.whole("timelines"),
        tensorboard: section.flag("tensorboard"),
        planned_step_ms: read_planned(&mut section, is_changed),
        label_smoothing: section.number("label_smoothing"),
        neftune_alpha: section.number("neftune_alpha"),
        accumulate: NonZeroU32::new(section.count("accumulate")).unwrap_or(NonZeroU32::MIN),
        rampup_steps: section.whole("rampup_steps"),
        fingerprint_every: section.whole("fingerprint_every"),
        eval_every: section.whole("eval_every"),
        eval_batches: section.count("eval_batches"),
        patience: section.whole("patience"),
        sample_prompts: section.texts("sample_prompts").unwrap_or_default(),
        sample_tokens: section.count("sample_tokens"),
    }
}

/// Reads the number of steps, or the number of passes over the data. If the file has one and an argument the
/// other, the argument counts.
fn read_length(section: &mut Section<'_>) -> (u64, Option<f64>) {
    let (steps, epochs) = (section.whole("steps"), section.given_number("epochs"));
    let has_both = section.is_written("steps") && epochs.is_some();
    match (section.is_argument("steps"), section.is_argument("epochs")) {
        (true, false) if has_both => return (steps, None),
        (false, true) => {}
        _ if has_both => section.report_twice("epochs", "steps", "the length of the run"),
        _ => {}
    }
    (if epochs.is_some() { UNKNOWN_STEPS } else { steps }, epochs)
}

/// Returns whether an argument changes a setting on which the time of a step depends, so that the time that
/// was planned for the file is of another step.
fn changes_steps(document: &Document) -> bool {
    document.sections.iter().any(|(section, table)| {
        let is_all = ["model", "pipeline", "mesh"].contains(section);
        let is_timed = |key: &str| is_all || find(section, key).is_some_and(Key::is_timed);
        table.entries.iter().any(|(key, entry)| entry.value.place.is_argument() && is_timed(key))
    })
}

/// Reads the planned time of a step. One from the file does not count if arguments change what was planned.
fn read_planned(section: &mut Section<'_>, is_changed: bool) -> Option<f64> {
    const KEY: &str = "planned_step_ms";
    let planned = section.given_number(KEY);
    planned.filter(|_| section.is_argument(KEY) || !is_changed)
}

fn read_loss_scale(section: &mut Section<'_>) -> u64 {
    let scale = section.whole("loss_scale");
    if !scale.is_power_of_two() {
        let range = "a power of two, such as 65536";
        section.out_of_range::<()>("loss_scale", &scale.to_string(), range);
    }
    scale
}

fn read_deadline(section: &mut Section<'_>) -> f64 {
    let seconds = section.number("deadline_seconds");
    if seconds > LONGEST_DEADLINE {
        let range = format!("at most {LONGEST_DEADLINE}");
        section.out_of_range::<()>("deadline_seconds", &seconds.to_string(), &range);
    }
    seconds
}
