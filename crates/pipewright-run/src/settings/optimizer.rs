//! The `[optimizer]` section: the algorithm, weight decay, clipping and a learning rate over time.

use pipewright::train::Decay;
use pipewright_models::ParameterGroup;
use serde::Serialize;

use crate::settings::document::Document;
use crate::settings::optimizer_groups::{self, GroupSettings};
use crate::settings::paths::Surroundings;
use crate::settings::section::Section;

/// How gradients update parameters.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OptimizerSettings {
    /// The algorithm.
    pub name: OptimizerName,
    /// The highest learning rate.
    pub learning_rate: f64,
    /// The rate to which the learning rate falls, if it is written.
    pub min_learning_rate: Option<f64>,
    /// AdamW, Adam: the decay rates of the first and second moment; Lion: the share of the momentum in the update, and
    /// in the next momentum.
    pub betas: [f64; 2],
    /// AdamW, Adam: the number that is added to the square root of the second moment.
    pub eps: f64,
    /// SGD, Muon: the share of the last update that the next one keeps.
    pub momentum: Option<f64>,
    /// SGD, Muon: whether the momentum looks ahead by one update.
    pub nesterov: Option<bool>,
    /// The weight decay, applied to every parameter that is not of a group in `no_decay`.
    pub weight_decay: f64,
    /// The groups of parameters without weight decay.
    pub no_decay: Vec<ParameterGroup>,
    /// The largest global gradient norm over all ranks; 0 turns clipping off.
    pub clip_norm: f64,
    /// The largest element of a gradient, after clipping by norm; 0 turns it off.
    pub clip_value: f64,
    /// Whether a rank updates while the gradient norm is computed, and repairs the update if necessary.
    pub post_validation: bool,
    /// By how many updates the parameters are delayed with which a batch is computed: 0 or 1.
    pub delay: u64,
    /// How updates are corrected for the delay.
    pub delay_correction: DelayCorrection,
    /// How the learning rate falls after the warm-up.
    pub schedule: Decay,
    /// The number of steps over which the learning rate rises.
    pub warmup_steps: u64,
    /// WSD: the number of steps over which the learning rate falls, if it is written.
    pub decay_steps: Option<u64>,
    /// The step at which the schedule begins again; 0 for none.
    pub restart_at: u64,
    /// How much the corrections of routers change in a step, if it is written.
    pub expert_balance_speed: Option<f64>,
    /// Parameters with settings of their own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupSettings>,
}

/// The name of an optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerName {
    /// Adam with decoupled weight decay.
    AdamW,
    /// AdamW whose moments of matrices have one byte for each element.
    #[serde(rename = "adamw_8bit")]
    AdamW8bit,
    /// The sign of a mean of gradients, with decoupled weight decay.
    Lion,
    /// Adam, whose weight decay is a part of the gradient.
    Adam,
    /// Gradient descent with or without momentum.
    Sgd,
    /// Orthogonal updates of hidden matrices, AdamW for the other parameters.
    Muon,
    /// Second moments by row and column.
    Adafactor,
}

impl OptimizerName {
    const ALL: [(&'static str, Self); 7] = [
        ("adamw", Self::AdamW),
        ("adamw_8bit", Self::AdamW8bit),
        ("lion", Self::Lion),
        ("adam", Self::Adam),
        ("sgd", Self::Sgd),
        ("muon", Self::Muon),
        ("adafactor", Self::Adafactor),
    ];

    /// Returns the default momentum and whether it looks ahead, if the algorithm has momentum.
    fn momentum(self) -> Option<(f64, bool)> {
        match self {
            Self::Sgd => Some((0.0, false)),
            Self::Muon => Some((0.95, true)),
            Self::AdamW | Self::AdamW8bit | Self::Lion | Self::Adam | Self::Adafactor => None,
        }
    }
}

/// How updates are corrected for weights that are delayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DelayCorrection {
    /// They are not.
    None,
    /// Each update adds the error of the one before ([`ErrorFeedback`](pipewright::optimizer::ErrorFeedback)).
    ErrorFeedback,
}

