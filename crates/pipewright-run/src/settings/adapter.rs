//! The `[adapter]` section: the adapters that are trained in place of the model's own parameters.

use std::path::PathBuf;

use pipewright_models::{LoraConfig, LoraTarget, LoraTargets};
use serde::Serialize;

use crate::settings::document::Document;
use crate::settings::model::ModelSettings;
use crate::settings::paths::Surroundings;
use crate::settings::section::Section;

/// The word for all linear layers, as in PEFT.
const ALL_LINEAR: &str = "all-linear";

/// The adapters that are trained.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AdapterSettings {
    /// The kind of adapters.
    pub kind: AdapterKind,
    /// Their settings and their source.
    #[serde(flatten)]
    pub source: AdapterSource,
}

/// The kinds of adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AdapterKind {
    /// Low-rank matrices.
    Lora,
}

/// Where adapters come from.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum AdapterSource {
    /// The adapters in a PEFT directory, which has their settings.
    From {
        /// The directory.
        path: PathBuf,
        /// The dropout in place of the directory's.
        dropout: Option<f64>,
    },
    /// New adapters.
    New {
        /// The rank of the matrices.
        rank: u32,
        /// The factor of the adapters' outputs, before it is divided.
        alpha: f64,
        /// The share of an adapter's inputs that is dropped in training.
        dropout: f64,
        /// Whether `alpha` is divided by the root of the rank.
        rslora: bool,
        /// Whether magnitudes are trained apart from directions.
        dora: bool,
        /// The layers that have an adapter, or one word for all of them.
        targets: Vec<String>,
        /// The modules that are trained whole next to the adapters.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        modules_to_save: Vec<String>,
    },
}

impl AdapterSource {
    /// Returns the settings of new adapters; `None` if a PEFT directory has them.
    pub(crate) fn new_lora(&self) -> Option<LoraConfig> {
        let Self::New { rank, alpha, dropout, rslora, dora, targets, modules_to_save } = self else {
            return None;
        };
        let targets = if targets == &[ALL_LINEAR] {
            LoraTargets::AllLinear
        } else {
            LoraTargets::named(targets.clone())
        };
        Some(LoraConfig {
            rank: *rank,
            alpha: *alpha,
            dropout: *dropout,
            rslora: *rslora,
            dora: *dora,
            own_experts: false,
            targets,
            modules_to_save: modules_to_save.iter().cloned().map(LoraTarget::from).collect(),
        })
    }
}

/// Reads the section. Returns `None` if the model's own parameters are trained.
pub(super) fn read(
    document: &mut Document,
    surroundings: &Surroundings,
    model: &ModelSettings,
) -> Option<AdapterSettings> {
    let mut section = Section::new(document, surroundings, "adapter");
    let kind = section.word("kind", &[("none", None), ("lora", Some(AdapterKind::Lora))]);
    let dropout = section.given_number("dropout");
    let rank = section.given_count("rank").unwrap_or(8);
    let alpha = section.given_number("alpha").unwrap_or(8.0);
    let [rslora, dora] = ["rslora", "dora"].map(|key| section.given_flag(key).unwrap_or(false));
    let targets = section.texts("targets").unwrap_or_else(|| vec![ALL_LINEAR.to_owned()]);
    let modules_to_save = section.texts("modules_to_save").unwrap_or_default();
    let path = section.path("path");
    let Some(kind) = kind else {
        report_without_kind(&mut section);
        return None;
    };
    if matches!(model, ModelSettings::Fresh(_)) {
        let (other, advice) = ("`from` in [model]", "name the folder of the model that the adapters change");
        section.report_without("kind", other, advice);
    }
    let source = match path {
        Some(path) => {
            for key in ["rank", "alpha", "rslora", "dora", "targets", "modules_to_save"] {
                if section.is_written(key) {
                    let sentence = format!(
                        "`{key}` is written next to `path`, and with `path` it follows from adapter_config.json"
                    );
                    section.report(key, sentence, format!("remove `{key}`, or remove `path`"));
                }
            }
            AdapterSource::From { path, dropout }
        }
        None => AdapterSource::New {
            rank,
            alpha,
            dropout: dropout.unwrap_or(0.0),
            rslora,
            dora,
            targets,
            modules_to_save,
        },
    };
    Some(AdapterSettings { kind, source })
}

/// Reports keys that have no effect without adapters.
fn report_without_kind(section: &mut Section<'_>) {
    for key in ["rank", "alpha", "dropout", "rslora", "dora", "targets", "modules_to_save", "path"] {
        if section.is_written(key) {
            section.report_without(
                key,
                "`kind = \"lora\"`",
                "write `kind = \"lora\"` too, or remove the key",
            );
        }
    }
}
