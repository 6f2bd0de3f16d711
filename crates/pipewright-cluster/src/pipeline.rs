//! The simulated run of a pipeline's schedule.

use std::collections::{BTreeMap, HashMap};

use pipewright_schedule::costs::{Link, StageCosts, StageSizes};
use pipewright_schedule::error_text::with_causes;
use pipewright_schedule::ids::Rank;
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::simulate::{peak_memory, timed};
use pipewright_schedule::{
    ActionKind, Costs, Level, LowerConfig, ScheduleSpec, TrainedStages, ValidatedProgram,
};
use thiserror::Error;

use crate::layout::Layout;

/// The computations above which a pipeline is not simulated: 1,024 ranks with 512 microbatches have as many.
const MAX_COMPUTATIONS: u64 = 1 << 20;

/// The computations of all programs above which they are forgotten, which bounds their memory.
const MAX_KEPT: u64 = 1 << 21;

/// The programs that were made, by name, size and trained stages.
#[derive(Debug)]
pub struct Programs {
    made: HashMap<(String, u32, u32, u32, TrainedStages), ValidatedProgram>,
    /// The computations of these programs.
    kept: u64,
    /// The computations above which a pipeline is not simulated.
    most: u64,
}

impl Default for Programs {
    fn default() -> Self {
        Self::up_to(MAX_COMPUTATIONS)
    }
}

/// The costs of the stages of a pipeline.
#[derive(Debug, Clone, PartialEq)]
pub struct PipelineCosts {
    /// The times of each stage.
    pub stages: Vec<StageCosts>,
    /// The activations and the output of each stage.
    pub sizes: Vec<StageSizes>,
    /// The stages that are trained. The others compute no gradients of weights, and no gradients that nothing
    /// needs.
    pub trained: TrainedStages,
    /// The link between neighbours, the slowest one if they differ. The closed form has only this one.
    pub link: Link,
    /// The links that differ from [`Self::link`], by sender and receiver.
    pub links: BTreeMap<(Rank, Rank), Link>,
}

/// The simulated run of a pipeline.
#[derive(Debug, Clone, PartialEq)]
pub struct PipelineRun {
    /// Seconds from the first forward to the last backward.
    pub makespan: f64,
    /// The largest number of bytes of activations on each rank.
    pub activations: Vec<u64>,
    /// The stages of each rank.
    pub stages_of_rank: Vec<Vec<usize>>,
    /// Whether gradients of weights are computed apart from gradients of inputs.
    pub splits_backward: bool,
}

/// The errors of a pipeline.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum PipelineError {
    /// The schedule does not exist, or not in this size, or its activations are too many to count.
    #[error("{0}")]
    Failed(String),
    /// The simulation would take too long.
    #[error(
        "{computations} computations are too many to simulate; use fewer microbatches or stages, or leave `schedule` out"
    )]
    TooLarge {
        /// The forwards and backwards of all stages.
        computations: u64,
    },
}

pipewright_schedule::message_as_debug!(PipelineError);

impl Programs {
    /// Makes an empty list that simulates pipelines of at most `most` computations. Larger ones have a closed
    /// form.
    pub fn up_to(most: u64) -> Self {
        Self { made: HashMap::new(), kept: 0, most: most.min(MAX_COMPUTATIONS) }
    }

