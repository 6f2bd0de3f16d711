//! A run as its folder shows it: the recorded steps, the program that they ran, and its costs.
//!
//! The program and the costs come from the timelines, so they are true of the steps even if a file that the
//! configuration names has changed. The configuration adds what timelines do not show: the schedule's name,
//! the sizes of activations, and the same schedule for other numbers of microbatches. If it cannot be used,
//! for example because the model's directory is gone, the page is made without these.

use std::path::Path;

use pipewright_models::CutModel;
use pipewright_models::training_memory::{ExpertLoad, KeptActivations};
use pipewright_planning::failure::Failure;
use pipewright_run::run_folder::CONFIG;
use pipewright_run::run_record::{RecordedTimeline, StepMetrics, median_of, metrics, require_run, timelines};
use pipewright_run::settings::Settings;
use pipewright_run::settings::pipeline::ScheduleChoice;
use pipewright_run::training::load::load_settings;
use pipewright_run::training::model::{compute_devices, described, read_model};
use pipewright_run::training::prepare::cut;
use pipewright_schedule::costs::StageSizes;
use pipewright_schedule::lower::{ProgramSource, TrainingLowering};
use pipewright_schedule::measured::{
    costs_of, join_replicas, join_steps, on_one_clock, program_of, replicas,
};
use pipewright_schedule::picture::{RecordedStep, WholeStep, microbatches_in_words};
use pipewright_schedule::words::counted;
use pipewright_schedule::{
    Action, Costs, LowerConfig, Partition, Program, Recompute, ScheduleSpec, Timeline, TrainedStages,
    ValidatedProgram,
};

use crate::schedules::other_sizes::other_sizes;

/// A run with everything that its page shows.
pub(crate) struct RecordedRun {
    pub(crate) title: String,
    /// The recorded steps that ran the program.
    pub(crate) steps: Vec<RecordedStep>,
    /// The number of recorded steps that ran another program.
    pub(crate) left_out: usize,
    /// The time of whole steps, as `report` has it.
    pub(crate) whole_step: Option<WholeStep>,
    /// The program of the last step, of one replica.
    pub(crate) program: Program,
    /// The median costs of `steps`.
    pub(crate) costs: Costs,
    /// The sizes of each stage in bytes; empty if they are not known.
    pub(crate) sizes: Vec<StageSizes>,
    pub(crate) other_programs: Vec<Program>,
    /// Whether stages read a frozen base from its files: a base that replicas share is in memory.
    pub(crate) reads_base: bool,
}

impl RecordedRun {
    /// Reads the folder of a run.
    pub(crate) fn read(run: &Path) -> Result<Self, Failure> {
        require_run(run)?;
        let located = |error| {
            Failure::input(format!("{}: {}", run.display(), pipewright_planning::failure::sentence(&error)))
        };
        let recorded = timelines(run)?;
        let mut steps = Vec::new();
        for RecordedTimeline { step, timeline } in &recorded {
            let replicas: Vec<Timeline> =
                replicas(timeline).map_err(located)?.iter().map(on_one_clock).collect();
            steps.push((*step, replicas));
        }
        let (_, last) = steps.last().expect("a run without timelines is refused");
        let program = program_of(&last[0]).map_err(located)?;
        let count = last.len();
        // A resumed run may have had another cut or another schedule in earlier steps, so the prediction and
        // the sizes of the stages are not theirs.
        let recorded = steps.len();
        steps.retain(|(_, replicas)| {
            program_of(&replicas[0]).is_ok_and(|other| computes_the_same(&other, &program))
        });
        // The first step also warms up caches.
        let warm = steps.iter().filter(|(step, _)| *step > 1 || steps.len() == 1);
        let costs = costs_of(&warm.flat_map(|(_, replicas)| replicas).cloned().collect::<Vec<Timeline>>());
        let settings = load_settings(Some(&run.join(CONFIG)), &[]).ok().map(|loaded| loaded.settings);
        let title = title(run, &program, count, settings.as_ref());
        let cut = settings.as_ref().and_then(|settings| cut_model(settings, &program));
        let sizes = settings
            .as_ref()
            .zip(cut.as_ref())
            .and_then(|(settings, (model, partition))| sizes(settings, &program, model, partition));
        let trained = cut.and_then(|(model, partition)| model.trained_stages(&partition).ok());
        let (sizes, trained) = (sizes.unwrap_or_default(), trained.unwrap_or_default());
        let others =
            settings.as_ref().map(|settings| others(settings, &program, &trained)).unwrap_or_default();
        let joined = |(step, replicas): (u64, Vec<Timeline>)| RecordedStep {
            step,
            before: 0,
            timeline: join_replicas(&replicas),
        };
        let mut steps: Vec<RecordedStep> = steps.into_iter().map(joined).collect();
        let left_out = recorded - steps.len();
        let metrics = metrics(run)?;
        steps.extend(overlapping(&steps, &metrics, program.microbatches()));
        let whole_step = whole_step(&metrics);
        let reads_base = settings.is_some_and(|settings| settings.mesh.shards() == 1);
        Ok(Self {
            title,
            steps,
            left_out,
            whole_step,
            program,
            costs,
            sizes,
            other_programs: others,
            reads_base,
        })
    }
}

