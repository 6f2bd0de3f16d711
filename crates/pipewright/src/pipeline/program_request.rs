//! The programs that a builder is asked for: their schedules, their sizes, and the passes that lower them.

use pipewright_schedule::generate::{Limits, generate_within, shared_microbatches};
use pipewright_schedule::lower::{
    OffloadConfig, ProgramSource, TrainingLowering, UnshardConfig, drop_bubbles,
};
use pipewright_schedule::simulate::few_microbatches;
use pipewright_schedule::words::counted;
use pipewright_schedule::{
    GenerateError, GenerateErrorKind, LowerConfig, PartitionError, ScheduleSpec, ValidatedProgram,
};

use super::build_error::BuildError;
use super::schedule_source::ScheduleSource;
use crate::config::PipelineConfig;

/// The programs that a builder is asked for.
pub(super) struct ProgramRequest {
    pub(super) schedule: ScheduleSource,
    pub(super) ranks: Option<u32>,
    pub(super) stages_per_rank: Option<u32>,
    pub(super) microbatches: Option<Microbatches>,
    /// The settings of a named schedule, except its size.
    spec: ScheduleSpec,
    pub(super) lower: Option<LowerConfig>,
    /// The schedule of evaluations.
    pub(super) eval_schedule: Option<ScheduleSource>,
    /// The microbatches of an evaluation, over all replicas.
    pub(super) eval_microbatches: Option<u32>,
}

/// The number of microbatches of a step.
#[derive(Clone, Copy, Debug)]
pub(super) enum Microbatches {
    Total(u32),
    PerReplica(u32),
}

impl Default for ProgramRequest {
    fn default() -> Self {
        Self {
            schedule: "1f1b".into(),
            ranks: None,
            stages_per_rank: None,
            microbatches: None,
            spec: ScheduleSpec::default(),
            lower: None,
            eval_schedule: None,
            eval_microbatches: None,
        }
    }
}

impl ProgramRequest {
    /// Sets the size and the settings of a named schedule.
    pub(super) fn set_spec(&mut self, spec: ScheduleSpec) {
        self.ranks = Some(spec.ranks);
        self.stages_per_rank = spec.stages_per_rank;
        self.microbatches = Some(Microbatches::PerReplica(spec.microbatches));
        self.spec = spec;
    }

    /// Makes and validates the program of a pipeline of a model with this number of layers.
    pub(super) fn program(
        &self,
        config: &PipelineConfig,
        layers: usize,
    ) -> Result<ValidatedProgram, BuildError> {
        let replicas = config.data_parallel;
        let program = self.lowered(&self.schedule, config, |name| {
            let limits = self.limits(replicas, layers);
            let spec = self.size(name, replicas, limits)?;
            let schedule = generate_within(name, &spec, limits).map_err(no_schedule)?;
            if let Some(note) = few_microbatches(&schedule) {
                tracing::warn!("{note}");
            }
            Ok(ProgramSource::Schedule(schedule))
        })?;
        self.check_size(&program, replicas)?;
        Ok(program)
    }

    /// Returns the program of a schedule. `named` returns the source of one that is given by its name.
    fn lowered(
        &self,
        schedule: &ScheduleSource,
        config: &PipelineConfig,
        named: impl FnOnce(&str) -> Result<ProgramSource, BuildError>,
    ) -> Result<ValidatedProgram, BuildError> {
        let source = match schedule {
            ScheduleSource::Named(name) => named(name)?,
            ScheduleSource::Made(schedule) => ProgramSource::Rows(drop_bubbles(schedule)),
            ScheduleSource::Program(program) => return Ok(program.clone()),
        };
        Ok(source.program(&self.passes(config))?)
    }

    /// Returns the passes that lower a schedule to a program.
    fn passes(&self, config: &PipelineConfig) -> LowerConfig {
        let training = || TrainingLowering {
            replicas: config.data_parallel,
            unshard_window: config.is_sharded().then(|| UnshardConfig::default().window),
            keep_overlaps: config.runs_overlaps(),
            offload: config.offload.as_ref().map(|_| OffloadConfig::all(config.recompute.clone())),
            delayed: config.may_overlap(),
            ..TrainingLowering::default()
        };
        self.lower.clone().unwrap_or_else(|| LowerConfig::from(training()))
    }

    /// Makes and validates the program of evaluations; `None` if none is asked for.
    pub(super) fn evaluation(
        &self,
        program: &ValidatedProgram,
        config: &PipelineConfig,
    ) -> Result<Option<ValidatedProgram>, BuildError> {
        let (schedule, microbatches) = (&self.eval_schedule, self.eval_microbatches);
        if schedule.is_none() && microbatches.is_none() {
            return Ok(None);
        }
        let replicas = config.data_parallel;
        let whole = program.microbatches() / program.slices().get();
        let asked = microbatches.unwrap_or(whole.saturating_mul(replicas));
        if !asked.is_multiple_of(replicas) {
            let below = asked - asked % replicas;
            let nearest = [below, below.saturating_add(replicas)];
            return Err(not_shared(asked, replicas, &nearest[usize::from(below == 0)..]));
        }
        // An evaluation drains, and the schedule's own order is faster then.
        let config = PipelineConfig { delayed: false, ..config.clone() };
        let evaluation = self.lowered(schedule.as_ref().unwrap_or(&self.schedule), &config, |name| {
            let spec = ScheduleSpec {
                ranks: program.ranks(),
                stages_per_rank: Some(program.placement().stages_per_rank()),
                microbatches: asked / replicas,
                // Another schedule does not have the settings of the training schedule.
                ..if schedule.is_none() { self.spec.clone() } else { ScheduleSpec::default() }
            };
            Ok(ProgramSource::Named(name.to_owned(), Box::new(spec)))
        })?;
        let found = (evaluation.microbatches() / evaluation.slices().get()).saturating_mul(replicas);
        match microbatches.filter(|&asked| asked != found) {
            Some(asked) => Err(other_size("eval_microbatches", asked, found)),
            None => Ok(Some(evaluation)),
        }
    }

