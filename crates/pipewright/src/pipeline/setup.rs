//! The setup of a pipeline, which all its ranks share: checked at launch, and used by each rank to build its
//! stages.

use std::fmt::Display;
use std::sync::Arc;

use pipewright_schedule::delay::Delayed;
use pipewright_schedule::lower::{forward_part, unmovable};
use pipewright_schedule::words::counted;
use pipewright_schedule::{Level, LowerError, Rank, Recompute, Slices, StageIndex, ValidatedProgram};

use super::error::{Mistake, PipelineError};
use crate::batch::Purpose;
use crate::byte_channel::ByteChannel;
use crate::collective::Group;
use crate::config::PipelineConfig;
use crate::device::computes_behind;
use crate::executor::{Connection, Executor, Follow, IdleThreads, NextBatch, OverlapRule, RankContext};
use crate::failure::{Abort, Cause, StepError};
use crate::ids::{StepNumber, WorldRank};
use crate::memory::{FrozenTensors, RankMemory};
use crate::mesh::{Mesh, RankGroups};
use crate::nn::TensorParallel;
use crate::offload::OffloadTo;
use crate::progress::ProgressBoard;
use crate::stage::{Skips, Stage, StageRunner, StageSettings};
use crate::tensor::Metadata;
use crate::transport::{Endpoint, World};
use crate::verification::Verify;

/// The reason for which a model with skip connections is refused.
const SKIPS_OF_FROZEN: &str = "the program leaves out backwards of frozen stages, and a stage with skip connections may \
                               need them: make the program without `TrainedStages`";

/// The reason for which a device is refused if steps are verified.
const VERIFIED_ON_DEVICE: &str = "steps are verified, which compares bits, and a device other than the processor may compute \
                                  others each time: use the processor, or do not verify steps (`verify`)";

/// The reason why replicas cannot hold experts together on another device.
const EXPERTS_ON_DEVICE: &str = "replicas that hold experts together (`expert_parallel`) compute on the processor, and the \
                                 stage is on another device: make it on the processor, or set `expert_parallel` to 1";

/// The reason why a base in files cannot be read for two batches at once.
const SHARDED_BASE: &str = "its matrices stay in files, and parameters are sharded and delayed by an update: leave out one of \
                            the three";

/// The reason why tensors of the processor cannot move to its memory.
const OFFLOAD_ON_PROCESSOR: &str = "it computes on the processor, whose tensors are in the host's memory already: move them \
                                    to a folder (`OffloadTo::Folder`), or use another device";

/// The setup that all ranks of a pipeline share, whether the ranks have their own threads or share one.
#[derive(Clone)]
pub(super) struct Setup {
    /// The program that trains.
    pub(super) program: Arc<ValidatedProgram>,
    pub(super) mesh: Mesh,
    /// The program of evaluations; `None` before the first one if it is the forward part of `program`.
    evaluation: Option<Arc<ValidatedProgram>>,
    pub(super) config: Arc<PipelineConfig>,
    pub(super) board: ProgressBoard,
    pub(super) abort: Abort,
    /// The batch that this process has begun after the one that runs.
    pub(super) next_batch: NextBatch,
    idle_threads: IdleThreads,
    /// The channel for the exchange of reports between processes; `None` within one process.
    reports: Option<ByteChannel>,
    /// The frozen tensors that the ranks make.
    frozen: FrozenTensors,
    /// The repeating row of each rank of the program, if batches overlap: whether each computation belongs to the next
    /// batch.
    turns: Option<Arc<[Arc<[bool]>]>>,
}

