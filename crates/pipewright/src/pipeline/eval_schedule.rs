//! The schedule of evaluations, as a builder makes it.

use pipewright_schedule::lower::{ProgramSource, drop_bubbles};
use pipewright_schedule::{ScheduleSpec, ValidatedProgram};

use super::build_error::BuildError;
use super::builder::PipelineBuilder;
use super::schedule_source::ScheduleSource;

/// The schedule of evaluations that a builder is asked for.
#[derive(Default)]
pub(super) struct Evaluation {
    schedule: Option<ScheduleSource>,
    /// Over all replicas.
    microbatches: Option<u32>,
}

impl PipelineBuilder {
    /// Sets the schedule of evaluations; only its forwards run. It must place the stages on the same ranks as the
    /// pipeline's schedule. Default: the pipeline's schedule.
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
        self.evaluation.schedule = Some(schedule.into());
        self
    }

    /// Sets the number of microbatches of an evaluation, over all replicas. Default: the pipeline's number.
    pub fn eval_microbatches(mut self, microbatches: u32) -> Self {
        self.evaluation.microbatches = Some(microbatches);
        self
    }

    /// Makes and validates the program of evaluations; `None` if the builder is asked for none.
    pub(super) fn evaluation_of(
        &self,
        program: &ValidatedProgram,
    ) -> Result<Option<ValidatedProgram>, BuildError> {
        let Evaluation { schedule, microbatches } = &self.evaluation;
        if schedule.is_none() && microbatches.is_none() {
            return Ok(None);
        }
        let replicas = self.config.data_parallel;
        let whole = program.microbatches() / program.slices().get();
        let asked = microbatches.unwrap_or(whole.saturating_mul(replicas));
        if !asked.is_multiple_of(replicas) {
            let below = asked - asked % replicas;
            let shared =
                [below, below.saturating_add(replicas)].into_iter().filter(|&count| count > 0).collect();
            return Err(BuildError::Microbatches { microbatches: asked, replicas, shared });
        }
        let lowered = |source: ProgramSource| source.program(&self.passes());
        let evaluation = match schedule.as_ref().unwrap_or(&self.schedule) {
            ScheduleSource::Named(name) => {
                let spec = ScheduleSpec {
                    ranks: program.ranks(),
                    stages_per_rank: Some(program.placement().stages() / program.ranks()),
                    microbatches: asked / replicas,
                    // The settings of the training schedule are not those of another one.
                    ..if schedule.is_none() { self.spec.clone() } else { ScheduleSpec::default() }
                };
                lowered(ProgramSource::Named(name.clone(), Box::new(spec)))?
            }
            ScheduleSource::Made(schedule) => lowered(ProgramSource::Rows(drop_bubbles(schedule)))?,
            ScheduleSource::Program(program) => program.clone(),
        };
        let found = (evaluation.microbatches() / evaluation.slices().get()).saturating_mul(replicas);
        match microbatches.filter(|&asked| asked != found) {
            Some(asked) => Err(BuildError::Size { what: "eval_microbatches", asked, found }),
            None => Ok(Some(evaluation)),
        }
    }
}
