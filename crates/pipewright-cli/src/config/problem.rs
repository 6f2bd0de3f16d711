//! The problems of a configuration, each with its place.
//!
//! Reading continues after a problem, so that all problems are reported together ([`ConfigError`]).

use std::fmt;
use std::path::PathBuf;

use miette::{LabeledSpan, SourceCode};
use pipewright::device::DeviceError;
use pipewright::tensor::Precision;
use pipewright_schedule::partition::LayoutError;
use pipewright_schedule::{GenerateError, LowerError, PartitionError};
use thiserror::Error;
use toml::Value;

use crate::config::place::Place;
use crate::escape::escape;
use crate::schedules::file::ScheduleFileError;
use crate::schedules::memory::OutOfMemory;
use crate::shortened::shortened;

/// The longest line of a file that is shown, in bytes. The message has the place of a mistake in any case.
const LONGEST_LINE: usize = 4096;

/// The reason why there are no settings.
#[derive(Debug, Error)]
pub(crate) enum ConfigError {
    /// The file cannot be read.
    #[error("{}: cannot read the {what}", path.display())]
    Read {
        /// The kind of file: a configuration or a profile.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The file or the arguments contain mistakes.
    #[error("{} problems in the configuration", .0.len())]
    Problems(Vec<Problem>),
}

/// One mistake in a configuration.
#[derive(Debug, Error)]
#[error("{place}: {kind}")]
pub(crate) struct Problem {
    /// The place where it was written.
    pub(crate) place: Place,
    /// The kind of mistake.
    pub(crate) kind: ProblemKind,
}

impl Problem {
    /// Returns whether the schedule does not fit into memory.
    pub(crate) fn is_memory(&self) -> bool {
        matches!(self.kind, ProblemKind::Memory(_))
    }
}

/// The kind of a mistake.
#[derive(Debug, Error)]
pub(crate) enum ProblemKind {
    /// The text is not TOML.
    #[error("not valid TOML: {}", message.replace('\n', ", "))]
    Syntax {
        /// The parser's words.
        message: String,
    },
    /// The value is TOML, but no type of this program can hold it, such as a whole number of more than 64 bits.
    #[error("the value of `{key}` cannot be held: {message}")]
    Unrepresentable {
        /// The key as written.
        key: String,
        /// The parser's words.
        message: String,
    },
    /// `--set` was not followed by `section.key=value`.
    #[error("not of the form section.key=value")]
    SetForm,
    /// No section has this name.
    #[error("unknown section `{section}`")]
    UnknownSection {
        /// The name as written.
        section: String,
        /// The name that was probably meant.
        suggestion: Option<Suggestion>,
    },
    /// A value is written where a section is expected.
    #[error("`{key}` is outside of any section")]
    OutsideSections {
        /// The key as written.
        key: String,
        /// The section and key that were probably meant.
        suggestion: Option<Suggestion>,
    },
    /// The section has no such key.
    #[error("unknown key `{key}` in [{section}]")]
    UnknownKey {
        /// The section.
        section: String,
        /// The key as written.
        key: String,
        /// The key that was probably meant.
        suggestion: Option<Suggestion>,
    },
    /// A key of a profile or of a list of tables is missing.
    #[error("`{key}` is missing in {section}")]
    Missing {
        /// The key.
        key: &'static str,
        /// The section, with its brackets.
        section: &'static str,
    },
    /// A key of a profile or of a list of tables does not exist.
    #[error("unknown key `{key}` in {section}")]
    UnknownKeyOf {
        /// The key as written.
        key: String,
        /// The section, with its brackets.
        section: &'static str,
        /// The keys that the section has.
        known: Vec<&'static str>,
        /// The key that was probably meant.
        suggestion: Option<&'static str>,
    },
    /// A key of a profile has another unit.
    #[error("`{key}` has a unit that profiles do not use; times are in seconds and sizes in bytes")]
    Unit {
        /// The key as written.
        key: String,
        /// The key with the right unit.
        meant: &'static str,
    },
    /// A profile has another number of layers than the model.
    #[error("the profile has {found} layers, and the model of the configuration has {expected}")]
    OtherLayers {
        /// The layers of the profile.
        found: u64,
        /// The layers of the model.
        expected: usize,
    },
    /// A size of a layer in a profile is not that of the model's layer.
    #[error("`{key}` is {found}, and layer {layer} of the model ({kind}) has {expected}")]
    OtherLayer {
        /// The key.
        key: &'static str,
        /// The layer, counted from 0.
        layer: usize,
        /// Its kind in the model.
        kind: String,
        /// The size in the profile.
        found: u64,
        /// The size in the model.
        expected: u64,
    },
    /// A profile was measured on another device.
    #[error("the profile is of the device {found}, and the configuration computes on {expected}")]
    OtherDevice {
        /// The device of the profile.
        found: String,
        /// The device of the configuration.
        expected: String,
    },
    /// A profile was measured with another value of a setting on which its figures depend.
    #[error("`{key}` of the profile is {found}, and `{setting}` of the configuration is {expected}")]
    OtherSetting {
        /// The key of the profile.
        key: &'static str,
        /// Its value.
        found: u32,
        /// The key of the configuration.
        setting: &'static str,
        /// Its value.
        expected: u32,
    },
    /// A profile was measured in another precision.
    #[error("the profile is of the precision {found}, and the configuration computes in {expected}")]
    OtherPrecision {
        /// The precision of the profile.
        found: String,
        /// The precision of the configuration.
        expected: Precision,
    },
    /// The value is of another type.
    #[error("`{key}` is {found}, where {expected} is expected")]
    WrongType {
        /// The key.
        key: &'static str,
        /// The expected type, with its article.
        expected: &'static str,
        /// The type that was found, with its article.
        found: &'static str,
    },
    /// The number is out of range.
    #[error("`{key}` is {}, where {range} is expected", shortened(.value))]
    OutOfRange {
        /// The key.
        key: &'static str,
        /// The number as found.
        value: String,
        /// The range in words.
        range: String,
    },
    /// The word is not one of the known ones.
    #[error("`{key}` is \"{}\", where {} is expected", shortened(.value), known.join(", "))]
    UnknownValue {
        /// The key.
        key: &'static str,
        /// The word as written.
        value: String,
        /// The words that are known.
        known: Vec<String>,
        /// The word that was probably meant.
        suggestion: Option<Suggestion>,
    },
    /// The word names a feature that this binary was built without.
    #[error("`{key}` is \"{value}\", which is not compiled into this binary")]
    NotCompiledIn {
        /// The key.
        key: &'static str,
        /// The word as written, which is also the name of the feature.
        value: String,
        /// A word that this binary knows.
        instead: &'static str,
    },
    /// The word names a feature that no build of this version has.
    #[error("`{key}` is \"{value}\", which this version of Pipewright does not support")]
    NotSupported {
        /// The key.
        key: &'static str,
        /// The word as written.
        value: String,
        /// The words that are supported.
        supported: &'static str,
    },
    /// A size differs from the size in the schedule's file.
    #[error("`{key}` is {value}, and the schedule in {} has {found}", file.display())]
    NotOfFile {
        /// The key.
        key: &'static str,
        /// The size as written.
        value: u32,
        /// The schedule's file.
        file: PathBuf,
        /// The size in the file.
        found: u64,
    },
    /// The learning rate would still rise when the run ends.
    #[error(
        "`warmup_steps` is {warmup_steps}, and the run has {steps} steps: the learning rate never reaches its highest"
    )]
    LongWarmup {
        /// The number of steps over which the learning rate rises.
        warmup_steps: u64,
        /// The number of steps of the run.
        steps: u64,
    },
    /// A key has an effect only together with another one.
    #[error("`{key}` has no effect without {other}")]
    Without {
        /// The key.
        key: &'static str,
        /// What is missing.
        other: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// A problem of one table of a list of several.
    #[error("table {number}: {problem}")]
    InTable {
        /// The number of the table, from 1.
        number: usize,
        /// The problem.
        problem: Box<ProblemKind>,
    },
    /// A cut by hand has more or fewer stages than the schedule.
    #[error("the layout has {found} stages, and the schedule {stages}")]
    LayoutStages {
        /// The stages of the layout.
        found: usize,
        /// The stages of the schedule.
        stages: u32,
    },
    /// Two keys choose the same thing.
    #[error("`{key}` and `{other}` both choose {what}")]
    Twice {
        /// The thing.
        what: &'static str,
        /// The key.
        key: &'static str,
        /// The other key.
        other: &'static str,
    },
    /// The replicas cannot share the microbatches evenly.
    #[error(
        "`microbatches` is {microbatches}, which {replicas} replicas (`mesh.data_parallel`) cannot share evenly"
    )]
    UnevenShare {
        /// The number of microbatches per step.
        microbatches: u32,
        /// The number of replicas of the pipeline.
        replicas: u32,
        /// The nearest numbers that the replicas can share and the schedule accepts.
        shared: Vec<u32>,
    },
    /// What the replicas hold contradicts the list of replicas.
    #[error(
        "`data_parallel_mode` is \"{written}\", and with `data_parallel = {groups}` the parameters are {meant}"
    )]
    OtherMode {
        /// The word as written.
        written: &'static str,
        /// The word that follows from the list.
        meant: &'static str,
        /// The list as written.
        groups: String,
        /// The number of all replicas.
        replicas: u32,
    },
    /// The text is empty.
    #[error("`{key}` is empty")]
    Empty {
        /// The key.
        key: &'static str,
    },
    /// A key is written beside `from`, which determines its value.
    #[error("`{key}` is written beside `from`, and with `from` the model follows from its config.json")]
    BesideFrom {
        /// The key.
        key: String,
    },
    /// No model has these sizes.
    #[error(transparent)]
    Model(#[from] pipewright_models::ConfigError),
    /// No schedule has these sizes.
    #[error(transparent)]
    Schedule(#[from] GenerateError),
    /// The schedule does not fit into memory.
    #[error(transparent)]
    Memory(#[from] OutOfMemory),
    /// The schedule cannot be lowered with these settings.
    #[error("`unshard_lookahead`: {0}")]
    Lookahead(#[from] LowerError),
    /// The schedule's file cannot be used.
    #[error(transparent)]
    ScheduleFile(#[from] ScheduleFileError),
    /// The schedule does not train.
    #[error("`{key}` is \"{value}\", which has no backward and cannot train")]
    NoTraining {
        /// The key.
        key: &'static str,
        /// The schedule.
        value: String,
    },
    /// The key needs whole microbatches, and the schedule cuts them into slices.
    #[error("`{key}` does not work with a schedule that cuts microbatches into slices")]
    BesideSlices {
        /// The key.
        key: &'static str,
    },
    /// The layers cannot be distributed over the stages.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// The device does not exist or cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Both keys name the devices.
    #[error("`device` and `devices` are both written")]
    BothDeviceKeys,
    /// The layout has a mistake, or does not fit the model.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// `partition` is `"explicit"`, but `boundaries` is missing.
    #[error("`partition` is \"explicit\", and there are no `boundaries`")]
    NoBoundaries,
    /// `boundaries` is given, but `partition` is not `"explicit"`.
    #[error("`boundaries` are given, and `partition` is not \"explicit\"")]
    UnusedBoundaries,
    /// The model's folder has a tokenizer in a form that is not read, and the data is text.
    #[error(
        "`{key}` is not written, and the tokenizer of {} is in a form that is not read ({file}): the text would be trained \
         as bytes",
        folder.display()
    )]
    OtherTokenizer {
        /// The key.
        key: &'static str,
        /// The folder of the model.
        folder: PathBuf,
        /// The file of the tokenizer.
        file: &'static str,
    },
    /// A path begins with a variable that is not set.
    #[error("`{key}` begins with ${variable}, which is not set in the environment")]
    NoVariable {
        /// The key.
        key: &'static str,
        /// The variable.
        variable: String,
    },
}

/// The word that the user probably meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Suggestion {
    /// Another name in the same place.
    Name(String),
    /// A key of some section.
    KeyOf {
        /// The section.
        section: String,
        /// The key.
        key: String,
    },
}

impl fmt::Display for Suggestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => write!(f, "`{name}`"),
            Self::KeyOf { section, key } => write!(f, "`{key}` in [{section}]"),
        }
    }
}

