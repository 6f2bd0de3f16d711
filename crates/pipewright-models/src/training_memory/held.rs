//! The bytes that each stage and each rank of a run holds at most.

use pipewright_schedule::costs::{RecomputeSizes, StageCosts, StageSizes};
use pipewright_schedule::delay::Delayed;
use pipewright_schedule::held_bytes::HeldBytes;
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::partition::Partition;
use pipewright_schedule::plan::READ_ROOM;
use pipewright_schedule::sharding::{Sharding, StageBytes};
use pipewright_schedule::simulate::{SimulateError, memory_curve, peak_memory, timed};
use pipewright_schedule::{
    Action, Costs, Level, LowerConfig, Placement, Rank, Recompute, StageIndex, Timeline, ValidatedProgram,
};

use crate::cut_model::CutModel;
use crate::parameter::{FirstCopies, ParameterSpec};
use crate::training_memory::arrived_rows::ExpertLoad;
use crate::training_memory::compute_devices::ComputeDevices;
use crate::training_memory::kept::KeptActivations;
use crate::training_memory::state::{StateRule, gradient_bytes};
use crate::training_memory::tensor_share::TensorShare;

/// The bytes of a stage's parameters with the optimizer's state, and of the gradients.
#[derive(Clone, Copy, Debug)]
pub(super) struct StageState {
    bytes: StageBytes,
    gradients: u64,
    undo: u64,
    /// The bytes of quantised matrices, which each replica has whole.
    quantised: u64,
}

/// A training run, as far as its memory depends on it.
#[derive(Clone, Copy, Debug)]
pub struct TrainingRun<'a> {
    /// The model.
    pub model: &'a CutModel,
    /// The program of one replica.
    pub program: &'a ValidatedProgram,
    /// The layers of each stage.
    pub partition: &'a Partition,
    /// The tokens of a row.
    pub tokens: usize,
    /// The rows of a microbatch.
    pub rows: u32,
    /// The part of their forwards that the stages compute again.
    pub recompute: &'a Recompute,
    /// The rule for the state of each parameter.
    pub state: StateRule,
    /// The distribution of parameters and optimizer state over replicas.
    pub sharding: Sharding,
    /// The devices on which the ranks compute.
    pub devices: ComputeDevices,
    /// The number of replicas that hold the experts of each mixture together; 1 if each holds all.
    pub expert_ranks: u32,
    /// The tokens that choose the experts of a replica, if several hold them together.
    pub expert_load: ExpertLoad,
    /// The ranks that compute each stage together.
    pub tensor: TensorShare,
    /// Whether a rank updates before it has the gradient norm
    /// ([`PipelineConfig::post_validation`](pipewright::pipeline::PipelineConfig::post_validation)).
    pub post_validation: bool,
    /// Whether parameters are delayed by one update, so that the trained ones have two versions
    /// ([`PipelineConfig::delayed`](pipewright::pipeline::PipelineConfig::delayed)).
    pub delayed: bool,
    /// Whether ranks hash their state
    /// ([`PipelineConfig::fingerprint_every`](pipewright::pipeline::PipelineConfig::fingerprint_every)).
    pub fingerprints: bool,
}

/// The most bytes that each stage and each rank of a replica holds. All replicas need the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainingMemory {
    ranks: Vec<HeldBytes>,
    stages: Vec<HeldBytes>,
    shared: u64,
    shared_again: u64,
    streamed: Option<StreamedBytes>,
}

/// The bytes of a frozen base that stays in its files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamedBytes {
    /// The most that a rank has in memory at once.
    pub window: u64,
    /// The bytes that all ranks of a replica read in a step.
    pub step: u64,
}

impl TrainingMemory {
    /// Returns the memory of ranks and stages whose bytes are known.
    pub fn new(ranks: Vec<HeldBytes>, stages: Vec<HeldBytes>) -> Self {
        Self { ranks, stages, shared: 0, shared_again: 0, streamed: None }
    }

    /// Sets the bytes of the parameters that the ranks in one process hold together, and the bytes that further
    /// ranks of a replica use again.
    pub fn with_shared(self, shared: u64, shared_again: u64) -> Self {
        Self { shared, shared_again, ..self }
    }