impl Setup {
    /// Checks that program, world and configuration fit together.
    pub(super) fn new(
        program: ValidatedProgram,
        world: World,
        config: &PipelineConfig,
    ) -> Result<(Self, Vec<Endpoint>), PipelineError> {
        let (endpoints, board) = world.into_parts();
        if program.level() == Level::Compute && program.ranks() > 1 {
            return Err(PipelineError::not_lowered(program.level()));
        }
        check_slices(program.slices(), config)?;
        let ranks = endpoints.first().map_or(0, Endpoint::ranks);
        let mesh = config.mesh(program.ranks());
        if mesh.shard_groups().is_none() {
            return Err(PipelineError::setup(format!(
                "{} cannot form groups of {}: set `shards` to a divisor of the number of replicas",
                counted(mesh.data, "replica"),
                mesh.shards
            )));
        }
        check_experts(&mesh, config)?;
        check_shares(config)?;
        if mesh.ranks() != Some(ranks) || ranks == 0 {
            let Mesh { pipeline, data, tensor, .. } = mesh;
            let of_tensor = if tensor == 1 { String::new() } else { format!(" x {tensor} (tensor ranks)") };
            let (world, replicas) = (counted(ranks, "rank"), counted(data, "replica"));
            return Err(PipelineError::setup(format!(
                "the transport has {world}, and {replicas} of a program of {} need {data} x {pipeline}{of_tensor}",
                counted(pipeline, "rank")
            )));
        }
        if config.optimizer.is_none() && !program.is_forward_only() {
            let reason = "a program with backward actions needs `PipelineConfig::optimizer`";
            return Err(PipelineError::setup(reason));
        }
        if config.is_sharded() && program.level() != Level::Full {
            return Err(PipelineError::never_gathers(program.level()));
        }
        check_metadata(&config.metadata, program.placement().stages())?;
        if let Some(stage) = config.recompute.largest_stage()
            && stage > program.placement().last_stage()
        {
            let stages = counted(program.placement().stages(), "stage");
            return Err(PipelineError::setup(format!(
                "stage {stage} is to be recomputed, and the program has {stages}: name stages that exist"
            )));
        }
        check_offload(&program, config)?;
        if !config.loss_scaling.is_valid() {
            return Err(PipelineError::setup(format!(
                "losses are scaled by {}: set the initial scale to a power of two, at least 1, and the number of updates to \
                 at least 1",
                config.loss_scaling
            )));
        }
        let abort = endpoints.first().map(|endpoint| endpoint.abort().clone()).unwrap_or_default();
        let reports = endpoints.first().and_then(Endpoint::report_channel);
        let program = Arc::new(program);
        board.set_tensor_ranks(mesh.tensor);
        board.set_program(&program);
        let evaluation = evaluation_program(&program, config)?;
        let (config, next_batch) = (Arc::new(config.clone()), NextBatch::default());
        let idle_threads = IdleThreads::new(
            board.clone(),
            config.threads_per_rank.clone(),
            endpoints.iter().map(Endpoint::rank),
        );
        let setup = Self {
            program,
            mesh,
            evaluation,
            config,
            board,
            abort,
            next_batch,
            idle_threads,
            reports,
            frozen: FrozenTensors::open(),
            turns: None,
        };
        Ok((setup, endpoints))
    }

    /// Returns the setup of a pipeline whose batches may overlap. Without this, they do not.
    pub(super) fn with_turns(self) -> Self {
        Self { turns: self.find_turns(), ..self }
    }

    /// Returns the repeating rows of the ranks; `None` if batches do not overlap.
    fn find_turns(&self) -> Option<Arc<[Arc<[bool]>]>> {
        // Only sharded parameters have two versions that are gathered. A base in files has one, which a batch drops.
        let may_overlap =
            self.config.may_overlap() && (self.config.is_sharded() || !self.program.as_program().gathers());
        let delayed = may_overlap.then(|| Delayed::of_program(&self.program))?;
        let delayed =
            delayed.inspect_err(|reason| tracing::info!("batches do not overlap: {reason}")).ok()?;
        Some(delayed.turns().into_iter().map(Arc::from).collect())
    }

    /// Returns whether steps may overlap.
    pub(super) fn overlaps(&self) -> bool {
        self.turns.is_some()
    }

    /// Returns how a step overlaps with the next one on a rank of the program.
    pub(super) fn overlap_rule(&self, rank: Rank, follow: &Follow) -> Option<OverlapRule> {
        let turns = self.turns.as_ref()?;
        let row = turns.get(rank.index())?.clone();
        let is_mixed = turns.iter().any(|row| row.contains(&true));
        Some(OverlapRule { row, is_mixed, follow: follow.clone() })
    }

