//! Makes a running pipeline from layers in one expression, for the common ways of training.
//!
//! [`PipelineBuilder`] makes the schedule, lowers and validates it, cuts the layers into stages, and launches ranks. It
//! uses only [`ProgramSource`](pipewright_schedule::lower::ProgramSource), [`partition`](partition()) and
//! [`Pipeline::launch`]; each of its methods replaces one of its default choices.

use std::sync::Arc;

use burn::tensor::Tensor;
use pipewright_schedule::{
    LowerConfig, Method, Partition, ScheduleSpec, StageIndex, ValidatedProgram, partition,
};

use super::build_error::BuildError;
use super::layer_list::{EdgeType, check_types};
use super::layers::{Cut, Layers, SharedLoss};
use super::program_request::{Microbatches, ProgramRequest};
use super::running::Pipeline;
use super::schedule_source::ScheduleSource;
use crate::config::PipelineConfig;
use crate::stage::{StageContext, StageError};
use crate::tensor::{Boundary, unpack};
use crate::transport::World;

/// The settings of a pipeline that is not launched yet; [`Pipeline::builder`] makes one.
///
/// By default the pipeline has one rank in this process that runs `1f1b`. Layers are cut evenly, and a step
/// has two microbatches per rank. A pipeline that trains needs a loss and an optimizer.
#[must_use = "a builder does nothing until it launches"]
pub struct PipelineBuilder {
    layers: Layers,
    programs: ProgramRequest,
    method: Option<Method>,
    seed: Option<u64>,
    loss: Option<SharedLoss>,
    /// The type of the outputs that the loss takes.
    loss_takes: Option<EdgeType>,
    world: Option<World>,
    config: PipelineConfig,
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
            programs: ProgramRequest::default(),
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
    /// Sets the number of ranks of one pipeline. They are threads of this process unless
    /// [`world`](Self::world) sets another transport. Default: 1.
    pub fn ranks(mut self, ranks: u32) -> Self {
        self.programs.ranks = Some(ranks);
        self
    }

    /// Sets the number of stages on each rank. Default: the number that the schedule needs.
    pub fn stages_per_rank(mut self, stages: u32) -> Self {
        self.programs.stages_per_rank = Some(stages);
        self
    }

    /// Sets the number of microbatches of a step, over all replicas. Default: two per rank of the world.
    pub fn microbatches(mut self, microbatches: u32) -> Self {
        self.programs.microbatches = Some(Microbatches::Total(microbatches));
        self
    }

    /// Sets the actions of the ranks and their order: the name of a schedule, a
    /// [`Schedule`](pipewright_schedule::Schedule), or a [`ValidatedProgram`]. The user's own schedule or program
    /// determines the numbers of ranks, stages and microbatches itself. Default: `1f1b`.
    pub fn schedule(mut self, schedule: impl Into<ScheduleSource>) -> Self {
        self.programs.schedule = schedule.into();
        self
    }

    /// Sets all settings of a named schedule. It replaces earlier calls of [`ranks`](Self::ranks),
    /// [`stages_per_rank`](Self::stages_per_rank) and [`microbatches`](Self::microbatches). The microbatches of a spec
    /// belong to one replica.
    pub fn spec(mut self, spec: ScheduleSpec) -> Self {
        self.programs.set_spec(spec);
        self
    }

    /// Sets the passes that lower a schedule to a program. Default: a stage sends as early as it can,
    /// replicas reduce a stage's gradients as soon as they are complete, and sharded parameters are gathered
    /// before their stage computes.
    pub fn lower(mut self, config: LowerConfig) -> Self {
        self.programs.lower = Some(config);
        self
    }

