//! Prepares a run for `train`, `resume` and `check`: turns the arguments into everything that is needed before a rank
//! starts.
//!
//! This module does not write files, does not create or read parameters, and does not change the settings.

use std::error::Error;
use std::num::NonZeroU32;
use std::path::Path;

use pipewright::device::Devices;
use pipewright::train::data::{DataConfig, SideRows, TokenRows, Tokenizer};
use pipewright::transport::Fields;
use pipewright_models::{InitialParameters, ModelConfig, hf};
use pipewright_schedule::csv::parse_schedule;
use pipewright_schedule::lower::{TrainingLowering, for_training};
use pipewright_schedule::partition::{Method, Partition, partition};
use pipewright_schedule::{Action, Level, ModelDesc, Program, ValidatedProgram, validate};
use serde_json::{Map, Value};

use crate::commands::schedule_file::{implied_level, locate};
use crate::config::data::{BYTES, DataSettings};
use crate::config::mesh::MeshSettings;
use crate::config::model::ModelSettings;
use crate::config::pipeline::{
    FoundSchedule, PartitionChoice, PipelineSettings, ScheduleChoice, TransportChoice,
};
use crate::config::{Loaded, Settings, Surroundings, sample};
use crate::failure::{Exit, Failure};

/// A run, with all checks done that do not need training.
pub(super) struct Prepared {
    /// The settings.
    pub(super) settings: Settings,
    /// The model's configuration.
    pub(super) model: ModelConfig,
    /// The model's initial parameters.
    pub(super) initial: InitialParameters,
    /// The model's layers.
    pub(super) layers: ModelDesc,
    /// The program that the ranks run.
    pub(super) program: ValidatedProgram,
    /// The layers of each stage.
    pub(super) partition: Partition,
    /// The data.
    pub(super) rows: TokenRows,
    /// The devices of all ranks. With several processes each one finds the device of its own rank later.
    pub(super) devices: Devices,
}

/// Returns the fields that must be equal in all processes of a run with this `description`. Paths may differ, because
/// files may be in different folders on different machines.
pub(super) fn identity(prepared: &Prepared, description: &Map<String, Value>) -> Fields {
    let mut fields = shared_settings(&prepared.settings);
    fields.extend(description.iter().map(|(part, content)| (part.clone(), content.to_string())));
    fields.insert("files of the weights".to_owned(), weights(&prepared.initial));
    fields
}

/// Returns the settings that must be equal in all processes.
pub(super) fn shared_settings(settings: &Settings) -> Fields {
    const MAY_DIFFER: [&str; 9] = [
        "data.path",
        "data.side",
        "data.tokenizer",
        "model.from",
        "pipeline.threads_per_rank",
        "run.out",
        "run.device",
        "run.devices",
        "run.exclusive",
    ];
    let mut fields = settings.by_key();
    fields.retain(|key, _| !MAY_DIFFER.contains(&key.as_str()));
    fields
}