    /// Builds a rank's stages and its executor. `make` is the caller's function from
    /// [`Pipeline::launch_split`]. Must be called on the rank's own thread.
    ///
    /// [`Pipeline::launch_split`]: super::Pipeline::launch_split
    pub(super) fn build<E: Display>(
        &self,
        endpoint: Endpoint,
        memory: RankMemory,
        make: &dyn Fn(StageIndex, &TensorParallel) -> Result<Stage, E>,
    ) -> Result<Executor, StepError> {
        let world_rank = endpoint.rank();
        let rank = self.mesh.coord(world_rank).rank;
        let failure =
            |cause| StepError { rank: world_rank, step: StepNumber::default(), action: None, cause };
        let placement = self.program.placement();
        let (world, is_distributed) = (Group::of_world(&endpoint), endpoint.is_distributed());
        let context = RankContext::new(
            &world,
            is_distributed,
            self.mesh,
            placement.clone(),
            self.config.clone(),
            self.next_batch.clone(),
            self.idle_threads.clone(),
        );
        let connection = Connection::new(endpoint, &context, self.board.clone(), memory);
        let mut stages = Vec::new();
        for &stage in placement.stages_of(rank) {
            let runner = self.stage(&context, &connection, stage, make).map_err(failure)?;
            self.board.moved(world_rank, 0);
            stages.push((stage, runner));
        }
        Ok(Executor::new(context, connection, stages, self.program.microbatches()))
    }

    /// Makes a stage and prepares it for its rank. Must be called on the rank's own thread.
    pub(super) fn stage<E: Display>(
        &self,
        context: &RankContext,
        connection: &Connection,
        stage: StageIndex,
        make: &dyn Fn(StageIndex, &TensorParallel) -> Result<Stage, E>,
    ) -> Result<Box<dyn StageRunner>, Cause> {
        let world_rank = context.world_rank;
        let rank = self.mesh.coord(world_rank).rank;
        let failure = |message| Cause::Build { message };
        let tensor = connection.tensor_parallel(context).with_whole_experts(self.config.whole_experts);
        let tensor = tensor.with_sequence_parallel(self.config.sequence_parallel);
        let tensor = tensor.with_frozen(self.frozen.of(world_rank));
        let made = make(stage, &tensor).map_err(|error| failure(format!("stage {stage}: {error}")))?;
        let layers = self.config.recompute.of(stage).and_then(|choice| choice.layers);
        let settings = StageSettings {
            device: self.config.devices.of(world_rank).cloned(),
            precision: self.config.precision,
            optimizer: self.config.optimizer.clone(),
            tensor_ranks: self.mesh.tensor,
            expert_ranks: self.mesh.experts,
            optimizer_groups: self.config.optimizer_groups.clone().into(),
            clip_groups: self.config.clip_groups.clone().into(),
            row_shards: context.row_shards(),
            delayed: self.config.delayed,
            must_have_loss: stage == self.program.placement().last_stage() && !self.program.is_forward_only(),
            slices: self.program.slices(),
            by_block: self.config.recompute.is_by_block(),
            recomputed_layers: layers.map(|layers| layers as usize),
            recomputed_parts: self.config.recompute.parts_of(stage),
            backward: self.program.as_program().trained().backward_of(stage),
        };
        let runner = made.prepare(settings).map_err(|error| failure(format!("stage {stage}: {error}")))?;
        if self.config.verify != Verify::Off && computes_behind(runner.device()) {
            return Err(failure(format!("stage {stage}: {VERIFIED_ON_DEVICE}")));
        }
        if self.mesh.experts > 1 && computes_behind(runner.device()) {
            return Err(failure(format!("stage {stage}: {EXPERTS_ON_DEVICE}")));
        }
        let offloads = self.program.row(rank).iter().any(|action| action.kind().is_offload());
        if offloads && self.config.offload == Some(OffloadTo::Host) && !computes_behind(runner.device()) {
            return Err(failure(format!("stage {stage}: {OFFLOAD_ON_PROCESSOR}")));
        }
        if let Some(layers) = layers.filter(|&layers| layers as usize > runner.blocks()) {
            return Err(failure(format!(
                "stage {stage} has {} (`StageModule::blocks`), and its first {layers} are to be recomputed; recompute \
                 at most as many as it has, or the whole stage",
                counted(runner.blocks(), "layer")
            )));
        }
        if self.overlaps() && self.config.is_sharded() && !runner.streamed().is_empty() {
            return Err(failure(format!("stage {stage}: {SHARDED_BASE}")));
        }
        let Skips { inputs, outputs } = runner.skips();
        let has_skips = !inputs.is_empty() || !outputs.is_empty();
        if has_skips && !self.program.as_program().trained().are_all() {
            return Err(failure(format!("stage {stage}: {SKIPS_OF_FROZEN}")));
        }
        Ok(runner)
    }