    /// Estimates the memory of a run whose stages have these parameters.
    ///
    /// # Errors
    /// When the program cannot be simulated, which a sound program always can.
    pub fn estimate(run: &TrainingRun<'_>, stages: &[Vec<ParameterSpec>]) -> Result<Self, SimulateError> {
        let placement = run.program.placement();
        let costs = run.costs(stages);
        let overlapping = run.overlapping();
        let simulation = timed(overlapping.as_ref().unwrap_or(run.program).as_program(), &costs)?;
        let timeline = simulation.timeline();
        let state = |specs: &Vec<ParameterSpec>| run.state_of(specs, &mut FirstCopies::default());
        let states: Vec<StageState> = stages.iter().map(state).collect();
        let in_backward = run.kept().backward_bytes(stages);
        let all_sizes = run.with_gradients_and_base(&costs.sizes, &in_backward, stages);
        let [activations, together] = [&costs.sizes, &all_sizes].map(|sizes| peak_memory(timeline, sizes));
        let rank_bytes = |rank: Rank| {
            let (held, streamed) = (run.rank_state(rank, stages), run.streamed_by(rank, stages).window);
            let parameters = held.parameters.saturating_add(streamed);
            let own = placement.stages_of(rank).iter().flat_map(|stage| &stages[stage.index()]);
            let whole = own.filter_map(ParameterSpec::read_whole).max().unwrap_or(0);
            let buffers = if streamed > 0 { READ_ROOM.saturating_add(whole) } else { 0 };
            let temporary = placement.stages_of(rank).iter().map(|stage| {
                let [whole, by_layer] = in_backward[stage.index()];
                if run.recompute.is_by_block() { whole.max(by_layer) } else { whole }
            });
            let temporary = temporary.max().unwrap_or(0);
            let activations = activations[rank.index()];
            let (undo, hashed) = run.in_update(rank, held, &states);
            let held = HeldBytes { undo, ..held };
            let temporary = temporary.saturating_add(hashed);
            let parts = HeldBytes { parameters, buffers, activations, temporary, ..held };
            // In the update there are neither activations nor matrices of the base that is in files.
            let in_update = held.state().saturating_add(held.undo);
            let always = held.parameters.saturating_add(held.optimizer);
            let computing = always.saturating_add(together[rank.index()]).saturating_add(hashed);
            let most = computing.max(in_update).saturating_add(buffers);
            HeldBytes { apart: parts.total().saturating_sub(most), ..parts }
        };
        let stage_bytes = |(stage, state): (StageIndex, &StageState)| HeldBytes {
            activations: stage_peak(timeline, placement, &costs.sizes, stage),
            ..run.stage_state(*state)
        };
        let ranks = placement.all_ranks().map(rank_bytes).collect();
        let memory = Self::new(ranks, placement.all_stages().zip(&states).map(stage_bytes).collect());
        let [shared, shared_again] = run.shared_bytes(stages);
        let streamed = run.model.streams().then(|| {
            let ranks = placement.all_ranks().map(|rank| run.streamed_by(rank, stages));
            ranks.fold(StreamedBytes::default(), |all, rank| StreamedBytes {
                window: all.window.max(rank.window),
                step: all.step.saturating_add(rank.step.saturating_mul(run.tensor.ranks.into())),
            })
        });
        Ok(Self { streamed, ..memory.with_shared(shared, shared_again) })
    }

    /// Returns the bytes of each rank of a replica.
    pub fn ranks(&self) -> &[HeldBytes] {
        &self.ranks
    }

    /// Returns the bytes of the base that stays in its files; `None` if it is in memory.
    pub fn streamed(&self) -> Option<StreamedBytes> {
        self.streamed
    }

    /// Returns the bytes of the parameters that the ranks of all replicas in one process hold together: the
    /// frozen base of adapters, unless it is sharded. Each rank's parameters include its part.
    pub fn shared(&self) -> u64 {
        self.shared
    }

    /// Returns the bytes of [`TrainingMemory::shared`] that are in the parameters of more than one rank of a
    /// replica, such as the table of a tied model, once for each further rank.
    pub fn shared_again(&self) -> u64 {
        self.shared_again
    }

    /// Returns the bytes of each stage. Its activations are the peak of the stage alone: a rank with several
    /// stages may hold less than their sum, because they have their peaks at different times.
    pub fn stages(&self) -> &[HeldBytes] {
        &self.stages
    }
}

