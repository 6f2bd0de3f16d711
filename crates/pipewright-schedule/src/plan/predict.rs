//! The prediction of one choice: what `simulate --profile` prints, and by which plans are judged.

use std::borrow::Cow;
use std::num::NonZeroU32;

use thiserror::Error;

use crate::costs::{Costs, StageSizes};
use crate::divisor::greatest_common_divisor;
use crate::ids::Rank;
use crate::lower::{LowerError, TrainingLowering, for_training};
use crate::mesh::{Mesh, least_rows_of_shares, rows_of_shares};
use crate::partition::{Method, PartitionError, partition};
use crate::placement::Placement;
use crate::plan::head_parts::with_head_parts;
use crate::plan::layers::Layers;
use crate::plan::network::Network;
use crate::plan::order::{Cell, Kind, Order, first_backward};
use crate::plan::peaks::peaks;
use crate::plan::report::Collectives;
use crate::plan::request::TrainingState;
use crate::plan::search::optimizer_time;
use crate::plan::second_forwards::is_recomputed;
use crate::plan::stage_load::{StageLoad, engine_costs, held_in_update, held_throughout, stage_loads};
use crate::profile::{LayerProfile, Profile};
use crate::recompute::{KeptForwards, Recompute, StageRecompute};
use crate::schedule::Schedule;
use crate::sharding::Sharding;
use crate::simulate::{SimulateError, Summary, TimedRun, logical, peak_memory, timed};
use crate::trained::TrainedStages;
use crate::validate::ValidatedProgram;
use crate::words::counted;

/// The choices besides the schedule.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanChoice {
    /// The number of parts into which the head is cut along the vocabulary, each a layer of its own; `None`
    /// for the number that the profile has.
    pub head_parts: Option<u32>,
    /// The first layer of each stage except the first.
    pub boundaries: Vec<usize>,
    /// For each stage, what it recomputes of its forwards; `None` for nothing.
    pub recompute: Vec<Option<StageRecompute>>,
    /// The mesh. The ranks of a pipeline are those of the schedule, whatever it says.
    pub mesh: Mesh,
    /// The number of rows of a microbatch; the mean over all replicas if their shares of the batch differ.
    pub microbatch_rows: u32,
    /// The share of each replica in the rows of a step; empty if they are equal.
    pub batch_shares: Vec<u32>,
    /// The memory for parameters besides the gradients.
    pub state: TrainingState,
    /// How a frozen base is read that stays in its files; `None` for one in memory.
    pub stream: Option<StreamChoice>,
}

/// How ranks read a frozen base that stays in its files.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StreamChoice {
    /// The stages of a rank that are in memory at once.
    pub window: NonZeroU32,
    /// The bytes per second that each rank reads.
    pub bytes_per_s: f64,
}

impl Default for PlanChoice {
    /// One stage on one rank that does not recompute, for microbatches of one row.
    fn default() -> Self {
        Self {
            head_parts: None,
            boundaries: Vec::new(),
            recompute: vec![None],
            mesh: Mesh::default(),
            microbatch_rows: 1,
            batch_shares: Vec::new(),
            state: TrainingState::default(),
            stream: None,
        }
    }
}

impl PlanChoice {
    /// Returns the layers of a profile for this choice, on `ranks` ranks of a pipeline.
    pub(super) fn layers(&self, profile: &Profile, ranks: u32) -> Result<Layers, PredictError> {
        let mesh = Mesh { pipeline: ranks, ..self.mesh };
        let Mesh { data: replicas, tensor, .. } = mesh;
        let all_ranks = ranks.saturating_mul(replicas).saturating_mul(tensor);
        if let Some(problem) = profile.problems_for(all_ranks).first() {
            return Err(PredictError::Choice(problem.to_string()));
        }
        self.check_shares(replicas)?;
        let (profile, _) = profile.with_equal_ranks_merged();
        if profile.has_unlike_ranks() && tensor > 1 {
            return Err(PredictError::Choice(format!(
                "{} were asked for, and the profile has unlike ranks ([[rank]] or [[pair]]), which each compute whole stages; \
                 use one, or remove these sections",
                counted(tensor, "tensor-parallel rank")
            )));
        }
        let is_merged = replicas > 1 && (profile.has_unlike_ranks() || !self.batch_shares.is_empty());
        let profile = if is_merged {
            let rank = |replica: u32| (0..ranks).map(move |rank| Rank::new(replica * ranks + rank)).collect();
            Cow::Owned(profile.of_replicas(&(0..replicas).map(rank).collect::<Vec<_>>(), &self.batch_shares))
        } else {
            profile
        };
        let profile = profile.as_ref();
        if tensor > 1 && profile.node.is_none() {
            return Err(PredictError::Choice(format!(
                "{} need the links inside a node, and the profile has no [node]; add it, with the ranks of a node and their link",
                counted(tensor, "tensor-parallel rank")
            )));
        }
        let network = Network::of(profile, mesh);
        let network = network.ok_or_else(|| {
            PredictError::Choice(format!(
                "{}, {} and {} of a pipeline do not divide the nodes of the profile evenly; use sizes that divide the ranks \
                 of a node, or that they divide",
                counted(tensor, "tensor-parallel rank"),
                counted(replicas, "replica"),
                counted(ranks, "rank")
            ))
        })?;
        let (profile, rows) = (with_head_parts(profile, self.head_parts), self.microbatch_rows);
        Ok(Layers::of(&profile, rows, network, self.state).with_speeds(&profile, rows, self.state))
    }