/// Returns the names and sizes of the files that contain the initial parameters. Their content is not compared, because
/// that would mean reading gigabytes.
fn weights(initial: &InitialParameters) -> String {
    let InitialParameters::Directory(folder) = initial else { return String::new() };
    let files = folder.read_dir().into_iter().flatten().flatten();
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

/// Prepares the run that the settings specify, and checks the files that contain its parameters.
pub(super) fn prepare(loaded: Loaded) -> Result<Prepared, Failure> {
    let prepared = prepare_settings(loaded)?;
    if let InitialParameters::Directory(directory) = &prepared.initial {
        let parameters = prepared.model.outline(0..prepared.layers.layers.len()).map_err(Failure::input)?;
        hf::check_weights(directory, &parameters).map_err(Failure::input)?;
    }
    Ok(prepared)
}

/// Loads the settings from a file, or those of the built-in sample. `--set` arguments override them.
pub(super) fn load_settings(file: Option<&Path>, set: &[String]) -> Result<Loaded, Failure> {
    let surroundings = Surroundings::of_process().map_err(|error| {
        Failure::input(format!("the working folder cannot be found: {error}; go to another"))
    })?;
    Ok(Settings::load(file, set, &surroundings)?)
}

/// Prepares the run that the settings specify. The weights of a model directory are not checked.
pub(super) fn prepare_settings(Loaded { settings, schedule }: Loaded) -> Result<Prepared, Failure> {
    let program = sound_program(schedule, &settings.pipeline, &settings.mesh)?;
    let model = read_model(&settings.model)?;
    let layers = model.describe(settings.data.seq_len as usize);
    let stages = program.placement().stages();
    let method = method(&settings.pipeline, &model, stages)?;
    let partition = partition(&layers.weights(), stages, &method).map_err(Failure::input)?;
    let rows = open_data(&settings, &model)?;
    let initial = match &settings.model {
        ModelSettings::From { from } => InitialParameters::Directory(from.clone()),
        ModelSettings::Fresh(_) => InitialParameters::Seed(settings.run.seed),
    };
    let devices = match settings.pipeline.transport {
        TransportChoice::Local => {
            let ranks = program.ranks().saturating_mul(settings.mesh.data_parallel);
            settings.run.devices.open(ranks).map_err(Failure::input)?
        }
        TransportChoice::Mpi => Devices::default(),
    };
    Ok(Prepared { settings, model, initial, layers, program, partition, rows, devices })
}

/// Returns how layers are distributed over stages.
fn method(pipeline: &PipelineSettings, model: &ModelConfig, stages: u32) -> Result<Method, Failure> {
    if pipeline.partition != PartitionChoice::Pattern {
        return Ok(pipeline.method());
    }
    let Some(cuts) = model.cuts() else {
        return Err(Failure::input(
            "`pipeline.partition` is \"pattern\", and the model has no pattern with bars: write `optimal`",
        ));
    };
    if cuts.len() + 1 != stages as usize {
        return Err(Failure::input(format!(
            "the model's pattern has {} bar(s), which make {} stage(s), and the schedule has {stages} stages: add or \
             remove bars, or set `pipeline.ranks` or `pipeline.stages_per_rank`",
            cuts.len(),
            cuts.len() + 1,
        )));
    }
    Ok(Method::Explicit { boundaries: cuts })
}

/// Returns the sound program of the schedule that was found with the settings, for one replica.
fn sound_program(
    schedule: FoundSchedule,
    pipeline: &PipelineSettings,
    mesh: &MeshSettings,
) -> Result<ValidatedProgram, Failure> {
    let place = &pipeline.schedule;
    let program = match schedule {
        FoundSchedule::Auto => {
            return Err(Failure::input(
                "`pipeline.schedule` is \"auto\", which only `train` and `check` plan: a run resumes with the plan that \
                 it stored, so leave the key out, or name a schedule",
            ));
        }
        FoundSchedule::Generated(schedule) => {
            for_training(&schedule, &lowering(mesh)).map_err(|error| Failure::new(Exit::Bug, error))?
        }
        FoundSchedule::Read { text, program } => lower_file(&pipeline.schedule, &text, program, mesh)?,
    };
    if mesh.is_sharded() && program.level() != Level::Full {
        return Err(Failure::input(format!(
            "{place}: the schedule already communicates and never gathers parameters, but they are sharded \
             (`mesh.data_parallel_mode`): give one without communication, one of level `full`, or set \
             mesh.data_parallel_mode=replicated"
        )));
    }
    if program.is_forward_only() {
        return Err(Failure::input(format!(
            "{place}: the schedule has no backward and cannot train; use another"
        )));
    }
    Ok(program)
}

/// Returns the program of a schedule's file. A program that already contains communication or gathers parameters is not
/// changed. Any other program is lowered.
fn lower_file(
    place: &ScheduleChoice,
    text: &str,
    program: Program,
    mesh: &MeshSettings,
) -> Result<ValidatedProgram, Failure> {
    let unsound = |error: &dyn Error| Failure::new(Exit::CheckFailed, format!("{place}: {error}"));
    let gathers = program.rows().iter().flatten().any(|action| matches!(action, Action::Unshard { .. }));
    if implied_level(&program) > Level::Compute || gathers {
        let level = if mesh.is_sharded() && gathers { Level::Full } else { Level::Comms };
        return validate(program, level).map_err(|error| unsound(&error));
    }
    validate(program, Level::Compute).map_err(|error| unsound(&error))?;
    let schedule = parse_schedule(text).map_err(|error| {
        Failure::input(match place {
            ScheduleChoice::Csv(file) => locate(file, &error),
            ScheduleChoice::Named(name) => format!("{name}: {error}"),
        })
    })?;
    for_training(&schedule, &lowering(mesh)).map_err(|error| unsound(&error))
}

/// Returns the configuration that lowers the program of a replica.
pub(super) fn lowering(mesh: &MeshSettings) -> TrainingLowering {
    TrainingLowering {
        replicas: mesh.data_parallel,
        unshard_window: NonZeroU32::new(mesh.unshard_window).filter(|_| mesh.is_sharded()),
        ..TrainingLowering::default()
    }
}

/// Returns the configuration of the model that the settings name.
pub(super) fn read_model(settings: &ModelSettings) -> Result<ModelConfig, Failure> {
    match settings {
        ModelSettings::From { from } => ModelConfig::read(from).map_err(Failure::input),
        ModelSettings::Fresh(model) => Ok(model.config()),
    }
}

pub(super) fn open_data(settings: &Settings, model: &ModelConfig) -> Result<TokenRows, Failure> {
    let vocab_size = model.vocab_size();
    let is_built_in = settings.data.is_built_in();
    let DataSettings { path, tokenizer, seq_len, shuffle, side } = &settings.data;
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
    let rows = opened.map_err(Failure::input)?;
    let Some(side) = side else { return Ok(rows) };
    let side = SideRows::read(side).map_err(Failure::input)?;
    model.check_side(&side, *seq_len as usize).map_err(Failure::input)?;
    rows.with_side(side).map_err(Failure::input)
}
