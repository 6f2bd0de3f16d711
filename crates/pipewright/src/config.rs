//! The configuration of a running pipeline, and the part of it that the processes of a run must agree on.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use burn::optim::ModuleOptimizer;
use pipewright_schedule::{Recompute, ValidatedProgram};

use crate::device::{Devices, RankThreads};
use crate::hook::ActionHook;
use crate::loss_scale::LossScaling;
use crate::mesh::{DataParallelMode, Mesh};
use crate::offload::OffloadTo;
use crate::optimizer::{ClipGroup, GradientHook, OptimizerGroup};
use crate::tensor::{CheckMetadata, Metadata, OnMismatch, Precision};
use crate::transport::Fields;
use crate::verification::Verify;

/// The configuration of a running pipeline.
#[derive(Clone)]
pub struct PipelineConfig {
    /// The optimizer of every stage; `None` for a pipeline that only evaluates.
    pub optimizer: Option<ModuleOptimizer>,
    /// Groups of parameters with an optimizer of their own.
    pub optimizer_groups: Vec<OptimizerGroup>,
    /// The largest global norm of the gradients; greater gradients are scaled down to it.
    pub clip_norm: Option<f64>,
    /// Groups of parameters with a largest norm of their own.
    pub clip_groups: Vec<ClipGroup>,
    /// Whether a rank updates its parameters while the gradient norm is computed, as if no gradient were
    /// scaled down. It keeps the parameters and the optimizer's state from before. If the norm is greater
    /// than `clip_norm` or a group's, if an update is skipped in f16, or if the step fails, the rank goes
    /// back to them, and updates again with the right factor. So parameters, losses and norms have the same
    /// bits as without the option. [`StepSummary::early_update`](crate::pipeline::StepSummary::early_update)
    /// and [`StepSummary::repaired`](crate::pipeline::StepSummary::repaired) report it. An optimizer must
    /// have its whole state in [`Optimizer::State`](burn::optim::Optimizer::State): it may be called twice in
    /// a step. The processes of a run may have different values.
    pub post_validation: bool,
    /// Whether each batch is computed at the parameters before the last update (PipeDream-2BW, Narayanan et al., 2021):
    /// with `W(-1) = W(0)`, batch `t` makes `W(t + 1) = update(W(t), gradient of batch t at W(t - 1))`. The batches that
    /// an update accumulates are one batch here. Evaluations and everything that reads parameters between two batches use
    /// the newer version, and checkpoints have both. The bits do not depend on the cut or the schedule. It is the same on
    /// all ranks. Modules that keep running statistics are refused.
    pub delayed: bool,
    /// Called for each gradient before the norm is computed; the same on all ranks.
    pub gradient_hook: Option<Arc<dyn GradientHook>>,
    /// Threads for the tensor operations of each rank; in a process of several, its own entry counts. While a rank sums the squares of its gradients or updates
    /// with [`AdamW`](crate::optimizer::AdamW), and all other ranks of the process wait, it uses their threads
    /// too, together at most as many as there are processors.
    pub threads_per_rank: RankThreads,
    /// The devices of the ranks. A stage is made where the caller makes it and then moved to the device of
    /// its rank. Without devices it stays where it was made.
    pub devices: Devices,
    /// The element type in which stages compute and which crosses their boundaries; the same on all ranks.
    pub precision: Precision,
    /// How losses are scaled if the precision is f16.
    pub loss_scaling: LossScaling,
    /// The time without progress on any rank after which a step fails; at most ten years.
    pub deadline: Duration,
    /// Replicas of the pipeline. Each of them gets its share of every batch. The number of ranks in the
    /// world is this number times the number of ranks of the program, times `tensor_parallel`.
    pub data_parallel: u32,
    /// The share of each replica in the rows of a batch, for replicas of unequal speed; empty for equal shares. The
    /// microbatches of a replica with the share 3 have three times the rows of those of a replica with the share 1
    /// ([`SplitRule::shared`](crate::batch::SplitRule::shared)). Each row counts equally in the loss and the gradients. A
    /// [`Batch`](crate::batch::Batch) that is split already is taken as it is.
    pub batch_shares: Vec<u32>,
    /// Ranks of the world that compute the stages of each rank of the program together, each with its shards
    /// of the parameters; see [`Pipeline::launch_split`](crate::pipeline::Pipeline::launch_split).
    pub tensor_parallel: u32,
    /// Whether each of these ranks holds whole experts of a mixture, instead of a shard of each expert. It is
    /// passed on to the stages ([`TensorParallel::experts`](crate::nn::TensorParallel::experts)), and those
    /// without experts do not change.
    pub whole_experts: bool,
    /// Whether each of these ranks has a share of the tokens of each row between the layers that the ranks compute
    /// together, instead of all tokens. It is passed on to the stages
    /// ([`TensorParallel::shares_tokens`](crate::nn::TensorParallel::shares_tokens)), whose modules must support it.
    pub sequence_parallel: bool,
    /// The number of consecutive replicas that hold the experts of each mixture together: a divisor of
    /// `data_parallel` that is a power of two, or `data_parallel`; 1 if each replica holds all experts. With
    /// more, tokens go to the replicas of their experts and back, inside the forwards and backwards
    /// ([`ExpertParallel`](crate::nn::ExpertParallel)). All other parameters are on every replica, or sharded
    /// (`data_parallel_mode`). Then one of the sizes of both kinds of groups divides the other, and one of
    /// them is a power of two unless all replicas hold the other parameters together.
    pub expert_parallel: u32,
    /// The part of the parameters that each replica holds. If parameters are sharded, the program must be at
    /// level `full`, and the optimizer must work element by element.
    pub data_parallel_mode: DataParallelMode,
    /// Whether stages keep their whole parameters between the batches of a step, if parameters are sharded. A step of
    /// several batches ([`Pipeline::accumulate`](crate::pipeline::Pipeline::accumulate)) then gathers the parameters
    /// of each stage once, when the stage first computes: a later `UNSHARD` finds them gathered, and `RESHARD` drops
    /// nothing. They are dropped after the actions of the batch that updates, or when a step fails, and when the
    /// parameters are read or the modules are visited. So a rank holds the whole parameters of all its stages,
    /// however many of them the program gathers at once. Results have the same bits. A step of one batch does not
    /// change. It is the same on all ranks.
    pub keep_gathered: bool,
    /// How the shapes and types of the tensors between stages are known. If ranks are processes, the pipeline
    /// knows what any process knows.
    pub metadata: Metadata,
    /// When the tensors between stages are checked against `metadata`.
    pub check_metadata: CheckMetadata,
    /// Whether tensors between stages that differ from `metadata` are an error.
    pub on_mismatch: OnMismatch,
    /// The seed of the random numbers that layers draw in training
    /// ([`StageContext::random`](crate::stage::StageContext::random)); the same on all ranks.
    pub seed: u64,
    /// The stages that keep only their inputs after a forward, and compute it again in their backward, as a
    /// whole or in part; or the parts of layers that backwards compute again
    /// ([`LayerParts`](pipewright_schedule::recompute::LayerParts)). It is the same on all ranks. A part of a
    /// forward is the first blocks of a stage
    /// ([`StageModule::blocks`](crate::stage::StageModule::blocks)), or the microbatches above a number in
    /// flight. Random numbers do not change, and losses and gradients keep their bits, with two exceptions.
    /// [`Recompute::Block`] and a choice of layers cut a stage of [`Stage::new`](crate::stage::Stage::new) into
    /// parts: in half precision, the values between two parts are rounded, and with slices, gradients are added
    /// in another order. A forward that its backward
    /// follows at once is not recomputed ([`pipewright_schedule::recompute`]).
    ///
    /// A module must depend only on itself, its input and its context. Numbers from a device's own generator
    /// would differ in the second forward, so a module draws from
    /// [`StageContext::random`](crate::stage::StageContext::random).
    pub recompute: Recompute,
    /// The place to which `OFFLOAD` moves the inputs that recomputed forwards keep ([`crate::offload`]); `None` for a
    /// program without that action ([`LowerConfig::offload`](pipewright_schedule::LowerConfig::offload)). Losses and
    /// gradients keep their bits. The processes of a run may have different places.
    pub offload: Option<OffloadTo>,
    /// The program of evaluations; `None` for the forward part of the pipeline's program. It places the
    /// stages on the same ranks, and may have another order and another number of microbatches. Only the
    /// forwards of a program that trains are run. It is the same in all processes.
    pub evaluation: Option<Arc<ValidatedProgram>>,
    /// Whether every stage gets the targets, as the side input [`TARGETS`](crate::batch::TARGETS) of every
    /// batch. Stages that compute a part of the loss need them.
    pub targets_for_all: bool,
    /// Whether suspicious steps are computed again, and their bits compared ([`crate::verification`]); the same on
    /// all ranks. The ranks must compute on the processor, because other devices may compute other bits each time,
    /// and layers, losses and hooks must compute the same bits each time: otherwise a rank is named that is not
    /// broken. While accumulated gradients wait for an update, modules cannot be changed or frozen.
    /// In a repeated step, a process with some of the replicas returns outputs and gradients of inputs of the
    /// microbatches that its replicas have computed then.
    pub verify: Verify,
    /// Whether a step that fails because a loss or a gradient is not finite is computed again, to name the first
    /// value that is not finite ([`Cause::Located`](crate::failure::Cause::Located)); the same on all ranks. The
    /// repetition reads the values of every layer, and changes no parameter and no bit of a later step. Hooks are
    /// called again. A pipeline that may search keeps the tensors of a step's batches until it has updated.
    pub name_not_finite: bool,
    /// The number of steps between two fingerprints of the state
    /// ([`StepSummary::fingerprint`](crate::pipeline::StepSummary::fingerprint)); 0: none. It is the same on all ranks.
    pub fingerprint_every: u64,
    /// Runs around actions, or in their place.
    pub hook: Option<Arc<dyn ActionHook>>,
    /// A flag that the caller raises to end training. Each rank reads it at the end of a step and of an
    /// evaluation, and the summary says whether any rank found it raised. So the processes of a run agree on their
    /// last step. A [`Trainer`](crate::train::Trainer) also ends an evaluation of several batches early, and
    /// does not begin the next step during one.
    pub interrupt: Option<Arc<AtomicBool>>,
    /// The number that [`Pipeline::announce`](crate::pipeline::Pipeline::announce) sets.
    pub announcement: Arc<AtomicU64>,
}

