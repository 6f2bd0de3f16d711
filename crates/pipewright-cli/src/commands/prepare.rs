//! What `train`, `resume` and `check` have in common: from arguments to everything that is needed before a rank starts.
//!
//! Nothing is written here, and no parameter is made or read.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use pipewright::data::{DataConfig, TokenRows, Tokenizer};
use pipewright::transport::Fields;
use pipewright_models::{ModelConfig, hf};
use pipewright_schedule::csv::{parse_program, parse_schedule};
use pipewright_schedule::lower::{ReduceWait, UnshardConfig};
use pipewright_schedule::partition::{Partition, partition};
use pipewright_schedule::{
    Action, Level, LowerConfig, ModelDesc, Program, Schedule, ScheduleSpec, ValidatedProgram, generate,
    lower, validate,
};
use serde_json::{Map, Value};

use crate::arguments::RunArguments;
use crate::commands::schedule_file::{self, implied_level, locate};
use crate::config::data::{BYTES, DataSettings};
use crate::config::mesh::MeshSettings;
use crate::config::model::ModelSettings;
use crate::config::pipeline::{PipelineSettings, ScheduleChoice};
use crate::config::sample;
use crate::config::{Settings, Surroundings};
use crate::failure::{Exit, Failure};

/// A run, checked as far as it can be without training.
pub(super) struct Prepared {
    /// The settings; sizes that a schedule's file brings are entered.
    pub(super) settings: Settings,
    /// The model's configuration.
    pub(super) model: ModelConfig,
    /// The Hugging Face folder whose parameters the model starts with; without it, those of the seed.
    pub(super) initial: Option<PathBuf>,
    /// The model's layers.
    pub(super) layers: ModelDesc,
    /// What each rank runs.
    pub(super) program: ValidatedProgram,
    /// Which layers each stage has.
    pub(super) partition: Partition,
    /// The data.
    pub(super) rows: TokenRows,
}

/// What must not differ between the processes of a run. Files may lie in different places on different machines.
/// `description` is the run's.
pub(super) fn identity(prepared: &Prepared, description: &Map<String, Value>) -> Fields {
    const MAY_DIFFER: [&str; 6] =
        ["data.path", "data.tokenizer", "model.from", "pipeline.threads_per_rank", "run.out", "run.device"];
    let mut fields = prepared.settings.by_key();
    fields.retain(|key, _| !MAY_DIFFER.contains(&key.as_str()));
    fields.extend(description.iter().map(|(part, content)| (part.clone(), content.to_string())));
    fields.insert("files of the weights".to_owned(), weights(prepared.initial.as_deref()));
    fields
}

/// The files that initial parameters come from, with their sizes: all that can be seen without reading gigabytes.
fn weights(folder: Option<&Path>) -> String {
    let files = folder.and_then(|folder| folder.read_dir().ok()).into_iter().flatten().flatten();
    let mut files: Vec<String> = files
        .filter(|file| file.path().extension().is_some_and(|ending| ending == "safetensors"))
        .map(|file| {
            let bytes = file.metadata().map_or(0, |metadata| metadata.len());
            format!("{} ({bytes} bytes)", file.file_name().to_string_lossy())
        })
        .collect();
    files.sort_unstable();
    files.join(", ")
}

/// Prepares the run that the arguments ask for.
pub(super) fn prepare(arguments: &RunArguments) -> Result<Prepared, Failure> {
    prepare_settings(load_settings(arguments.config.as_deref(), &arguments.set)?)
}

/// The settings in a file, or the built-in sample's, with `--set` arguments on top.
pub(super) fn load_settings(file: Option<&Path>, set: &[String]) -> Result<Settings, Failure> {
    let surroundings = Surroundings::of_process().map_err(|error| {
        Failure::input(format!("the working folder cannot be found: {error}; go to another"))
    })?;
    Ok(Settings::load(file, set, &surroundings)?)
}

/// Prepares the run that the settings ask for.
pub(super) fn prepare_settings(mut settings: Settings) -> Result<Prepared, Failure> {
    let program = read_program(&mut settings.pipeline, &settings.mesh)?;
    let model = read_model(&settings.model)?;
    let layers = model.describe(settings.data.seq_len as usize);
    let method = settings.pipeline.method();
    let partition =
        partition(&layers.weights(), program.placement().stages(), &method).map_err(Failure::input)?;
    let rows = open_data(&settings, model.vocab_size())?;
    let initial = match &settings.model {
        ModelSettings::From { from } => Some(from.clone()),
        ModelSettings::Fresh(_) => None,
    };
    Ok(Prepared { settings, model, initial, layers, program, partition, rows })
}

