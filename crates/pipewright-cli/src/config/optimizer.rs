//! The `[optimizer]` section: AdamW with decoupled weight decay, global clipping and a learning rate over time.

use pipewright::train::Decay;
use pipewright_models::ParameterGroup;
use serde::Serialize;

use crate::config::document::Document;
use crate::config::paths::Surroundings;
use crate::config::section::{Bound, Section};

/// How gradients update parameters.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct OptimizerSettings {
    /// The algorithm.
    pub(crate) name: OptimizerName,
    /// The highest learning rate.
    pub(crate) learning_rate: f64,
    /// The decay rates of the first and second moment.
    pub(crate) betas: [f64; 2],
    /// The number that is added to the square root of the second moment.
    pub(crate) eps: f64,
    /// The decoupled weight decay, applied to every parameter that is not of a group in `no_decay`.
    pub(crate) weight_decay: f64,
    /// The groups of parameters without weight decay.
    pub(crate) no_decay: Vec<ParameterGroup>,
    /// The largest global gradient norm over all ranks; 0 turns clipping off.
    pub(crate) clip_norm: f64,
    /// How the learning rate falls after the warm-up.
    pub(crate) schedule: Decay,
    /// The number of steps over which the learning rate rises.
    pub(crate) warmup_steps: u64,
}

/// The name of an optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OptimizerName {
    /// Adam with decoupled weight decay.
    AdamW,
}

/// Reads the section.
pub(super) fn read(document: &mut Document, surroundings: &Surroundings) -> OptimizerSettings {
    const DECAYS: [(&str, Decay); 3] =
        [("constant", Decay::Constant), ("cosine", Decay::Cosine), ("linear", Decay::Linear)];
    let groups = ParameterGroup::ALL.map(|group| (group.name(), group));
    let mut section = Section::new(document, surroundings, "optimizer");
    OptimizerSettings {
        name: section.choice("name", OptimizerName::AdamW, &[("adamw", OptimizerName::AdamW)]),
        learning_rate: section.number("learning_rate", 3e-4, &Bound::Positive),
        betas: section.pair("betas", [0.9, 0.95], &Bound::Fraction),
        eps: section.number("eps", 1e-8, &Bound::Positive),
        weight_decay: section.number("weight_decay", 0.1, &Bound::NonNegative),
        no_decay: section.choices("no_decay", &groups),
        clip_norm: section.number("clip_norm", 1.0, &Bound::NonNegative),
        schedule: section.choice("schedule", Decay::Constant, &DECAYS),
        warmup_steps: section.whole("warmup_steps", 0, 0, i64::MAX as u64),
    }
}