impl Default for PipelineConfig {
    /// No optimizer, no clipping, one thread per rank, stages that stay where they are made, a deadline of a
    /// minute, one replica, and metadata that is taken from the first step and checked there.
    fn default() -> Self {
        Self {
            optimizer: None,
            optimizer_groups: Vec::new(),
            clip_norm: None,
            clip_groups: Vec::new(),
            post_validation: false,
            delayed: false,
            gradient_hook: None,
            threads_per_rank: 1.into(),
            devices: Devices::default(),
            precision: Precision::default(),
            loss_scaling: LossScaling::default(),
            deadline: Duration::from_secs(60),
            data_parallel: 1,
            batch_shares: Vec::new(),
            tensor_parallel: 1,
            whole_experts: false,
            sequence_parallel: false,
            expert_parallel: 1,
            data_parallel_mode: DataParallelMode::default(),
            keep_gathered: false,
            metadata: Metadata::default(),
            check_metadata: CheckMetadata::default(),
            on_mismatch: OnMismatch::default(),
            seed: 0,
            recompute: Recompute::None,
            offload: None,
            evaluation: None,
            targets_for_all: false,
            verify: Verify::default(),
            name_not_finite: false,
            fingerprint_every: 0,
            hook: None,
            interrupt: None,
            announcement: Arc::default(),
        }
    }
}