    /// Returns the stages that are trained, with which a schedule of this choice is lowered. The profile says
    /// which layers are.
    pub fn trained_stages(&self, profile: &Profile) -> TrainedStages {
        let profile = with_head_parts(profile, self.head_parts);
        let layers: Vec<bool> = profile.each_layer().map(LayerProfile::is_trained).collect();
        let starts = [0].into_iter().chain(self.boundaries.iter().copied());
        let ends = self.boundaries.iter().copied().chain([layers.len()]);
        let is_trained = |(start, end): (usize, usize)| {
            layers.get(start..end).is_some_and(|layers| layers.contains(&true))
        };
        TrainedStages::of(&starts.zip(ends).map(is_trained).collect::<Vec<_>>())
    }

    /// Returns how the program of a run with this choice is made, with the exchanges of the profile.
    pub fn lowering(&self, profile: &Profile) -> TrainingLowering {
        let (replicas, trained) = (self.mesh.data, self.trained_stages(profile));
        let stream_window = self.stream.map(|stream| stream.window);
        let lowering = TrainingLowering { replicas, trained, stream_window, ..TrainingLowering::default() };
        lowering.with_exchanges(profile.has_exchanges())
    }

    /// Checks that each replica has a share of the batch, and whole rows in each microbatch.
    fn check_shares(&self, replicas: u32) -> Result<(), PredictError> {
        let shares = &self.batch_shares;
        let refused = |sentence| Err(PredictError::Choice(sentence));
        if shares.is_empty() {
            return Ok(());
        }
        if shares.len() != replicas as usize {
            return refused(format!(
                "there {} {} of the batch, and there are {}; give one for each replica",
                if shares.len() == 1 { "is" } else { "are" },
                counted(shares.len(), "share"),
                counted(replicas, "replica")
            ));
        }
        if let Some(replica) = shares.iter().position(|&share| share == 0) {
            return refused(format!(
                "replica {replica} has the share 0 of the batch; give each replica a share from 1"
            ));
        }
        if rows_of_shares(u64::from(self.microbatch_rows) * u64::from(replicas), shares).is_none() {
            let least = least_rows_of_shares(shares);
            let step = least / greatest_common_divisor(least, replicas.into());
            return refused(format!(
                "microbatches of {} on average do not have whole numbers of rows in each replica with the shares {shares:?} of \
                 the batch; use a multiple of {}, or other shares",
                counted(self.microbatch_rows, "row"),
                counted(step, "row")
            ));
        }
        Ok(())
    }

    /// Checks that there is a choice of recomputation for each stage.
    pub(super) fn check_recompute(&self, stages: u32) -> Result<(), PredictError> {
        if self.recompute.len() == stages as usize {
            return Ok(());
        }
        Err(PredictError::Choice(format!(
            "recomputation is given for {}, and the schedule has {stages}; give one entry for each",
            counted(self.recompute.len(), "stage")
        )))
    }
}

/// The predicted step of a choice.
#[derive(Debug, Clone)]
pub struct Prediction {
    /// The program that each replica runs.
    pub program: ValidatedProgram,
    /// The costs of its stages.
    pub costs: Costs,
    /// The predicted run, without the optimizer.
    pub run: TimedRun,
    /// The time of the optimizer, in seconds. It begins when all ranks have finished.
    pub optimizer_s: f64,
    /// The peak bytes of each rank: parameters, optimizer state, gradients and activations.
    pub peak_bytes: Vec<u64>,
    /// The assumed times of collectives in the step.
    pub collectives: Collectives,
}

