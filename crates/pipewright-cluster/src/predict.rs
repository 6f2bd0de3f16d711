//! The prediction of a training step: its time, its parts, and the memory of each rank.

use std::ops::Range;

use pipewright_schedule::TrainedStages;
use pipewright_schedule::costs::{Link, StageCosts, StageSizes};
use thiserror::Error;

use crate::collective::Group;
use crate::layout::{LayoutError, ShardedState};
use crate::machine::Machine;
use crate::memory::{Parameters, buffers, logits};
use crate::parts::Parts;
use crate::pipeline::{PipelineCosts, PipelineError, PipelineRun, Programs};
use crate::setting::Setting;
use crate::stage_time::StageTime;
use crate::units::{Unit, Units};
use pipewright_schedule::held_bytes::HeldBytes;

/// Bytes of a parameter that AdamW reads and writes: the gradient twice (norm and update), its copy of 4
/// bytes and two moments, each read and written, and the parameter.
pub(crate) const OPTIMIZER_TRAFFIC: f64 = 34.0;

/// A predicted step.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// Seconds of a step.
    pub seconds: f64,
    /// Seconds of the busiest rank by what they are spent on.
    pub parts: Parts,
    /// Seconds of the busiest rank that compute a forward again. They are also in `parts`.
    pub again: Parts,
    /// Seconds in which the busiest rank waits for other ranks of its pipeline and their messages.
    pub bubble: f64,
    /// Seconds of the optimizer.
    pub optimizer: f64,
    /// The blocks of each stage.
    pub blocks: Vec<usize>,
    /// The memory of each rank of a pipeline.
    pub memory: Vec<HeldBytes<f64>>,
    /// Tokens per second of each GPU.
    pub tokens_per_gpu: f64,
    /// Operations of the model per second on each GPU, with the pairs of attention that are used.
    pub operations_per_gpu: f64,
}

impl Prediction {
    /// Returns the first block of each stage but the first.
    pub fn boundaries(&self) -> Vec<usize> {
        let ends = self.blocks.iter().scan(0, |end, blocks| {
            *end += blocks;
            Some(*end)
        });
        ends.take(self.blocks.len().saturating_sub(1)).collect()
    }

    /// Returns the bytes of the rank that needs most.
    pub fn peak_memory(&self) -> f64 {
        self.largest_rank().1.total()
    }

    /// Returns the rank of a pipeline that needs most, with its memory. If several ranks need equally much,
    /// the first one wins.
    pub fn largest_rank(&self) -> (usize, HeldBytes<f64>) {
        let larger = |one: (usize, HeldBytes<f64>), other: (usize, HeldBytes<f64>)| {
            if other.1.total() > one.1.total() { other } else { one }
        };
        self.memory.iter().copied().enumerate().reduce(larger).unwrap_or_default()
    }
}

/// The errors of predictions.
#[derive(Clone, PartialEq, Error)]
pub enum PredictError {
    /// The layout does not fit.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The pipeline cannot be simulated.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
}

pipewright_schedule::message_as_debug!(PredictError);

/// Predicts a step.
///
/// # Errors
/// When the layout does not fit the model, or its schedule does not exist in its size.
pub fn predict(setting: &Setting<'_>, programs: &mut Programs) -> Result<Prediction, PredictError> {
    setting.layout.check(setting.model)?;
    let units = Units::of(setting);
    let run = |costs: &_| programs.run(setting.layout, costs);
    Ok(RunPipeline::new(setting, &units, units.cut(setting.layout), run)?.predict(setting, &units))
}

/// A pipeline with its stages and its run. It does not depend on what replicas divide among themselves.
pub(crate) struct RunPipeline {
    /// The blocks of each stage.
    cut: Vec<Range<usize>>,
    /// The costs of each rank.
    ranks: Vec<Unit>,
    /// The times of the rank that computes most.
    busiest: StageTime,
    run: PipelineRun,
}