impl PipelineConfig {
    /// Returns whether the ranks run the halves of an overlap together, so that the program should keep its
    /// overlaps whole ([`keep_overlaps`](pipewright_schedule::LowerConfig::keep_overlaps)). A hook says so itself
    /// ([`ActionHook::runs_overlaps`]). Without one, they do if replicas exchange tokens
    /// ([`TrainingLowering::with_exchanges`](pipewright_schedule::lower::TrainingLowering::with_exchanges)).
    pub fn runs_overlaps(&self) -> bool {
        self.hook.as_ref().map_or(self.expert_parallel > 1, |hook| hook.runs_overlaps())
    }

    /// Returns the mesh of a program of this many ranks.
    pub(crate) fn mesh(&self, pipeline: u32) -> Mesh {
        let (data, tensor, experts) = (self.data_parallel, self.tensor_parallel, self.expert_parallel);
        Mesh {
            pipeline,
            data,
            shards: self.data_parallel_mode.shards(data),
            experts,
            tensor,
            ..Mesh::default()
        }
    }

    /// Returns whether each replica holds a part of the parameters.
    pub(crate) fn is_sharded(&self) -> bool {
        self.data_parallel_mode.shards(self.data_parallel) > 1
    }

    /// Returns whether batches may overlap: parameters are delayed, no step is repeated, and no action is a function's or moves
    /// tensors out of memory.
    pub fn may_overlap(&self) -> bool {
        self.delayed && self.hook.is_none() && self.offload.is_none() && self.verify == Verify::Off
    }
}

