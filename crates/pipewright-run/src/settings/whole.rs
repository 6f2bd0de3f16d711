//! The validated settings of a run.
//!
//! Settings can be written as TOML, which leaves out what is `None`; reading that TOML gives equal settings.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::settings::adapter::AdapterSettings;
use crate::settings::data::DataSettings;
use crate::settings::mesh::MeshSettings;
use crate::settings::model::ModelSettings;
use crate::settings::optimizer::OptimizerSettings;
use crate::settings::pipeline::{PipelineSettings, ScheduleChoice};
use crate::settings::preference::PreferenceSettings;
use crate::settings::run::RunSettings;

/// Everything that a run depends on. It is checked, and missing keys have their defaults.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Settings {
    /// The model to train.
    pub model: ModelSettings,
    /// The adapters, if these are trained in place of the model's own parameters.
    pub adapter: Option<AdapterSettings>,
    /// The loss of preference training, if it takes the place of the cross entropy.
    pub preference: Option<PreferenceSettings>,
    /// The training data.
    pub data: DataSettings,
    /// How the model is distributed over ranks, and how a step runs.
    pub pipeline: PipelineSettings,
    /// The replicas of the pipeline that train together.
    pub mesh: MeshSettings,
    /// How gradients update parameters.
    pub optimizer: OptimizerSettings,
    /// The length of the training and the folder of the results.
    pub run: RunSettings,
}

impl Settings {
    /// Returns the effective configuration by dotted key. A schedule's file has its name without its folder, because
    /// hosts may have it in different folders.
    pub fn by_key(&self) -> BTreeMap<String, String> {
        let mut settings = self.with_short_schedule();
        if let ScheduleChoice::Csv(file) = &mut settings.pipeline.schedule {
            *file = file.file_name().unwrap_or_default().into();
        }
        let table = toml::Table::try_from(settings);
        let table = table.expect("settings are tables of plain values");
        let mut by_key = BTreeMap::new();
        flatten("", &table, &mut by_key);
        by_key
    }

    /// Returns the effective configuration as TOML, for a file in the folder of the run. A schedule in that
    /// folder is named by its file name, so that the folder can be moved.
    pub fn to_toml(&self) -> String {
        toml::to_string(&self.with_short_schedule())
            .expect("settings are tables of plain values, and their paths came from UTF-8 text")
    }

    /// Returns the settings with the path of a schedule in the folder of the run relative to that folder.
    fn with_short_schedule(&self) -> Self {
        let mut settings = self.clone();
        if let ScheduleChoice::Csv(file) = &mut settings.pipeline.schedule
            && let Ok(inside) = file.strip_prefix(&self.run.out)
        {
            *file = inside.to_owned();
        }
        settings
    }
}

/// Inserts the values of `table` and of its nested tables into `into`, by dotted key.
fn flatten(prefix: &str, table: &toml::Table, into: &mut BTreeMap<String, String>) {
    for (key, value) in table {
        let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        match value {
            toml::Value::Table(table) => flatten(&key, table, into),
            value => drop(into.insert(key, value.to_string())),
        }
    }
}
