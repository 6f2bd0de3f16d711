//! Prepares a run for `train`, `resume` and `check`: turns the arguments into everything that is needed before a rank
//! starts.
//!
//! This module does not write files, does not create or read parameters, and does not change the settings.

use std::cell::OnceCell;
use std::path::Path;

use pipewright::device::Devices;
use pipewright::train::Validation;
use pipewright::train::data::{
    DOCUMENTS, DataConfig, DataError, DataIdentity, Documents, POSITIONS, SideRows, TokenRows, Tokenizer,
};
use pipewright::transport::Fields;
use pipewright_models::{CutModel, InitialParameters, ModelConfig, hf};
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::partition::{Method, Partition, partition};
use pipewright_schedule::words::counted;
use pipewright_schedule::{Level, LowerConfig, ModelDesc, ValidatedProgram};
use serde_json::{Map, Value, json};

use crate::config::data::{BYTES, DataSettings};
use crate::config::mesh::MeshSettings;
use crate::config::model::ModelSettings;
use crate::config::pipeline::{FoundSchedule, PartitionChoice, PipelineSettings, TransportChoice};
use crate::config::{Loaded, Settings, sample};
use crate::failure::{Exit, Failure, sentence};
use crate::training::model_notes::{check_weights, model_notes};
use crate::training::optimizer::update;

/// A run, with all checks done that do not need training.
pub(crate) struct Prepared {
    /// The settings.
    pub(crate) settings: Settings,
    /// The model's configuration.
    pub(crate) model: CutModel,
    /// The model's initial parameters.
    pub(crate) initial: InitialParameters,
    /// The model's layers.
    pub(crate) layers: ModelDesc,
    /// The program that the ranks run.
    pub(crate) program: ValidatedProgram,
    /// The layers of each stage.
    pub(crate) partition: Partition,
    /// The data.
    pub(crate) rows: TokenRows,
    /// The validation data, if the run has some.
    pub(crate) validation: Option<Validation>,
    /// The identity of the validation data, once it was asked for.
    validation_identity: OnceCell<DataIdentity>,
    /// Sentences about the files of the model that the user should know.
    pub(crate) notes: Vec<String>,
    /// The devices of all ranks. With several processes each one finds the device of its own rank later.
    pub(crate) devices: Devices,
}

impl Prepared {
    /// Returns the identity of the validation data. The first call reads all of it.
    pub(crate) fn validation_identity(&self) -> Option<&DataIdentity> {
        let validation = self.validation.as_ref()?;
        Some(self.validation_identity.get_or_init(|| validation.rows().identity()))
    }
}

/// Returns the fields that must be equal in all processes of a run with this `description`. Paths may differ, because
/// files may be in different folders on different machines.
pub(crate) fn identity(prepared: &Prepared, description: &Map<String, Value>) -> Fields {
    let mut fields = shared_settings(&prepared.settings);
    fields.extend(description.iter().map(|(part, content)| (part.clone(), content.to_string())));
    fields.insert("files of the weights".to_owned(), weights(&prepared.initial));
    if let Some(identity) = prepared.validation_identity() {
        fields.insert("validation data".to_owned(), json!(identity).to_string());
    }
    fields
}