impl TrainingRun<'_> {
    /// Returns a program of several batches that overlap, if parameters are delayed and batches may overlap.
    fn overlapping(&self) -> Option<ValidatedProgram> {
        if !self.delayed || self.program.ranks() == 1 || self.model.streams() {
            return None;
        }
        let delayed = Delayed::of_program(self.program).ok()?;
        let batches = delayed.batches(delayed.enough_batches()).ok()?;
        ProgramSource::Schedule(batches).program(&LowerConfig::from(Level::Comms)).ok()
    }

    /// Returns costs with the sizes of the run, whose stages have these parameters. A rank runs its actions
    /// in the order of its row for any costs, so unit costs give the same peaks.
    fn costs(&self, stages: &[Vec<ParameterSpec>]) -> Costs {
        // The times do not matter.
        let unit = StageCosts { recompute: Some(1.0), ..StageCosts::new(1.0, 1.0, 1.0) };
        Costs {
            stages: vec![unit],
            sizes: self.kept().sizes(stages),
            recompute: self.recompute.clone(),
            ..Costs::default()
        }
    }

    /// Returns the bytes that a rank holds only in its update, in addition to its gradients, and the bytes that it holds next to
    /// the activations of another batch. A fingerprint copies the optimizer's state of one stage at a time: into a record, and into
    /// the bytes of the record.
    fn in_update(&self, rank: Rank, held: HeldBytes, states: &[StageState]) -> (u64, u64) {
        if !self.fingerprints {
            return (held.undo, 0);
        }
        let own = self.program.placement().stages_of(rank).iter();
        let copied = own.map(|stage| self.stage_state(states[stage.index()]).optimizer).max().unwrap_or(0);
        let copied = copied.saturating_mul(2);
        if self.delayed {
            return (held.undo, copied);
        }
        (held.undo.max(copied), 0)
    }

    fn kept(&self) -> KeptActivations<'_> {
        let &Self {
            model,
            partition,
            tokens,
            rows,
            recompute,
            devices,
            expert_ranks,
            expert_load,
            tensor,
            ..
        } = self;
        let (slices, precision) = (self.program.slices(), self.state.precision);
        KeptActivations {
            model,
            partition,
            tokens,
            rows,
            slices,
            precision,
            recompute,
            devices,
            expert_ranks,
            expert_load,
            tensor,
        }
    }

    /// Returns the bytes of a rank without activations.
    pub(super) fn rank_state(&self, rank: Rank, stages: &[Vec<ParameterSpec>]) -> HeldBytes {
        let mut known = FirstCopies::default();
        let own = self.program.placement().stages_of(rank).iter().map(|stage| {
            let specs = &stages[stage.index()];
            // A stage that computes has all of its parameters whole if replicas share them.
            let mut of_stage = FirstCopies::default();
            let known = if self.sharding.shards > 1 { &mut of_stage } else { &mut known };
            self.state_of(specs, known)
        });
        let own: Vec<StageState> = own.collect();
        without_activations(&own, self.sharding, self.expert_ranks)
    }

    /// Adds to the sizes of stages, which have these parameters, their gradients, the bytes that a backward holds
    /// ([`KeptActivations::backward_bytes`]), and the matrices that they read from files.
    fn with_gradients_and_base(
        &self,
        sizes: &[StageSizes],
        in_backward: &[[u64; 2]],
        stages: &[Vec<ParameterSpec>],
    ) -> Vec<StageSizes> {
        let by_block = self.recompute.is_by_block();
        let added = |((&sizes, specs), held): ((&StageSizes, &Vec<ParameterSpec>), &[u64; 2])| StageSizes {
            gradient: self.gradients_of(specs),
            streamed: Self::streamed_of(specs),
            parts: held[0],
            recompute: sizes.recompute.map(|sizes| RecomputeSizes {
                // A stage that is not computed again has its backward as a whole.
                recomputed: if by_block {
                    sizes.recomputed.saturating_add(held[1]).saturating_sub(held[0])
                } else {
                    sizes.recomputed
                },
                ..sizes
            }),
            ..sizes
        };
        sizes.iter().zip(stages).zip(in_backward).map(added).collect()
    }

    /// Returns the bytes of the streamed matrices of the stages that the program of a rank reads.
    fn streamed_by(&self, rank: Rank, stages: &[Vec<ParameterSpec>]) -> StreamedBytes {
        let (mut held, mut read) = (0_u64, StreamedBytes::default());
        for action in self.program.row(rank) {
            let specs = &stages[action.stage().index()];
            let bytes = || Self::streamed_of(specs);
            match action {
                Action::Unshard { .. } => {
                    held = held.saturating_add(bytes());
                    let from_files = specs.iter().filter_map(|spec| spec.read_bytes);
                    read.step = from_files.fold(read.step, u64::saturating_add);
                }
                Action::Reshard { .. } => held = held.saturating_sub(bytes()),
                _ => {}
            }
            read.window = read.window.max(held);
        }
        read
    }

    /// Returns the bytes of a matrix that is in memory only while its stage computes; 0 for other parameters.
    fn streamed_bytes(spec: &ParameterSpec) -> u64 {
        spec.quantised_bytes.filter(|_| spec.read_bytes.is_some()).unwrap_or(0)
    }

    fn streamed_of(specs: &[ParameterSpec]) -> u64 {
        specs.iter().map(Self::streamed_bytes).fold(0, u64::saturating_add)
    }

    /// Returns the parameters that a rank holds all the time.
    fn resident(&self, specs: &[ParameterSpec]) -> Vec<ParameterSpec> {
        specs.iter().filter(|spec| Self::streamed_bytes(spec) == 0).cloned().collect()
    }

    /// Returns the bytes of [`TrainingMemory::shared`] and of [`TrainingMemory::shared_again`].
    pub(super) fn shared_bytes(&self, stages: &[Vec<ParameterSpec>]) -> [u64; 2] {
        if self.sharding.shards > 1 {
            // Each replica has rows of its own.
            return [0, 0];
        }
        let is_trained = |path: &str| self.model.is_trained(path);
        let placement = self.program.placement();
        let bytes = |specs: &[ParameterSpec]| self.state.shared_bytes(specs, self.expert_ranks, is_trained);
        let of_rank = |rank: Rank| {
            let mut known = FirstCopies::default();
            let of_stage = |stage: &StageIndex| self.resident(&stages[stage.index()]);
            let own = placement.stages_of(rank).iter().flat_map(|stage| known.of(&of_stage(stage)));
            bytes(&own.collect::<Vec<_>>())
        };
        let of_ranks = placement.all_ranks().map(of_rank).fold(0, u64::saturating_add);
        let together = bytes(&FirstCopies::default().of(&self.resident(&stages.concat())));
        [together, of_ranks.saturating_sub(together)]
    }

    /// Returns the bytes of the gradients of a stage with these parameters.
    fn gradients_of(&self, specs: &[ParameterSpec]) -> u64 {
        // While batches overlap, each has its own.
        let batches = if self.delayed && self.program.ranks() > 1 { 2 } else { 1 };
        gradient_bytes(specs, self.expert_ranks, |path| self.model.is_trained(path)).saturating_mul(batches)
    }

    /// Returns the bytes of a stage with these parameters on a rank that holds the parameters in `known` already,
    /// for other stages, and adds them to `known`. The copy in half precision belongs to the stage.
    pub(super) fn state_of(&self, specs: &[ParameterSpec], known: &mut FirstCopies) -> StageState {
        let is_trained = |path: &str| self.model.is_trained(path);
        let specs = &self.resident(specs);
        let (own, of_stage) = (known.of(specs), FirstCopies::default().of(specs));
        let quantised = own.iter().filter_map(|spec| spec.quantised_bytes).fold(0, u64::saturating_add);
        let [own, of_stage] = [own, of_stage].map(|specs| -> Vec<ParameterSpec> {
            specs.into_iter().filter(|spec| spec.quantised_bytes.is_none()).collect()
        });
        let [mut bytes, of_stage] = [&own, &of_stage].map(|specs| self.state.of_stage(specs, is_trained));
        bytes.others.copy = of_stage.others.copy;
        if self.delayed {
            let trained: Vec<ParameterSpec> =
                own.iter().filter(|spec| is_trained(&spec.path)).cloned().collect();
            let older = self.state.of_stage(&trained, |_| true);
            for (bytes, older) in [(&mut bytes.experts, older.experts), (&mut bytes.others, older.others)] {
                bytes.parameters = bytes.parameters.saturating_add(older.parameters);
                // Each version has a copy in half precision.
                bytes.copy = bytes.copy.saturating_mul(2);
            }
        }
        StageState {
            bytes,
            gradients: self.gradients_of(specs),
            undo: if self.post_validation { self.trained_state(&own) } else { 0 },
            quantised,
        }
    }

    /// Returns the bytes of a stage without activations. If parameters are sharded, a replica holds its part
    /// of them and of the optimizer's state; the parameters of a stage that computes are whole.
    pub(super) fn stage_state(&self, state: StageState) -> HeldBytes {
        let StageState { bytes, gradients, undo, quantised } = state;
        let part = self.sharding.part(bytes, self.expert_ranks);
        HeldBytes {
            parameters: part.parameters.saturating_add(part.copy).saturating_add(quantised),
            gradients,
            optimizer: part.optimizer,
            undo,
            ..HeldBytes::default()
        }
    }

    /// Returns the bytes of a stage's trained parameters, with the optimizer's state, on one replica.
    pub(super) fn trained_state(&self, specs: &[ParameterSpec]) -> u64 {
        let trained = specs.iter().filter(|spec| self.model.is_trained(&spec.path)).cloned();
        let trained: Vec<ParameterSpec> = trained.collect();
        let part = self.sharding.part(self.state.of_stage(&trained, |_| true), self.expert_ranks);
        part.parameters.saturating_add(part.optimizer)
    }
}

