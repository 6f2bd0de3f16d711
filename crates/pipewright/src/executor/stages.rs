//! The stages of a rank: their runners, and the tensors between two actions.

use std::collections::HashMap;
use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use pipewright_schedule::recompute::KeptForwards;
use pipewright_schedule::{Microbatch, StageIndex};

use super::context::RankContext;
use super::step_input::StepInput;
use crate::batch::SideSums;
use crate::collective::Exchange;
use crate::message::Direction;
use crate::stage::{Auxiliary, Skips, StageRunner};
use crate::tensor::{Boundaries, OptionalTensors, TensorRank, TensorShard, Values};

/// A stage and a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At {
    pub(super) stage: StageIndex,
    pub(super) microbatch: Microbatch,
}

/// A skip connection's direction, the stage at its other end, and the microbatch.
pub(super) type SkipKey = (Direction, StageIndex, Microbatch);

/// An entry for each microbatch. The action that makes or receives the content fills the entry, and the
/// action that uses or sends it empties the entry.
pub(super) struct Slots<T>(Vec<Option<T>>);

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Slots<T> {
    pub(super) fn put(&mut self, microbatch: Microbatch, content: T) {
        let index = microbatch.index();
        if self.0.len() <= index {
            self.0.resize_with(index + 1, || None);
        }
        self.0[index] = Some(content);
    }

    /// Fills the entries of the first microbatches.
    fn put_all(&mut self, contents: Vec<T>) {
        (0..).zip(contents).for_each(|(index, content)| self.put(Microbatch::new(index), content));
    }

    pub(super) fn has(&self, microbatch: Microbatch) -> bool {
        self.0.get(microbatch.index()).is_some_and(Option::is_some)
    }

    /// Takes out an entry that an earlier action has filled.
    pub(super) fn take(&mut self, microbatch: Microbatch) -> T {
        let content = self.take_if_present(microbatch);
        content.expect("in a validated program, an earlier action has made the tensors of this one")
    }

    pub(super) fn take_if_present(&mut self, microbatch: Microbatch) -> Option<T> {
        self.0.get_mut(microbatch.index())?.take()
    }

    /// Takes out all entries that are filled, in order, with their numbers.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = (usize, T)> {
        self.0.drain(..).enumerate().filter_map(|(index, entry)| Some((index, entry?)))
    }
}

/// The tensors of a batch on a stage between two actions.
#[derive(Default)]
pub(super) struct BatchTensors {
    pub(super) inputs: Slots<Values>,
    pub(super) targets: Slots<Values>,
    pub(super) outputs: Slots<Values>,
    /// Outputs that the step returns by stage.
    pub(super) kept: Slots<Values>,
    pub(super) output_gradients: Slots<OptionalTensors>,
    pub(super) input_gradients: Slots<OptionalTensors>,
    /// The gradients of the side inputs that require one, for the report.
    pub(super) side_gradients: Slots<SideSums>,
    pub(super) losses: Slots<Tensor<1>>,
    pub(super) auxiliary: Slots<Vec<Auxiliary>>,
    /// The microbatches that keep their activations while others are recomputed.
    pub(super) kept_forwards: KeptForwards,
    /// Tensors that arrived over skip connections, and gradients that came back over them.
    arrived_skips: HashMap<SkipKey, OptionalTensors>,
}

/// A stage on its rank.
pub(super) struct LocalStage {
    pub(super) index: StageIndex,
    runner: Box<dyn StageRunner>,
    /// The tensors of the batch that runs.
    pub(super) batch: BatchTensors,
    /// The tensors of another batch that runs at the same time.
    parked: BatchTensors,
    /// Shapes and types of the tensors at the stage's edges.
    pub(super) boundaries: Boundaries,
    /// The report on the parameters whose gradients `I` computed.
    pub(super) undeferred: UndeferredReport,
    /// Whether it has been logged that `W` has nothing to compute.
    pub(super) is_empty_w_logged: bool,
    /// Rows of the stage's parameters that other replicas send, if parameters are sharded.
    pub(super) gathering: Gathering,
    /// The same for the other batch that runs at the same time.
    parked_gathering: Gathering,
    /// Skip connections from and to stages that are not neighbours.
    skips: Arc<Skips>,
}

impl LocalStage {
    fn new(index: StageIndex, runner: Box<dyn StageRunner>, boundaries: Boundaries) -> Self {
        Self {
            skips: Arc::new(runner.skips().clone()),
            index,
            runner,
            batch: BatchTensors::default(),
            parked: BatchTensors::default(),
            boundaries,
            undeferred: UndeferredReport::default(),
            is_empty_w_logged: false,
            gathering: Gathering::default(),
            parked_gathering: Gathering::default(),
        }
    }