impl ProblemKind {
    /// Returns the problem of a value that is not of the expected type.
    pub(super) fn wrong_type(key: &'static str, expected: &'static str, value: &Value) -> Self {
        let found = match value {
            Value::String(_) => "a text",
            Value::Integer(_) => "a whole number",
            Value::Float(_) => "a number with a fraction",
            Value::Boolean(_) => "true or false",
            Value::Datetime(_) => "a date",
            Value::Array(_) => "a list",
            Value::Table(_) => "a table",
        };
        Self::WrongType { key, expected, found }
    }

    /// Returns what to do about the mistake, unless the message already says so.
    fn advice(&self) -> Option<String> {
        Some(match self {
            Self::InTable { problem, .. } => return problem.advice(),
            Self::Schedule(error) => return set_stages(error),
            Self::Model(_)
            | Self::Memory(_)
            | Self::Lookahead(_)
            | Self::Partition(_)
            | Self::ScheduleFile(_)
            | Self::Device(_)
            | Self::Layout(_) => return None,
            Self::BothDeviceKeys => "remove one of them".into(),
            Self::Syntax { .. } => "write keys as `key = value` below a `[section]`".into(),
            Self::Unrepresentable { message, .. } if message.contains("date") => {
                "write the value that the key has in config.json".into()
            }
            Self::Unrepresentable { .. } => "write a number that fits 64 bits".into(),
            Self::SetForm => "write for example --set pipeline.ranks=4".into(),
            Self::UnknownSection { suggestion: Some(meant), .. }
            | Self::OutsideSections { suggestion: Some(meant), .. }
            | Self::UnknownKey { suggestion: Some(meant), .. }
            | Self::UnknownValue { suggestion: Some(meant), .. } => format!("did you mean {meant}?"),
            Self::UnknownSection { .. } => format!("the sections are {}", sections()),
            Self::OutsideSections { .. } => format!("put it below one of {}", sections()),
            Self::UnknownKey { section, .. } => format!("the keys of [{section}] are {}", keys(section)),
            Self::UnknownValue { .. } => "write one of these".into(),
            Self::Missing { key, .. } => format!("write `{key} = ...`"),
            Self::UnknownKeyOf { suggestion: Some(meant), .. } => format!("did you mean `{meant}`?"),
            Self::UnknownKeyOf { known, .. } => format!("the keys are {}", known.join(", ")),
            Self::Unit { meant, .. } => format!("write `{meant}`, and convert the value"),
            Self::OtherLayers { .. }
            | Self::OtherLayer { .. }
            | Self::OtherDevice { .. }
            | Self::OtherSetting { .. } => {
                "use the profile of this run: `pipewright profile` with its configuration measures one".into()
            }
            Self::OtherPrecision { expected, .. } => format!(
                "`pipewright profile` with this configuration measures one; in a profile that is written by hand, write \
                 `precision = \"{expected}\"` below `[device]`"
            ),
            Self::WrongType { expected, .. } => format!("write {expected}"),
            Self::OutOfRange { range, .. } => format!("write {range}"),
            Self::NotCompiledIn { key, value, instead } => {
                format!("build with `cargo build --release --features {value}`, or write `{key} = {instead}`")
            }
            Self::NotSupported { supported, .. } => format!("write {supported}"),
            Self::NotOfFile { key, found, .. } => {
                format!("remove `{key}`, which follows from the file, or write `{key} = {found}`")
            }
            Self::LongWarmup { .. } => {
                "lower `warmup_steps` in [optimizer], or raise `steps` in [run]".into()
            }
            Self::Without { advice, .. } => (*advice).into(),
            Self::LayoutStages { stages, .. } => format!("separate {stages} stages with bars"),
            Self::Twice { key, other, .. } => format!("remove `{key}` or `{other}`"),
            Self::UnevenShare { shared, replicas, .. } => match shared.as_slice() {
                [] => format!("change `mesh.data_parallel`, which is {replicas}"),
                numbers => {
                    let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
                    format!("write {}", numbers.join(" or "))
                }
            },
            Self::OtherMode { written, meant, replicas, .. } => format!(
                "write `data_parallel_mode = \"{meant}\"` or leave it out, or write `data_parallel = {replicas}` for {written} \
                 parameters"
            ),
            Self::Empty { key } => format!("give `{key}` a value, or leave it out"),
            Self::BesideFrom { key } => format!("remove `{key}`, or remove `from`"),
            Self::NoTraining { key, .. } => format!("write for example `{key} = \"1f1b\"`"),
            Self::BesideSlices { key } => {
                format!("leave `{key}` out, or write for example `schedule = \"1f1b\"` in [pipeline]")
            }
            Self::NoBoundaries => "name each later stage's first layer, such as `boundaries = [4]`".into(),
            Self::UnusedBoundaries => "write `partition = \"explicit\"`, or remove `boundaries`".into(),
            Self::OtherTokenizer { key, .. } => format!(
                "write a `tokenizer.json` (`AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)` of transformers), or \
                 `{key} = \"bytes\"`"
            ),
            Self::NoVariable { variable, .. } => format!("set {variable}, or write the path out"),
        })
    }
}