    /// Ends the launch: all ranks have built their stages.
    pub(super) fn end_launch(&self) {
        self.frozen.close();
    }

    /// Returns the setup of stages that are made again while the pipeline runs, for this program.
    pub(super) fn again(&self, program: Arc<ValidatedProgram>) -> Result<Self, PipelineError> {
        let evaluation = evaluation_program(&program, &self.config)?;
        let has_same_rows = program == self.program;
        let again = Self { program, evaluation, frozen: FrozenTensors::open(), ..self.clone() };
        Ok(if has_same_rows { again } else { again.with_turns() })
    }

    /// Makes the program of evaluations, if it is the forward part of the program and there was no evaluation
    /// before.
    pub(super) fn prepare_evaluation(&mut self) -> Result<(), PipelineError> {
        if self.evaluation.is_none() {
            let program = forward_part(&self.program).map_err(no_evaluation)?;
            self.evaluation = Some(Arc::new(program));
        }
        Ok(())
    }

    /// Returns the program of a step or an evaluation. The program of evaluations must be prepared.
    pub(super) fn program_for(&self, purpose: Purpose) -> &Arc<ValidatedProgram> {
        match purpose {
            Purpose::Evaluate => self.evaluation.as_ref().unwrap_or(&self.program),
            Purpose::Update { .. } | Purpose::Accumulate => &self.program,
        }
    }

    /// Returns the number of microbatches of a step or an evaluation, over all replicas.
    pub(super) fn microbatches_for(&self, purpose: Purpose) -> u32 {
        let program = self.program_for(purpose);
        program.microbatches() / program.slices().get() * self.mesh.data
    }

    /// Returns the number of slices of a microbatch, the same in all programs.
    pub(super) fn slices(&self) -> Slices {
        self.program.slices()
    }

    /// Returns whether a process with this number of ranks has all ranks of the world.
    pub(super) fn is_whole_world(&self, ranks: usize) -> bool {
        self.mesh.ranks() == Some(ranks as u32)
    }

    /// Returns the channel for the exchange of reports between processes; `None` within one process.
    pub(super) fn reports(&self) -> Option<ByteChannel> {
        self.reports.clone()
    }
}

fn no_evaluation(reason: LowerError) -> PipelineError {
    let sentence = format!("the forward part of the program cannot be run alone: {reason}");
    PipelineError::Setup(Mistake::caused(sentence, reason))
}

/// Returns an error if tensors cannot leave memory as the program says.
fn check_offload(program: &ValidatedProgram, config: &PipelineConfig) -> Result<(), PipelineError> {
    if config.offload.is_some() && !config.recompute.has_second_forwards() {
        let reason = "`offload` moves the inputs that recomputed forwards keep, and no forward is recomputed: the others keep \
                      tapes, which belong to Burn; set `recompute`, or leave `offload` out";
        return Err(PipelineError::setup(reason));
    }
    let rows = program.as_program().rows();
    let Some(&action) = rows.iter().flatten().find(|action| action.kind().is_offload()) else {
        return Ok(());
    };
    let Some(place) = &config.offload else { return Err(PipelineError::NoOffloadPlace { action }) };
    if let Some(action) = unmovable(program.as_program(), &config.recompute) {
        return Err(PipelineError::OffloadedTape { action });
    }
    match (place, place.prepare()) {
        (OffloadTo::Folder(folder), Err(source)) => {
            Err(PipelineError::OffloadFolder { folder: folder.clone(), source })
        }
        _ => Ok(()),
    }
}

/// Returns an error if the replicas do not form expert groups, or another setting does not work with them.
fn check_experts(mesh: &Mesh, config: &PipelineConfig) -> Result<(), PipelineError> {
    if mesh.expert_groups().is_none() {
        return Err(PipelineError::setup(format!(
            "{} cannot form groups of {} that hold the experts together: set `expert_parallel` to a divisor of the number of \
             replicas that is a power of two, or to that number",
            counted(mesh.data, "replica"),
            mesh.experts
        )));
    }
    if !mesh.groups_fit() {
        let sizes: Vec<String> = mesh.expert_sizes().iter().map(u32::to_string).collect();
        return Err(PipelineError::setup(format!(
            "groups of {} replicas that hold the experts together do not fit groups of {} that hold the other parameters \
             together: set `expert_parallel` to {}",
            mesh.experts,
            mesh.shards,
            sizes.join(" or ")
        )));
    }
    let setting = if mesh.experts == 1 {
        return Ok(());
    } else if config.tensor_parallel > 1 && config.whole_experts {
        "whole experts of tensor ranks (`whole_experts`)"
    } else if !is_on_processor(mesh, config) {
        "devices other than the processor (`devices`)"
    } else {
        return Ok(());
    };
    Err(PipelineError::beside_expert_groups(mesh.experts, setting))
}

