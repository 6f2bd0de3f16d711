//! Prepares a run for `train`, `resume` and `check`: turns the arguments into everything that is needed
//! before a rank starts.
//!
//! This module does not write files, does not create or read parameters, and does not change the settings.

use std::cell::OnceCell;
use std::num::NonZeroU32;
use std::sync::Arc;

use pipewright::device::Devices;
use pipewright::pipeline::PipelineError;
use pipewright::train::data::{DataError, DataIdentity, TokenRows};
use pipewright::train::{TOKENS, Validation};
use pipewright_models::{AdapterStart, InitialParameters, ParameterSpec, PreferenceKind, hf};
use pipewright_schedule::error_text::with_causes as sentence;
use pipewright_schedule::lower::{ProgramSource, SourceError, TrainingLowering, most_gathered, unmovable};
use pipewright_schedule::partition::{Method, Partition, partition};
use pipewright_schedule::recompute::LayerParts;
use pipewright_schedule::simulate::few_microbatches;
use pipewright_schedule::words::counted;
use pipewright_schedule::{Level, LowerConfig, ModelDesc, Recompute, TrainedStages, ValidatedProgram};
use serde_json::Value;

use crate::error::{ErrorKind, RunError};
use crate::run_data::require_one_beginning;
use crate::run_model::RunModel;
use crate::settings::mesh::MeshSettings;
use crate::settings::model::{ModelSettings, STREAM_WINDOW};
use crate::settings::pipeline::{PartitionChoice, TransportChoice};
use crate::settings::replan::Replan;
use crate::settings::{Scheduled, Settings};
use crate::training::model::{
    check_weights, model_notes, tokenizer_note, trained_adapters, untrained_tokens, window_note,
};
use crate::training::optimizer::{expert_balance, require_elementwise, require_whole, update};
use crate::training::pipeline_settings::pipeline_config;
use crate::training::remote_files::RemoteData;
use crate::training::samples::SamplePrompts;
use crate::training::{exact, run_adapter, run_length};

/// A run, with all checks done that do not need training.
pub struct Prepared {
    /// The settings.
    pub settings: Settings,
    /// The model's configuration.
    pub model: Arc<dyn RunModel>,
    /// The model's initial parameters.
    pub initial: InitialParameters,
    /// The number of parameters that training changes.
    pub trained: u64,
    /// The description of the adapters in checkpoints, if these are trained.
    pub adapter: Option<Value>,
    /// A fingerprint of the adapters in the PEFT directory with which training starts.
    pub start_of_adapter: Option<String>,
    /// The model's layers.
    pub layers: ModelDesc,
    /// The source of the program, if layers may move while the run trains.
    pub source: Option<ProgramSource>,
    /// The program that the ranks run.
    pub program: ValidatedProgram,
    /// The layers of each stage.
    pub partition: Partition,
    /// The data.
    pub rows: TokenRows,
    /// The validation data, if the run has some.
    pub validation: Option<Validation>,
    /// The prompts that the model continues with each evaluation, if the run has some.
    pub samples: Option<SamplePrompts>,
    /// The number of targets that count in the loss, if some do not.
    pub counted_targets: Option<usize>,
    /// The identity of the validation data, once it was read.
    validation_identity: OnceCell<DataIdentity>,
    /// Sentences about the schedule and the files of the model that the user should know.
    pub notes: Vec<String>,
    /// The devices of all ranks. With several processes each one finds the device of its own rank later.
    pub devices: Devices,
}

/// The parts of a run that determine what its ranks hold.
#[derive(Clone, Copy)]
pub struct RunParts<'a> {
    /// The settings.
    pub settings: &'a Settings,
    /// The model.
    pub model: &'a dyn RunModel,
    /// The program of one replica.
    pub program: &'a ValidatedProgram,
    /// The layers of each stage.
    pub partition: &'a Partition,
}

impl RunParts<'_> {
    /// Returns the parameters of each stage, with the shapes of the first tensor rank's shards.
    pub fn outlines(&self) -> Result<Vec<Vec<ParameterSpec>>, RunError> {
        let rank = self.settings.mesh.first_tensor_rank();
        let outline = |range| self.model.outline(range, &rank);
        self.partition.ranges().map(outline).collect()
    }
}

/// The program of a run, and the cut of its model into the stages of the program.
pub struct CutProgram {
    /// The program of one replica.
    pub program: ValidatedProgram,
    /// The layers of each stage.
    pub partition: Partition,
    /// The model's layers.
    layers: ModelDesc,
    /// Sentences about the schedule that the user should know.
    notes: Vec<String>,
}