/// Returns the settings that must be equal in all processes.
pub(crate) fn shared_settings(settings: &Settings) -> Fields {
    const MAY_DIFFER: [&str; 11] = [
        "data.path",
        "data.side",
        "data.tokenizer",
        "data.validation",
        "data.validation_side",
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
pub(crate) fn prepare(loaded: Loaded) -> Result<Prepared, Failure> {
    let mut prepared = prepare_settings(loaded)?;
    let model = prepared.model.model();
    prepared.notes = model_notes(&prepared.settings, model)?;
    if let InitialParameters::Directory(directory) = &prepared.initial {
        prepared.notes.extend(check_weights(directory, model)?);
    }
    Ok(prepared)
}

/// Prepares the run that the settings specify. The weights of a model directory are not checked.
pub(crate) fn prepare_settings(Loaded { settings, schedule, .. }: Loaded) -> Result<Prepared, Failure> {
    let program = sound_program(schedule, &settings.pipeline, &settings.mesh)?;
    let model = read_model(&settings)?;
    // A group without parameters is found here, before the folder of the results changes.
    update(&settings.optimizer, model.model())?;
    let layers = model.describe(settings.data.seq_len as usize);
    let stages = program.placement().stages();
    let method = method(&settings.pipeline, model.model(), &layers, stages)?;
    let partition =
        partition(&settings.pipeline.weights(&layers), stages, &method).map_err(Failure::input)?;
    require_split(&settings.mesh, &model, &partition)?;
    require_slices(&program, &model)?;
    require_one_beginning(&settings.data, model.model())?;
    let (rows, validation) = open_data(&settings, model.model())?;
    let initial = match &settings.model {
        ModelSettings::From { from } if !hf::is_config_alone(from) => {
            InitialParameters::Directory(from.clone())
        }
        ModelSettings::From { .. } | ModelSettings::Fresh(_) => InitialParameters::Seed(settings.run.seed),
    };
    let devices = match settings.pipeline.transport {
        TransportChoice::Local => {
            let ranks = settings.mesh.ranks(program.ranks());
            settings.run.devices.open(ranks, settings.run.precision).map_err(Failure::input)?
        }
        TransportChoice::Mpi => Devices::default(),
    };
    let validation_identity = OnceCell::new();
    Ok(Prepared {
        settings,
        model,
        initial,
        layers,
        program,
        partition,
        rows,
        validation,
        validation_identity,
        notes: Vec::new(),
        devices,
    })
}

/// Returns how layers are distributed over stages.
pub(crate) fn method(
    pipeline: &PipelineSettings,
    model: &ModelConfig,
    layers: &ModelDesc,
    stages: u32,
) -> Result<Method, Failure> {
    if let Some(layout) = &pipeline.layout {
        layout.check(layers).map_err(|error| Failure::input(format!("`pipeline.layout`: {error}")))?;
    }
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
            "the model's pattern has {}, for {}, and the schedule has {}: add or remove bars, or set \
             `pipeline.ranks` or `pipeline.stages_per_rank`",
            counted(cuts.len(), "bar"),
            counted(cuts.len() + 1, "stage"),
            counted(stages, "stage"),
        )));
    }
    Ok(Method::Explicit { boundaries: cuts })
}

/// Lowers the schedule of the settings and returns the validated program of one replica.
fn sound_program(
    schedule: FoundSchedule,
    pipeline: &PipelineSettings,
    mesh: &MeshSettings,
) -> Result<ValidatedProgram, Failure> {
    let choice = &pipeline.schedule;
    let (source, exit) = match schedule {
        FoundSchedule::Auto => {
            return Err(Failure::input(
                "`pipeline.schedule` is \"auto\", which only `train` and `check` plan: a run resumes with the plan that \
                 it stored, so leave the key out, or name a schedule",
            ));
        }
        FoundSchedule::Generated(schedule) => (ProgramSource::Schedule(schedule), Exit::Bug),
        FoundSchedule::Read(program) => (ProgramSource::Rows(program), Exit::CheckFailed),
    };
    let program = source
        .program(&LowerConfig::from(mesh.lowering()))
        .map_err(|error| Failure::new(exit, format!("{choice}: {}", sentence(&error))))?;
    if mesh.is_sharded() && program.level() != Level::Full {
        return Err(Failure::input(format!(
            "{choice}: the schedule already communicates and never gathers parameters, but they are sharded \
             (`mesh.data_parallel_mode`, or a list in `mesh.data_parallel`): give one without communication, one of \
             level `full`, or set mesh.data_parallel={} and mesh.data_parallel_mode=replicated",
            mesh.data_parallel
        )));
    }
    if program.is_forward_only() {
        return Err(Failure::input(format!(
            "{choice}: the schedule has no backward and cannot train; use another"
        )));
    }
    Ok(program)
}

/// Returns the configuration of the model that the settings name, with its head in as many parts.
pub(crate) fn read_model(settings: &Settings) -> Result<CutModel, Failure> {
    let model = match &settings.model {
        ModelSettings::From { from } => ModelConfig::read(from).map_err(Failure::input)?,
        ModelSettings::Fresh(model) => model.config(),
    };
    CutModel::new(model, settings.pipeline.head_parts).map_err(Failure::input)
}

/// Refuses a model with a layer that cannot be split over the ranks that compute each stage together.
fn require_split(mesh: &MeshSettings, model: &CutModel, partition: &Partition) -> Result<(), Failure> {
    if mesh.tensor_parallel == 1 {
        return Ok(());
    }
    for (stage, range) in partition.ranges().enumerate() {
        let outline = model.outline(range, &mesh.first_tensor_rank());
        outline.map_err(|error| Failure::input(format!("stage {stage}: {}", sentence(&error))))?;
    }
    Ok(())
}

/// Refuses a model that cannot run the slices into which the schedule cuts microbatches.
fn require_slices(program: &ValidatedProgram, model: &CutModel) -> Result<(), Failure> {
    let slices = program.slices();
    match model.refuses_slices().map_err(Failure::input)? {
        Some(reason) if !slices.is_one() => Err(Failure::input(format!(
            "the schedule cuts microbatches into {slices} slices, and the model cannot run them: {reason}; or write for \
             example `schedule = \"1f1b\"` in [pipeline]"
        ))),
        _ => Ok(()),
    }
}

