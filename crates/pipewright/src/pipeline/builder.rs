//! Makes a running pipeline from layers in one expression, for the common ways of training.
//!
//! [`PipelineBuilder`] makes the schedule, lowers and validates it, cuts the layers into stages, and launches ranks. It
//! uses only [`ProgramSource`], [`partition`](partition()) and [`Pipeline::launch`]; each of its methods replaces one of its
//! default choices.

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Tensor;
use pipewright_schedule::generate::{Limits, generate_within, shared_microbatches};
use pipewright_schedule::lower::{ProgramSource, drop_bubbles};
use pipewright_schedule::simulate::few_microbatches;
use pipewright_schedule::{
    GenerateError, GenerateErrorKind, LowerConfig, Method, Partition, PartitionError, Recompute,
    ScheduleSpec, StageIndex, ValidatedProgram, partition,
};

use super::build_error::BuildError;
use super::eval_schedule::Evaluation;
use super::layer_list::{EdgeType, check_types};
use super::layers::{Cut, Layers, SharedLoss};
use super::running::Pipeline;
use super::schedule_source::{ScheduleSource, training_passes};
use crate::config::PipelineConfig;
use crate::device::Devices;
use crate::hook::ActionHook;
use crate::loss_scale::LossScaling;
use crate::mesh::DataParallelMode;
use crate::stage::{StageContext, StageError};
use crate::tensor::{Boundary, CheckMetadata, Metadata, OnMismatch, Precision, unpack};
use crate::transport::World;

/// The settings of a pipeline that is not launched yet; [`Pipeline::builder`] makes one.
///
/// By default the pipeline has one rank in this process that runs `1f1b`. Layers are cut evenly, and a step has two
/// microbatches per rank. A pipeline that trains needs a loss and an optimizer.
#[must_use = "a builder does nothing until it launches"]
pub struct PipelineBuilder {
    layers: Layers,
    pub(super) schedule: ScheduleSource,
    pub(super) evaluation: Evaluation,
    ranks: Option<u32>,
    stages_per_rank: Option<u32>,
    microbatches: Option<Microbatches>,
    /// The settings of a named schedule, except its size.
    pub(super) spec: ScheduleSpec,
    pub(super) lower: Option<LowerConfig>,
    method: Option<Method>,
    seed: Option<u64>,
    loss: Option<SharedLoss>,
    /// The type of the outputs that the loss takes.
    loss_takes: Option<EdgeType>,
    world: Option<World>,
    pub(super) config: PipelineConfig,
}

/// The number of microbatches of a step.
#[derive(Clone, Copy, Debug)]
enum Microbatches {
    InAll(u32),
    EachReplica(u32),
}

impl Pipeline {
    /// Begins a pipeline of these layers. A `Vec` of [`StageModule`](crate::stage::StageModule)s converts to
    /// [`Layers`]; see there for other kinds of layers.
    ///
    /// ```
    /// use burn::module::Module;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::optim::AdamWConfig;
    /// use burn::tensor::{Device, Tensor};
    /// use pipewright::pipeline::{Layers, Pipeline};
    /// use pipewright::stage::{StageContext, StageModule};
    ///
    /// #[derive(Module, Debug)]
    /// struct Block {
    ///     linear: Linear,
    /// }
    ///
    /// impl StageModule for Block {
    ///     type Input = Tensor<2>;
    ///     type Output = Tensor<2>;
    ///
    ///     fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
    ///         self.linear.forward(input).tanh()
    ///     }
    /// }
    ///
    /// let block = |_layer| Block { linear: LinearConfig::new(8, 8).init(&Device::flex().autodiff()) };
    /// let mut pipeline = Pipeline::builder(Layers::new(4, block))
    ///     .ranks(2)
    ///     .schedule("zbvzerobubble")
    ///     .microbatches(8)
    ///     .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
    ///     .optimizer(AdamWConfig::new().init())
    ///     .launch()?;
    /// let data = Tensor::<2>::ones([16, 8], &Device::flex());
    /// let summary = pipeline.step(data.clone(), data, 1e-2)?;
    /// assert_eq!(summary.losses.len(), 8);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn builder(layers: impl Into<Layers>) -> PipelineBuilder {
        PipelineBuilder {
            layers: layers.into(),
            schedule: "1f1b".into(),
            evaluation: Evaluation::default(),
            ranks: None,
            stages_per_rank: None,
            microbatches: None,
            spec: ScheduleSpec::default(),
            lower: None,
            method: None,
            seed: Some(0),
            loss: None,
            loss_takes: None,
            world: None,
            config: PipelineConfig::default(),
        }
    }
}

