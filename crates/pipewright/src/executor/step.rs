//! One step of one rank: its input, its phase, and its results so far.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pipewright_schedule::{Event, Scope, SkipEvent, StageIndex, ValidatedProgram};

use super::agreement::Agreement;
use super::figures::Figures;
use super::gather::NamedParameter;
use super::norm::Norms;
use super::parameters::{ListedParameter, NormOrder};
use super::reduction::Reduction;
use super::report::{AuxiliaryPart, RankReport};
use super::sharing::SharedSum;
use super::statistics::StatisticsMean;
use crate::batch::{SideInputs, StepForm};
use crate::collective::Exchange;
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::stage::ExpertLoad;
use crate::tensor::Values;

/// The input of a rank's step.
pub(crate) struct StepInput {
    /// Counted from 1.
    pub step: StepNumber,
    /// The pipeline's attempt at this step.
    pub attempt: Attempt,
    /// The first stage's input of each microbatch; empty on other ranks.
    pub inputs: Vec<Values>,
    /// Whether the step returns the gradient of each of these inputs.
    pub wanted_gradients: Arc<[bool]>,
    /// The last stage's targets of each microbatch; empty on other ranks.
    pub targets: Vec<Values>,
    /// Tensors that every stage may read, the same on all ranks.
    pub side_inputs: Arc<SideInputs>,
    /// The factor of the losses of each microbatch in their backward, for each of its slices.
    pub loss_weights: Arc<[f64]>,
    /// The share of each slice in the loss of its microbatch.
    pub slice_shares: Arc<[f64]>,
    /// What the step adds to the divisor of the gradient sums, and the divisor of its auxiliary losses.
    pub divisor: f64,
    /// Whether gradient sums are not divided.
    pub is_sum: bool,
    /// The factor of all losses in their backward, by which the sums of gradients are divided.
    pub loss_scale: f64,
    /// Whether the report contains the last stage's outputs.
    pub keep_outputs: bool,
    /// The stages whose outputs the report contains by stage.
    pub kept_stages: Arc<[StageIndex]>,
    /// The optimizer's learning rate.
    pub learning_rate: f64,
    /// Whether the step ends with an update. If not, its gradients are kept and those of the next step are added.
    pub update: bool,
    /// The program of the pipeline, or its forward part.
    pub program: Arc<ValidatedProgram>,
    /// The time at which the timeline starts.
    pub origin: Instant,
}

impl StepInput {
    /// Makes the input of a step without data, which a rank has between two steps.
    pub(super) fn empty(step: StepNumber, program: Arc<ValidatedProgram>) -> Self {
        Self {
            step,
            attempt: Attempt::default(),
            inputs: Vec::new(),
            wanted_gradients: Arc::default(),
            targets: Vec::new(),
            side_inputs: Arc::default(),
            loss_weights: Arc::default(),
            slice_shares: Arc::default(),
            divisor: 1.0,
            is_sum: false,
            loss_scale: 1.0,
            keep_outputs: false,
            kept_stages: Arc::default(),
            learning_rate: 0.0,
            update: false,
            program,
            origin: Instant::now(),
        }
    }
}

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

/// A step of one rank.
pub(super) struct StepState {
    pub(super) input: StepInput,
    pub(super) phase: Phase,
    /// The number of actions of the program that are done.
    pub(super) position: usize,
    /// Whether the last poll could not continue.
    pub(super) waits: bool,
    /// The time at which the current action was first tried; a waiting action is tried again.
    pub(super) entered: Option<Instant>,
    pub(super) events: Vec<Event>,
    /// The messages of skip connections.
    pub(super) skips: Vec<SkipEvent>,
    /// The bytes of the boundaries' tensors that this rank has sent.
    pub(super) boundary_bytes: u64,
    /// The spans that hooks have named.
    pub(super) scopes: Vec<Scope>,
    /// See [`RankReport::exposed_communication`].
    pub(super) exposed: Duration,
    pub(super) losses: Vec<f64>,
    pub(super) auxiliary: Vec<AuxiliaryPart>,
    /// The loads of experts that the forwards reported.
    pub(super) loads: Vec<ExpertLoad>,
    /// Gradients that are being summed over the replicas. The sums may start before the program ends.
    pub(super) reductions: Vec<Reduction>,
    /// The last stage whose update has begun. The step can then no longer be undone.
    pub(super) updates: Option<StageIndex>,
}

impl StepState {
    pub(super) fn new(input: StepInput) -> Self {
        Self {
            input,
            phase: Phase::Idle,
            position: 0,
            waits: false,
            entered: None,
            events: Vec::new(),
            skips: Vec::new(),
            boundary_bytes: 0,
            scopes: Vec::new(),
            exposed: Duration::ZERO,
            losses: Vec::new(),
            auxiliary: Vec::new(),
            loads: Vec::new(),
            reductions: Vec::new(),
            updates: None,
        }
    }
}

/// A phase of a step. Phases after the program own their exchanges. Their protocol is in `README.md` beside this file.
#[derive(Default)]
pub(super) enum Phase {
    /// No step is in progress.
    #[default]
    Idle,
    /// The rank runs the actions of its row of the program.
    Actions,
    /// The rank waits for the running statistics of its replicas.
    Statistics(Vec<StatisticsMean>),
    /// The rank waits for the gradient sums over the replicas ([`StepState::reductions`]).
    ReplicaSums,
    /// The rank waits for the gradients of shared parameters from their other owners.
    SharedGradients(Vec<SharedSum>),
    /// The rank waits for squares of the gradients' parts from replicas or, without sharding, for the message that they
    /// are ready.
    ReplicaSquares(Exchange<Vec<f64>>),
    /// The rank waits for the squares of the gradients of its subtree.
    Squares(Exchange<Vec<f64>>),
    /// The rank waits for the gradient norms.
    Norm(Exchange<Norms>),
    /// The rank updates its parameters.
    Update { norms: Norms },
    /// Across processes, before a step: the rank waits for what its subtree knows of the batch.
    StepForms(Exchange<Vec<(WorldRank, StepForm)>>),
    /// Across processes, before a step: the rank waits for what all processes agree on.
    AgreedStep(Exchange<Arc<[u8]>>),
    /// Across processes: the rank waits for the reports of its subtree.
    Reports { outcome: Outcome, reports: Exchange<Vec<Figures>> },
    /// Across processes: the rank waits for the encoded reports of all ranks from the root.
    Summary { outcome: Outcome, message: Exchange<Arc<[u8]>> },
    /// At launch: the rank waits for the parameter lists of its subtree.
    ParameterLists(Exchange<Vec<ListedParameter>>),
    /// At launch: the rank waits for the encoded list of shared parameters from the root. Only the root knows the order of
    /// the norm.
    SharedParameters { order: NormOrder, message: Exchange<Arc<[u8]>> },
    /// Not a step: the whole parameters of the rank's stages are collected. The next stage is the one at `place`.
    Collect { place: usize, collected: Vec<NamedParameter> },
    /// The step is done.
    Done(Outcome),
}

/// The results of a step, or of collecting parameters.
#[derive(Default)]
pub(super) struct Outcome {
    /// This rank's report; across processes also those of all other ranks, which have events only on the first rank.
    pub(super) reports: Vec<RankReport>,
    /// The whole parameters, if the rank was asked to collect them.
    pub(super) collected: Vec<NamedParameter>,
    /// What all processes agree on, if the rank was asked to compare their batches.
    pub(super) agreed: Option<Agreement>,
}