impl CutProgram {
    /// Makes the program of the `source`, proves it sound, and cuts the model.
    pub fn new(source: ProgramSource, settings: &Settings, model: &dyn RunModel) -> Result<Self, RunError> {
        let of_frozen = model.adapter().map(|_| source.clone());
        let (mut program, mut notes) = sound_program(source, settings, TrainedStages::ALL, model)?;
        notes.extend(overlap_note(settings));
        notes.extend(window_note(settings, model.streams()));
        let layers = model.describe(settings.data.seq_len as usize);
        let partition = cut(settings, model, &layers, program.placement().stages())?;
        let trained_stages = model.trained_stages(&partition)?;
        if let Some(source) = of_frozen.filter(|_| !trained_stages.are_all()) {
            program = sound_program(source, settings, trained_stages, model)?.0;
        }
        require_split(&settings.mesh, model, &partition)?;
        require_slices(&program, model)?;
        require_recomputed_layers(&settings.pipeline.recompute, &partition)?;
        require_recomputed_parts(&settings.pipeline.recompute, &partition, &layers)?;
        Ok(Self { program, partition, layers, notes })
    }
}

impl Prepared {
    /// Returns whether losses are means over tokens in nats. Losses of preferences and of labels are not.
    pub(crate) fn is_loss_of_tokens(&self) -> bool {
        self.model.unit() == TOKENS && self.settings.preference.is_none() && !self.model.has_labels()
    }

    /// Returns the parts of the run that determine what its ranks hold.
    pub fn parts(&self) -> RunParts<'_> {
        let Self { settings, model, program, partition, .. } = self;
        RunParts { settings, model: &**model, program, partition }
    }

    /// Returns whether layers may move to other ranks while the run trains.
    pub fn moves_layers(&self) -> bool {
        self.source.is_some() && self.program.ranks() > 1
    }

    /// Reads the validation data for its identity.
    pub fn identify_validation(&self) -> Result<(), DataError> {
        if let (Some(validation), None) = (&self.validation, self.validation_identity.get()) {
            let identity = validation.rows().identity()?;
            self.validation_identity.get_or_init(|| identity);
        }
        Ok(())
    }

    /// Returns the identity of the validation data, after [`Prepared::identify_validation`].
    pub fn validation_identity(&self) -> Option<&DataIdentity> {
        self.validation_identity.get()
    }

    /// Like [`RunParts::outlines`].
    pub fn outlines(&self) -> Result<Vec<Vec<ParameterSpec>>, RunError> {
        self.parts().outlines()
    }
}

/// Prepares the run that the settings specify, and checks the files that contain the model's parameters.
pub fn prepare(scheduled: Scheduled, model: Arc<dyn RunModel>) -> Result<Prepared, RunError> {
    prepare_with(scheduled, model, None)
}

/// Like [`prepare`], with the data of the first process on a host without data.
pub(crate) fn prepare_with(
    scheduled: Scheduled,
    model: Arc<dyn RunModel>,
    data: Option<&RemoteData>,
) -> Result<Prepared, RunError> {
    let mut prepared = prepare_settings_with(scheduled, model, data)?;
    require_whole(&prepared.settings)?;
    if prepared.settings.mesh.tensor_parallel > 1 {
        require_elementwise(&prepared.settings, &prepared.outlines()?)?;
    }
    let model = &*prepared.model;
    prepared.notes.extend(model_notes(&prepared.settings)?);
    prepared.notes.extend(tokenizer_note(&prepared.settings, model.vocab_size(), &prepared.rows));
    if let InitialParameters::Directory { path: directory, .. } = &prepared.initial {
        prepared.notes.extend(check_weights(directory, &model.parameters()?)?);
    }
    Ok(prepared)
}

/// Returns how many records preference training has, and whether it computes a reference.
fn preference_note(settings: &Settings, rows: &TokenRows) -> Option<String> {
    let preference = settings.preference.as_ref()?;
    let records = counted(rows.sequences() / 2, "record");
    let pass = match &preference.reference {
        None if preference.loss.needs_reference() => {
            "; before the first step, one forward pass over all rows computes the reference"
        }
        _ => "",
    };
    Some(format!("preference: {records} of two sequences each, both in one row{pass}"))
}

/// Returns how many records do not fit into a row, and how many cannot be used.
fn record_notes(data: &str, rows: &TokenRows) -> Vec<String> {
    let long = rows.long_records().map(|count| format!("{data}: {count}"));
    long.into_iter().chain(rows.bad_records().map(|bad| format!("{data}: {bad}"))).collect()
}

