//! Where a rank's step stands: what it began with, its phase, and what has come of it so far.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pipewright_schedule::{Event, Rank, ValidatedProgram};

use super::gather::NamedParameter;
use super::reduction::Reduction;
use super::report::RankReport;
use crate::batch::SideInputs;
use crate::message::{Contribution, OwnedParameter};
use crate::tensor::{OptionalTensors, Values};

/// What a rank needs to begin a step.
pub(crate) struct StepInput {
    /// Counted from 1.
    pub step: u64,
    /// Counts what the pipeline was asked to run: never goes back, where a checkpoint may take the step back.
    pub attempt: u64,
    /// The first stage's input of each microbatch; empty on other ranks.
    pub inputs: Vec<Values>,
    /// The last stage's targets of each microbatch; empty on other ranks.
    pub targets: Vec<Values>,
    /// What every stage may read, the same on all ranks.
    pub side_inputs: Arc<SideInputs>,
    /// What each microbatch counts for, times their number.
    pub loss_weights: Arc<[f64]>,
    /// Whether the report has the last stage's outputs.
    pub keep_outputs: bool,
    /// The optimizer's learning rate.
    pub learning_rate: f64,
    /// Whether the step ends with an update; if not, its gradients stay and those of the next step are added.
    pub update: bool,
    /// What to run: the program of the pipeline, or the forward part of it.
    pub program: Arc<ValidatedProgram>,
    /// The zero of the timeline.
    pub origin: Instant,
}

/// How far a poll got.
#[derive(Debug, PartialEq)]
pub(crate) enum Poll {
    /// Something was done: poll again.
    Progress,
    /// Nothing can be done before something has arrived: the board says what.
    Pending,
    /// The step is done.
    Done,
}

/// Where the step stands.
pub(super) struct StepState {
    pub(super) number: u64,
    pub(super) learning_rate: f64,
    pub(super) update_follows: bool,
    pub(super) phase: Phase,
    pub(super) position: usize,
    /// Whether the last poll found nothing to do.
    pub(super) waits: bool,
    /// When the current action was first tried; a waiting one is tried again.
    pub(super) entered: Option<Instant>,
    pub(super) origin: Instant,
    pub(super) events: Vec<Event>,
    pub(super) exposed: Duration,
    pub(super) side_inputs: Arc<SideInputs>,
    pub(super) loss_weights: Arc<[f64]>,
    pub(super) keep_outputs: bool,
    pub(super) losses: Vec<f64>,
    pub(super) auxiliary: BTreeMap<Arc<str>, f64>,
    /// What each rank holds, while that is being found out.
    pub(super) owned: Vec<(Rank, Vec<OwnedParameter>)>,
    /// The gradients of a shared parameter that are here, by owner.
    pub(super) shared_gradients: OptionalTensors,
    /// Gradients on their way between replicas.
    pub(super) reductions: Vec<Reduction>,
    pub(super) norm_parts: Contribution,
    /// The same of other replicas, where each has a part of the parameters.
    pub(super) squared_norms: Vec<Option<Contribution>>,
    pub(super) norm: Option<f64>,
    pub(super) update: Duration,
    /// Whether the update has begun: what comes after it cannot be taken back.
    pub(super) has_updated: bool,
    /// Whole parameters, where they are asked for between two steps.
    pub(super) collected: Vec<NamedParameter>,
    /// Reports of the step that is done; this rank's is the first.
    pub(super) reports: Vec<RankReport>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Phase {
    Actions,
    /// The gradients of all replicas are added up.
    Replicas,
    /// The parameters of ranks below this one are known.
    Parameters {
        next: Rank,
    },
    /// Shared parameters below this one have the sum of their gradients.
    Shared {
        next: u32,
    },
    /// The parts of replicas below this one have been taken.
    SquaredNorms {
        next: usize,
    },
    /// The parts of ranks below this one have been taken.
    Norm {
        next: Rank,
    },
    /// Replicas below this one are ready to update too.
    Ready {
        next: usize,
    },
    Update,
    /// The first rank has the reports of ranks below this one; only across processes.
    Reports {
        next: Rank,
    },
    /// The others wait for what it makes of them.
    Summary,
    /// No step: the parameters of stages before this one are collected.
    Collect {
        next: usize,
    },
    Done,
}

impl StepState {
    pub(super) fn idle() -> Self {
        Self {
            number: 0,
            learning_rate: 0.0,
            update_follows: true,
            phase: Phase::Done,
            position: 0,
            waits: false,
            entered: None,
            origin: Instant::now(),
            events: Vec::new(),
            exposed: Duration::ZERO,
            side_inputs: Arc::default(),
            loss_weights: Arc::default(),
            keep_outputs: false,
            losses: Vec::new(),
            auxiliary: BTreeMap::new(),
            owned: Vec::new(),
            shared_gradients: Vec::new(),
            reductions: Vec::new(),
            norm_parts: Vec::new(),
            squared_norms: Vec::new(),
            collected: Vec::new(),
            norm: None,
            update: Duration::ZERO,
            has_updated: false,
            reports: Vec::new(),
        }
    }
}
