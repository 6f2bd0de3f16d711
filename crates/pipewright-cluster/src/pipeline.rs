//! The simulated run of a pipeline's schedule.

use std::collections::HashMap;

use pipewright_schedule::costs::{Link, StageCosts, StageSizes};
use pipewright_schedule::lower::{LowerError, ProgramSource, SourceError};
use pipewright_schedule::simulate::{SimulateError, peak_memory, timed};
use pipewright_schedule::{Costs, GenerateError, Level, LowerConfig, ScheduleSpec, ValidatedProgram};
use thiserror::Error;

use crate::layout::Layout;

/// The computations above which a pipeline is not simulated: 1,024 ranks with 512 microbatches have as many.
const MAX_COMPUTATIONS: u64 = 1 << 20;

/// The programs that were made, by name and size.
#[derive(Debug, Default)]
pub struct Programs {
    made: HashMap<(String, u32, u32, u32), ValidatedProgram>,
}

/// The costs of the stages of a pipeline.
#[derive(Debug, Clone, PartialEq)]
pub struct PipelineCosts {
    /// The times of each stage.
    pub stages: Vec<StageCosts>,
    /// The activations and the output of each stage.
    pub sizes: Vec<StageSizes>,
    /// The link between neighbours.
    pub link: Link,
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
}

/// The errors of a pipeline.
#[derive(Clone, PartialEq, Error)]
pub enum PipelineError {
    /// The schedule does not exist, or not in this size.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The costs do not fit.
    #[error(transparent)]
    Simulate(#[from] SimulateError),
    /// The simulation would take too long.
    #[error("{computations} computations are too many to simulate; leave `schedule` out")]
    TooLarge {
        /// The forwards and backwards of all stages.
        computations: u64,
    },
    /// The bytes of activations are too many to count.
    #[error(
        "the activations of all microbatches have more than 2^64 bytes; use a smaller model, `mbs` or `seq`"
    )]
    Activations,
}

pipewright_schedule::message_as_debug!(PipelineError);

impl From<GenerateError> for PipelineError {
    fn from(error: GenerateError) -> Self {
        Self::Source(error.into())
    }
}

impl From<LowerError> for PipelineError {
    fn from(error: LowerError) -> Self {
        Self::Source(error.into())
    }
}

impl Programs {
    /// Simulates the pipeline of a layout.
    ///
    /// # Errors
    /// When the layout's schedule does not exist in its size, or its pipeline is too large to simulate
    /// or to count its activations.
    pub fn run(&mut self, layout: &Layout, costs: &PipelineCosts) -> Result<PipelineRun, PipelineError> {
        let microbatches = layout.microbatches();
        let computations = u64::from(layout.stages()).saturating_mul(2 * u64::from(microbatches));
        let of_stage = |sizes: &StageSizes| u128::from(sizes.activation) + u128::from(sizes.output);
        let of_microbatch: u128 = costs.sizes.iter().map(of_stage).sum();
        // A pipeline that is not simulated keeps fewer microbatches than this.
        let kept = u128::from(microbatches).min(MAX_COMPUTATIONS.into());
        if of_microbatch * kept > u64::MAX.into() {
            return Err(PipelineError::Activations);
        }
        if computations > MAX_COMPUTATIONS {
            return match layout.schedule {
                None => Ok(closed_form(layout, costs)),
                Some(_) => Err(PipelineError::TooLarge { computations }),
            };
        }
        let program = self.program(layout)?.as_program();
        let placement = program.placement();
        let stages_of = |rank| placement.stages_of(rank).iter().map(|stage| stage.index()).collect();
        let simulated = Costs {
            stages: costs.stages.clone(),
            sizes: costs.sizes.clone(),
            link: costs.link,
            ..Costs::default()
        };
        let run = timed(program, &simulated)?;
        Ok(PipelineRun {
            makespan: run.timeline().makespan(),
            activations: peak_memory(run.timeline(), &costs.sizes),
            stages_of_rank: placement.all_ranks().map(stages_of).collect(),
        })
    }

    fn program(&mut self, layout: &Layout) -> Result<&ValidatedProgram, PipelineError> {
        let default = if layout.chunks > 1 { "interleaved1f1b" } else { "1f1b" };
        let name = layout.schedule.clone().unwrap_or_else(|| default.into());
        let microbatches = layout.microbatches();
        let key = (name.clone(), layout.pipeline, layout.chunks, microbatches);
        if !self.made.contains_key(&key) {
            let spec = ScheduleSpec {
                ranks: layout.pipeline,
                stages_per_rank: Some(layout.chunks),
                microbatches,
                ..ScheduleSpec::default()
            };
            let program =
                ProgramSource::Named(name, Box::new(spec)).program(&LowerConfig::from(Level::Comms))?;
            self.made.insert(key.clone(), program);
        }
        Ok(&self.made[&key])
    }
}

/// The run of 1F1B, interleaved if there are several chunks, without a simulation: the work of the busiest
/// rank, the way of the first microbatch to the last rank and back, and the messages of that way (arXiv
/// 2104.04473, section 2.2). The first rank holds the activations of `v p + p - 1` chunks.
pub fn closed_form(layout: &Layout, costs: &PipelineCosts) -> PipelineRun {
    let (ranks, chunks) = (layout.pipeline as usize, layout.chunks as usize);
    let microbatches = f64::from(layout.microbatches());
    let seconds = |stage: usize| costs.stages[stage].forward + costs.stages[stage].backward;
    let stages_of_rank: Vec<Vec<usize>> =
        (0..ranks).map(|rank| (0..chunks).map(|chunk| chunk * ranks + rank).collect()).collect();
    let busiest = stages_of_rank.iter().map(|stages| stages.iter().map(|&stage| seconds(stage)).sum::<f64>());
    let busiest = busiest.fold(0.0, f64::max);
    let fill: f64 = (0..ranks.saturating_sub(1)).map(seconds).sum();
    let hop = costs.sizes[0].output as f64 / costs.link.bandwidth + costs.link.latency;
    let hops = 2.0 * (ranks as f64 - 1.0) * hop;
    let in_flight = |rank: usize| {
        let chunks_in_flight =
            if chunks > 1 { 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1 } else { ranks - rank };
        chunks_in_flight.min(chunks * layout.microbatches() as usize) as u64
    };
    let activations = (0..ranks).map(|rank| {
        let all: u64 = stages_of_rank[rank].iter().map(|&stage| costs.sizes[stage].activation).sum();
        in_flight(rank) * all / chunks as u64
    });
    PipelineRun {
        makespan: microbatches * busiest + fill + hops,
        activations: activations.collect(),
        stages_of_rank,
    }
}
