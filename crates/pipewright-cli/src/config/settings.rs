//! The validated settings of a run, made from a file and `--set` arguments.
//!
//! Settings can be written as TOML; reading that TOML gives equal settings.

use std::collections::BTreeMap;
use std::path::Path;

use pipewright::bounded_file::{SMALL_TEXT, read_text};
use pipewright_schedule::lower::ProgramSource;
use serde::Serialize;

use crate::config::data::{self, DataSettings};
use crate::config::document::Document;
use crate::config::mesh::{self, MeshSettings};
use crate::config::model::{self, ModelSettings};
use crate::config::optimizer::{self, OptimizerSettings};
use crate::config::paths::Surroundings;
use crate::config::pipeline::{self, PipelineSettings, ScheduleChoice};
use crate::config::place::Source;
use crate::config::problem::ConfigError;
use crate::config::run::{self, RunSettings};
use crate::config::sample;
use crate::config::{cross_checks, schedule};

/// Everything that a run depends on. It is checked, and missing keys have their defaults.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Settings {
    /// The model to train.
    pub(crate) model: ModelSettings,
    /// The training data.
    pub(crate) data: DataSettings,
    /// How the model is distributed over ranks, and how a step runs.
    pub(crate) pipeline: PipelineSettings,
    /// The replicas of the pipeline that train together.
    pub(crate) mesh: MeshSettings,
    /// How gradients update parameters.
    pub(crate) optimizer: OptimizerSettings,
    /// The length of the training and the folder of the results.
    pub(crate) run: RunSettings,
}

/// A configuration as it was read.
#[derive(Debug)]
pub(crate) struct Loaded {
    /// The settings.
    pub(crate) settings: Settings,
    /// Sentences about keys of the file that the arguments replace.
    pub(crate) notes: Vec<String>,
    /// The source of the program; `None` if a plan chooses the schedule.
    source: Option<ProgramSource>,
}

/// The settings of a run whose schedule is chosen, by the configuration or by a plan.
#[derive(Debug)]
pub(crate) struct Scheduled {
    /// The settings.
    pub(crate) settings: Settings,
    /// The source of the program of one replica.
    pub(crate) source: ProgramSource,
}

impl Loaded {
    /// Returns the settings with their schedule; the settings alone if a plan chooses it.
    pub(crate) fn scheduled(self) -> Result<Scheduled, Box<Settings>> {
        match self.source {
            Some(source) => Ok(Scheduled { settings: self.settings, source }),
            None => Err(Box::new(self.settings)),
        }
    }
}

impl Settings {
    /// Reads the settings of `file`, or the settings of the built-in sample. `arguments`, of the form
    /// `section.key=value`, override them.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or with every mistake in the file and in the arguments.
    pub(crate) fn load(
        file: Option<&Path>,
        arguments: &[String],
        surroundings: &Surroundings,
    ) -> Result<Loaded, ConfigError> {
        let text = match file {
            Some(file) => read_source(file, "configuration")?,
            None => Source { name: sample::NAME.to_owned(), text: sample::CONFIG.to_owned() },
        };
        let mut document = Document::new(Some(text), arguments);
        let model = model::read(&mut document, surroundings);
        let data = data::read(&mut document, surroundings, &model);
        let fresh = match &model {
            ModelSettings::Fresh(model) if document.problems.is_empty() => {
                Some((model.config(), data.seq_len as usize))
            }
            ModelSettings::Fresh(_) | ModelSettings::From { .. } => None,
        };
        let mesh = mesh::read(&mut document, surroundings);
        let mut pipeline = pipeline::read(&mut document, surroundings);
        let source = schedule::read(&mut document, surroundings, &mut pipeline, fresh, &mesh);
        let optimizer = optimizer::read(&mut document, surroundings);
        let run = run::read(&mut document, surroundings);
        let settings = Self { model, data, pipeline, mesh, optimizer, run };
        cross_checks::check(&mut document, surroundings, &settings, source.as_ref());
        if !document.problems.is_empty() {
            return Err(ConfigError::Problems(document.problems));
        }
        Ok(Loaded { settings, notes: document.notes, source })
    }

    /// Returns the effective configuration by dotted key. A schedule in the folder of the run has its file
    /// name.
    pub(crate) fn by_key(&self) -> BTreeMap<String, String> {
        let table = toml::Table::try_from(self.with_short_schedule());
        let table = table.expect("settings are tables of plain values");
        let mut by_key = BTreeMap::new();
        flatten("", &table, &mut by_key);
        by_key
    }

    /// Returns the effective configuration as TOML, for a file in the folder of the run. A schedule in that
    /// folder is named by its file name, so that the folder can be moved.
    pub(crate) fn to_toml(&self) -> String {
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

/// Refuses a path that is not UTF-8, because the effective configuration contains paths that begin with it.
fn require_utf8(path: &Path) -> std::io::Result<()> {
    match path.to_str() {
        Some(_) => Ok(()),
        None => Err(std::io::Error::new(
            std::io::ErrorKind::InvalidData,
            "the path is not UTF-8; rename the file or its folder",
        )),
    }
}

/// Reads a file of the kind `what`.
pub(super) fn read_source(path: &Path, what: &'static str) -> Result<Source, ConfigError> {
    let text = require_utf8(path)
        .and_then(|()| read_text(path, SMALL_TEXT))
        .map_err(|source| ConfigError::Read { what, path: path.to_owned(), source })?;
    // The mark of some editors at the beginning is not part of the first line.
    let text = text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text);
    Ok(Source { name: path.display().to_string(), text })
}