impl PipelineBuilder {
    /// Sets the number of ranks of one pipeline. They are threads of this process unless [`world`](Self::world) sets
    /// another transport. Default: 1.
    pub fn ranks(mut self, ranks: u32) -> Self {
        self.ranks = Some(ranks);
        self
    }

    /// Sets the number of stages on each rank. Default: the number that the schedule needs.
    pub fn stages_per_rank(mut self, stages: u32) -> Self {
        self.stages_per_rank = Some(stages);
        self
    }

    /// Sets the number of microbatches of a step, over all replicas. Default: two per rank of the world.
    pub fn microbatches(mut self, microbatches: u32) -> Self {
        self.microbatches = Some(Microbatches::InAll(microbatches));
        self
    }

    /// Sets the actions of the ranks and their order: the name of a schedule, a
    /// [`Schedule`](pipewright_schedule::Schedule), or a [`ValidatedProgram`]. The user's own schedule or program
    /// determines the numbers of ranks, stages and microbatches itself. Default: `1f1b`.
    pub fn schedule(mut self, schedule: impl Into<ScheduleSource>) -> Self {
        self.schedule = schedule.into();
        self
    }

    /// Sets all settings of a named schedule. It replaces earlier calls of [`ranks`](Self::ranks),
    /// [`stages_per_rank`](Self::stages_per_rank) and [`microbatches`](Self::microbatches). The microbatches of a spec
    /// are those of one replica.
    pub fn spec(mut self, spec: ScheduleSpec) -> Self {
        self.ranks = Some(spec.ranks);
        self.stages_per_rank = spec.stages_per_rank;
        self.microbatches = Some(Microbatches::EachReplica(spec.microbatches));
        self.spec = spec;
        self
    }

    /// Sets the passes that lower a schedule to a program. Default: a stage sends as early as it can, replicas reduce a
    /// stage's gradients as soon as they are complete, and sharded parameters are gathered before their stage computes.
    pub fn lower(mut self, config: LowerConfig) -> Self {
        self.lower = Some(config);
        self
    }

    /// Sets the method that cuts layers into stages. Default: at the splits of a graph if it has any, otherwise evenly.
    /// [`Layers::with_weights`] sets the weights of layers.
    pub fn partition(mut self, method: Method) -> Self {
        self.method = Some(method);
        self
    }

    /// Sets the first layer of each stage except the first stage.
    pub fn boundaries(self, boundaries: impl Into<Vec<usize>>) -> Self {
        self.partition(Method::Explicit { boundaries: boundaries.into() })
    }

    /// Sets the seed of the initial parameters, or `None` to leave the random generator unchanged. Default: 0.
    ///
    /// The CPU's generator belongs to the whole process. It is seeded before each layer is made, from this seed and the
    /// layer's place, and continues afterwards from a number that it gave before. So a layer starts with the same
    /// parameters on every rank and in every replica, if no other thread draws random numbers while the pipeline is
    /// launched. Without a seed, the function that makes the layers must ensure this.
    pub fn seed(mut self, seed: impl Into<Option<u64>>) -> Self {
        self.seed = seed.into();
        self
    }

    /// Sets the loss, a function of the last layer's output and the microbatch's targets. It returns the mean over the
    /// microbatch (shape `[1]`).
    pub fn loss<O, T, F>(self, loss: F) -> Self
    where
        O: Boundary + 'static,
        T: Boundary,
        F: Fn(O, T) -> Tensor<1> + Send + Sync + 'static,
    {
        self.context_loss(move |output, target, _: &StageContext| loss(output, target))
    }

    /// As [`loss`](Self::loss), for a loss that also reads side inputs or values, or adds auxiliary losses.
    pub fn context_loss<O, T, F>(mut self, loss: F) -> Self
    where
        O: Boundary + 'static,
        T: Boundary,
        F: Fn(O, T, &StageContext) -> Tensor<1> + Send + Sync + 'static,
    {
        self.loss_takes = Some(EdgeType::of::<O>());
        self.loss = Some(Arc::new(move |output, target, context: &StageContext| {
            let output = unpack(output).map_err(StageError::Output)?;
            Ok(loss(output, unpack(target).map_err(StageError::Target)?, context))
        }));
        self
    }

