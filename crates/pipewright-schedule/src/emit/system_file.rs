//! A file of another system: which one it is of, and the plan in it.

use serde_json::Value;

use crate::csv::parse_rows;
use crate::emit::json_options::json_options;
use crate::emit::options::{CHECKPOINTING, Options, with_dashes};
use crate::emit::read_error::ReadError;
use crate::emit::read_plan::{ReadPlan, no_system};
use crate::emit::{read_deepspeed, read_megatron, read_torchtitan};
use crate::plan::System;
use crate::profile::Profile;

/// The longest start of a text that an error shows, in characters.
const SHOWN: usize = 40;

/// A file whose system is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SystemFile {
    content: Content,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Content {
    Torchtitan(Options),
    Megatron(Options),
    Deepspeed {
        config: Value,
        /// The keys with their lines.
        options: Options,
    },
}

impl SystemFile {
    /// Recognises the system of a text by its options or keys.
    ///
    /// # Errors
    /// When the text is of no system, or of two.
    pub fn parse(text: &str) -> Result<Self, ReadError> {
        let text = text.trim_start_matches('\u{feff}');
        let trimmed = text.trim_start();
        if trimmed.starts_with('{') {
            let (config, options) = json_options(text)?;
            return Ok(Self { content: Content::Deepspeed { config, options } });
        }
        let options = Options::parse(text, |key| system_of(key).is_some())?;
        let mut system = None;
        for entry in &options.list {
            let Some(own) = system_of(&entry.key) else { continue };
            let expected = *system.get_or_insert(own);
            if expected != own {
                let key = with_dashes(&entry.key);
                let error = ReadError::new(format!(
                    "`{key}` is an option of {own}, and the options before it are of {expected}; use one system's"
                ));
                return Err(error.at(entry.line));
            }
        }
        match system {
            Some(System::Torchtitan) => Ok(Self { content: Content::Torchtitan(options) }),
            Some(_) => Ok(Self { content: Content::Megatron(options) }),
            None => Err(unknown(trimmed)),
        }
    }

    /// Returns the file of torchtitan whose options were read from a document.
    pub fn of_torchtitan(options: Options) -> Self {
        Self { content: Content::Torchtitan(options) }
    }

    /// Returns the file of Megatron whose options were read from a document.
    pub fn of_megatron(options: Options) -> Self {
        Self { content: Content::Megatron(options) }
    }

    /// Returns the options. A key of DeepSpeed's JSON is the path to a value, such as `zero_optimization.stage`.
    pub fn options(&self) -> &Options {
        match &self.content {
            Content::Torchtitan(options)
            | Content::Megatron(options)
            | Content::Deepspeed { options, .. } => options,
        }
    }

    /// Returns the system.
    pub fn system(&self) -> System {
        match self.content {
            Content::Torchtitan(_) => System::Torchtitan,
            Content::Megatron(_) => System::Megatron,
            Content::Deepspeed { .. } => System::Deepspeed,
        }
    }

    /// Returns the path of the table of computations that the file names, as it is written there.
    pub fn table(&self) -> Option<&str> {
        match &self.content {
            Content::Torchtitan(options) => read_torchtitan::table_of(options),
            Content::Megatron(_) | Content::Deepspeed { .. } => None,
        }
    }

    /// Reads the plan for the layers of `profile`. `table` is the content of the file that
    /// [`SystemFile::table`] names. `ranks` is the number of ranks over all replicas; without it, there are
    /// as many replicas as the file says, or one.
    ///
    /// # Errors
    /// When a key or a value is wrong, the plan does not fit the layers or the ranks, or it is too large to
    /// be predicted.
    pub fn plan(
        &self,
        profile: &Profile,
        table: Option<&str>,
        ranks: Option<u32>,
    ) -> Result<ReadPlan, ReadError> {
        let plan = match &self.content {
            Content::Torchtitan(options) => read_torchtitan::read(options, profile, table, ranks),
            Content::Megatron(options) => read_megatron::read(options, profile, ranks),
            Content::Deepspeed { config, options } => read_deepspeed::read(config, options, profile, ranks),
        }?;
        plan.check_size()?;
        let is_read = |key: &str| match self.system() {
            System::Torchtitan => read_torchtitan::is_read(key),
            System::Megatron => read_megatron::is_read(key),
            System::Deepspeed => false,
        };
        let options = self.options();
        let notes = options.notes.iter().cloned().chain(options.doubtful_flags(is_read));
        Ok(ReadPlan { remarks: plan.remarks.into_iter().chain(notes).collect(), ..plan })
    }
}

/// Returns the system that has an option, if the option says how the model is divided.
fn system_of(key: &str) -> Option<System> {
    if read_torchtitan::is_torchtitan(key) || key.starts_with(CHECKPOINTING) {
        Some(System::Torchtitan)
    } else {
        read_megatron::is_megatron(key).then_some(System::Megatron)
    }
}

/// Returns the error for a text without options: it may be a table alone.
fn unknown(text: &str) -> ReadError {
    let has_actions = |rows: Vec<Vec<_>>| rows.iter().flatten().any(Option::is_some);
    if parse_rows(text).is_ok_and(has_actions) {
        return ReadError::new(
            "read a table of actions, which does not say the layers of its stages; check the options that name it in \
             `--parallelism.pipeline_parallel_schedule_csv`, or predict the best cut with `pipewright simulate --csv`",
        );
    }
    let first = text.lines().next().unwrap_or_default();
    let start: String = first.chars().take(SHOWN).collect();
    let dots = if first.chars().count() > SHOWN { ".." } else { "" };
    let found = if start.is_empty() { "an empty text".to_owned() } else { format!("`{start}{dots}`") };
    no_system(&found)
}