impl DelayCorrection {
    const ALL: [(&'static str, Self); 2] = [("none", Self::None), ("error-feedback", Self::ErrorFeedback)];
}

/// Reads the section.
pub(super) fn read(document: &mut Document, surroundings: &Surroundings) -> OptimizerSettings {
    let groups = ParameterGroup::ALL.map(|group| (group.name(), group));
    let mut section = Section::new(document, surroundings, "optimizer");
    let name = section.word("name", &OptimizerName::ALL);
    let (momentum, nesterov) = read_momentum(&mut section, name);
    let learning_rate = section.number("learning_rate");
    let delay = section.whole("delay");
    let schedule = section.word("schedule", &Decay::ALL.map(|decay| (decay.name(), decay)));
    OptimizerSettings {
        name,
        learning_rate,
        min_learning_rate: read_lowest(&mut section, schedule, learning_rate),
        betas: read_betas(&mut section, name),
        eps: section.number("eps"),
        momentum,
        nesterov,
        weight_decay: section.number("weight_decay"),
        no_decay: section.words("no_decay", &groups).unwrap_or_default(),
        clip_norm: section.number("clip_norm"),
        clip_value: section.number("clip_value"),
        post_validation: section.flag("post_validation"),
        delay,
        delay_correction: read_correction(&mut section, delay),
        schedule,
        warmup_steps: section.whole("warmup_steps"),
        decay_steps: read_decay_steps(&mut section, schedule),
        restart_at: section.whole("restart_at"),
        expert_balance_speed: section.given_number("expert_balance_speed").filter(|speed| *speed > 0.0),
        groups: optimizer_groups::read(&mut section),
    }
}

/// Reads the correction of a delay, which runs without one refuse.
fn read_correction(section: &mut Section<'_>, delay: u64) -> DelayCorrection {
    const KEY: &str = "delay_correction";
    let correction = section.word(KEY, &DelayCorrection::ALL);
    if delay == 0 && correction != DelayCorrection::None {
        section.report_without(KEY, "`delay = 1`", "write `delay = 1`, or leave it out");
    }
    correction
}

/// Reads the decay rates, whose default for Lion is the authors'.
fn read_betas(section: &mut Section<'_>, name: OptimizerName) -> [f64; 2] {
    const KEY: &str = "betas";
    let is_written = section.is_written(KEY);
    let betas = section.pair(KEY);
    if name == OptimizerName::Lion && !is_written { [0.9, 0.99] } else { betas }
}

/// Reads the rate to which a schedule falls. A resumed run may change its schedule and change back, so the
/// key is kept where it has no effect.
fn read_lowest(section: &mut Section<'_>, schedule: Decay, highest: f64) -> Option<f64> {
    const KEY: &str = "min_learning_rate";
    let lowest = section.given_number(KEY)?;
    if !schedule.has_lowest() {
        note_no_effect(section, KEY, schedule);
    } else if lowest > highest {
        let sentence =
            format!("`min_learning_rate` is {lowest:e}, which is above `learning_rate`, {highest:e}");
        section.report(KEY, sentence, "lower `min_learning_rate`, or raise `learning_rate`");
    }
    Some(lowest)
}

/// Reads the number of steps over which WSD falls.
fn read_decay_steps(section: &mut Section<'_>, schedule: Decay) -> Option<u64> {
    const KEY: &str = "decay_steps";
    let steps = section.given_whole(KEY)?;
    if schedule != Decay::Wsd {
        note_no_effect(section, KEY, schedule);
    }
    Some(steps)
}

fn note_no_effect(section: &mut Section<'_>, key: &'static str, schedule: Decay) {
    section.note(format!("`optimizer.{key}` has no effect with `schedule = \"{}\"`", schedule.name()));
}

/// Reads the settings of algorithms with momentum, which others refuse.
fn read_momentum(section: &mut Section<'_>, name: OptimizerName) -> (Option<f64>, Option<bool>) {
    let Some((momentum, nesterov)) = name.momentum() else {
        for key in ["momentum", "nesterov"] {
            if section.is_written(key) {
                let other = "`name = \"sgd\"` or \"muon\"";
                section.report_without(key, other, "leave it out, or change `name`");
            }
        }
        return (None, None);
    };
    let momentum = section.given_number("momentum").unwrap_or(momentum);
    (Some(momentum), Some(section.given_flag("nesterov").unwrap_or(nesterov)))
}
