//! One step of one rank: what it began with, its phase, and its results so far.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pipewright_schedule::{Event, ValidatedProgram};

use super::gather::NamedParameter;
use super::parameters::{ListedParameter, NormOrder};
use super::reduction::Reduction;
use super::report::{Figures, RankReport};
use super::sharing::SharedSum;
use crate::batch::SideInputs;
use crate::collective::Exchange;
use crate::tensor::Values;

/// What a rank needs to begin a step.
pub(crate) struct StepInput {
    /// Counted from 1.
    pub step: u64,
    /// Counts what the pipeline was asked to run. It never goes back, while a checkpoint may take the step back.
    pub attempt: u64,
    /// The first stage's input of each microbatch; empty on other ranks.
    pub inputs: Vec<Values>,
    /// The last stage's targets of each microbatch; empty on other ranks.
    pub targets: Vec<Values>,
    /// Tensors that every stage may read, the same on all ranks.
    pub side_inputs: Arc<SideInputs>,
    /// The weight of each microbatch's loss, times the number of microbatches.
    pub loss_weights: Arc<[f64]>,
    /// Whether the report has the last stage's outputs.
    pub keep_outputs: bool,
    /// The optimizer's learning rate.
    pub learning_rate: f64,
    /// Whether the step ends with an update; if not, its gradients stay and those of the next step are added.
    pub update: bool,
    /// The program of the pipeline, or its forward part.
    pub program: Arc<ValidatedProgram>,
    /// The zero of the timeline.
    pub origin: Instant,
}

impl StepInput {
    /// The input of a step without data: a rank has it between two steps.
    pub(super) fn empty(step: u64, program: Arc<ValidatedProgram>) -> Self {
        Self {
            step,
            attempt: 0,
            inputs: Vec::new(),
            targets: Vec::new(),
            side_inputs: Arc::default(),
            loss_weights: Arc::default(),
            keep_outputs: false,
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
    /// Something was done: poll again.
    Progress,
    /// Nothing can be done before a message arrives; the board says which.
    Pending,
    /// The step is done.
    Done,
}

/// A step of one rank.
pub(super) struct StepState {
    pub(super) input: StepInput,
    pub(super) phase: Phase,
    /// Actions of the program that are done.
    pub(super) position: usize,
    /// Whether the last poll found nothing to do.
    pub(super) waits: bool,
    /// When the current action was first tried; a waiting one is tried again.
    pub(super) entered: Option<Instant>,
    pub(super) events: Vec<Event>,
    /// See [`RankReport::exposed_communication`].
    pub(super) exposed: Duration,
    pub(super) losses: Vec<f64>,
    pub(super) auxiliary: BTreeMap<Arc<str>, f64>,
    /// Gradients that are being summed over the replicas. The program may start them before it ends.
    pub(super) reductions: Vec<Reduction>,
    /// Whether the update has begun. From then on the step cannot be taken back.
    pub(super) has_updated: bool,
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
            exposed: Duration::ZERO,
            losses: Vec::new(),
            auxiliary: BTreeMap::new(),
            reductions: Vec::new(),
            has_updated: false,
        }
    }
}

/// A phase of a step. Those after the program own what they exchange; `README.md` beside this file has their protocol.
#[derive(Default)]
pub(super) enum Phase {
    /// No step is under way.
    #[default]
    Idle,
    /// The rank does the actions of its row of the program.
    Actions,
    /// The rank waits for the gradient sums over the replicas ([`StepState::reductions`]).
    ReplicaSums,
    /// The lists of the parameters of the rank's subtree arrive.
    ParameterLists(Exchange<Vec<ListedParameter>>),
    /// The parameters that stages share arrive from the root, encoded. The order of the norm is known at the root alone.
    SharedParameters { order: NormOrder, message: Exchange<Arc<[u8]>> },
    /// Gradients of shared parameters arrive from their other owners.
    SharedGradients(Vec<SharedSum>),
    /// Squares of the gradients' parts arrive from replicas; without sharding, only that they are ready.
    ReplicaSquares(Exchange<Vec<f64>>),
    /// Squares of the gradients of the rank's subtree arrive.
    Squares(Exchange<Vec<f64>>),
    /// The gradient norm arrives.
    Norm(Exchange<f64>),
    /// The rank updates its parameters.
    Update { norm: f64 },
    /// Between processes: the reports of the rank's subtree arrive.
    Reports { outcome: Outcome, reports: Exchange<Vec<Figures>> },
    /// Between processes: the reports of all ranks arrive from the root, encoded.
    Summary { outcome: Outcome, message: Exchange<Arc<[u8]>> },
    /// No step: whole parameters of the rank's stages are collected, of this stage next.
    Collect { place: usize, collected: Vec<NamedParameter> },
    /// The step is done.
    Done(Outcome),
}

/// The results of a step, or of collecting parameters.
#[derive(Default)]
pub(super) struct Outcome {
    /// This rank's report; across processes also those of all others, without their events on all ranks but the first.
    pub(super) reports: Vec<RankReport>,
    /// Whole parameters, if the rank was asked for them.
    pub(super) collected: Vec<NamedParameter>,
}
