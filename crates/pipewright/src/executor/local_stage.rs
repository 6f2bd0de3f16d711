//! What a rank keeps for one of its stages: the stage, and the tensors between two actions.

use std::collections::HashMap;
use std::sync::Arc;

use burn::tensor::Tensor;
use pipewright_schedule::{Microbatch, StageIndex};

use crate::collective::Round;
use crate::message::Direction;
use crate::stage::{Runner, Skips, Stage};
use crate::tensor::{Boundaries, OptionalTensors, Values};

/// A stage on its rank. Every list has one place a microbatch; a place is full from the action that makes the tensors
/// to the one that uses them up.
pub(crate) struct LocalStage {
    pub(crate) stage: StageIndex,
    pub(crate) runner: Box<dyn Runner>,
    pub(crate) inputs: Vec<Option<Values>>,
    pub(crate) targets: Vec<Option<Values>>,
    pub(crate) outputs: Vec<Option<Values>>,
    pub(crate) output_gradients: Vec<Option<OptionalTensors>>,
    pub(crate) input_gradients: Vec<Option<OptionalTensors>>,
    /// What comes and goes past the neighbours.
    pub(crate) routes: Arc<Skips>,
    /// Tensors that came straight from stages that are not neighbours, and the gradients that came back.
    pub(crate) skips: HashMap<(Direction, StageIndex, Microbatch), OptionalTensors>,
    /// The parameters on their way here, where they are sharded.
    pub(crate) gathering: Option<Round>,
    /// How often they were sent for in this step.
    pub(crate) gathers: u32,
    /// What is known of the stage's edges.
    pub(crate) boundaries: Boundaries,
    /// Whether the stage has said that `W` finds nothing to do.
    pub(crate) told: bool,
    pub(crate) losses: Vec<Option<Tensor<1>>>,
    pub(crate) auxiliary: Vec<Vec<(Arc<str>, Tensor<1>)>>,
}

impl LocalStage {
    pub(crate) fn new(stage: StageIndex, runner: Stage, microbatches: u32, boundaries: Boundaries) -> Self {
        let microbatches = microbatches as usize;
        Self {
            routes: Arc::new(runner.runner.skips().clone()),
            stage,
            runner: runner.runner,
            inputs: vec![None; microbatches],
            targets: vec![None; microbatches],
            outputs: vec![None; microbatches],
            output_gradients: vec![None; microbatches],
            input_gradients: vec![None; microbatches],
            skips: HashMap::new(),
            gathering: None,
            gathers: 0,
            boundaries,
            told: false,
            losses: vec![None; microbatches],
            auxiliary: vec![Vec::new(); microbatches],
        }
    }

    /// Forgets everything of a step that failed.
    pub(crate) fn reset(&mut self) {
        self.runner.reset();
        self.inputs.fill(None);
        self.targets.fill(None);
        self.outputs.fill(None);
        self.output_gradients.fill(None);
        self.input_gradients.fill(None);
        self.skips.clear();
        self.gathering = None;
        self.boundaries.reset();
        self.losses.fill(None);
        self.auxiliary.fill(Vec::new());
    }
}