/// Refuses several ranks for each stage, for a command that measures layers.
pub(crate) fn require_whole_layers(mesh: &MeshSettings) -> Result<(), Failure> {
    match mesh.tensor_parallel {
        1 => Ok(()),
        ranks => Err(Failure::input(format!(
            "`profile` and the schedule `auto` know only layers that one rank computes, and `mesh.tensor_parallel` is \
             {ranks}: set it to 1, or name a schedule"
        ))),
    }
}

/// Refuses packed documents that begin with another id than the model's own.
fn require_one_beginning(data: &DataSettings, model: &ModelConfig) -> Result<(), Failure> {
    let of_model = model.to_json()["bos_token_id"].as_u64();
    match (of_model, data.bos_id) {
        (Some(model), Some(of_data)) if data.packed && model != u64::from(of_data) => {
            Err(Failure::input(format!(
                "`data.bos_id` is {of_data}, and the model's documents begin with {model} (`model.bos_token_id`): write \
                 the same id"
            )))
        }
        _ => Ok(()),
    }
}

/// Returns the training data and the validation data.
fn open_data(settings: &Settings, model: &ModelConfig) -> Result<(TokenRows, Option<Validation>), Failure> {
    let data = &settings.data;
    let (rows, mut held_out) = open_files(settings, model)?;
    if !data.validation.is_empty() {
        let config = DataConfig { path: data.validation.clone(), shuffle: false, ..data_config(settings) };
        let opened = config.open(model.vocab_size(), 0).map_err(Failure::input)?;
        held_out = Some(with_side(opened, data.validation_side.as_deref(), settings, model)?);
    }
    let batches = Some(settings.run.eval_batches as usize).filter(|batches| *batches > 0);
    let validation = |rows| Validation::new(rows, settings.pipeline.rows(), batches);
    let validation: Result<Option<Validation>, DataError> = held_out.map(validation).transpose();
    Ok((rows, validation.map_err(Failure::input)?))
}

/// Returns the training data. Files of validation data are not read.
pub(crate) fn open_training(settings: &Settings, model: &ModelConfig) -> Result<TokenRows, Failure> {
    open_files(settings, model).map(|(training, _)| training)
}

/// Opens the files of `data.path`. Returns the training data, and the part that is held out for validation.
fn open_files(settings: &Settings, model: &ModelConfig) -> Result<(TokenRows, Option<TokenRows>), Failure> {
    let (data, vocab_size) = (&settings.data, model.vocab_size());
    let config = data_config(settings);
    // Which part of the data is too short is only known when a share of it is held out.
    let batch_rows = if data.validation_share.is_some() { 0 } else { settings.pipeline.rows() };
    let opened = if data.is_built_in() {
        config.open_text(sample::TEXT, vocab_size, batch_rows)
    } else {
        config.open(vocab_size, batch_rows)
    };
    let rows = with_side(opened.map_err(Failure::input)?, data.side.as_deref(), settings, model)?;
    let Some(share) = data.validation_share else { return Ok((rows, None)) };
    let (training, held_out) = rows.hold_out(share).map_err(Failure::input)?;
    training.require_batch(settings.pipeline.rows()).map_err(Failure::input)?;
    Ok((training, Some(held_out)))
}

fn data_config(settings: &Settings) -> DataConfig {
    let DataSettings { path, tokenizer, seq_len, shuffle, bos_id, packed, restart_positions, .. } =
        &settings.data;
    DataConfig {
        path: path.clone(),
        tokenizer: match tokenizer.as_str() {
            BYTES => Tokenizer::Bytes,
            file => Tokenizer::File(file.into()),
        },
        seq_len: *seq_len as usize,
        shuffle: *shuffle,
        seed: settings.run.seed,
        documents: bos_id.map(|bos_id| Documents {
            bos_id,
            packed: *packed,
            restart_positions: *restart_positions,
        }),
    }
}

/// Adds the side inputs in the file `side`, if there is one.
fn with_side(
    rows: TokenRows,
    side: Option<&Path>,
    settings: &Settings,
    model: &ModelConfig,
) -> Result<TokenRows, Failure> {
    let Some(side) = side else { return Ok(rows) };
    let side = SideRows::read(side).map_err(Failure::input)?;
    model.check_side(&side, settings.data.seq_len as usize).map_err(Failure::input)?;
    let made = [DOCUMENTS, POSITIONS].into_iter().find(|name| settings.data.packed && side.has(name));
    if let Some(name) = made {
        let problem = "is made from the token ids if `data.packed` is true: remove it from the file, or unset `data.packed`";
        return Err(Failure::input(side.error(name, problem.to_owned())));
    }
    rows.with_side(side).map_err(Failure::input)
}