/// Prepares the run that the settings specify. The weights of a model directory are not checked.
pub fn prepare_settings(scheduled: Scheduled, model: Arc<dyn RunModel>) -> Result<Prepared, RunError> {
    prepare_settings_with(scheduled, model, None)
}

/// Like [`prepare_settings`], with the data of the first process on a host without data.
pub(crate) fn prepare_settings_with(
    scheduled: Scheduled,
    model: Arc<dyn RunModel>,
    data: Option<&RemoteData>,
) -> Result<Prepared, RunError> {
    let Scheduled { mut settings, source } = scheduled;
    let kept = (settings.run.replan == Replan::WhenSlow).then(|| source.clone());
    let CutProgram { program, partition, layers, mut notes } = CutProgram::new(source, &settings, &*model)?;
    // A group without parameters is found here, before the folder of the results changes.
    update(&settings.optimizer, &*model)?;
    expert_balance(&settings.optimizer, &*model)?;
    let all = layers.layers.iter().map(|layer| layer.parameters).sum();
    let (trained, note) =
        trained_adapters(&*model, all)?.map_or((all, None), |(trained, note)| (trained, Some(note)));
    notes.extend(note.into_iter().chain(exact::require(&settings.run)?));
    notes.extend(untrained_tokens(&settings, &*model)?);
    require_one_beginning(&settings.data, &model.to_json())?;
    let (rows, validation) = match data {
        Some(data) => data.open(&settings)?,
        None => model.open_data(&settings)?,
    };
    notes.extend(run_length::resolve(&mut settings, &rows)?);
    notes.extend(rows.missing_end().map(|missing| format!("data: {missing}")));
    notes.extend(record_notes("data", &rows));
    notes.extend(preference_note(&settings, &rows));
    // A part that is held out has the records of the same files.
    let files = validation.as_ref().filter(|_| settings.data.validation_share.is_none());
    notes.extend(files.into_iter().flat_map(|files| record_notes("validation data", files.rows())));
    let initial = match &settings.model {
        ModelSettings::From { from, .. } if !hf::is_config_alone(from) => {
            InitialParameters::Directory { path: from.clone(), seed: settings.run.seed }
        }
        ModelSettings::From { .. } | ModelSettings::Fresh(_) => InitialParameters::Seed(settings.run.seed),
    };
    let start_of_adapter = match model.adapter().map(|adapter| &adapter.start) {
        Some(AdapterStart::Directory(dir)) => Some(hf::adapter_fingerprint(dir).map_err(RunError::input)?),
        Some(AdapterStart::Seed(_)) | None => None,
    };
    let adapter = match (model.adapter(), &settings.model) {
        (Some(adapter), ModelSettings::From { from, .. }) => Some(run_adapter::describe(adapter, from)?),
        _ => None,
    };
    let devices = match settings.pipeline.transport {
        TransportChoice::Local => {
            let ranks = settings.mesh.ranks(program.ranks());
            settings.run.devices.open(ranks, settings.run.precision).map_err(RunError::input)?
        }
        TransportChoice::Mpi => Devices::default(),
    };
    let is_reward = settings.preference.as_ref().is_some_and(|loss| loss.loss == PreferenceKind::Reward);
    // Rewards are those of whole sequences.
    let counted_targets = if is_reward { None } else { rows.counted_targets().map_err(RunError::input)? };
    let samples = SamplePrompts::open(&settings, &*model)?;
    Ok(Prepared {
        settings,
        model,
        initial,
        trained,
        adapter,
        start_of_adapter,
        layers,
        source: kept,
        program,
        partition,
        rows,
        validation,
        samples,
        counted_targets,
        validation_identity: OnceCell::new(),
        notes,
        devices,
    })
}

/// Distributes the layers of a model over stages as the settings say.
pub fn cut(
    settings: &Settings,
    model: &dyn RunModel,
    layers: &ModelDesc,
    stages: u32,
) -> Result<Partition, RunError> {
    let pipeline = &settings.pipeline;
    if let Some(layout) = &pipeline.layout {
        layout.check(layers).map_err(|error| RunError::input(format!("`pipeline.layout`: {error}")))?;
    }
    let method = if pipeline.partition == PartitionChoice::Pattern {
        Method::Explicit { boundaries: cuts_of_pattern(model, stages)? }
    } else {
        pipeline.method(layers)
    };
    partition(&pipeline.weights(layers), stages, &method).map_err(RunError::input)
}

