//! A configuration of another system.

use pipewright_schedule::emit::{Options, ReadError, SystemFile};
use pipewright_schedule::plan::System;

use crate::emit::profile_of;
use crate::judge::given_run::{GivenRun, Place};
use crate::judge::{deepspeed, document, megatron, torchtitan};

/// A file whose system is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Configuration {
    file: SystemFile,
    options: Options,
    /// Whether the file is YAML, whose other keys are in a recipe.
    is_recipe: bool,
}

impl Configuration {
    /// Reads a text by the ending of its name: `.yaml` and `.yml` are recipes of Megatron-Bridge or NeMo, `.toml` is of
    /// torchtitan, `.json` of DeepSpeed, and anything else a script or options of Megatron or torchtitan.
    ///
    /// # Errors
    /// When the text cannot be read, or is of no system, or of two.
    pub fn parse(name: &str, text: &str) -> Result<Self, ReadError> {
        let ending = name.rsplit('.').next().unwrap_or_default().to_lowercase();
        let file = match ending.as_str() {
            "yaml" | "yml" => SystemFile::of_megatron(megatron::from_yaml(document::yaml(text)?)),
            "toml" => SystemFile::of_torchtitan(document::toml(text)?),
            _ => SystemFile::parse(text)?,
        };
        let options = match file.options() {
            Some(options) => options.clone(),
            None => {
                let checked = serde_json::from_str::<serde_json::Value>(text);
                checked.map_err(|error| ReadError {
                    line: Some(error.line()),
                    reason: format!("the JSON cannot be read: {error}"),
                })?;
                document::yaml(text)?
            }
        };
        Ok(Self { file, options, is_recipe: ["yaml", "yml"].contains(&ending.as_str()) })
    }

    /// Returns the path of the table of computations that the file names, as it is written there.
    pub fn table(&self) -> Option<&str> {
        self.file.table()
    }

    /// Returns the file, which can be predicted against a profile.
    pub fn file(&self) -> &SystemFile {
        &self.file
    }

    /// Returns the run on a place. `table` is the content of the file that [`Configuration::table`] names.
    ///
    /// # Errors
    /// When an option that changes the layout is not known, a value is wrong or not known, or the layout is not of
    /// this model or not for so many GPUs.
    pub fn run(&self, place: &Place<'_>, table: Option<&str>) -> Result<GivenRun, ReadError> {
        let options = &self.options;
        let system = self.file.system();
        if system == System::Megatron {
            return megatron::read(options, place, self.is_recipe);
        }
        let profile = profile_of(place.model, place.sequence.unwrap_or(1));
        let plan = self.file.plan(&profile, table, Some(place.gpus))?;
        match system {
            System::Torchtitan => torchtitan::read(options, &plan, place),
            System::Megatron | System::Deepspeed => deepspeed::read(options, &plan, place),
        }
    }
}