/// Returns the last three steps on one time axis, if each overlaps with the one before. In each replica, a step has so
/// many `microbatches`.
fn overlapping(steps: &[RecordedStep], metrics: &[StepMetrics], microbatches: u32) -> Option<RecordedStep> {
    let [first, second, third] = steps.last_chunk()?;
    let start_after = |before: &RecordedStep, step: &RecordedStep| {
        let metrics = metrics.iter().rfind(|metrics| metrics.step == step.step)?;
        metrics
            .start_after_ms
            .filter(|_| step.step == before.step + 1)
            .map(|milliseconds| milliseconds * 1e-3)
    };
    let (of_second, of_third) = (start_after(first, second)?, start_after(second, third)?);
    let placed =
        [(0.0, &first.timeline), (of_second, &second.timeline), (of_second + of_third, &third.timeline)];
    Some(RecordedStep { step: third.step, before: 2, timeline: join_steps(&placed, microbatches) })
}

/// Returns the time of whole steps, if the metrics have it.
fn whole_step(metrics: &[StepMetrics]) -> Option<WholeStep> {
    let seconds = |value| median_of(metrics, value).map(|milliseconds| milliseconds * 1e-3);
    let predicted = seconds(|step| step.predicted_step_ms);
    Some(WholeStep { measured: seconds(|step| step.step_ms)?, predicted })
}

/// Returns whether the ranks of both programs run the same computations in the same order.
fn computes_the_same(one: &Program, other: &Program) -> bool {
    let computations = |program: &Program| -> Vec<Vec<Action>> {
        let row = |row: &Vec<Action>| row.iter().copied().filter(|action| action.is_compute()).collect();
        program.rows().iter().map(row).collect()
    };
    one.slices() == other.slices() && computations(one) == computations(other)
}

fn title(run: &Path, program: &Program, replicas: usize, settings: Option<&Settings>) -> String {
    let schedule = settings.map_or(String::new(), |settings| format!(", {}", settings.pipeline.schedule));
    let replicas = if replicas > 1 { format!("{replicas} replicas of ") } else { String::new() };
    let (ranks, stages) = (program.ranks(), program.placement().stages());
    let (ranks, stages) = (counted(ranks, "rank"), counted(stages, "stage"));
    let microbatches = microbatches_in_words(program.microbatches(), program.slices());
    format!("{}{schedule}: {replicas}{ranks}, {stages}, {microbatches}", run.display())
}

/// Returns the model of the run, cut into the program's stages.
fn cut_model(settings: &Settings, program: &Program) -> Option<(CutModel, Partition)> {
    let model = read_model(settings).ok()?;
    let layers = described(settings, &model);
    let cut = cut(settings, &model, &layers, program.placement().stages()).ok()?;
    Some((model, cut))
}

/// Returns the sizes of each stage's activations.
fn sizes(
    settings: &Settings,
    program: &Program,
    model: &CutModel,
    partition: &Partition,
) -> Option<Vec<StageSizes>> {
    let tensor = settings.mesh.first_tensor_rank();
    let stages: Result<Vec<_>, _> = partition.ranges().map(|range| model.outline(range, &tensor)).collect();
    let kept = KeptActivations {
        model,
        partition,
        tokens: settings.data.seq_len as usize,
        rows: settings.mesh.largest_microbatch(settings.pipeline.microbatch_size),
        slices: program.slices(),
        precision: settings.run.precision,
        recompute: &settings.pipeline.recompute,
        devices: compute_devices(settings),
        expert_ranks: settings.mesh.expert_parallel,
        expert_load: ExpertLoad::Mean,
        tensor: settings.mesh.tensor_share(),
    };
    Some(kept.sizes(&stages.ok()?))
}

/// Returns the programs of the run's schedule for other numbers of microbatches, if the schedule has a name.
/// A run with recomputation has no other programs: generated programs do not contain the forwards that
/// backwards compute again.
fn others(settings: &Settings, program: &Program, trained: &TrainedStages) -> Vec<Program> {
    if settings.pipeline.recompute != Recompute::None {
        return Vec::new();
    }
    let ScheduleChoice::Named(name) = &settings.pipeline.schedule else { return Vec::new() };
    let ranks = program.ranks();
    let stages_per_rank = Some(program.placement().stages_per_rank());
    other_sizes(program, |microbatches| {
        let size = ScheduleSpec { ranks, stages_per_rank, microbatches, ..ScheduleSpec::default() };
        let spec = settings.pipeline.generator.spec(size);
        let source = ProgramSource::Named(name.clone(), Box::new(spec));
        let lowering = TrainingLowering { trained: trained.clone(), ..settings.mesh.lowering() };
        source.program(&LowerConfig::from(lowering)).ok().map(ValidatedProgram::into_program)
    })
}
