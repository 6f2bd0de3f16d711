//! The kinds of mistakes in a configuration, with their messages.

use std::path::PathBuf;

use pipewright::device::DeviceError;
use pipewright_schedule::partition::LayoutError;
use pipewright_schedule::words::counted;
use pipewright_schedule::{GenerateError, LowerError, PartitionError};
use pipewright_system::schedule_memory::OutOfMemory;
use thiserror::Error;
use toml::Value;

use crate::schedule_file::ScheduleFileError;
use crate::settings::keys::Suggestion;
use crate::settings::problem::profile_mismatch::ProfileMismatch;
use crate::text::shortened;

/// The kind of a mistake.
#[derive(Debug, Error)]
pub enum ProblemKind {
    /// The text is not TOML.
    #[error("not valid TOML: {}", message.replace('\n', ", "))]
    Syntax { message: String },
    /// The value is TOML, but no type of this program can hold it, such as a whole number of more than 64
    /// bits.
    #[error("the value of `{key}` cannot be held: {message}")]
    Unrepresentable { key: String, message: String },
    /// `--set` was not followed by `section.key=value`.
    #[error("not of the form section.key=value")]
    SetForm,
    /// No section has this name.
    #[error("unknown section `{section}`")]
    UnknownSection { section: String, suggestion: Option<Suggestion> },
    /// A value is written where a section is expected.
    #[error("`{key}` is outside of any section")]
    OutsideSections { key: String, suggestion: Option<Suggestion> },
    /// The section has no such key.
    #[error("unknown key `{key}` in [{section}]")]
    UnknownKey { section: String, key: String, suggestion: Option<Suggestion> },
    /// A key of a profile or of a list of tables is missing.
    #[error("`{key}` is missing in {section}")]
    Missing { key: &'static str, section: &'static str },
    /// A key of a profile or of a list of tables does not exist.
    #[error("unknown key `{key}` in {section}")]
    UnknownKeyOf {
        key: String,
        section: &'static str,
        known: Vec<&'static str>,
        suggestion: Option<&'static str>,
    },
    /// A profile has another unit, or is not of the run.
    #[error(transparent)]
    Profile(#[from] ProfileMismatch),
    /// The value is of another type.
    #[error("`{key}` is {found}, where {expected} is expected")]
    WrongType { key: &'static str, expected: &'static str, found: &'static str },
    /// The number is out of range.
    #[error("`{key}` is {}, where {range} is expected", shortened(.value))]
    OutOfRange { key: &'static str, value: String, range: String },
    /// The word is not one of the known ones.
    #[error("`{key}` is \"{}\", where {} is expected", shortened(.value), known.join(", "))]
    UnknownValue { key: &'static str, value: String, known: Vec<String>, suggestion: Option<Suggestion> },
    /// The word names a feature that this binary was built without.
    #[error("`{key}` is \"{value}\", which is not compiled into this binary")]
    NotCompiledIn { key: &'static str, value: String, instead: &'static str },
    /// The word names a feature that no build of this version has.
    #[error("`{key}` is \"{value}\", which this version of Pipewright does not support")]
    NotSupported { key: &'static str, value: String, supported: &'static str },
    /// A size differs from the size in the schedule's file.
    #[error("`{key}` is {value}, and the schedule in {} has {found}", file.display())]
    NotOfFile { key: &'static str, value: u32, file: PathBuf, found: u64 },
    /// The learning rate would still rise when the run ends.
    #[error(
        "`warmup_steps` is {warmup_steps}, and the run has {}: the learning rate never reaches its highest",
        counted(*steps, "step")
    )]
    LongWarmup { warmup_steps: u64, steps: u64 },
    /// The learning rate would still rise when the run ends, after its schedule has begun again.
    #[error(
        "`warmup_steps` is {warmup_steps}, and `restart_at` is {restart_at} of {}: the learning rate never reaches its \
         highest again",
        counted(*steps, "step")
    )]
    LongSecondWarmup { warmup_steps: u64, restart_at: u64, steps: u64 },
    /// The learning rate would fall over more steps than the run has after its warm-up.
    #[error(
        "`decay_steps` is {decay_steps}, and after {}the warm-up, the run has {}",
        if *restart_at > 0 { format!("`restart_at` = {restart_at} and ") } else { String::new() },
        counted(*steps, "step")
    )]
    LongDecay { decay_steps: u64, restart_at: u64, steps: u64 },
    /// The schedule would begin again after the run.
    #[error("`restart_at` is {restart_at}, and the run has {}", counted(*steps, "step"))]
    LateRestart { restart_at: u64, steps: u64 },
    /// The learning rate would rise instead of fall.
    #[error("`min_learning_rate` is {lowest:e}, which is above `learning_rate`, {highest:e}")]
    LowestAboveHighest { lowest: f64, highest: f64 },
    /// A key has an effect only together with another one.
    #[error("`{key}` has no effect without {other}")]
    Without { key: &'static str, other: &'static str, advice: &'static str },
    /// A problem of one table of a list of several.
    #[error("table {number}: {problem}")]
    InTable { number: usize, problem: Box<ProblemKind> },
    /// A cut by hand has more or fewer stages than the schedule.
    #[error("the layout has {found} stages, and the schedule {stages}")]
    LayoutStages { found: usize, stages: u32 },
    /// Two keys choose the same thing.
    #[error("`{key}` and `{other}` both choose {what}")]
    Twice { what: &'static str, key: &'static str, other: &'static str },
    /// Both keys name the training data.
    #[error("`path` and `mix` both name the training data")]
    PathAndMix,
    /// The replicas cannot share the microbatches evenly.
    #[error(
        "`microbatches` is {microbatches}, which {replicas} replicas (`mesh.data_parallel`) cannot share evenly"
    )]
    UnevenShare {
        microbatches: u32,
        replicas: u32,
        /// The nearest numbers that the replicas can share and the schedule accepts.
        shared: Vec<u32>,
    },
    /// The mode of the replicas contradicts the list of replicas.
    #[error(
        "`data_parallel_mode` is \"{written}\", and with `data_parallel = {groups}` the parameters are {meant}"
    )]
    OtherMode {
        /// The word as written.
        written: &'static str,
        meant: &'static str,
        /// The list as written.
        groups: String,
        replicas: u32,
    },
    /// The text is empty.
    #[error("`{key}` is empty")]
    Empty { key: &'static str },
    /// A key is written together with `from`, which determines its value.
    #[error("`{key}` is written next to `from`, and with `from` the model follows from its config.json")]
    BesideFrom { key: String },
    /// A key is written together with `path`, which determines its value.
    #[error("`{key}` is written next to `path`, and with `path` it follows from adapter_config.json")]
    BesidePath { key: &'static str },
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
    NoTraining { key: &'static str, value: String },
    /// The key needs whole microbatches, and the schedule cuts them into slices.
    #[error("`{key}` does not work with a schedule that cuts microbatches into slices")]
    BesideSlices { key: &'static str },
    /// The key does not work if replicas hold the experts together.
    #[error(
        "`{key}` does not work with {experts} replicas that hold the experts together (`mesh.expert_parallel`)"
    )]
    BesideExperts { key: &'static str, experts: u32 },
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
    OtherTokenizer { key: &'static str, folder: PathBuf, file: &'static str },
    /// A path begins with a variable that is not set.
    #[error("`{key}` begins with ${variable}, which is not set in the environment")]
    NoVariable { key: &'static str, variable: String },
}

impl ProblemKind {
    /// Returns the problem of a value that is not of the expected type.
    pub fn wrong_type(key: &'static str, expected: &'static str, value: &Value) -> Self {
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
}
