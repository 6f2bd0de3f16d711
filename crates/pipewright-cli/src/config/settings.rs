//! The validated settings of a run, made from a file and `--set` arguments.
//!
//! Settings can be written as TOML; reading that TOML gives equal settings.

use std::collections::BTreeMap;
use std::path::Path;

use pipewright::bounded_file::{SMALL_TEXT, read_text};
use serde::Serialize;

use crate::config::data::{self, DataSettings};
use crate::config::document::Document;
use crate::config::mesh::{self, MeshSettings};
use crate::config::model::{self, ModelSettings};
use crate::config::optimizer::{self, OptimizerSettings};
use crate::config::paths::Surroundings;
use crate::config::pipeline::{self, FoundSchedule, PipelineSettings, ScheduleChoice};
use crate::config::place::{Place, Source};
use crate::config::problem::{ConfigError, ProblemKind};
use crate::config::run::{self, RunSettings};
use crate::config::sample;
use crate::config::section::Section;
use crate::config::slices;
use crate::config::validation;

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

/// The settings, and the schedule that was generated or read to check them.
#[derive(Debug)]
pub(crate) struct Loaded {
    /// The settings. Only a plan (`pipeline.schedule = "auto"`) changes them.
    pub(crate) settings: Settings,
    /// The schedule that the setting `pipeline.schedule` names.
    pub(crate) schedule: FoundSchedule,
    /// Sentences about keys of the file that the arguments replace.
    pub(crate) notes: Vec<String>,
}

impl Loaded {
    /// Returns whether the schedule is to be planned.
    pub(crate) fn is_auto(&self) -> bool {
        matches!(self.schedule, FoundSchedule::Auto)
    }
}

impl Settings {
    /// Reads the settings of `file`, or those of the built-in sample. `arguments`, of the form `section.key=value`,
    /// override them.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or with every mistake in the file and in the arguments.
    pub(crate) fn load(
        file: Option<&Path>,
        arguments: &[String],
        surroundings: &Surroundings,
    ) -> Result<Loaded, ConfigError> {
        let source = match file {
            Some(file) => read_source(file, "configuration")?,
            None => Source { name: sample::NAME.to_owned(), text: sample::CONFIG.to_owned() },
        };
        let mut document = Document::new(Some(source), arguments);
        let model = model::read(&mut document, surroundings);
        let data = data::read(&mut document, surroundings, &model);
        let fresh = match &model {
            ModelSettings::Fresh(model) if document.problems.is_empty() => {
                Some((model.config(), data.seq_len as usize))
            }
            ModelSettings::Fresh(_) | ModelSettings::From { .. } => None,
        };
        let mesh = mesh::read(&mut document, surroundings);
        let (pipeline, schedule) = pipeline::read(&mut document, surroundings, fresh, &mesh);
        let optimizer = optimizer::read(&mut document, surroundings);
        let run = run::read(&mut document, surroundings);
        check_warmup(&mut document, surroundings, &optimizer, &run);
        validation::check(&mut document, surroundings, &data, &run);
        mesh::check_lookahead(&mut document, surroundings, &mesh, pipeline.ranks);
        if let Some(schedule) = &schedule {
            slices::check(&mut document, surroundings, schedule.slices(), (&data, &pipeline, &mesh));
        }
        match schedule {
            Some(schedule) if document.problems.is_empty() => {
                let settings = Self { model, data, pipeline, mesh, optimizer, run };
                Ok(Loaded { settings, schedule, notes: document.notes })
            }
            _ => Err(ConfigError::Problems(document.problems)),
        }
    }

    /// Returns the effective configuration by dotted key. A schedule in the folder of the run has its file name.
    pub(crate) fn by_key(&self) -> BTreeMap<String, String> {
        let table = toml::Table::try_from(self.with_short_schedule());
        let table = table.expect("settings are tables of plain values");
        let mut by_key = BTreeMap::new();
        flatten("", &table, &mut by_key);
        by_key
    }

    /// Returns the effective configuration as TOML, for a file in the folder of the run. A schedule in that folder is
    /// named by its file name, so that the folder can be moved.
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

/// Refuses a warm-up that is longer than the run. The problem is reported at the key that was written last.
fn check_warmup(
    document: &mut Document,
    surroundings: &Surroundings,
    optimizer: &OptimizerSettings,
    run: &RunSettings,
) {
    let (warmup_steps, steps) = (optimizer.warmup_steps, run.steps);
    if !document.problems.is_empty() || warmup_steps <= steps {
        return;
    }
    let kind = ProblemKind::LongWarmup { warmup_steps, steps };
    let is_argument = |section: &Section<'_>, key| matches!(section.place(key), Place::Set { .. });
    let optimizer = Section::new(document, surroundings, "optimizer");
    let is_warmup_argument = is_argument(&optimizer, "warmup_steps");
    let mut run = Section::new(document, surroundings, "run");
    if is_argument(&run, "steps") && !is_warmup_argument {
        return run.report("steps", kind);
    }
    Section::new(document, surroundings, "optimizer").report("warmup_steps", kind);
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