impl RunPipeline {
    /// Runs the pipeline of a layout, which was checked, from the costs of the model's parts and the blocks
    /// of each stage.
    pub(crate) fn new(
        setting: &Setting<'_>,
        units: &Units,
        cut: Vec<Range<usize>>,
        run: impl FnOnce(&PipelineCosts) -> Result<PipelineRun, PipelineError>,
    ) -> Result<Self, PipelineError> {
        let stages = units.stages(&cut);
        let run = run(&pipeline_costs(setting, &stages))?;
        let rank = |stages_of_rank: &Vec<usize>| {
            let mut sum = Unit::default();
            stages_of_rank.iter().for_each(|&stage| sum += stages[stage]);
            sum
        };
        let ranks: Vec<Unit> = run.stages_of_rank.iter().map(rank).collect();
        let times = ranks.iter().map(|rank| rank.time);
        let busiest = times.max_by(|one, other| one.total().total_cmp(&other.total())).unwrap_or_default();
        Ok(Self { cut, ranks, busiest, run })
    }

    /// Predicts a step. The setting may differ in its sharding from the one of [`Self::new`].
    pub(crate) fn predict(&self, setting: &Setting<'_>, units: &Units) -> Prediction {
        let (layout, Self { cut, ranks, busiest, run }) = (setting.layout, self);
        let by_shard = |one: &&Unit, other: &&Unit| {
            one.parameters.shard(layout).total_cmp(&other.parameters.shard(layout))
        };
        let most = ranks.iter().max_by(by_shard).copied().unwrap_or_default();
        let data = match layout.sharding {
            ShardedState::Nothing | ShardedState::Optimizer | ShardedState::Gradients => {
                exposed_data(setting, &most, busiest)
            }
            // Frozen parameters are gathered too, and another rank may have most of them.
            ShardedState::Parameters => {
                ranks.iter().map(|rank| exposed_data(setting, rank, busiest)).fold(0.0, f64::max)
            }
        };
        let optimizer = optimizer_seconds(setting, most.parameters);
        let microbatches = f64::from(layout.microbatches());
        let mut parts = (busiest.forward + busiest.backward + busiest.again) * microbatches;
        if run.splits_backward {
            parts.tensor += busiest.behind_weights * microbatches;
        }
        // Without a wait, the difference of both sums may be a rounding error below 0.
        let bubble = (run.makespan - parts.total()).max(0.0);
        parts.data = data;
        let seconds = run.makespan + data + optimizer;
        let tokens_per_gpu = layout.step_tokens() / seconds / f64::from(layout.gpus);
        Prediction {
            seconds,
            parts,
            again: busiest.again * microbatches,
            bubble,
            optimizer,
            blocks: cut.iter().map(ExactSizeIterator::len).collect(),
            memory: memory(setting, units, ranks, run, cut.len() - 1),
            tokens_per_gpu,
            operations_per_gpu: units.operations * tokens_per_gpu,
        }
    }
}

fn pipeline_costs(setting: &Setting<'_>, stages: &[Unit]) -> PipelineCosts {
    let (layout, machine) = (setting.layout, setting.machine);
    let costs = |stage: &Unit| {
        let time = &stage.time;
        let backward = (time.backward + time.again).total();
        let for_inputs = (backward - time.weights + time.behind_weights).max(0.0);
        StageCosts { backward, ..StageCosts::new(time.forward.total(), for_inputs, time.weights) }
    };
    // With sequence parallelism, or a scattered message, each rank of a tensor group sends its share.
    let output = setting.hidden_bytes() / f64::from(layout.tensor);
    let sizes = |stage: &Unit| StageSizes {
        output: output as u64,
        activation: stage.activation as u64,
        stash: stage.stash as u64,
        ..StageSizes::default()
    };
    let inside = layout.gpus <= machine.gpus_per_node;
    let bandwidth = if inside { machine.bandwidth_among(2) } else { machine.network_bandwidth };
    let latency = if inside { machine.node_latency } else { machine.network_latency };
    let is_trained: Vec<bool> = stages.iter().map(|stage| stage.parameters.total() > 0.0).collect();
    PipelineCosts {
        trained: TrainedStages::of(&is_trained),
        stages: stages.iter().map(costs).collect(),
        sizes: stages.iter().map(sizes).collect(),
        link: Link { latency, bandwidth: bandwidth * machine.constants.link },
    }
}

