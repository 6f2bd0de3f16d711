//! The `[preference]` section: the loss of preference training.

use std::path::PathBuf;

use pipewright::train::data::PreferenceData;
use pipewright_models::{PreferenceKind, PreferenceLoss};
use serde::Serialize;

use crate::settings::document::Document;
use crate::settings::paths::Surroundings;
use crate::settings::section::Section;

/// The loss of preference training. A key that the loss does not read is `None`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PreferenceSettings {
    /// The kind of the loss.
    pub loss: PreferenceKind,
    /// The factor of log-probabilities.
    pub beta: Option<f64>,
    /// The share of pairs that may be in the wrong order.
    pub label_smoothing: Option<f64>,
    /// The margin between the rewards of a pair.
    pub margin: Option<f64>,
    /// The weight of desirable completions.
    pub desirable_weight: Option<f64>,
    /// The weight of other completions.
    pub undesirable_weight: Option<f64>,
    /// The factor of the squared sums of the rewards of a pair.
    pub center_rewards_coefficient: Option<f64>,
    /// A file with the log-probabilities of the reference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference: Option<PathBuf>,
}

impl PreferenceSettings {
    /// Returns the loss.
    pub fn loss(&self) -> PreferenceLoss {
        PreferenceLoss {
            kind: self.loss,
            beta: self.beta.unwrap_or(0.1),
            label_smoothing: self.label_smoothing.unwrap_or(0.0),
            margin: self.margin.unwrap_or(0.5),
            weights: [self.desirable_weight, self.undesirable_weight].map(|weight| weight.unwrap_or(1.0)),
            center: self.center_rewards_coefficient.unwrap_or(0.0),
        }
    }

    /// Returns the form of the records, for microbatches of so many rows.
    pub(crate) fn data(&self, microbatch_rows: u32) -> PreferenceData {
        match self.loss {
            PreferenceKind::Reward => PreferenceData::Scored,
            PreferenceKind::Kto => PreferenceData::Unpaired { block: microbatch_rows },
            kind => PreferenceData::Pairs { whole_chosen: kind == PreferenceKind::Orpo },
        }
    }
}

/// Reads the section. Returns `None` for other training.
pub(super) fn read(document: &mut Document, surroundings: &Surroundings) -> Option<PreferenceSettings> {
    use PreferenceKind::{Dpo, Ipo, Kto, Orpo, Reward, SimPo};
    let mut section = Section::new(document, surroundings, "preference");
    let kinds = [
        ("none", None),
        ("dpo", Some(Dpo)),
        ("ipo", Some(Ipo)),
        ("orpo", Some(Orpo)),
        ("simpo", Some(SimPo)),
        ("kto", Some(Kto)),
        ("reward", Some(Reward)),
    ];
    let kind = section.word("loss", &kinds);
    let beta = section.given_number("beta");
    let [label_smoothing, margin, desirable_weight, undesirable_weight, center_rewards_coefficient] =
        ["label_smoothing", "margin", "desirable_weight", "undesirable_weight", "center_rewards_coefficient"]
            .map(|key| section.given_number(key));
    let reference = section.path("reference");
    let of_keys: [(&str, &[PreferenceKind], &str); 7] = [
        ("beta", &[Dpo, Ipo, Orpo, SimPo, Kto], "a `loss` with log-probabilities"),
        ("label_smoothing", &[Dpo, SimPo], "`loss = \"dpo\"` or `\"simpo\"`"),
        ("margin", &[SimPo], "`loss = \"simpo\"`"),
        ("desirable_weight", &[Kto], "`loss = \"kto\"`"),
        ("undesirable_weight", &[Kto], "`loss = \"kto\"`"),
        ("center_rewards_coefficient", &[Reward], "`loss = \"reward\"`"),
        ("reference", &[Dpo, Ipo, Kto], "`loss = \"dpo\"`, `\"ipo\"` or `\"kto\"`"),
    ];
    for (key, kinds, other) in of_keys {
        if section.is_written(key) && !kind.is_some_and(|kind| kinds.contains(&kind)) && section.is_sound() {
            section.report_without(key, other, "write such a loss, or remove the key");
        }
    }
    Some(PreferenceSettings {
        loss: kind?,
        beta: (kind != Some(Reward)).then(|| beta.unwrap_or(0.1)),
        label_smoothing,
        margin,
        desirable_weight,
        undesirable_weight,
        center_rewards_coefficient,
        reference,
    })
}
