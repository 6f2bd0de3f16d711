//! A stage on its rank: its runner, and the tensors between two actions.

use std::collections::HashMap;
use std::sync::Arc;

use burn::tensor::Tensor;
use pipewright_schedule::{Microbatch, StageIndex};

use crate::collective::Exchange;
use crate::message::Direction;
use crate::stage::{Auxiliary, Skips, StageRunner};
use crate::tensor::{Boundaries, OptionalTensors, Values};

/// A stage on its rank. Every list has one entry per microbatch. What makes or receives the tensors fills the entry, and
/// what uses or sends them empties it.
pub(crate) struct LocalStage {
    pub(crate) index: StageIndex,
    pub(crate) runner: Box<dyn StageRunner>,
    pub(crate) inputs: Vec<Option<Values>>,
    pub(crate) targets: Vec<Option<Values>>,
    pub(crate) outputs: Vec<Option<Values>>,
    /// Outputs that the step returns by stage.
    pub(crate) kept: Vec<Option<Values>>,
    pub(crate) output_gradients: Vec<Option<OptionalTensors>>,
    pub(crate) input_gradients: Vec<Option<OptionalTensors>>,
    /// Skip connections from and to stages that are not neighbours.
    pub(crate) routes: Arc<Skips>,
    /// Tensors that arrived over skip connections, and gradients that came back over them.
    pub(crate) skips: HashMap<(Direction, StageIndex, Microbatch), OptionalTensors>,
    /// Rows of the stage's parameters that other replicas send, if parameters are sharded.
    pub(crate) gathering: Option<Exchange<OptionalTensors>>,
    /// The number of times that the parameters were gathered in this step.
    pub(crate) gathers: u32,
    /// Shapes and types of the tensors at the stage's edges.
    pub(crate) boundaries: Boundaries,
    /// Whether it has been logged that `W` has nothing to compute.
    pub(crate) logged_empty_weight_backward: bool,
    /// Whether to report the parameters whose gradients `I` computed.
    pub(crate) undeferred: UndeferredReport,
    pub(crate) losses: Vec<Option<Tensor<1>>>,
    pub(crate) auxiliary: Vec<Vec<Auxiliary>>,
}

/// The report on the parameters whose gradients `I` computed. A stage makes it once, after its first step with `W`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum UndeferredReport {
    /// No `W` has run.
    #[default]
    NotDue,
    Due,
    Made,
}

impl UndeferredReport {
    /// Records that `W` has run.
    pub(crate) fn found(&mut self) {
        if *self == Self::NotDue {
            *self = Self::Due;
        }
    }

    /// Returns whether the report is due, and records that it is made.
    pub(crate) fn take(&mut self) -> bool {
        let is_due = *self == Self::Due;
        if is_due {
            *self = Self::Made;
        }
        is_due
    }
}

impl LocalStage {
    pub(crate) fn new(
        index: StageIndex,
        runner: Box<dyn StageRunner>,
        microbatches: u32,
        boundaries: Boundaries,
    ) -> Self {
        let microbatches = microbatches as usize;
        Self {
            routes: Arc::new(runner.skips().clone()),
            index,
            runner,
            inputs: vec![None; microbatches],
            targets: vec![None; microbatches],
            outputs: vec![None; microbatches],
            kept: vec![None; microbatches],
            output_gradients: vec![None; microbatches],
            input_gradients: vec![None; microbatches],
            skips: HashMap::new(),
            gathering: None,
            gathers: 0,
            boundaries,
            logged_empty_weight_backward: false,
            undeferred: UndeferredReport::default(),
            losses: vec![None; microbatches],
            auxiliary: vec![Vec::new(); microbatches],
        }
    }

    /// Drops all data of a failed step.
    pub(crate) fn reset(&mut self) {
        self.runner.reset();
        self.inputs.fill(None);
        self.targets.fill(None);
        self.outputs.fill(None);
        self.kept.fill(None);
        self.output_gradients.fill(None);
        self.input_gradients.fill(None);
        self.skips.clear();
        self.gathering = None;
        self.boundaries.reset();
        self.losses.fill(None);
        self.auxiliary.fill(Vec::new());
    }
}