/// The program that the settings name, for one of the replicas. The sizes that a file brings replace those of the
/// settings.
fn read_program(pipeline: &mut PipelineSettings, mesh: &MeshSettings) -> Result<ValidatedProgram, Failure> {
    let replicas = mesh.data_parallel;
    let program = match &pipeline.schedule {
        ScheduleChoice::Named(name) => {
            let stages_per_rank = Some(pipeline.stages_per_rank);
            let spec = ScheduleSpec {
                ranks: pipeline.ranks,
                stages_per_rank,
                microbatches: pipeline.microbatches / replicas,
                ..ScheduleSpec::default()
            };
            // Reading the settings made the same schedule, so what fails here is ours.
            let schedule = generate(name, &spec).map_err(|error| Failure::new(Exit::Bug, error))?;
            lower_to_run(&schedule, mesh).map_err(|error| Failure::new(Exit::Bug, error))?
        }
        ScheduleChoice::Csv(file) => read_csv(file, mesh)?,
    };
    let place = pipeline.schedule.to_string();
    let level = match mesh.is_sharded() && gathers(&program) {
        true => Level::Full,
        false => implied_level(&program).max(Level::Comms),
    };
    let program = validate(program, level)
        .map_err(|error| Failure::new(Exit::CheckFailed, format!("{place}: {error}")))?;
    if mesh.is_sharded() && level != Level::Full {
        return Err(Failure::input(format!(
            "{place}: the schedule communicates already and never gathers parameters, which are sharded \
             (`mesh.data_parallel_mode`): give one without communication, one of level `full`, or set \
             mesh.data_parallel_mode=replicated"
        )));
    }
    if program.is_forward_only() {
        return Err(Failure::input(format!(
            "{place}: the schedule has no backward and cannot train; use another"
        )));
    }
    let placement = program.placement();
    pipeline.ranks = program.ranks();
    let too_many =
        || Failure::input(format!("{place}: {replicas} replicas have more microbatches than can be"));
    pipeline.microbatches = program.microbatches().checked_mul(replicas).ok_or_else(too_many)?;
    let on_a_rank = placement.all_ranks().map(|rank| placement.stages_of(rank).len() as u32);
    pipeline.stages_per_rank = on_a_rank.max().unwrap_or(1);
    Ok(program)
}

fn read_csv(file: &Path, mesh: &MeshSettings) -> Result<Program, Failure> {
    let text = schedule_file::read(file)?;
    let located = |error| Failure::input(locate(file, &error));
    let program = parse_program(&text).map_err(located)?;
    if implied_level(&program) > Level::Compute || gathers(&program) {
        return Ok(program);
    }
    let unsound = |error: String| Failure::new(Exit::CheckFailed, format!("{}: {error}", file.display()));
    validate(program, Level::Compute).map_err(|error| unsound(error.to_string()))?;
    lower_to_run(&parse_schedule(&text).map_err(located)?, mesh).map_err(unsound)
}

/// Whether a program gathers parameters.
fn gathers(program: &Program) -> bool {
    program.rows().iter().flatten().any(|action| matches!(action, Action::Unshard { .. }))
}

/// Adds communication; what another rank waits for leaves as soon as it is there. Where there are replicas, a stage's
/// gradients are reduced as soon as they are there, and waited for at the end; where parameters are sharded, they are
/// gathered before their stage computes.
fn lower_to_run(schedule: &Schedule, mesh: &MeshSettings) -> Result<Program, String> {
    let reduce_grad = (mesh.data_parallel > 1).then_some(ReduceWait::AtEnd);
    let window = NonZeroU32::new(mesh.unshard_window).filter(|_| mesh.is_sharded());
    let unshard = window.map(|window| UnshardConfig { window, lookahead: None });
    let config = LowerConfig { send_early: true, reduce_grad, unshard, ..LowerConfig::from(Level::Comms) };
    lower(schedule, &config).map_err(|error| error.to_string())
}

fn read_model(settings: &ModelSettings) -> Result<ModelConfig, Failure> {
    match settings {
        ModelSettings::From { from } => hf::read_config(from).map_err(Failure::input),
        ModelSettings::Fresh(model) => Ok(model.config()),
    }
}

fn open_data(settings: &Settings, vocab_size: usize) -> Result<TokenRows, Failure> {
    let is_built_in = settings.data.is_built_in();
    let DataSettings { path, tokenizer, seq_len, shuffle } = &settings.data;
    let config = DataConfig {
        path: path.clone(),
        tokenizer: match tokenizer.as_str() {
            BYTES => Tokenizer::Bytes,
            file => Tokenizer::File(file.into()),
        },
        seq_len: *seq_len as usize,
        shuffle: *shuffle,
        seed: settings.run.seed,
    };
    let batch_rows = settings.pipeline.rows();
    let opened = match is_built_in {
        true => config.open_text(sample::TEXT, vocab_size, batch_rows),
        false => config.open(vocab_size, batch_rows),
    };
    opened.map_err(Failure::input)
}
