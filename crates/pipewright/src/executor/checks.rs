//! The checksums of a rank's results, for the comparison with a repetition of the step
//! ([`crate::verification`]).
//!
//! A repetition compares them at the end of the program: the checksums of all its computations go up the tree
//! of all ranks ([`Tag::Checksums`]). The root compares them, and sends down the first result that differs
//! ([`Tag::Verdict`]). If the repetition does not count, the root fails instead. No rank reads its losses
//! before, so a loss that is not finite fails only in a repetition whose bits are confirmed.

use std::collections::BTreeMap;

use pipewright_schedule::{Action, Microbatch, StageIndex};

use super::accumulation::Accumulation;
use super::context::RankContext;
use super::group_link::ExchangeSum;
use super::stages::{At, LocalStage, LocalStages};
use super::step_input::StepInput;
use crate::collective::Exchange;
use crate::message::{Direction, Tag};
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
        let (earlier, slices) = (accumulation.microbatches, input.program.slices().get());
        let batch = CheckedShare { share: input.share, earlier, tensor, slices };
        self.batch = Some(batch);
        self.sums.begin(verification.repetition, accumulation.is_empty());
        if verification.repetition > 0 && accumulation.is_empty() {
            for stage in stages.iter() {
                self.note_parameters(context, batch.key(Content::Parameters, stage.index), stage);
            }
        }
    }

    /// Notes the parameters of a stage: the experts that other replicas of the expert group do not have, and
    /// all others.
    fn note_parameters(&mut self, context: &RankContext, key: ResultKey, stage: &LocalStage) {
        let runner = stage.runner();
        let is_expert = |index: usize| runner.table().is_on_one_replica(index);
        let (experts, others): (Vec<_>, Vec<_>) =
            runner.parameters().into_iter().enumerate().partition(|(index, _)| is_expert(*index));
        let (rows, parts) =
            context.row_shards().map_or((0, 1), |shards| (shards.others.index, shards.others.of));
        for (share, values) in [(rows, others), (parts + context.part(), experts)] {
            if !values.is_empty() {
                let sum = checksum(values.into_iter().map(|(_, values)| Some(values)));
                self.sums.note(ResultKey { share, ..key }, sum);
            }
        }
    }

    /// Notes the tensors that the rank has sent to the replicas of its expert group in a forward or a
    /// backward.
    pub(super) fn note_exchanges(
        &mut self,
        sums: Vec<ExchangeSum>,
        action_of: impl Fn(Option<Direction>) -> Action,
    ) {
        let Some(batch) = self.batch else { return };
        let mut counts = BTreeMap::new();
        for ExchangeSum { half, sum } in sums {
            let mut parts = action_of(half).parts();
            // A hook may exchange tokens in an overlap before it runs one of the halves.
            let (Some(action), None) = (parts.next(), parts.next()) else { continue };
            let (content, microbatch) = match action {
                Action::Forward { microbatch, .. } => (Content::Forward, microbatch),
                Action::Backward { microbatch, .. } => (Content::Backward, microbatch),
                Action::InputBackward { microbatch, .. } => (Content::InputBackward, microbatch),
                _ => continue,
            };
            let count: &mut u32 = counts.entry((action.stage(), content)).or_default();
            let exchange = Some(*count);
            *count += 1;
            self.sums.note(ResultKey { microbatch, exchange, ..batch.key(content, action.stage()) }, sum);
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
        let (key, runner) = (batch.key(Content::Weights, stage.index), stage.runner());
        if !self.sums.has(&key) {
            self.sums.note(
                key,
                sum_of((0..runner.table().paths.len()).flat_map(|index| runner.sums().sources(index))),
            );
        }
    }

    fn note(&mut self, content: Content, At { stage, microbatch }: At, sum: impl FnOnce() -> u64) {
        if let Some(batch) = self.batch {
            self.sums.note(ResultKey { microbatch, ..batch.key(content, stage) }, sum());
        }
    }

    /// Starts to gather the checksums of the rank's subtree.
    pub(super) fn gather(&self, context: &RankContext) -> Exchange<Vec<RankChecksums>> {
        let own = RankChecksums { rank: context.world_rank, sums: self.sums.clone() };
        Exchange::gather(vec![own], Tag::Checksums, &context.world_tree.children)
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
        let (microbatch, exchange) = (Microbatch::new(0), None);
        ResultKey { content, stage, earlier, microbatch, slices, exchange, share, tensor }
    }
}

/// Returns the checksum of tensors; some may be absent.
fn sum_of(tensors: impl Iterator<Item = Option<Value>>) -> u64 {
    checksum(tensors.map(|tensor| tensor.map(Value::into_data)))
}