/// The errors of a prediction.
#[derive(Error)]
pub enum PredictError {
    /// The choice does not fit the schedule or the profile, as a sentence with advice.
    #[error("{0}")]
    Choice(String),
    /// The boundaries do not cut the layers into the stages of the schedule.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// The schedule is unsound.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// The program cannot be simulated.
    #[error(transparent)]
    Simulate(#[from] SimulateError),
}

crate::error_text::message_as_debug!(PredictError);

impl Prediction {
    /// Returns the time of a step, in seconds.
    pub fn step_s(&self) -> f64 {
        self.run.timeline().makespan() + self.optimizer_s
    }

    /// Returns the figures of the step: the makespan includes the optimizer, and the peak bytes include
    /// parameters and optimizer state.
    ///
    /// # Errors
    /// When the logical simulation of the program fails, which that of a sound program does not.
    pub fn summary(&self) -> Result<Summary, SimulateError> {
        let steps = logical(self.program.as_program())?.steps();
        Ok(Summary {
            makespan: self.step_s(),
            peak_bytes: Some(self.peak_bytes.clone()),
            ..Summary::of(&self.run, steps, &self.costs)
        })
    }
}

/// Predicts a step of `schedule` at the costs of `profile`, which has no problems.
///
/// # Errors
/// When the choice does not fit the schedule, or the schedule is unsound or cuts microbatches into slices.
pub fn predict(
    profile: &Profile,
    schedule: &Schedule,
    choice: &PlanChoice,
) -> Result<Prediction, PredictError> {
    predict_program(profile, schedule, for_training(schedule, &choice.lowering(profile))?, choice)
}

/// Does the same for a program that is already lowered ([`PlanChoice::lowering`]). `schedule` is its computation, by which memory is counted. Tensors
/// that the program moves out of memory are not counted while they are away.
///
/// # Errors
/// When the choice does not fit the schedule, or the schedule cuts microbatches into slices.
pub fn predict_program(
    profile: &Profile,
    schedule: &Schedule,
    program: ValidatedProgram,
    choice: &PlanChoice,
) -> Result<Prediction, PredictError> {
    if !schedule.slices().is_one() {
        return Err(PredictError::Choice(format!(
            "the schedule cuts microbatches into {} slices, and a profile has the times of whole microbatches; simulate it at \
             costs of your own (`--cost`), or choose another schedule, such as `1f1b`",
            schedule.slices()
        )));
    }
    predict_on(&choice.layers(profile, schedule.ranks())?, schedule, program, choice)
}

/// Does the same for layers that are made for this choice.
pub(super) fn predict_on(
    layers: &Layers,
    schedule: &Schedule,
    program: ValidatedProgram,
    choice: &PlanChoice,
) -> Result<Prediction, PredictError> {
    let loads = loads(layers, schedule.placement(), choice)?;
    let mut costs = engine_costs(layers, &loads);
    if let Some(stream) = choice.stream {
        add_reads(&mut costs, &loads, stream);
    }
    let run = timed(program.as_program(), &costs)?;
    let order = Order::with_overlaps(schedule, layers.has_exchanges).split(first_backward(&loads));
    let (optimizer_s, mut peak_bytes) =
        (optimizer_time(&order, &loads), peaks(&order, &loads, layers.sharding));
    if program.as_program().offloads() {
        let less = less_by_offload(&run, &costs.sizes);
        for ((peak, less), rank) in peak_bytes.iter_mut().zip(less).zip(order.placement.all_ranks()) {
            // In the update, which may have the peak, no tensors are away.
            let in_update = held_in_update(order.placement.stages_of(rank), &loads, layers.sharding);
            *peak = peak.saturating_sub(less).max(in_update);
        }
    }
    if choice.stream.is_some() {
        peak_bytes = streamed_peaks(&run, &costs, &order, &loads, layers.sharding);
    }
    let collectives = collectives(&order, &loads);
    Ok(Prediction { program, costs, run, optimizer_s, peak_bytes, collectives })
}

/// Adds the reads of a base that stays in its files.
fn add_reads(costs: &mut Costs, loads: &[StageLoad], stream: StreamChoice) {
    for ((costs, sizes), load) in costs.stages.iter_mut().zip(&mut costs.sizes).zip(loads) {
        costs.unshard = load.read as f64 / stream.bytes_per_s;
        sizes.streamed = load.streamed;
    }
}

/// Returns by how many bytes the peak of each rank in its actions falls because tensors leave memory: the
/// difference of the simulated peaks. It depends on the times of the transfers, so [`peaks`], which counts an
/// order, does not know it. It is exact for a rank with one stage. The stages of a rank may differ in the bytes
/// that their actions hold while they run, and the result is off by at most this difference.
fn less_by_offload(run: &TimedRun, sizes: &[StageSizes]) -> Vec<u64> {
    let all_stay: Vec<StageSizes> = sizes.iter().map(|&sizes| StageSizes { offload: 0, ..sizes }).collect();
    let [whole, less] = [&all_stay[..], sizes].map(|sizes| peak_memory(run.timeline(), sizes));
    whole.into_iter().zip(less).map(|(whole, less)| whole.saturating_sub(less)).collect()
}

/// Returns the peak bytes of each rank of a run whose base stays in its files.
fn streamed_peaks(
    run: &TimedRun,
    costs: &Costs,
    order: &Order,
    loads: &[StageLoad],
    sharding: Sharding,
) -> Vec<u64> {
    let of_rank = |(rank, peak): (Rank, u64)| {
        let own = order.placement.stages_of(rank);
        let of = |bytes: fn(&StageLoad) -> u64| own.iter().map(move |stage| bytes(&loads[stage.index()]));
        let streamed = of(|load| load.streamed).fold(0, u64::saturating_add);
        let most = |bytes| of(bytes).max().unwrap_or(0);
        let temporary = most(|load| load.temporary).saturating_add(most(|load| load.read_room));
        let held = held_throughout(own, loads, sharding).saturating_add(peak).saturating_add(temporary);
        held.max(held_in_update(own, loads, sharding)).saturating_sub(streamed)
    };
    order.placement.all_ranks().zip(peak_memory(run.timeline(), &costs.sizes)).map(of_rank).collect()
}

/// Returns the costs of the stages of a placement at a choice, for schedules that are made to measure.
///
/// # Errors
/// When the choice does not fit the stages.
pub fn choice_costs(
    profile: &Profile,
    placement: &Placement,
    choice: &PlanChoice,
) -> Result<Costs, PredictError> {
    let layers = choice.layers(profile, placement.ranks())?;
    Ok(engine_costs(&layers, &loads(&layers, placement, choice)?))
}

/// Returns the times of the collectives of an order.
fn collectives(order: &Order, loads: &[StageLoad]) -> Collectives {
    let is_dropped = |cell: Cell| cell.is_dropped(loads);
    let mut kept = vec![KeptForwards::default(); loads.len()];
    let mut sums_of = |row: &[Cell], position: usize| {
        let cell = row[position];
        let load = &loads[cell.stage as usize];
        if is_dropped(cell) {
            return 0.0;
        }
        let kept = &mut kept[cell.stage as usize];
        let is_again = is_recomputed(load.recompute, kept, row, position, is_dropped);
        match cell.kind {
            Kind::Forward => load.sums,
            Kind::Input | Kind::Backward if is_again => load.input_sums + load.sums_again,
            Kind::Input | Kind::Backward => load.input_sums,
            Kind::Weight => 0.0,
        }
    };
    let tensor = order.rows.iter().map(|row| (0..row.len()).map(|at| sums_of(row, at)).sum());
    let sums_of_rank = |rank| {
        let own = order.placement.stages_of(rank).iter();
        own.map(|stage| loads[stage.index()].replica_sums).sum()
    };
    Collectives {
        tensor_s: tensor.fold(0.0, f64::max),
        replicas_s: order.placement.all_ranks().map(sums_of_rank).fold(0.0, f64::max),
    }
}

fn loads(
    layers: &Layers,
    placement: &Placement,
    choice: &PlanChoice,
) -> Result<Vec<StageLoad>, PredictError> {
    let stages = placement.stages();
    let method = Method::Explicit { boundaries: choice.boundaries.clone() };
    let cut = partition(&vec![1; layers.count()], stages, &method)?;
    choice.check_recompute(stages)?;
    let starts: Vec<usize> = cut.ranges().map(|range| range.start).chain([layers.count()]).collect();
    let recompute = Recompute::of_stages(&choice.recompute);
    if let Some((stage, layers, count)) = recompute.beyond_layers(|stage| cut.range(stage).len()) {
        return Err(PredictError::Choice(format!(
            "stage {stage} has {}, and its first {layers} are to be recomputed; name at most as many as it has",
            counted(count, "layer")
        )));
    }
    if let Some((stage, parts)) = recompute.parts_beyond(stages, |stage| layers.parts_of(cut.range(stage))) {
        let whole = stage.map_or_else(|| "the profile".to_owned(), |stage| format!("stage {stage}"));
        return Err(PredictError::Choice(format!(
            "no layer of {whole} has these parts, which are to be recomputed: {parts}; write their sizes into [[layers]] \
             (`norms_bytes`, `feed_forward_bytes`), or leave them out"
        )));
    }
    Ok(stage_loads(layers, placement, &starts, &choice.recompute))
}