    /// Returns whether this replica has parameters of the stage that the others of its expert group do not
    /// have.
    pub(super) fn has_own_experts(&self) -> bool {
        self.runner.table().has_own_experts
    }

    pub(super) fn runner(&self) -> &dyn StageRunner {
        &*self.runner
    }

    pub(super) fn runner_mut(&mut self) -> &mut dyn StageRunner {
        &mut *self.runner
    }

    /// Returns the stage's device without its tape, for gradients and parameters.
    pub(super) fn inner_device(&self) -> Device {
        self.runner.device().clone().inner()
    }

    /// Returns the shard of a parameter that a rank of the stage's tensor group holds.
    pub(super) fn shard_of(&self, parameter: usize, rank: TensorRank) -> TensorShard {
        self.runner.table().placement(parameter).shard_of(rank)
    }

    /// Returns the stage's skip connections.
    pub(super) fn skips(&self) -> Arc<Skips> {
        self.skips.clone()
    }

    pub(super) fn put_skip(&mut self, key: SkipKey, tensors: OptionalTensors) {
        self.batch.arrived_skips.insert(key, tensors);
    }

    pub(super) fn has_skip(&self, key: &SkipKey) -> bool {
        self.batch.arrived_skips.contains_key(key)
    }

    pub(super) fn take_skip(&mut self, key: &SkipKey) -> OptionalTensors {
        let tensors = self.batch.arrived_skips.remove(key);
        tensors.expect("a stage runs only when its skip connections have arrived")
    }

    /// Drops all rows of the stage's parameters except this replica's.
    pub(super) fn release(&mut self) {
        self.gathering.end();
        self.runner.release();
    }

    /// Drops all data of a failed step.
    fn reset(&mut self) {
        self.runner.reset();
        self.batch = BatchTensors::default();
        self.gathering.end();
        self.boundaries.reset();
    }
}

/// The exchange of the rows of a stage's sharded parameters.
#[derive(Default)]
pub(super) struct Gathering {
    rows: Option<Exchange<OptionalTensors>>,
    /// The number of times that the parameters were gathered in this step.
    rounds: u32,
}

impl Gathering {
    /// Returns the exchange; `None` if none is in progress.
    pub(super) fn rows_mut(&mut self) -> Option<&mut Exchange<OptionalTensors>> {
        self.rows.as_mut()
    }

    pub(super) fn is_in_progress(&self) -> bool {
        self.rows.is_some()
    }

    /// Returns the number of the next exchange in this step.
    pub(super) fn next_round(&mut self) -> u32 {
        self.rounds += 1;
        self.rounds - 1
    }

    pub(super) fn begin(&mut self, rows: Exchange<OptionalTensors>) {
        self.rows = Some(rows);
    }

    /// Ends the exchange, and returns it.
    pub(super) fn end(&mut self) -> Option<Exchange<OptionalTensors>> {
        self.rows.take()
    }
}

/// The report on the parameters whose gradients `I` computed. A stage makes it for each batch with `W` until its
/// first update: if a batch fails, its report is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum UndeferredReport {
    /// No `W` has run.
    #[default]
    NotDue,
    Due,
    Made,
}

impl UndeferredReport {
    /// Records that `W` has run.
    pub(super) fn note_run(&mut self) {
        if *self == Self::NotDue {
            *self = Self::Due;
        }
    }

    /// Returns whether the report is due. It is the last one if the batch ends with an update.
    pub(super) fn take(&mut self, updates: bool) -> bool {
        let is_due = *self == Self::Due;
        if is_due && updates {
            *self = Self::Made;
        }
        is_due
    }
}

/// The stages of a rank, in local order. Every rank has at least one.
pub(super) struct LocalStages {
    stages: Vec<LocalStage>,
    /// For each stage of the pipeline, its index in the list, if it is on this rank.
    local: Vec<Option<usize>>,
    /// Whether parameters are delayed by one update, so that there are two versions.
    is_delayed: bool,
    /// Whether the stages compute with the older version.
    is_older: bool,
}

impl LocalStages {
    /// `microbatches` is the number of microbatches in a step that trains.
    pub(super) fn new(
        context: &RankContext,
        stages: Vec<(StageIndex, Box<dyn StageRunner>)>,
        microbatches: u32,
    ) -> Self {
        let config = &context.config;
        let mut local = vec![None; context.placement.stages() as usize];
        let stages = stages.into_iter().enumerate().map(|(local_index, (index, runner))| {
            local[index.index()] = Some(local_index);
            let boundaries = Boundaries::new(&config.metadata, config.check_metadata, index, microbatches);
            LocalStage::new(index, runner, boundaries)
        });
        let stages = stages.collect();
        Self { stages, local, is_delayed: config.delayed, is_older: false }
    }