    /// Simulates the pipeline of a layout.
    ///
    /// # Errors
    /// When the layout's schedule does not exist in its size, or its pipeline is too large to simulate
    /// or to count its activations.
    pub fn run(&mut self, layout: &Layout, costs: &PipelineCosts) -> Result<PipelineRun, PipelineError> {
        let microbatches = layout.microbatches();
        let computations = computations(layout);
        let kept_bytes = |sizes: &StageSizes| {
            u128::from(sizes.activation) + u128::from(sizes.output) + u128::from(sizes.stash)
        };
        let microbatch_bytes: u128 = costs.sizes.iter().map(kept_bytes).sum();
        // A pipeline that is not simulated keeps fewer microbatches than this.
        let kept = u128::from(microbatches).min(MAX_COMPUTATIONS.into());
        if microbatch_bytes * kept > u64::MAX.into() {
            return Err(PipelineError::Failed(
                "the activations of all microbatches have more than 2^64 bytes; use a smaller model, `mbs` or `seq`"
                    .to_owned(),
            ));
        }
        if computations > self.most {
            return match layout.schedule {
                None => Ok(closed_form(layout, costs)),
                Some(_) => Err(PipelineError::TooLarge { computations }),
            };
        }
        let program = self.program(layout, &costs.trained)?.as_program();
        let placement = program.placement();
        let stages_of = |rank| placement.stages_of(rank).iter().map(|stage| stage.index()).collect();
        let simulated = Costs {
            stages: costs.stages.clone(),
            sizes: costs.sizes.clone(),
            link: costs.link,
            links: costs.links.clone(),
            ..Costs::default()
        };
        let run = timed(program, &simulated).map_err(|error| PipelineError::Failed(with_causes(&error)))?;
        let mut events = placement.all_ranks().flat_map(|rank| run.timeline().events_of(rank));
        Ok(PipelineRun {
            makespan: run.timeline().makespan(),
            activations: peak_memory(run.timeline(), &costs.sizes),
            stages_of_rank: placement.all_ranks().map(stages_of).collect(),
            splits_backward: events.any(|event| event.action.kind() == ActionKind::WeightBackward),
        })
    }

    fn program(
        &mut self,
        layout: &Layout,
        trained: &TrainedStages,
    ) -> Result<&ValidatedProgram, PipelineError> {
        let name = layout.schedule_name().to_owned();
        let microbatches = layout.microbatches();
        let key = (name.clone(), layout.pipeline, layout.chunks, microbatches, trained.clone());
        if !self.made.contains_key(&key) {
            let spec = ScheduleSpec {
                ranks: layout.pipeline,
                stages_per_rank: Some(layout.chunks),
                microbatches,
                ..ScheduleSpec::default()
            };
            let passes = LowerConfig { trained: trained.clone(), ..LowerConfig::from(Level::Comms) };
            let program = ProgramSource::Named(name, Box::new(spec)).program(&passes);
            let program = program.map_err(|error| PipelineError::Failed(with_causes(&error)))?;
            let computations = u64::from(layout.stages()) * u64::from(microbatches);
            if self.kept + computations > MAX_KEPT {
                self.made.clear();
                self.kept = 0;
            }
            self.kept += computations;
            self.made.insert(key.clone(), program);
        }
        Ok(&self.made[&key])
    }
}

/// Returns the forwards and backwards of a layout's pipeline.
pub(crate) fn computations(layout: &Layout) -> u64 {
    u64::from(layout.stages()).saturating_mul(2 * u64::from(layout.microbatches()))
}

/// Returns the run of 1F1B, interleaved if there are several chunks, without a simulation. All messages count as the
/// largest one. The activations are the simulated ones.
pub fn closed_form(layout: &Layout, costs: &PipelineCosts) -> PipelineRun {
    let form = layout.closed_form();
    let stages_of_rank = form.stages_of_rank();
    let activations = (0..layout.pipeline).zip(&stages_of_rank).map(|(rank, stages)| {
        let chunks: Vec<u64> = stages.iter().map(|&stage| costs.sizes[stage].activation).collect();
        form.activations(rank, &chunks)
    });
    let messages = &costs.sizes[..costs.sizes.len().saturating_sub(1).max(1)];
    let message = messages.iter().map(|sizes| sizes.output).max().unwrap_or(0);
    PipelineRun {
        makespan: form.makespan(&costs.stages, message, costs.link),
        activations: activations.collect(),
        stages_of_rank,
        splits_backward: false,
    }
}