    /// Sets the schedule of evaluations; only its forwards run. It must place the stages on the same ranks as
    /// the pipeline's schedule. Default: the pipeline's schedule.
    ///
    /// ```
    /// # use burn::module::Module;
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::optim::AdamWConfig;
    /// # use burn::tensor::{Device, Tensor};
    /// # use pipewright::pipeline::{Layers, Pipeline};
    /// # use pipewright::stage::{StageContext, StageModule};
    /// # #[derive(Module, Debug)]
    /// # struct Block {
    /// #     linear: Linear,
    /// # }
    /// # impl StageModule for Block {
    /// #     type Input = Tensor<2>;
    /// #     type Output = Tensor<2>;
    /// #     fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
    /// #         self.linear.forward(input)
    /// #     }
    /// # }
    /// # let block = |_layer| Block { linear: LinearConfig::new(8, 8).init(&Device::flex().autodiff()) };
    /// # let loss = |output: Tensor<2>, target: Tensor<2>| (output - target).square().mean();
    /// # let builder = Pipeline::builder(Layers::new(4, block)).ranks(2).loss(loss).optimizer(AdamWConfig::new().init());
    /// let mut pipeline =
    ///     builder.schedule("1f1b").microbatches(8).eval_schedule("forwardonly").eval_microbatches(3).launch()?;
    /// let data = Tensor::<2>::ones([6, 8], &Device::flex());
    /// assert_eq!(pipeline.eval(data.clone(), Some(data))?.losses.len(), 3);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn eval_schedule(mut self, schedule: impl Into<ScheduleSource>) -> Self {
        self.programs.eval_schedule = Some(schedule.into());
        self
    }

    /// Sets the number of microbatches of an evaluation, over all replicas. Default: the pipeline's number.
    pub fn eval_microbatches(mut self, microbatches: u32) -> Self {
        self.programs.eval_microbatches = Some(microbatches);
        self
    }

    /// Sets the method that cuts layers into stages. Default: at the splits of a graph if it has any,
    /// otherwise evenly.
    /// [`Layers::with_weights`] sets the weights of layers.
    pub fn partition(mut self, method: Method) -> Self {
        self.method = Some(method);
        self
    }

    /// Sets the first layer of each stage except the first stage.
    pub fn boundaries(self, boundaries: impl Into<Vec<usize>>) -> Self {
        self.partition(Method::Explicit { boundaries: boundaries.into() })
    }

    /// Sets the seed of the initial parameters, or `None` to leave the random generator unchanged. Default:
    /// 0.
    ///
    /// The CPU's generator belongs to the whole process. It is seeded before each layer is made, from this
    /// seed and the layer's index, and continues afterwards from a number that it gave before. So a layer
    /// starts with the same parameters on every rank and in every replica, if no other thread draws random
    /// numbers while the pipeline is launched. Without a seed, the function that makes the layers must ensure
    /// this.
    pub fn seed(mut self, seed: impl Into<Option<u64>>) -> Self {
        self.seed = seed.into();
        self
    }

    /// Sets the loss, a function of the last layer's output and the microbatch's targets. It returns the mean
    /// over the microbatch (shape `[1]`).
    pub fn loss<O, T, F>(self, loss: F) -> Self
    where
        O: Boundary + 'static,
        T: Boundary,
        F: Fn(O, T) -> Tensor<1> + Send + Sync + 'static,
    {
        self.context_loss(move |output, target, _: &StageContext| loss(output, target))
    }

    /// Like [`loss`](Self::loss), for a loss that also reads side inputs or values, or adds auxiliary losses.
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

    /// Sets the transport between ranks. Default: threads of this process, as many as all replicas need.
    pub fn world(mut self, world: World) -> Self {
        self.world = Some(world);
        self
    }

    /// Sets fields of the configuration.
    pub(super) fn configured(mut self, change: impl FnOnce(&mut PipelineConfig)) -> Self {
        change(&mut self.config);
        self
    }

    /// Makes and validates the program that the pipeline would run, for example to draw or to simulate it.
    /// Starts nothing.
    ///
    /// # Errors
    /// When the schedule does not exist at this size, cannot be lowered, or has other sizes than the builder
    /// was asked for.
    pub fn program(&self) -> Result<ValidatedProgram, BuildError> {
        self.programs.program(&self.config, self.layers.count)
    }

    /// Starts the ranks of this process and makes their layers on them.
    ///
    /// # Errors
    /// When a setting of the pipeline is impossible or missing, which is found before a thread starts, or
    /// when the pipeline does not start.
    pub fn launch(self) -> Result<Pipeline, BuildError> {
        check_types(&self.layers.types, self.loss_takes)?;
        let program = self.program()?;
        if !program.is_forward_only() {
            let needed = [("loss", self.loss.is_some()), ("optimizer", self.config.optimizer.is_some())];
            if let Some((what, _)) = needed.iter().find(|(_, is_given)| !is_given) {
                return Err(BuildError::Settings(format!(
                    "the schedule trains, and there is no {what}: give one with `{what}`, or use the schedule `forwardonly`"
                )));
            }
        }
        let partition = self.cut(program.placement().stages())?;
        let evaluation = self.programs.evaluation(&program, &self.config)?.map(Arc::new);
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

    /// Cuts the layers into stages.
    fn cut(&self, stages: u32) -> Result<Partition, BuildError> {
        let Layers { count, weights, splits, .. } = &self.layers;
        let weights = weights.clone().unwrap_or_else(|| vec![1; *count]);
        if *count == 0 {
            let reason = "the model has no layers: a pipeline needs at least one for each stage";
            return Err(BuildError::Settings(reason.to_owned()));
        }
        if weights.len() != *count {
            let found = weights.len();
            return Err(BuildError::Settings(format!(
                "{found} weights are given for {count} layers: give one for each (`Layers::with_weights`)"
            )));
        }
        let method = match &self.method {
            Some(method) => method.clone(),
            None if splits.is_empty() => Method::Even,
            None => Method::Explicit { boundaries: splits.clone() },
        };
        partition(&weights, stages, &method).map_err(BuildError::Partition)
    }
}