/// Returns the argument that sets the number of stages on each rank to one that the schedule has, and what else has to
/// change for it, if the number of stages is the problem.
fn set_stages(error: &GenerateError) -> Option<String> {
    let advice = error.advice.first()?;
    let stages = advice.stages_per_rank?;
    let microbatches = advice.microbatches.map(|number| u64::from(number) * u64::from(error.replicas));
    let further = [
        ("ranks", advice.ranks.map(u64::from)),
        ("microbatches", microbatches),
        ("group_size", advice.group_size.map(u64::from)),
    ];
    let mut text = format!("add --set pipeline.stages_per_rank={stages}");
    for (key, number) in further {
        text.extend(number.map(|number| format!(" --set pipeline.{key}={number}")));
    }
    Some(text)
}

fn sections() -> String {
    let names: Vec<String> = super::keys::SECTIONS.iter().map(|(name, _)| format!("[{name}]")).collect();
    names.join(", ")
}

fn keys(section: &str) -> String {
    let names = super::keys::keys_of(section).unwrap_or_default();
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

impl miette::Diagnostic for Problem {
    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        let advice = self.kind.advice()?;
        Some(Box::new(advice))
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        match &self.place {
            // The line is shown as it is, so it must not have control characters.
            Place::File { source, .. }
                if self.place.line_length() <= LONGEST_LINE && escape(&source.text) == source.text =>
            {
                Some(&source.text)
            }
            _ => None,
        }
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        match &self.place {
            Place::File { span, .. } => {
                let label = LabeledSpan::new_primary_with_span(None, (span.start, span.len()));
                Some(Box::new(std::iter::once(label)))
            }
            Place::Set { .. } | Place::Default => None,
        }
    }
}