    /// Puts a stage that was made again in place of the one before. All stages forget the metadata of their
    /// edges, which may have moved.
    pub(super) fn replace(&mut self, stage: StageIndex, runner: Box<dyn StageRunner>) {
        self.stages.iter_mut().for_each(|stage| stage.boundaries.reset());
        let held = self.get_mut(stage);
        held.skips = Arc::new(runner.skips().clone());
        held.runner = runner;
    }

    /// Gives the stages the inputs and targets of a step. `is_first` says that no gradients of earlier
    /// batches wait for an update: all batches whose gradients are accumulated are one step.
    pub(super) fn begin_step(&mut self, input: &mut StepInput, is_first: bool, has_replicas: bool) {
        let is_training = !input.program.is_forward_only();
        for stage in &mut self.stages {
            stage.gathering.rounds = 0;
            stage.boundaries.begin_step();
            if is_first {
                stage.runner.keep_buffers(is_training);
            }
            if is_training && has_replicas {
                stage.runner.note_statistics();
            }
        }
        self.first_mut().batch.inputs.put_all(std::mem::take(&mut input.inputs));
        self.last_mut().batch.targets.put_all(std::mem::take(&mut input.targets));
    }

    /// Prepares the stages for a visit between two steps.
    pub(super) fn begin_visit(&mut self, is_first: bool) {
        for stage in &mut self.stages {
            stage.gathering.rounds = 0;
            if is_first {
                stage.runner.keep_buffers(false);
            }
        }
    }

    pub(super) fn get(&self, stage: StageIndex) -> &LocalStage {
        &self.stages[self.local_index(stage)]
    }

    pub(super) fn get_mut(&mut self, stage: StageIndex) -> &mut LocalStage {
        let index = self.local_index(stage);
        &mut self.stages[index]
    }

    /// Returns two different stages.
    pub(super) fn two_mut(&mut self, stages: [StageIndex; 2]) -> [&mut LocalStage; 2] {
        let indices = stages.map(|stage| self.local_index(stage));
        self.stages.get_disjoint_mut(indices).expect("the stages differ")
    }

    fn local_index(&self, stage: StageIndex) -> usize {
        self.local[stage.index()].expect("the row of a rank has the rank's stages only")
    }

    pub(super) fn first(&self) -> &LocalStage {
        self.stages.first().expect("every rank owns a stage")
    }

    pub(super) fn first_mut(&mut self) -> &mut LocalStage {
        self.stages.first_mut().expect("every rank owns a stage")
    }

    pub(super) fn last_mut(&mut self) -> &mut LocalStage {
        self.stages.last_mut().expect("every rank owns a stage")
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &LocalStage> {
        self.stages.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut LocalStage> {
        self.stages.iter_mut()
    }

    pub(super) fn indices(&self) -> Vec<StageIndex> {
        self.stages.iter().map(|stage| stage.index).collect()
    }

    /// Lets every stage forget the running statistics from before the step: the step is complete, and a later
    /// failure must not undo its changes to them.
    pub(super) fn forget_buffers(&mut self) {
        self.stages.iter_mut().for_each(|stage| stage.runner.keep_buffers(false));
    }

    /// Lets all stages compute with the older or with the newer version of delayed parameters.
    pub(super) fn select_version(&mut self, is_older: bool) {
        if self.is_older != is_older {
            self.switch();
        }
    }

    /// Lets all stages continue with the other version of delayed parameters, and with the batch that uses it.
    pub(super) fn switch(&mut self) {
        self.is_older = !self.is_older;
        for stage in &mut self.stages {
            std::mem::swap(&mut stage.batch, &mut stage.parked);
            std::mem::swap(&mut stage.gathering, &mut stage.parked_gathering);
            stage.boundaries.switch();
            stage.runner.switch_version();
        }
    }

    /// Notes that all stages have updated, so that they have the newer version of delayed parameters.
    pub(super) fn note_update(&mut self) {
        self.is_older = false;
    }

    /// Undoes the early updates of all stages.
    pub(super) fn undo_updates(&mut self) {
        for stage in &mut self.stages {
            stage.runner.undo_update();
        }
    }

    /// Drops the rows of the other replicas of all stages.
    pub(super) fn release_all(&mut self) {
        self.stages.iter_mut().for_each(LocalStage::release);
    }

    /// Drops all data of the batch that runs.
    pub(super) fn reset_batch(&mut self) {
        self.stages.iter_mut().for_each(LocalStage::reset);
    }

    /// Drops all data of a failed step.
    pub(super) fn reset(&mut self) {
        self.reset_batch();
        if self.is_delayed {
            self.switch();
            self.reset_batch();
            self.switch();
        }
        self.select_version(false);
    }
}
