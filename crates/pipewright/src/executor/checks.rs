//! The checksums of a rank's results, for the comparison with a repetition of the step
//! ([`crate::verification`]).
//!
//! A repetition compares them at the end of the program: the checksums of all its computations go up the tree
//! of all ranks ([`Tag::Checksums`]). The root compares them, and sends down the first result that differs
//! ([`Tag::Verdict`]). If the repetition does not count, the root fails instead. No rank reads its losses
//! before, so a loss that is not finite fails only in a repetition whose bits are confirmed.

use pipewright_schedule::{Action, Microbatch, StageIndex};

use super::accumulation::Accumulation;
use super::context::RankContext;
use super::stages::{At, LocalStage, LocalStages};
use super::step_input::StepInput;
use crate::collective::Exchange;
use crate::message::Tag;
use crate::stage::Forwarded;
use crate::tensor::{OptionalTensors, Value};
use crate::verification::{Checksums, Content, Difference, RankChecksums, ResultKey, checksum};

/// The checksums of the computations of a step.
#[derive(Default)]
pub(super) struct Checks {
    sums: Checksums,
    /// The batch that runs; `None` if nothing is noted.
    batch: Option<CheckedShare>,
    /// The first result that differs, of a repetition that counts.
    difference: Option<Difference>,
}

/// The share of a batch that the rank computes.
#[derive(Clone, Copy)]
struct CheckedShare {
    share: u32,
    /// The microbatches of the step's earlier batches on this replica.
    earlier: u32,
    tensor: u32,
    /// The number of slices of a microbatch.
    slices: u32,
}

impl Checks {
    /// Begins a batch. In a repetition, the parameters are checked first.
    pub(super) fn begin(
        &mut self,
        context: &RankContext,
        stages: &LocalStages,
        input: &StepInput,
        accumulation: Accumulation,
    ) {
        (self.difference, self.batch) = (None, None);
        let Some(verification) = input.verification else { return };
        let tensor = context.tensor_rank().index;
        let (earlier, slices) = (accumulation.microbatches(), input.program.slices().get());
        let batch = CheckedShare { share: input.share, earlier, tensor, slices };
        self.batch = Some(batch);
        self.sums.begin(verification.repetition, accumulation.is_empty());
        if verification.repetition > 0 && accumulation.is_empty() {
            let rows = context.row_shards().map_or(0, |shards| shards.others.index);
            for stage in stages.iter() {
                let values = stage.runner().parameters();
                let key = ResultKey { share: rows, ..batch.key(Content::Parameters, stage.index()) };
                self.sums.note(key, checksum(values.into_iter().map(Some)));
            }
        }
    }

    /// Notes the results of a forward.
    pub(super) fn note_forward(&mut self, at: At, forwarded: &Forwarded) {
        let auxiliary = || forwarded.auxiliary.iter().map(|auxiliary| &auxiliary.loss);
        self.note(Content::Forward, at, || {
            let losses = auxiliary().chain(&forwarded.loss).map(|loss| Value::of(loss.clone()));
            sum_of(forwarded.outputs.iter().cloned().chain(losses).map(Some))
        });
    }

    /// Notes that a forward has stopped at a number that is not finite.
    pub(super) fn note_failed_forward(&mut self, at: At) {
        self.note(Content::Forward, at, || 0);
    }

    /// Notes the gradients of the inputs that a backward has computed.
    pub(super) fn note_backward(&mut self, action: Action, at: At, gradients: &OptionalTensors) {
        let is_whole = matches!(action, Action::Backward { .. });
        let content = if is_whole { Content::Backward } else { Content::InputBackward };
        self.note(content, at, || sum_of(gradients.iter().cloned()));
    }

    /// Notes the sums of a stage's weight gradients, before replicas add theirs.
    pub(super) fn note_gradients(&mut self, stage: &LocalStage) {
        let Some(batch) = self.batch else { return };
        let (key, runner) = (batch.key(Content::Weights, stage.index()), stage.runner());
        if !self.sums.has(&key) {
            self.sums.note(key, sum_of((0..runner.paths().len()).map(|index| runner.gradient(index))));
        }
    }

    fn note(&mut self, content: Content, At { stage, microbatch }: At, sum: impl FnOnce() -> u64) {
        if let Some(batch) = self.batch {
            self.sums.note(ResultKey { microbatch, ..batch.key(content, stage) }, sum());
        }
    }

    /// Starts to gather the checksums of the rank's subtree.
    pub(super) fn gather(&self, context: &RankContext) -> Exchange<Vec<RankChecksums>> {
        let own = RankChecksums { rank: context.world_rank(), sums: self.sums.clone() };
        Exchange::gather(vec![own], Tag::Checksums, context.world_tree().children())
    }

    /// Keeps the result of the comparison.
    pub(super) fn set_difference(&mut self, difference: Option<Difference>) {
        self.difference = difference;
    }

    /// Takes out the result of the comparison.
    pub(super) fn take_difference(&mut self) -> Option<Difference> {
        self.difference.take()
    }
}

impl CheckedShare {
    /// Returns the key of a result without a microbatch.
    fn key(self, content: Content, stage: StageIndex) -> ResultKey {
        let Self { share, earlier, tensor, slices } = self;
        ResultKey { content, stage, earlier, microbatch: Microbatch::new(0), slices, share, tensor }
    }
}

/// Returns the checksum of tensors; some may be absent.
fn sum_of(tensors: impl Iterator<Item = Option<Value>>) -> u64 {
    checksum(tensors.map(|tensor| tensor.map(Value::into_data)))
}
