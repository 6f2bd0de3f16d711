//! The prediction of a training step: its time, its parts, and the memory of each rank.

use std::ops::Range;

use pipewright_schedule::TrainedStages;
use pipewright_schedule::costs::{StageCosts, StageSizes};
use thiserror::Error;

use crate::collective::Group;
use crate::implementation::Optimizer;
use crate::layout::{Layout, LayoutError, Precision, ShardedState};
use crate::machine::Machine;
use crate::measured_times::Kernel;
use crate::memory::{Parameters, buffers, logits};
use crate::parts::Parts;
use crate::pipeline::{PipelineCosts, PipelineError, PipelineRun, Programs};
use crate::placed::Placed;
use crate::setting::Setting;
use crate::stage_time::StageTime;
use crate::units::{Unit, Units};
use pipewright_schedule::held_bytes::HeldBytes;

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
    /// Seconds in which each rank waits for other ranks of its pipeline and their messages.
    pub waits: Vec<f64>,
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
    /// Activations go to the host, and the machine has no figure for the link.
    #[error(
        "activations go to the memory of the host, and `{0}` has no `host_gb_per_s`; add it to the machine"
    )]
    NoHostLink(String),
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
    predict_placed(&Placed::on_one(*setting), programs)
}

/// Like [`predict`], on machines of one or several kinds.
///
/// # Errors
/// When activations go to the host and a kind has no link to it, or the schedule does not exist in its size.
pub fn predict_placed(placed: &Placed<'_>, programs: &mut Programs) -> Result<Prediction, PredictError> {
    let layout = placed.layout();
    let lacks_link = |kind: &&Setting<'_>| kind.machine.host_bandwidth.is_none();
    if let Some(kind) = placed.kinds.iter().find(lacks_link).filter(|_| layout.offload_layers > 0) {
        return Err(PredictError::NoHostLink(kind.machine.name.clone()));
    }
    let units: Vec<Units> = placed.kinds.iter().map(Units::of).collect();
    let run = |costs: &_| programs.run(layout, costs);
    Ok(RunPipeline::new(placed, &units, placed.cut(&units), run)?.predict(placed, &units))
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
    /// Runs the pipeline of a layout, which was checked, from the costs of the model's parts on each kind of
    /// machine and the blocks of each stage.
    pub(crate) fn new(
        placed: &Placed<'_>,
        units: &[Units],
        cut: Vec<Range<usize>>,
        run: impl FnOnce(&PipelineCosts) -> Result<PipelineRun, PipelineError>,
    ) -> Result<Self, PipelineError> {
        let stages = |units: &Units| units.stages(placed.layout(), &placed.rank_of_stage, &cut);
        let by_kind: Vec<Vec<Unit>> = units.iter().map(stages).collect();
        let kinds = placed.kind_of_stage();
        let mut stages: Vec<Unit> =
            kinds.iter().enumerate().map(|(stage, &kind)| by_kind[kind][stage]).collect();
        for (stage, kind) in stages.iter_mut().zip(kinds) {
            stage.wait_for_host(&placed.kinds[kind]);
        }
        let run = run(&pipeline_costs(placed, &stages))?;
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

    /// Predicts a step. The layout may differ in its sharding from the one of [`Self::new`].
    pub(crate) fn predict(&self, placed: &Placed<'_>, units: &[Units]) -> Prediction {
        let (layout, Self { cut, ranks, busiest, run }) = (placed.layout(), self);
        let by_shard = |one: &&Unit, other: &&Unit| {
            one.parameters.shard(layout).total_cmp(&other.parameters.shard(layout))
        };
        let (mut data, mut optimizer) = (0.0_f64, 0.0_f64);
        for (kind, setting) in placed.kinds.iter().enumerate() {
            let own = || {
                ranks.iter().zip(&placed.kind_of_rank).filter(|(_, own)| **own == kind).map(|(rank, _)| rank)
            };
            let most = own().max_by(by_shard).copied().unwrap_or_default();
            let of_kind = match layout.sharding {
                ShardedState::Nothing | ShardedState::Optimizer | ShardedState::Gradients => {
                    exposed_data(setting, &most, busiest)
                }
                // Frozen parameters are gathered too, and another rank may have most of them.
                ShardedState::Parameters => {
                    own().map(|rank| exposed_data(setting, rank, busiest)).fold(0.0, f64::max)
                }
            };
            data = data.max(of_kind);
            optimizer = optimizer.max(optimizer_seconds(setting, most.parameters));
        }
        let microbatches = f64::from(layout.step_microbatches());
        let mut parts = (busiest.forward + busiest.backward + busiest.again) * microbatches;
        if run.splits_backward {
            parts.tensor += busiest.behind_weights * microbatches;
        }
        // Without a wait, the difference of both sums may be a rounding error below 0.
        let makespan = run.makespan * f64::from(layout.passes());
        let bubble = (makespan - parts.total()).max(0.0);
        parts.data = data;
        let seconds = makespan + data + optimizer;
        let tokens_per_gpu = layout.step_tokens() / seconds / f64::from(layout.gpus);
        Prediction {
            seconds,
            parts,
            again: busiest.again * microbatches,
            bubble,
            waits: ranks.iter().map(|rank| (makespan - rank.time.total() * microbatches).max(0.0)).collect(),
            optimizer,
            blocks: cut.iter().map(ExactSizeIterator::len).collect(),
            memory: memory(placed, &units[0], ranks, run, cut.len() - 1),
            tokens_per_gpu,
            operations_per_gpu: units[0].operations * tokens_per_gpu,
        }
    }
}

impl Unit {
    /// Adds the time in which a stage waits for activations that go to the memory of the host during its forward,
    /// and come back during its backward. Two blocks' activations are on the way at a time, so the peak of memory
    /// does not have them.
    fn wait_for_host(&mut self, setting: &Setting<'_>) {
        let Some(bandwidth) = setting.machine.host_bandwidth.filter(|_| self.offloaded > 0.0) else { return };
        let seconds = self.offloaded / (bandwidth * setting.machine.constants.link);
        let wait = |computed: f64| (seconds - computed).max(0.0);
        self.time.forward.offload += wait(self.time.forward.total());
        self.time.backward.offload += wait((self.time.backward + self.time.again).total());
    }
}

fn pipeline_costs(placed: &Placed<'_>, stages: &[Unit]) -> PipelineCosts {
    let (model, layout) = (placed.kinds[0].model, placed.layout());
    let costs = |stage: &Unit| {
        let time = &stage.time;
        let backward = (time.backward + time.again).total();
        let for_inputs = (backward - time.weights + time.behind_weights).max(0.0);
        StageCosts { backward, ..StageCosts::new(time.forward.total(), for_inputs, time.weights) }
    };
    // With sequence parallelism, or a scattered message, each rank of a tensor group sends its share.
    let output = placed.kinds[0].hidden_bytes() / f64::from(layout.tensor);
    let sizes = |(index, stage): (usize, &Unit)| StageSizes {
        output: (output * layout.passed_states(index, model)) as u64,
        activation: stage.activation as u64,
        stash: stage.stash as u64,
        ..StageSizes::default()
    };
    let (link, links) = placed.links();
    let is_trained: Vec<bool> = stages.iter().map(|stage| stage.parameters.total() > 0.0).collect();
    PipelineCosts {
        trained: TrainedStages::of(&is_trained),
        stages: stages.iter().map(costs).collect(),
        sizes: stages.iter().enumerate().map(sizes).collect(),
        link,
        links,
    }
}

/// The seconds of gathers and reductions of replicas that computation does not hide. Gradients are reduced
/// while the last microbatch's backward runs. Parameters are gathered while the first forward runs, if the
/// optimizer is sharded. If gradients are sharded, each microbatch reduces them. If parameters are sharded
/// without a pipeline, each microbatch gathers them before its forward, and also before its backward unless they
/// stay, and reduces its gradients.
fn exposed_data(setting: &Setting<'_>, rank: &Unit, busiest: &StageTime) -> f64 {
    let (layout, parameters) = (setting.layout, rank.parameters);
    // Frozen parameters are gathered if they are sharded.
    let of_adapter = layout.adapter_format().bytes();
    let [of_trained, of_frozen, of_gradient] = match (setting.model.is_adapted(), layout.sharding) {
        (false, _) => [layout.gathered_format().bytes(), 0.0, layout.state_formats().gradients.bytes()],
        (true, ShardedState::Parameters) => [of_adapter, layout.precision.element_bytes(), of_adapter],
        (true, _) => [of_adapter, 0.0, of_adapter],
    };
    let gathered = parameters * of_trained + rank.frozen * of_frozen;
    let summed = parameters * of_gradient;
    // Experts have replicas of their own, one group after another on the same links.
    let expert_stride = layout.expert_tensor.saturating_mul(layout.expert);
    let seconds = |collective: fn(&Group, &Machine, f64) -> f64, bytes: Parameters, groups: [Group; 2]| {
        let parts = [bytes.outside_experts(), bytes.experts].into_iter().zip(groups);
        let used = parts.filter(|&(bytes, _)| bytes > 0.0);
        used.map(|(bytes, group)| collective(&group, setting.machine, bytes)).sum::<f64>()
    };
    let all = [(layout.replicas(), layout.tensor), (layout.expert_replicas(), expert_stride)];
    let shards = [(layout.shards(), layout.tensor), (layout.expert_shards(), expert_stride)];
    // Groups that each hold all shards add their shares of the gradients. Ranks with the same share are apart by the
    // ranks of a group.
    let [of_shared, of_experts] = shards.map(|(ranks, stride)| stride.saturating_mul(ranks));
    let copies = [(layout.shard_groups(), of_shared), (layout.expert_shard_groups(), of_experts)];
    let [all, shards, copies] =
        [all, shards, copies].map(|groups| groups.map(|(ranks, stride)| Group { ranks, stride }));
    let gather = seconds(Group::gather, gathered, shards);
    let reduce =
        seconds(Group::gather, summed, shards) + seconds(Group::all_reduce, summed.shards(layout), copies);
    let (forward, backward) = (busiest.forward.total(), (busiest.backward + busiest.again).total());
    let overlap = setting.machine.measured.overlap.unwrap_or(1.0);
    let exposed =
        |communication: f64, computation: f64| communication - overlap * communication.min(computation);
    let microbatches = f64::from(layout.step_microbatches());
    let passes = f64::from(layout.passes());
    match layout.sharding {
        ShardedState::Nothing => exposed(seconds(Group::all_reduce, summed, all), backward),
        ShardedState::Optimizer => exposed(gather, forward) + exposed(reduce, backward),
        ShardedState::Gradients => exposed(gather, forward) + exposed(reduce, backward) * microbatches,
        ShardedState::Parameters if layout.keeps_gathered() => {
            let rounds = if layout.sums_gradients() { passes } else { microbatches };
            (exposed(gather, forward) + exposed(reduce, backward)) * rounds
        }
        ShardedState::Parameters => {
            (exposed(gather, forward) + exposed(gather + reduce, backward)) * microbatches
        }
    }
}

/// Returns the bytes of a parameter that an optimizer reads and writes: the gradient twice (norm and update), the copy
/// that is updated and `moments` moments, each read and written, and the parameter in the form that products read.
pub fn optimizer_traffic(layout: &Layout, moments: f64) -> f64 {
    let formats = layout.state_formats();
    let updated = formats.main_weights.unwrap_or(formats.weights).bytes();
    let computed = if formats.main_weights.is_some() { formats.weights.bytes() } else { 0.0 };
    2.0 * (formats.gradients.bytes() + updated + moments * formats.moments.bytes()) + computed
}

/// The iterations that make the update of a matrix orthogonal (Newton-Schulz; kellerjordan.github.io/posts/muon).
const ITERATIONS: f64 = 5.0;

/// The operations per parameter of matrices of the products that make their updates orthogonal; 0 without them. For a
/// matrix of `m x n` with `m <= n`, an iteration has two products of `m x n` and `n x m`, or their size, and one of
/// `m x m`.
fn orthogonal_operations(setting: &Setting<'_>) -> f64 {
    if setting.layout.implementation.optimizer != Optimizer::Muon {
        return 0.0;
    }
    let (mut operations, mut parameters) = (0.0, 0.0);
    for matrix in setting.model.blocks.iter().flat_map(|block| block.matrices(setting.model.hidden)) {
        let (least, most) = (matrix.input.min(matrix.output) as f64, matrix.input.max(matrix.output) as f64);
        let own = matrix.parameters() as f64;
        operations += ITERATIONS * (4.0 * least + 2.0 * least * least / most) * own;
        parameters += own;
    }
    if parameters > 0.0 { operations / parameters } else { 0.0 }
}

fn optimizer_seconds(setting: &Setting<'_>, parameters: Parameters) -> f64 {
    let updated = match setting.layout.sharding {
        ShardedState::Nothing => parameters,
        ShardedState::Optimizer | ShardedState::Gradients | ShardedState::Parameters => {
            parameters.shards(setting.layout)
        }
    };
    let orthogonal = orthogonal_operations(setting) * (updated.matrices + updated.experts);
    setting.update_seconds(updated) + orthogonal / setting.product_rate(Precision::Half)
}

impl Setting<'_> {
    /// Returns the seconds in which a rank updates parameters, without the products of Muon.
    pub(crate) fn update_seconds(&self, parameters: Parameters) -> f64 {
        let [slowdown, _] = self.machine.kernel_slowdown(Kernel::Optimizer);
        let bytes = |moments: f64, parameters: f64| optimizer_traffic(self.layout, moments) * parameters;
        let moments = self.layout.implementation.optimizer.moments();
        let of_matrices = bytes(moments, parameters.matrices + parameters.experts);
        let of_tables = bytes(Optimizer::TABLE_MOMENTS, parameters.tables);
        (of_matrices + of_tables) * slowdown / self.machine.kernel_bandwidth()
    }
}

fn memory(
    placed: &Placed<'_>,
    units: &Units,
    ranks: &[Unit],
    run: &PipelineRun,
    last: usize,
) -> Vec<HeldBytes<f64>> {
    let (model, layout) = (placed.kinds[0].model, placed.layout());
    let logits: Vec<f64> = placed.kinds.iter().map(logits).collect();
    let buffers = buffers(model, layout);
    let rank = |index: usize| {
        let head =
            if run.stages_of_rank[index].contains(&last) { logits[placed.kind_of_rank[index]] } else { 0.0 };
        HeldBytes {
            activations: run.activations[index] as f64,
            temporary: head.max(units.backward),
            buffers,
            ..units.state(ranks[index].parameters, ranks[index].frozen, layout)
        }
    };
    (0..ranks.len()).map(rank).collect()
}