    /// Sets the time without any progress after which a step fails. Default: a minute.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.config.deadline = deadline;
        self
    }

    /// Sets the number of threads that compute for one rank. Default: 1.
    pub fn threads_per_rank(mut self, threads: usize) -> Self {
        self.config.threads_per_rank = threads;
        self
    }

    /// Sets the devices of the ranks: one for all of them, or a list, from which rank `r` takes entry `r` modulo its
    /// length. Layers are moved there after they are made. So make layers on the CPU: its generator is the one that the
    /// [`seed`](Self::seed) applies to, and the initial parameters do not depend on the devices. Batches may be on any
    /// device.
    pub fn devices(mut self, devices: impl Into<Devices>) -> Self {
        self.config.devices = devices.into();
        self
    }

    /// Sets the number of replicas of the pipeline, which share the microbatches of a step. Default: 1.
    pub fn data_parallel(mut self, replicas: u32) -> Self {
        self.config.data_parallel = replicas;
        self
    }

    /// Sets the part of the parameters that each replica holds. Default: all.
    pub fn data_parallel_mode(mut self, mode: DataParallelMode) -> Self {
        self.config.data_parallel_mode = mode;
        self
    }

    /// Sets the element type in which stages compute. Default: single precision.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.config.precision = precision;
        self
    }

    /// Sets how losses are scaled if the precision is f16. Default: from 65536, doubled after 2000 updates.
    pub fn loss_scaling(mut self, loss_scaling: LossScaling) -> Self {
        self.config.loss_scaling = loss_scaling;
        self
    }

    /// Sets how the shapes and types of the tensors between stages are known. Default: from the first step.
    pub fn metadata(mut self, metadata: Metadata) -> Self {
        self.config.metadata = metadata;
        self
    }

    /// Sets when the tensors between stages are checked, and what happens if they differ. Default: in the first step, and
    /// the step fails.
    pub fn check_metadata(mut self, check: CheckMetadata, on_mismatch: OnMismatch) -> Self {
        (self.config.check_metadata, self.config.on_mismatch) = (check, on_mismatch);
        self
    }

    /// Sets the stages that keep only their inputs after a forward, and compute it again in their backward. Default:
    /// none.
    pub fn recompute(mut self, recompute: Recompute) -> Self {
        self.config.recompute = recompute;
        self
    }

    /// Sets the hook, which is called around every action. Default: none.
    pub fn hook(mut self, hook: Arc<dyn ActionHook>) -> Self {
        self.config.hook = Some(hook);
        self
    }

    /// Sets the transport between ranks. Default: threads of this process, as many as all replicas need.
    pub fn world(mut self, world: World) -> Self {
        self.world = Some(world);
        self
    }

    /// Sets all settings of [`Pipeline::launch`]. It replaces earlier calls of the methods above that set a field of
    /// the configuration; later calls replace its fields.
    pub fn config(mut self, config: PipelineConfig) -> Self {
        self.config = config;
        self
    }

    /// Makes and validates the program that the pipeline would run, for example to draw or to simulate it. Starts
    /// nothing.
    ///
    /// # Errors
    /// When the schedule does not exist at this size, cannot be lowered, or has other sizes than the builder was asked
    /// for.
    pub fn program(&self) -> Result<ValidatedProgram, BuildError> {
        let lowered = |source: ProgramSource| source.program(&self.passes());
        let program = match &self.schedule {
            ScheduleSource::Named(name) => {
                let schedule =
                    generate_within(name, &self.size(name)?, self.limits()).map_err(no_schedule)?;
                if let Some(note) = few_microbatches(&schedule) {
                    tracing::warn!("{note}");
                }
                lowered(ProgramSource::Schedule(schedule))?
            }
            ScheduleSource::Made(schedule) => lowered(ProgramSource::Rows(drop_bubbles(schedule)))?,
            ScheduleSource::Program(program) => program.clone(),
        };
        self.check_size(&program)?;
        Ok(program)
    }

    /// Returns the passes that lower a schedule to a program.
    pub(super) fn passes(&self) -> LowerConfig {
        self.lower.clone().unwrap_or_else(|| training_passes(&self.config))
    }

    /// Starts the ranks of this process and makes their layers on them.
    ///
    /// # Errors
    /// When a setting of the pipeline is impossible or missing, which is found before a thread starts, or when the
    /// pipeline does not start.
    pub fn launch(self) -> Result<Pipeline, BuildError> {
        check_types(&self.layers.types, self.loss_takes)?;
        let program = self.program()?;
        if !program.is_forward_only() {
            self.loss.as_ref().ok_or(BuildError::NoLoss)?;
            self.config.optimizer.as_ref().ok_or(BuildError::NoOptimizer)?;
        }
        let partition = self.cut(program.placement().stages())?;
        let evaluation = self.evaluation_of(&program)?.map(Arc::new);
        let Self { layers, seed, loss, world, mut config, .. } = self;
        config.evaluation = evaluation.or(config.evaluation);
        let ranks = config.mesh(program.ranks()).ranks().unwrap_or(u32::MAX);
        let world = world.unwrap_or_else(|| World::local(ranks));
        let placement = program.placement().clone();
        let last = placement.last_stage();
        let make = layers.place(Cut { partition, placement, seed }).map_err(BuildError::Graph)?;
        let make = move |stage: StageIndex| make(stage, loss.clone().filter(|_| stage == last));
        Ok(Pipeline::launch(program, world, &config, make)?)
    }

    /// Returns the size and the settings of a named schedule, for one replica.
    fn size(&self, name: &str) -> Result<ScheduleSpec, BuildError> {
        let (ranks, replicas) = (self.ranks.unwrap_or(1), self.config.data_parallel);
        let sized = |microbatches| {
            let stages_per_rank = self.stages_per_rank;
            ScheduleSpec { ranks, stages_per_rank, microbatches, ..self.spec.clone() }
        };
        let microbatches = match self.microbatches {
            _ if replicas == 0 => return Err(BuildError::NoReplicas),
            // At least 1, so that the error of 0 ranks names the ranks and not the microbatches.
            None => ranks.max(1).saturating_mul(2),
            Some(Microbatches::EachReplica(microbatches)) => microbatches,
            Some(Microbatches::InAll(microbatches)) if microbatches.is_multiple_of(replicas) => {
                microbatches / replicas
            }
            Some(Microbatches::InAll(microbatches)) => {
                let shared = shared_microbatches(name, &sized(microbatches / replicas), self.limits());
                return Err(BuildError::Microbatches { microbatches, replicas, shared });
            }
        };
        Ok(sized(microbatches))
    }

    /// Returns what a named schedule has to fit. Numbers of microbatches are those of all replicas if the user gave such a
    /// number.
    fn limits(&self) -> Limits {
        let is_of_each = matches!(self.microbatches, Some(Microbatches::EachReplica(_)));
        let replicas = if is_of_each { 1 } else { self.config.data_parallel.max(1) };
        Limits { layers: u32::try_from(self.layers.count).ok().filter(|count| *count > 0), replicas }
    }

    /// Returns an error if the user's own schedule has other sizes than the builder was asked for.
    fn check_size(&self, program: &ValidatedProgram) -> Result<(), BuildError> {
        let (ranks, replicas) = (program.ranks(), self.config.data_parallel);
        if replicas == 0 {
            return Err(BuildError::NoReplicas);
        }
        let whole = program.microbatches() / program.slices().get();
        let microbatches = match self.microbatches {
            Some(Microbatches::InAll(asked)) => Some((asked, whole.saturating_mul(replicas))),
            Some(Microbatches::EachReplica(asked)) => Some((asked, whole)),
            None => None,
        };
        let stages_per_rank = program.placement().stages() / ranks.max(1);
        let sizes = [
            ("ranks", self.ranks.map(|asked| (asked, ranks))),
            ("stages_per_rank", self.stages_per_rank.map(|asked| (asked, stages_per_rank))),
            ("microbatches", microbatches),
        ];
        let differs = sizes.into_iter().find_map(|(what, size)| {
            let (asked, found) = size.filter(|(asked, found)| asked != found)?;
            Some(BuildError::Size { what, asked, found })
        });
        differs.map_or(Ok(()), Err)
    }

    /// Cuts the layers into stages.
    fn cut(&self, stages: u32) -> Result<Partition, BuildError> {
        let Layers { count, weights, splits, .. } = &self.layers;
        let weights = weights.clone().unwrap_or_else(|| vec![1; *count]);
        if *count == 0 {
            return Err(BuildError::NoLayers);
        }
        if weights.len() != *count {
            return Err(BuildError::Weights { weights: weights.len(), layers: *count });
        }
        let method = match &self.method {
            Some(method) => method.clone(),
            None if splits.is_empty() => Method::Even,
            None => Method::Explicit { boundaries: splits.clone() },
        };
        partition(&weights, stages, &method).map_err(BuildError::Partition)
    }
}

/// Returns the error of a named schedule. That of too few layers is the same for all sources of a schedule.
fn no_schedule(error: GenerateError) -> BuildError {
    match error.kind {
        GenerateErrorKind::TooManyStages { stages, layers, .. } => {
            let stages = u32::try_from(stages).unwrap_or(u32::MAX);
            BuildError::Partition(PartitionError::MoreStagesThanLayers { layers: layers as usize, stages })
        }
        _ => BuildError::Schedule(error),
    }
}
