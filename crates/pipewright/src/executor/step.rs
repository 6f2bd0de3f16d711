//! One step of one rank, or an exchange between two steps: how far it is, and its result.

use std::sync::Arc;

use pipewright_schedule::{Action, Rank, StageIndex, ValidatedProgram};

use super::agreement::Agreement;
use super::collection::{Collection, NamedParameter, Visited};
use super::early_updates::EarlyUpdates;
use super::moves::Arrivals;
use super::norm::{Contribution, Norms};
use super::parameters::{ListedParameter, NormOrder};
use super::report::RankReport;
use super::report_exchange::OpenReport;
use super::report_message::ReportMessage;
use super::sharing::SharedSum;
use super::statistics::StatisticsMean;
use super::step_input::StepInput;
use crate::batch::{StepForm, StepForms};
use crate::collective::Exchange;
use crate::ids::StepNumber;
use crate::tensor::OptionalTensors;
use crate::verification::RankChecksums;

/// The result of a poll.
#[derive(Debug, PartialEq)]
pub(crate) enum Poll {
    /// An action or a message was processed: poll again.
    Progress,
    /// The rank waits for a message, which the board names.
    Pending,
    /// The step is done.
    Done,
}

/// A step of one rank, or an exchange between two steps.
pub(super) struct Step {
    pub(super) number: StepNumber,
    /// `None` in an exchange between two steps.
    input: Option<StepInput>,
    pub(super) phase: Phase,
    /// The number of actions of the program that are done.
    pub(super) position: usize,
    /// Whether the last poll could not continue.
    waits: bool,
    /// The last stage whose update has begun. The step can then no longer be undone.
    pub(super) updates: Option<StageIndex>,
    pub(super) early: EarlyUpdates,
    /// Across processes: whether all ranks have the same next batch, which they begin after the update or have begun.
    pub(super) has_next: bool,
    /// While batches overlap: which ranks of the action group have the messages of the current action. `None` if this rank has
    /// not said that it has its own.
    pub(super) group_turn: Option<Exchange<()>>,
}

/// A phase of a step. Phases after the program own their exchanges. Their protocol is in `README.md` in this
/// folder.
#[derive(Default)]
pub(super) enum Phase {
    /// No step is in progress.
    #[default]
    Idle,
    /// The rank runs the actions of its row of the program.
    Actions,
    /// In a repetition of a step: the rank waits for the checksums of its subtree.
    Checksums(Exchange<Vec<RankChecksums>>),
    /// In a repetition of a step: the rank waits for the encoded result of their comparison.
    Verdict(Exchange<Arc<[u8]>>),
    /// The rank waits for the running statistics of its replicas.
    Statistics(Vec<StatisticsMean>),
    /// The rank waits for the gradient sums over the replicas ([`Reductions`](super::reduction::Reductions)).
    ReplicaSums,
    /// The rank waits for the gradients of shards that other ranks of its tensor group hold too.
    Copies(Exchange<OptionalTensors>),
    /// The rank waits for the gradients of shared parameters from their other owners.
    SharedGradients(Vec<SharedSum>),
    /// The rank waits for squares of the gradients' parts from replicas or, without sharding, for the message
    /// that they are ready.
    ReplicaSquares(Exchange<Contribution>),
    /// The rank waits for the squares of the gradients of its subtree.
    Squares(Exchange<Contribution>),
    /// The rank waits for the gradient norms.
    Norm(Exchange<Norms>),
    /// The rank updates its parameters.
    Update { norms: Norms },
    /// Across processes, before a step: the rank waits for the hashes of what its subtree knows of the batch.
    /// `form` is what this rank knows.
    StepDigests { form: StepForm, digests: Exchange<Option<u64>> },
    /// Across processes, before a step: the rank waits for whether all know the same.
    SameStep { form: StepForm, same: Exchange<bool> },
    /// Across processes, before a step: the rank waits for what its subtree knows of the batch.
    StepForms(Exchange<StepForms>),
    /// Across processes, before a step: the rank waits for what all processes agree on.
    AgreedStep(Exchange<Arc<[u8]>>),
    /// Across processes: the rank waits for the reports of its subtree.
    Reports { outcome: Outcome, reports: Exchange<Vec<ReportMessage>> },
    /// Across processes: the rank waits for the encoded reports of all ranks from the root.
    Summary { outcome: Outcome, message: Exchange<Arc<[u8]>> },
    /// At launch: the rank waits for the parameter lists of its subtree.
    ParameterLists(Exchange<Vec<ListedParameter>>),
    /// At launch: the rank waits for the encoded list of shared parameters from the root. Only the root knows
    /// the order of the norm.
    SharedParameters { order: NormOrder, message: Exchange<Arc<[u8]>> },
    /// Not a step: the rank waits for what the first rank's process passes to all.
    Shared(Exchange<Arc<[u8]>>),
    /// Not a step: the rank waits for the state of layers that move to its stages.
    Layers(Box<Arrivals>),
    /// Not a step: the parameters of the rank's stages are collected, or their modules are visited.
    Collect(Collection),
    /// The step is done.
    Done(Outcome),
}