/// The seconds of gathers and reductions of replicas that computation does not hide. Gradients are reduced
/// while the last microbatch's backward runs. Parameters are gathered while the first forward runs, if the
/// optimizer is sharded. If gradients are sharded, each microbatch reduces them. If parameters are sharded
/// without a pipeline, each microbatch gathers them before its forward and its backward, and reduces its
/// gradients.
fn exposed_data(setting: &Setting<'_>, rank: &Unit, busiest: &StageTime) -> f64 {
    let (layout, parameters) = (setting.layout, rank.parameters);
    // Frozen parameters are gathered if they are sharded. Adapters are gathered in single precision.
    let [of_trained, of_frozen] = match (setting.model.is_adapted(), layout.sharding) {
        (false, _) => [2.0, 0.0],
        (true, ShardedState::Parameters) => [4.0, 2.0],
        (true, _) => [4.0, 0.0],
    };
    let gathered = parameters * of_trained + rank.frozen * of_frozen;
    let summed = parameters * 4.0;
    // Experts have replicas of their own, one group after another on the same links.
    let shared = Group { ranks: layout.replicas(), stride: layout.tensor };
    let experts =
        Group { ranks: layout.expert_replicas(), stride: layout.expert_tensor.saturating_mul(layout.expert) };
    let seconds = |collective: fn(&Group, &Machine, f64) -> f64, bytes: Parameters| {
        let parts = [(bytes.shared, &shared), (bytes.experts, &experts)];
        let used = parts.into_iter().filter(|&(bytes, _)| bytes > 0.0);
        used.map(|(bytes, group)| collective(group, setting.machine, bytes)).sum::<f64>()
    };
    let (gather, reduce) = (seconds(Group::gather, gathered), seconds(Group::gather, summed));
    let (forward, backward) = (busiest.forward.total(), (busiest.backward + busiest.again).total());
    let exposed = |communication: f64, computation: f64| (communication - computation).max(0.0);
    let microbatches = f64::from(layout.microbatches());
    match layout.sharding {
        ShardedState::Nothing => exposed(seconds(Group::all_reduce, summed), backward),
        ShardedState::Optimizer => exposed(gather, forward) + exposed(reduce, backward),
        ShardedState::Gradients => exposed(gather, forward) + exposed(reduce, backward) * microbatches,
        ShardedState::Parameters if layout.pipeline > 1 => {
            exposed(gather, forward) + exposed(reduce, backward)
        }
        ShardedState::Parameters => {
            (exposed(gather, forward) + exposed(gather + reduce, backward)) * microbatches
        }
    }
}

fn optimizer_seconds(setting: &Setting<'_>, parameters: Parameters) -> f64 {
    let updated = match setting.layout.sharding {
        ShardedState::Nothing => parameters.total(),
        ShardedState::Optimizer | ShardedState::Gradients | ShardedState::Parameters => {
            parameters.shard(setting.layout)
        }
    };
    OPTIMIZER_TRAFFIC * updated / setting.machine.kernel_bandwidth()
}

fn memory(
    setting: &Setting<'_>,
    units: &Units,
    ranks: &[Unit],
    run: &PipelineRun,
    last: usize,
) -> Vec<HeldBytes<f64>> {
    let logits = logits(setting.model, setting.layout);
    let buffers = buffers(setting.model, setting.layout);
    let rank = |index: usize| {
        let head = if run.stages_of_rank[index].contains(&last) { logits } else { 0.0 };
        HeldBytes {
            activations: run.activations[index] as f64,
            temporary: head.max(units.again),
            buffers,
            ..units.state(ranks[index].parameters, ranks[index].frozen, setting.layout)
        }
    };
    (0..ranks.len()).map(rank).collect()
}