/// Returns the boundaries at the bars of the model's pattern.
fn cuts_of_pattern(model: &dyn RunModel, stages: u32) -> Result<Vec<usize>, RunError> {
    let Some(cuts) = model.cuts() else {
        return Err(RunError::input(
            "`pipeline.partition` is \"pattern\", and the model has no pattern with bars: write `optimal`",
        ));
    };
    if cuts.len() + 1 != stages as usize {
        return Err(RunError::input(format!(
            "the model's pattern has {}, for {}, and the schedule has {}: add or remove bars, or set \
             `pipeline.ranks` or `pipeline.stages_per_rank`",
            counted(cuts.len(), "bar"),
            counted(cuts.len() + 1, "stage"),
            counted(stages, "stage"),
        )));
    }
    Ok(cuts)
}

/// Makes the program of one replica, of which these stages are trained: generates and lowers the schedule,
/// and proves it sound. Also returns a note about a schedule of the catalogue with few microbatches.
fn sound_program(
    source: ProgramSource,
    settings: &Settings,
    trained: TrainedStages,
    model: &dyn RunModel,
) -> Result<(ValidatedProgram, Vec<String>), RunError> {
    let (choice, mesh) = (&settings.pipeline.schedule, &settings.mesh);
    let (is_named, is_file) =
        (matches!(source, ProgramSource::Named(..)), matches!(source, ProgramSource::Rows(_)));
    // The size of a named schedule was checked, and a plan has made another one.
    let exit = if is_file { ErrorKind::CheckFailed } else { ErrorKind::Bug };
    let refused = |error: SourceError| RunError::new(exit, format!("{choice}: {}", sentence(&error)));
    let source = source.generated().map_err(|error| refused(error.into()))?;
    let note = match &source {
        ProgramSource::Schedule(schedule) if is_named => few_microbatches(schedule),
        _ => None,
    };
    let has_messages = matches!(&source, ProgramSource::Rows(rows) if rows.communicates());
    let offload = settings.pipeline.offload.pass(&settings.pipeline.recompute);
    let streaming = settings.model.streaming();
    let stream_window = model.streams().then(|| streaming.window.unwrap_or(STREAM_WINDOW));
    // Otherwise the pipeline drains, and the schedule's own order is faster. Routers are corrected after each step.
    let delayed = settings.optimizer.delay > 0
        && settings.run.accumulate.get() == 1
        && settings.optimizer.expert_balance_speed.is_none()
        && !model.streams()
        && pipeline_config(settings, model)?.may_overlap();
    let lowering = TrainingLowering { trained, offload, stream_window, delayed, ..mesh.lowering() };
    let program = source.program(&LowerConfig::from(lowering)).map_err(refused)?;
    if mesh.is_sharded() && program.level() != Level::Full {
        return Err(RunError::input(format!(
            "{choice}: the schedule already communicates and never gathers parameters, but they are sharded \
             (`mesh.data_parallel_mode`, or a list in `mesh.data_parallel`): give one without communication, one of \
             level `full`, or set mesh.data_parallel={} and mesh.data_parallel_mode=replicated",
            mesh.data_parallel
        )));
    }
    if let Some(window) = stream_window {
        require_window(&program, window).map_err(|fault| RunError::input(format!("{choice}: {fault}")))?;
    }
    require_offload(&program, settings, has_messages)?;
    if program.is_forward_only() {
        return Err(RunError::input(format!(
            "{choice}: the schedule has no backward and cannot train; use another"
        )));
    }
    Ok((program, note.iter().map(ToString::to_string).collect()))
}

/// Requires that the stages of a base that is streamed are read, and that no more are in memory than the settings say.
fn require_window(program: &ValidatedProgram, window: NonZeroU32) -> Result<(), String> {
    let overlaps = program.as_program().rows().iter().flatten().any(|action| action.parts().count() > 1);
    let most = window.get() + u32::from(overlaps);
    match most_gathered(program) {
        None => Err("the base stays in its files (`model.stream`), and the schedule communicates and never reads a stage \
                     (UNSHARD): give one without communication, or set model.stream=false"
            .to_owned()),
        Some(found) if found.get() > most => Err(format!(
            "the schedule reads {} at once, and `model.stream_window` is {window}: change one of them",
            counted(found.get(), "stage")
        )),
        Some(_) => Ok(()),
    }
}

/// Returns a note about a schedule that is made for overlaps and has no exchanges for them.
fn overlap_note(settings: &Settings) -> Option<String> {
    let is_in_vain = settings.pipeline.generator.overlap && settings.mesh.expert_parallel == 1;
    is_in_vain.then(|| {
        "`pipeline.overlap` hides nothing, because no tokens are exchanged (`mesh.expert_parallel` is 1), and a step may \
         take longer with it: remove it"
            .to_owned()
    })
}

