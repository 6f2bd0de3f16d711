//! The `[run]` section: the number of steps, the seed, the device, and the folder of the results.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use pipewright::loss_scale::LossScaling;
use pipewright::tensor::Precision;
use pipewright::verification::Verify;
use serde::Serialize;

use crate::settings::checkpoints::{self, CheckpointEvery, Copies, FailureEvery};
use crate::settings::devices::{self, DeviceSettings};
use crate::settings::document::Document;
use crate::settings::paths::Surroundings;
use crate::settings::place::Place;
use crate::settings::problem::ProblemKind;
use crate::settings::section::{Bound, Section};

/// The longest deadline in seconds, about three years. A longer one is a mistake, and adding it to an instant
/// could overflow.
const LONGEST_DEADLINE: f64 = 1e8;

/// The folder whose files Linux keeps in memory.
const COPY_FOLDER: &str = "/dev/shm";

/// The largest initial loss scale. Losses in single precision times a larger one would soon be infinite.
const LARGEST_LOSS_SCALE: u64 = 1 << 40;

/// The length of the training and the folder of the results.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunSettings {
    /// The number of optimizer steps.
    pub steps: u64,
    /// The seed of the initial parameters and of the order of the data.
    pub seed: u64,
    /// The absolute folder of the results.
    pub out: PathBuf,
    /// The steps between two checkpoints.
    pub checkpoint_every: CheckpointEvery,
    /// The expected time between two failures of the run, if it is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_every: Option<FailureEvery>,
    /// The number of newest checkpoints that are kept.
    pub keep_checkpoints: u32,
    /// How long a rank waits for another before the run fails.
    pub deadline_seconds: f64,
    /// How often the run continues from its newest checkpoint after a fault.
    pub restarts: u64,
    /// Whether `launch` replaces the host of a slow rank by a spare one.
    pub replace_slow: bool,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub planned_step_ms: Option<f64>,
    /// The number of batches whose gradients are summed before an update.
    pub accumulate: NonZeroU32,
    /// The steps in which the number of batches of a step rises from 1 to `accumulate`.
    pub rampup_steps: u64,
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
    /// Returns how long a rank waits for another before the run fails.
    pub fn deadline(&self) -> Duration {
        Duration::from_secs_f64(self.deadline_seconds)
    }
}

/// Reads the section.
pub(super) fn read(document: &mut Document, surroundings: &Surroundings) -> RunSettings {
    let is_changed = changes_steps(document);
    let mut section = Section::new(document, surroundings, "run");
    let checkpoint_every = checkpoints::read_every(&mut section);
    RunSettings {
        steps: section.whole("steps", 100, 1, i64::MAX as u64),
        seed: section.whole("seed", 42, 0, i64::MAX as u64),
        out: read_folder(&mut section, surroundings, "out", "runs/sample"),
        checkpoint_every,
        failure_every: checkpoints::read_failure_every(&mut section, checkpoint_every),
        keep_checkpoints: section.count("keep_checkpoints", 3),
        deadline_seconds: read_deadline(&mut section),
        restarts: section.whole("restarts", 0, 0, i64::MAX as u64),
        replace_slow: section.flag("replace_slow", false),
        verify: section.choice("verify", Verify::Off, &Verify::NAMED),
        replace_wrong: section.flag("replace_wrong", false),
        grow: section.flag("grow", true),
        copy_every: section.whole("copy_every", 0, 0, i64::MAX as u64),
        copies: section.choice("copies", Copies::Machine, &Copies::NAMED),
        copy_folder: read_folder(&mut section, surroundings, "copy_folder", COPY_FOLDER),
        devices: devices::read(&mut section),
        precision: section.choice("precision", Precision::F32, &Precision::NAMED),
        loss_scale: read_loss_scale(&mut section),
        loss_scale_interval: section.count("loss_scale_interval", LossScaling::default().interval),
        timelines: section.whole("timelines", 8, 0, 10_000),
        tensorboard: section.flag("tensorboard", false),
        planned_step_ms: read_planned(&mut section, is_changed),
        accumulate: NonZeroU32::new(section.count("accumulate", 1)).unwrap_or(NonZeroU32::MIN),
        rampup_steps: section.whole("rampup_steps", 0, 0, i64::MAX as u64),
        eval_every: section.whole("eval_every", 0, 0, i64::MAX as u64),
        eval_batches: section.count_from_0("eval_batches"),
        patience: section.whole("patience", 0, 0, i64::MAX as u64),
        sample_prompts: section.texts("sample_prompts").unwrap_or_default(),
        sample_tokens: section.count("sample_tokens", 32),
    }
}

/// Returns whether an argument changes a setting on which the time of a step depends, so that the time that
/// was planned for the file is of another step.
fn changes_steps(document: &Document) -> bool {
    const KEYS: [(&str, &[&str]); 3] = [
        ("data", &["seq_len", "side", "bos_id", "packed", "restart_positions"]),
        ("optimizer", &["name", "momentum", "clip_norm", "groups"]),
        ("run", &["device", "devices", "precision", "accumulate", "rampup_steps"]),
    ];
    let is_argument = |place: &Place| matches!(place, Place::Set { .. });
    let any = |section: &str| document.written(section).any(|(_, place)| is_argument(place));
    let one_of = |(section, keys): (&str, &[&str])| {
        document.written(section).any(|(key, place)| keys.contains(&key) && is_argument(place))
    };
    ["model", "pipeline", "mesh"].into_iter().any(any) || KEYS.into_iter().any(one_of)
}

/// Reads the planned time of a step. One from the file does not count if arguments change what was planned.
fn read_planned(section: &mut Section<'_>, is_changed: bool) -> Option<f64> {
    const KEY: &str = "planned_step_ms";
    let is_argument = matches!(section.place(KEY), Place::Set { .. });
    let planned = section.is_written(KEY).then(|| section.number(KEY, 0.0, &Bound::Positive));
    planned.filter(|_| is_argument || !is_changed)
}

/// Reads a folder that the run writes to. It is relative to the working folder, wherever the configuration
/// is.
fn read_folder(
    section: &mut Section<'_>,
    surroundings: &Surroundings,
    key: &'static str,
    default: &str,
) -> PathBuf {
    let text = section.text(key).unwrap_or_else(|| default.into());
    surroundings.path(key, &text, &Place::Default).unwrap_or_else(|kind| {
        section.report(key, kind);
        PathBuf::new()
    })
}

fn read_loss_scale(section: &mut Section<'_>) -> u64 {
    let default = LossScaling::default().initial as u64;
    let scale = section.whole("loss_scale", default, 1, LARGEST_LOSS_SCALE);
    if scale.is_power_of_two() {
        return scale;
    }
    let range = "a power of two, such as 65536".to_owned();
    section
        .report("loss_scale", ProblemKind::OutOfRange { key: "loss_scale", value: scale.to_string(), range });
    default
}

fn read_deadline(section: &mut Section<'_>) -> f64 {
    let seconds = section.number("deadline_seconds", 60.0, &Bound::Positive);
    if seconds > LONGEST_DEADLINE {
        let (value, range) = (seconds.to_string(), format!("at most {LONGEST_DEADLINE}"));
        section.report("deadline_seconds", ProblemKind::OutOfRange { key: "deadline_seconds", value, range });
    }
    seconds
}