impl Phase {
    /// Returns whether the gradient sums of the rank are complete, and it waits for the norm or for what the
    /// norm depends on.
    pub(super) fn awaits_norm(&self) -> bool {
        matches!(self, Self::ReplicaSquares(_) | Self::Squares(_) | Self::Norm(_))
    }
}

/// The results of a step, or of an exchange between two steps.
#[derive(Default)]
pub(crate) struct Outcome {
    /// This rank's report; across processes also the reports of all other ranks, which have events only on
    /// the first rank.
    pub(crate) reports: Vec<RankReport>,
    /// This rank's report if the rank begins the next step before it has the reports of the others. `reports`
    /// is empty then.
    pub(crate) open: Option<OpenReport>,
    /// The whole parameters, if the rank was asked to collect them.
    pub(crate) parameters: Vec<NamedParameter>,
    /// The results of a visit to the modules.
    pub(crate) visited: Visited,
    /// The bytes that the first rank's process has passed to all, if it was asked to.
    pub(crate) shared: Option<Arc<[u8]>>,
    /// The result of comparing the processes' batches, if the rank was asked to compare them.
    pub(crate) agreed: Option<Agreement>,
}

impl Step {
    /// Makes the state between two steps: an exchange that begins with `phase`, or none.
    pub(super) fn between(number: StepNumber, phase: Phase) -> Self {
        Self {
            number,
            input: None,
            phase,
            position: 0,
            waits: false,
            updates: None,
            early: EarlyUpdates::default(),
            has_next: false,
            group_turn: None,
        }
    }

    /// Begins a step.
    pub(super) fn new(input: StepInput) -> Self {
        let number = input.step;
        Self { input: Some(input), ..Self::between(number, Phase::Actions) }
    }

    /// Returns the input of a step. Only the actions and the phases of a step call this.
    pub(super) fn input(&self) -> &StepInput {
        self.input.as_ref().expect("the phases of a step run only in a step")
    }

    /// Returns whether this is the first computation of a batch whose step is repeated if it is suspicious.
    pub(super) fn is_first_of_verified(&self) -> bool {
        let verification = self.input.as_ref().and_then(|input| input.verification);
        verification.is_some_and(|verification| verification.is_first)
    }

    /// Returns whether the step only accumulates gradients.
    pub(super) fn accumulates(&self) -> bool {
        let accumulates = |input: &StepInput| !input.update && !input.program.is_forward_only();
        self.input.as_ref().is_some_and(accumulates)
    }

    /// Returns whether the step is computed again to find the first value that is not finite.
    pub(super) fn searches(&self) -> bool {
        self.input.as_ref().is_some_and(|input| input.searches)
    }

    /// Drops the side inputs, which no action needs any more.
    pub(super) fn drop_side_inputs(&mut self) {
        if let Some(input) = &mut self.input {
            input.side_inputs = Arc::default();
        }
    }

    pub(super) fn program(&self) -> &ValidatedProgram {
        &self.input().program
    }

    /// Returns the actions of a rank; none in an exchange between two steps.
    pub(super) fn row(&self, rank: Rank) -> &[Action] {
        self.input.as_ref().map_or(&[], |input| input.program.row(rank))
    }

    /// Returns the action that `rank` runs; `None` before and after the program.
    pub(super) fn action(&self, rank: Rank) -> Option<Action> {
        match self.phase {
            Phase::Actions => self.row(rank).get(self.position).copied(),
            _ => None,
        }
    }

    /// Returns the actions of a rank that are not done, with the current one.
    pub(super) fn rest(&self, rank: Rank) -> &[Action] {
        self.row(rank).get(self.position..).unwrap_or_default()
    }

    /// Notes that the current action is done.
    pub(super) fn advance(&mut self) {
        self.position += 1;
        self.group_turn = None;
    }

    /// Takes out the phase. [`Step::set_phase`] puts it back, or its successor.
    pub(super) fn take_phase(&mut self) -> Phase {
        std::mem::take(&mut self.phase)
    }

    pub(super) fn set_phase(&mut self, phase: Phase) {
        self.phase = phase;
    }

    /// Notes whether the rank waits for a message. Returns whether it did before.
    pub(super) fn set_waits(&mut self, waits: bool) -> bool {
        std::mem::replace(&mut self.waits, waits)
    }

    /// Notes that the update of a stage begins.
    pub(super) fn begin_update(&mut self, stage: StageIndex) {
        self.updates = Some(stage);
    }

    pub(super) fn early_mut(&mut self) -> &mut EarlyUpdates {
        &mut self.early
    }
}