/// Returns an error unless each replica has a share of the batch.
fn check_shares(config: &PipelineConfig) -> Result<(), PipelineError> {
    let (shares, replicas) = (&config.batch_shares, config.data_parallel);
    if shares.is_empty() || shares.len() == replicas as usize && !shares.contains(&0) {
        return Ok(());
    }
    Err(PipelineError::setup(format!(
        "{} of the batch ({shares:?}) for {}: set `batch_shares` to a number from 1 for each replica, or to none",
        counted(shares.len(), "share"),
        counted(replicas, "replica")
    )))
}

/// Returns whether the processor computes all stages, as far as the configuration knows the devices.
fn is_on_processor(mesh: &Mesh, config: &PipelineConfig) -> bool {
    let mut ranks = (0..mesh.ranks().unwrap_or(0)).map(WorldRank::new);
    ranks.all(|rank| config.devices.of(rank).is_none_or(|device| !computes_behind(device)))
}

/// Returns the program of evaluations that the configuration gives, or that `program` itself is; `None` if
/// its forward part is to be made when it is needed.
fn evaluation_program(
    program: &Arc<ValidatedProgram>,
    config: &PipelineConfig,
) -> Result<Option<Arc<ValidatedProgram>>, PipelineError> {
    let Some(given) = &config.evaluation else {
        return Ok(program.is_forward_only().then(|| program.clone()));
    };
    if given.placement() != program.placement() {
        let reason = "the program of evaluations places its stages on other ranks than the program: use a schedule with the \
                      same placement, such as the program's own with another number of microbatches";
        return Err(PipelineError::setup(reason));
    }
    if given.slices() != program.slices() {
        return Err(PipelineError::setup(format!(
            "the program of evaluations cuts microbatches into {}, and the program into {}: use the same number",
            counted(given.slices().get(), "slice"),
            program.slices()
        )));
    }
    if given.level() == Level::Compute && given.ranks() > 1 {
        return Err(PipelineError::not_lowered(given.level()));
    }
    if config.is_sharded() && given.level() != Level::Full {
        return Err(PipelineError::never_gathers(given.level()));
    }
    if given.is_forward_only() {
        return Ok(Some(given.clone()));
    }
    let forwards = forward_part(given).map_err(no_evaluation)?;
    Ok(Some(Arc::new(forwards)))
}

/// Returns an error if a setting needs whole microbatches, and the program cuts them.
fn check_slices(slices: Slices, config: &PipelineConfig) -> Result<(), PipelineError> {
    let setting = if slices.is_one() {
        return Ok(());
    } else if config.recompute != Recompute::None {
        "recomputation (`recompute`)"
    } else if config.tensor_parallel > 1 {
        "tensor ranks (`tensor_parallel`)"
    } else if config.targets_for_all {
        "targets for all stages (`targets_for_all`)"
    } else {
        return Ok(());
    };
    Err(PipelineError::setup(format!(
        "the program cuts microbatches into {slices} slices, which does not work with {setting}: leave that out, or use a \
         schedule of whole microbatches, such as `1f1b`"
    )))
}

/// Returns an error if metadata is given for stages that the program does not have.
pub(super) fn check_metadata(metadata: &Metadata, stages: u32) -> Result<(), PipelineError> {
    let expected = stages as usize - 1;
    match metadata {
        Metadata::Static { stages } if stages.len() != expected => {
            let found = stages.len();
            Err(PipelineError::setup(format!(
                "metadata is given for {found} boundaries, the program has {expected}: one before each stage but the first"
            )))
        }
        Metadata::Partial { stages: known, .. } => {
            match known.keys().find(|stage| !(1..stages).contains(&stage.get())) {
                Some(stage) => Err(PipelineError::setup(format!(
                    "metadata is given for the inputs of stage {stage}, and the program has {stages} stages: name stages \
                     that follow another one"
                ))),
                None => Ok(()),
            }
        }
        _ => Ok(()),
    }
}