/// Refuses a program that moves tensors out of memory otherwise than the settings say. Rows that have
/// messages are not changed, so they move none if they have no `OFFLOAD`.
fn require_offload(
    program: &ValidatedProgram,
    settings: &Settings,
    has_messages: bool,
) -> Result<(), RunError> {
    let (pipeline, rows) = (&settings.pipeline, program.as_program().rows());
    let place = pipeline.offload.place();
    let first = rows.iter().flatten().find(|action| action.kind().is_offload());
    let problem = match first {
        Some(&action) if place.is_none() => PipelineError::NoOffloadPlace { action }.to_string(),
        Some(_) => match unmovable(program.as_program(), &pipeline.recompute) {
            Some(action) => PipelineError::OffloadedTape { action }.to_string(),
            None => return Ok(()),
        },
        None if has_messages && place.is_some() => {
            "the schedule already communicates and moves no tensors out of memory, and `pipeline.offload` says that it does: \
             give one without communication, add the actions with `pipewright lower --pass offload`, or remove \
             `pipeline.offload`"
                .to_owned()
        }
        None => return Ok(()),
    };
    Err(RunError::input(format!("{}: {problem}", pipeline.schedule)))
}

/// Refuses a model with a layer that cannot be split over the ranks that compute each stage together, or over
/// the replicas that hold the experts together, and a model without experts for such replicas.
fn require_split(mesh: &MeshSettings, model: &dyn RunModel, partition: &Partition) -> Result<(), RunError> {
    let experts = mesh.expert_parallel;
    if mesh.tensor_parallel == 1 && experts == 1 {
        return Ok(());
    }
    let mut has_experts = false;
    for (stage, range) in partition.ranges().enumerate() {
        let outline = model.outline(range, &mesh.first_tensor_rank());
        let specs = outline.map_err(|error| RunError::input(format!("stage {stage}: {error}")))?;
        has_experts |= specs.iter().any(ParameterSpec::is_of_routed_expert);
    }
    if experts > 1 && !has_experts {
        return Err(RunError::input(format!(
            "the model has no experts that {experts} replicas could hold together: set mesh.expert_parallel=1"
        )));
    }
    Ok(())
}

/// Refuses a stage that is to recompute more layers than it has.
fn require_recomputed_layers(recompute: &Recompute, partition: &Partition) -> Result<(), RunError> {
    let beyond = recompute.beyond_layers(|stage| partition.range(stage).len());
    let Some((stage, layers, count)) = beyond else { return Ok(()) };
    Err(RunError::input(format!(
        "`pipeline.recompute` names the first {layers} layers of stage {stage}, which has {}: name at most as many as it has, \
         or the whole stage",
        counted(count, "layer")
    )))
}

/// Refuses parts of layers that no layer of the stage, or of the model, computes again.
fn require_recomputed_parts(
    recompute: &Recompute,
    partition: &Partition,
    model: &ModelDesc,
) -> Result<(), RunError> {
    let parts_of = |stage| LayerParts::of_layers(&model.layers[partition.range(stage)]);
    let Some((stage, parts)) = recompute.parts_beyond(partition.stages(), parts_of) else { return Ok(()) };
    let place = stage.map_or_else(|| "this model".to_owned(), |stage| format!("stage {stage}"));
    Err(RunError::input(format!(
        "`pipeline.recompute` names parts that no layer of {place} computes again: {parts}; leave them out, or name layers \
         or stages"
    )))
}

/// Refuses a model that cannot run the slices into which the schedule cuts microbatches.
fn require_slices(program: &ValidatedProgram, model: &dyn RunModel) -> Result<(), RunError> {
    let slices = program.slices();
    match model.refuses_slices()? {
        Some(reason) if !slices.is_one() => Err(RunError::input(format!(
            "the schedule cuts microbatches into {slices} slices, and the model cannot run them: {reason}; or write for \
             example `schedule = \"1f1b\"` in [pipeline]"
        ))),
        _ => Ok(()),
    }
}

/// Refuses several ranks for each stage, for a command that measures layers.
pub fn require_whole_layers(mesh: &MeshSettings) -> Result<(), RunError> {
    let (key, ranks) = match (mesh.tensor_parallel, mesh.expert_parallel) {
        (1, 1) => return Ok(()),
        (1, replicas) => ("mesh.expert_parallel", replicas),
        (ranks, _) => ("mesh.tensor_parallel", ranks),
    };
    Err(RunError::input(format!(
        "`profile` and the schedule `auto` know only layers that one rank computes, and `{key}` is {ranks}: set it to 1, \
         or name a schedule"
    )))
}