    /// Returns the size and the settings of a named schedule, for one replica.
    fn size(&self, name: &str, replicas: u32, limits: Limits) -> Result<ScheduleSpec, BuildError> {
        let ranks = self.ranks.unwrap_or(1);
        let sized = |microbatches| {
            let stages_per_rank = self.stages_per_rank;
            ScheduleSpec { ranks, stages_per_rank, microbatches, ..self.spec.clone() }
        };
        let microbatches = match self.microbatches {
            _ if replicas == 0 => return Err(no_replicas()),
            // At least 1, so that the error of 0 ranks names the ranks and not the microbatches.
            None => ranks.max(1).saturating_mul(2),
            Some(Microbatches::PerReplica(microbatches)) => microbatches,
            Some(Microbatches::Total(microbatches)) if microbatches.is_multiple_of(replicas) => {
                microbatches / replicas
            }
            Some(Microbatches::Total(microbatches)) => {
                let shared = shared_microbatches(name, &sized(microbatches / replicas), limits);
                return Err(not_shared(microbatches, replicas, &shared));
            }
        };
        Ok(sized(microbatches))
    }

    /// Returns what a named schedule has to fit. Microbatches are counted over all replicas if the user gave
    /// such a number.
    fn limits(&self, replicas: u32, layers: usize) -> Limits {
        let is_per_replica = matches!(self.microbatches, Some(Microbatches::PerReplica(_)));
        let replicas = if is_per_replica { 1 } else { replicas.max(1) };
        Limits { layers: u32::try_from(layers).ok().filter(|count| *count > 0), replicas }
    }

    /// Returns an error if the user's own schedule has other sizes than the builder was asked for.
    fn check_size(&self, program: &ValidatedProgram, replicas: u32) -> Result<(), BuildError> {
        let ranks = program.ranks();
        if replicas == 0 {
            return Err(no_replicas());
        }
        let whole = program.microbatches() / program.slices().get();
        let microbatches = match self.microbatches {
            Some(Microbatches::Total(asked)) => Some((asked, whole.saturating_mul(replicas))),
            Some(Microbatches::PerReplica(asked)) => Some((asked, whole)),
            None => None,
        };
        let stages_per_rank = program.placement().stages_per_rank();
        let sizes = [
            ("ranks", self.ranks.map(|asked| (asked, ranks))),
            ("stages_per_rank", self.stages_per_rank.map(|asked| (asked, stages_per_rank))),
            ("microbatches", microbatches),
        ];
        let differs = sizes.into_iter().find_map(|(what, size)| {
            let (asked, found) = size.filter(|(asked, found)| asked != found)?;
            Some(other_size(what, asked, found))
        });
        differs.map_or(Ok(()), Err)
    }
}

fn no_replicas() -> BuildError {
    let reason = "0 replicas of the pipeline have nothing to run: `data_parallel` needs at least 1";
    BuildError::Settings(reason.to_owned())
}

/// Returns the error of microbatches that the replicas cannot share equally. `shared` has the nearest numbers that
/// they can share.
fn not_shared(microbatches: u32, replicas: u32, shared: &[u32]) -> BuildError {
    let numbers: Vec<String> = shared.iter().map(u32::to_string).collect();
    let advice = match &numbers[..] {
        [] => "use another number of replicas".to_owned(),
        numbers => format!("use {}", numbers.join(" or ")),
    };
    let microbatches = counted(microbatches, "microbatch");
    BuildError::Settings(format!("{microbatches} cannot be shared equally by {replicas} replicas: {advice}"))
}

/// Returns the error of a schedule that has another size than the builder's method `what` was given.
fn other_size(what: &str, asked: u32, found: u32) -> BuildError {
    BuildError::Settings(format!(
        "the schedule has {found} {what}, and the builder was asked for {asked}: leave `{what}` out"
    ))
}

/// Returns the error of a named schedule. All sources of a schedule have the same error for too few layers.
fn no_schedule(error: GenerateError) -> BuildError {
    match error.kind {
        GenerateErrorKind::TooManyStages { stages, layers, .. } => {
            let stages = u32::try_from(stages).unwrap_or(u32::MAX);
            BuildError::Partition(PartitionError::more_stages_than_layers(layers as usize, stages))
        }
        _ => BuildError::Schedule(error),
    }
}