/// Returns the memory of a rank with these stages, without activations. Gradients are whole until a stage's last
/// microbatch, so sharding does not lower their peak.
fn without_activations(stages: &[StageState], sharding: Sharding, expert_ranks: u32) -> HeldBytes {
    let held = sharding.held_with_experts(stages.iter().map(|stage| stage.bytes), expert_ranks);
    let quantised = stages.iter().map(|stage| stage.quantised).fold(0, u64::saturating_add);
    HeldBytes {
        parameters: held.parameters.saturating_add(held.copy).saturating_add(quantised),
        gradients: stages.iter().map(|stage| stage.gradients).fold(0, u64::saturating_add),
        optimizer: held.optimizer,
        undo: stages.iter().map(|stage| stage.undo).fold(0, u64::saturating_add),
        ..HeldBytes::default()
    }
}

/// Returns the most bytes of activations that a stage holds.
fn stage_peak(timeline: &Timeline, placement: &Placement, sizes: &[StageSizes], stage: StageIndex) -> u64 {
    let own = |other: StageIndex| if other == stage { sizes[other.index()] } else { StageSizes::default() };
    let only: Vec<StageSizes> = placement.all_stages().map(own).collect();
    let curve = memory_curve(timeline, placement.rank_of(stage), &only);
    curve.iter().map(|step| step.held).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use pipewright::tensor::Precision;

    use super::*;
    use crate::parameter::ParameterKind;
    use crate::training_memory::state::OptimizerState;

    #[test]
    fn an_expert_has_a_sum_of_gradients_for_each_replica_whose_tokens_reach_it() {
        let spec = |path: &str| ParameterSpec::new(path.to_owned(), vec![3, 5], ParameterKind::Matrix);
        let specs = ["a.mlp.experts.3.up_proj.weight", "a.mlp.shared_expert.up_proj.weight"].map(spec);
        assert_eq!(gradient_bytes(&specs, 1, |_| true), 4 * 30);
        assert_eq!(gradient_bytes(&specs, 4, |_| true), 4 * (4 * 15 + 15));
    }

    #[test]
    fn what_is_frozen_is_the_same_in_all_replicas() {
        let spec = |path: &str| ParameterSpec::new(path.to_owned(), vec![3, 5], ParameterKind::Matrix);
        let paths = ["a.mlp.experts.3.up_proj.weight", "a.q_proj.weight", "a.q_proj.lora_A.weight"];
        let specs = paths.map(spec);
        let shared = |precision, experts| {
            let rule = StateRule { optimizer: OptimizerState::TwoMoments, precision, is_corrected: false };
            rule.shared_bytes(&specs, experts, |path| path.contains(".lora_"))
        };
        assert_eq!(shared(Precision::F32, 1), 4 * 30);
        assert_eq!(shared(Precision::Bf16, 1), 2 * 30);
        // Each replica has other experts.
        assert_eq!(shared(Precision::F32, 2), 4 * 15);
    }

    #[test]
    fn replicas_that_share_hold_their_part_and_what_is_gathered() {
        let whole = HeldBytes { parameters: 240, gradients: 240, optimizer: 480, ..HeldBytes::default() };
        let held_in = |shards, window, precision| {
            let rule = StateRule { optimizer: OptimizerState::TwoMoments, precision, is_corrected: false };
            let stage = |elements: usize| {
                let (path, kind) = (String::new(), ParameterKind::Matrix);
                let specs = [ParameterSpec::new(path, vec![elements], kind)];
                StageState {
                    bytes: rule.of_stage(&specs, |_| true),
                    gradients: gradient_bytes(&specs, 1, |_| true),
                    undo: 0,
                    quantised: 0,
                }
            };
            without_activations(&[10, 30, 20].map(stage), Sharding { shards, window }, 1)
        };
        let held = |shards, window| held_in(shards, window, Precision::F32);
        assert_eq!(held(1, 1), whole);
        let parts = HeldBytes { parameters: 4 * (15 + 30), optimizer: 120, ..whole };
        assert_eq!(held(4, 1), parts);
        assert_eq!(held(4, 9).parameters, 4 * (15 + 60));
        // With the rounded copy of the parameters that compute.
        let in_half = |shards| held_in(shards, 1, Precision::Bf16).parameters;
        assert_eq!(in_half(1), (4 + 2) * 60);
        assert_eq!(in_half(4), 4 * (15 + 30) + 2 * 30);
    }
}
