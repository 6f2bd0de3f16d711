//! Makes settings from a file and `--set` arguments.

use std::path::Path;

use pipewright_document::{Problems, Source};
use pipewright_schedule::lower::ProgramSource;
use pipewright_system::config_file::{ConfigError, read_source};

use crate::settings::document::Document;
use crate::settings::model::ModelSettings;
use crate::settings::paths::Surroundings;
use crate::settings::whole::Settings;
use crate::settings::{
    adapter, cross_checks, data, mesh, model, optimizer, pipeline, preference, run, sample, schedule,
};

/// The configuration whose keys the arguments override.
#[derive(Clone, Copy, Debug)]
pub enum Base<'a> {
    /// A file.
    File(&'a Path),
    /// The text of a file, which need not be in the file any more.
    Text(&'a Path, &'a str),
    /// The built-in sample.
    Sample,
    /// The built-in configuration for a model and data that the arguments name.
    FineTuning,
}

/// The name of the built-in configuration for a fine-tuning in messages, and its text.
const FINE_TUNING: (&str, &str) =
    ("the built-in configuration for fine-tuning", include_str!("fine_tuning.toml"));

/// A configuration as it was read.
#[derive(Debug)]
pub struct Loaded {
    /// The settings.
    pub settings: Settings,
    /// Sentences about keys of the file that the arguments replace.
    pub notes: Vec<String>,
    /// The source of the program; `None` if a plan chooses the schedule.
    source: Option<ProgramSource>,
}

/// The settings of a run whose schedule is chosen, by the configuration or by a plan.
#[derive(Debug)]
pub struct Scheduled {
    /// The settings.
    pub settings: Settings,
    /// The source of the program of one replica.
    pub source: ProgramSource,
}

impl Loaded {
    /// Returns the settings with their schedule; the settings alone if a plan chooses it.
    pub fn scheduled(self) -> Result<Scheduled, Box<Settings>> {
        match self.source {
            Some(source) => Ok(Scheduled { settings: self.settings, source }),
            None => Err(Box::new(self.settings)),
        }
    }
}

impl Settings {
    /// Reads the settings of `base`. `arguments`, of the form `section.key=value`, override them.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or with every mistake in the file and in the arguments.
    pub fn load(
        base: Base<'_>,
        arguments: &[String],
        surroundings: &Surroundings,
    ) -> Result<Loaded, ConfigError> {
        let text = match base {
            Base::File(file) => read_source(file, "configuration")?,
            Base::Text(file, text) => Source { name: file.display().to_string(), text: text.to_owned() },
            Base::Sample => Source { name: sample::NAME.to_owned(), text: sample::CONFIG.to_owned() },
            Base::FineTuning => Source { name: FINE_TUNING.0.to_owned(), text: FINE_TUNING.1.to_owned() },
        };
        let mut document = Document::new(text, arguments);
        let model = model::read(&mut document, surroundings);
        let adapter = adapter::read(&mut document, surroundings, &model);
        let preference = preference::read(&mut document, surroundings);
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
        let settings = Self { model, adapter, preference, data, pipeline, mesh, optimizer, run };
        cross_checks::check(&mut document, surroundings, &settings, source.as_ref());
        if !document.problems.is_empty() {
            return Err(ConfigError::Problems(Problems(document.problems)));
        }
        Ok(Loaded { settings, notes: document.notes, source })
    }
}