/// Returns the settings that must be the same in every process of a run.
pub(crate) fn identity(program: &ValidatedProgram, config: &PipelineConfig) -> Fields {
    let placement = program.placement();
    let stages = placement.all_ranks().map(|rank| {
        let stages = placement.stages_of(rank).iter().map(ToString::to_string);
        stages.collect::<Vec<_>>().join("+")
    });
    let fields = [
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ("program", rows_of(program)),
        (
            "evaluation",
            config.evaluation.as_ref().map_or("its forwards".to_owned(), |program| rows_of(program)),
        ),
        ("placement", stages.collect::<Vec<_>>().join(" ")),
        ("microbatches", program.microbatches().to_string()),
        ("slices", program.slices().to_string()),
        ("clip norm", format!("{:?}", config.clip_norm)),
        ("delayed parameters", config.delayed.to_string()),
        ("clip groups", format!("{:?}", config.clip_groups)),
        ("optimizer groups", format!("{:?}", config.optimizer_groups)),
        ("gradient hook", config.gradient_hook.is_some().to_string()),
        ("seed", config.seed.to_string()),
        ("precision", config.precision.to_string()),
        ("loss scaling", config.loss_scaling.to_string()),
        ("recompute", config.recompute.to_string()),
        ("replicas", config.data_parallel.to_string()),
        ("batch shares", format!("{:?}", config.batch_shares)),
        ("tensor ranks", config.tensor_parallel.to_string()),
        ("whole experts", config.whole_experts.to_string()),
        ("sequence parallel", config.sequence_parallel.to_string()),
        ("replicas of an expert group", config.expert_parallel.to_string()),
        ("data parallel mode", format!("{:?}", config.data_parallel_mode)),
        ("keep gathered", config.keep_gathered.to_string()),
        ("verify", format!("{:?}", config.verify)),
        ("name not finite", config.name_not_finite.to_string()),
        ("fingerprint every", config.fingerprint_every.to_string()),
        ("trains", config.optimizer.is_some().to_string()),
    ];
    fields.map(|(name, value)| (name.to_owned(), value)).into()
}

/// Returns a hash of the rows of a program.
fn rows_of(program: &ValidatedProgram) -> String {
    let mut rows = DefaultHasher::new();
    program.microbatches().hash(&mut rows);
    program.placement().all_ranks().for_each(|rank| program.row(rank).hash(&mut rows));
    format!("{:016x}", rows.finish())
}

#[cfg(test)]
mod tests {
    use pipewright_schedule::{Level, LowerConfig, ScheduleSpec, generate, lower, validate};

    use super::*;
    use crate::optimizer::ParameterGradient;

    #[test]
    fn processes_agree_on_whether_a_hook_changes_gradients() {
        let spec = ScheduleSpec { ranks: 2, microbatches: 2, ..ScheduleSpec::default() };
        let schedule = generate("gpipe", &spec).expect("a schedule");
        let program = lower(&schedule, &LowerConfig::from(Level::Comms)).expect("it lowers");
        let program = validate(program, Level::Comms).expect("it is sound");
        let hook = Arc::new(|_: &mut ParameterGradient<'_>| ());
        let with = PipelineConfig { gradient_hook: Some(hook), ..PipelineConfig::default() };
        let fields = [with, PipelineConfig::default()].map(|config| identity(&program, &config));
        let differ = fields[0].iter().filter(|(name, value)| fields[1][*name] != **value);
        assert_eq!(differ.map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["gradient hook"]);
    }
}
