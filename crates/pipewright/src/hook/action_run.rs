//! The actions that a hook's functions run: [`ForwardRun`], [`BackwardRun`], and both together in
//! [`OverlapRun`].

use std::any::type_name;
use std::time::Instant;

use burn::tensor::{Device, Tensor};
use pipewright_schedule::{Action, Microbatch, StageIndex};

use crate::ids::WorldRank;
use crate::message::Direction;
use crate::stage::{BackwardState, ForwardState, StageCompute, StageContext, StageError};
use crate::tensor::{OptionalTensors, Values};

/// The stages of a rank, and the timeline of its step.
pub(crate) trait Stages {
    fn stage(&self, stage: StageIndex) -> &dyn StageCompute;

    fn stage_mut(&mut self, stage: StageIndex) -> &mut dyn StageCompute;

    /// Notes which half of an overlap runs next.
    fn begin_half(&mut self, half: Direction);

    fn note_scope(&mut self, name: &str, start: Instant, end: Instant);
}

/// The rank and the action of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) rank: WorldRank,
    pub(crate) action: Action,
}

impl Place {
    fn in_block(self, block: usize) -> impl Fn(StageError) -> StageError {
        move |source| StageError::InBlock { action: self.action, block, source: Box::new(source) }
    }
}

/// A forward of a stage for a microbatch, which a function runs block by block.
///
/// The blocks are the blocks of the stage's module
/// ([`StageModule::blocks`](crate::stage::StageModule::blocks)). In a pipeline of layers each layer is a
/// block, and a stage of a graph is one block.
pub struct ForwardRun<'a> {
    place: Place,
    stages: &'a mut dyn Stages,
    state: &'a mut ForwardState,
}

impl<'a> ForwardRun<'a> {
    pub(crate) fn new(place: Place, stages: &'a mut dyn Stages, state: &'a mut ForwardState) -> Self {
        Self { place, stages, state }
    }

    /// Returns the action: a forward, also if it is a part of an overlap.
    pub fn action(&self) -> Action {
        self.place.action
    }

    /// Returns the stage, the microbatch, and the side inputs and values of the batch.
    pub fn context(&self) -> &StageContext {
        self.state.context()
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> usize {
        self.compute().blocks()
    }

    /// Returns the block that runs next; `None` if all have run.
    pub fn next_block(&self) -> Option<usize> {
        self.state.next_block()
    }

    /// Returns the inputs of the next block, off the tape. They are the inputs of the stage before the first
    /// block, and its outputs after the last one. A stage with a loss has outputs only if the batch asks for
    /// them.
    pub fn values(&self) -> &Values {
        &self.state.values
    }

    /// Replaces the inputs of the next block, or the outputs of the stage. The backward then gets the
    /// gradients of the new values and needs the gradients of the old ones: its function must replace them
    /// too ([`BackwardRun::set_gradients`]).
    pub fn set_values(&mut self, values: &Values) {
        self.state.set_values(values);
    }

    /// Returns the targets of the microbatch; `None` on stages without a loss, and in an evaluation without
    /// targets.
    pub fn targets(&self) -> Option<&Values> {
        self.state.target()
    }

    /// Returns the loss of the microbatch, off the tape; `None` before the last block, and on stages without
    /// a loss.
    pub fn loss(&self) -> Option<&Tensor<1>> {
        self.state.loss()
    }

    /// Runs the next block. Does nothing if all have run.
    ///
    /// # Errors
    /// When the block does not take its values, or it returns results that a stage cannot return.
    pub fn run_block(&mut self) -> Result<(), StageError> {
        let Some(block) = self.next_block() else { return Ok(()) };
        let stage = self.stage();
        let outcome = self.stages.stage_mut(stage).forward_block(self.state, None);
        outcome.map_err(self.place.in_block(block))
    }

    /// Runs `function` in place of the next block. It gets the module on the tape, so that the backward
    /// differentiates it as it would differentiate the block. The block is not recomputed. Does nothing if
    /// all blocks have run.
    ///
    /// # Errors
    /// When the module is not an `M`, and as [`ForwardRun::run_block`].
    pub fn run_block_with<M: 'static>(
        &mut self,
        mut function: impl FnMut(&M, Values, &StageContext) -> Result<Values, StageError>,
    ) -> Result<(), StageError> {
        let Some(block) = self.next_block() else { return Ok(()) };
        let mut replacement = |module: &dyn std::any::Any, values, context: &StageContext| {
            let module = module.downcast_ref::<M>();
            let module = module.ok_or_else(|| {
                StageError::Mistake(format!(
                    "the stage's module is not a `{}`: name the type of the module that the stage was made of, or `Vec<L>` in \
                     a pipeline of layers `L`",
                    type_name::<M>()
                ))
            })?;
            function(module, values, context)
        };
        let stage = self.stage();
        let outcome = self.stages.stage_mut(stage).forward_block(self.state, Some(&mut replacement));
        outcome.map_err(self.place.in_block(block))
    }

    /// Runs what is left: the whole module if no block has run.
    ///
    /// # Errors
    /// As [`ForwardRun::run_block`].
    pub fn run_all(&mut self) -> Result<(), StageError> {
        let stage = self.stage();
        self.stages.stage_mut(stage).forward(self.state)
    }

    fn stage(&self) -> StageIndex {
        self.state.context().stage()
    }
}

/// A backward of a stage for a microbatch, which a function runs block by block, from the last block to the
/// first. It has the blocks that its forward ran one by one; after a forward that ran as a whole it has one.
pub struct BackwardRun<'a> {
    place: Place,
    stages: &'a mut dyn Stages,
    state: &'a mut BackwardState,
}

impl<'a> BackwardRun<'a> {
    pub(crate) fn new(place: Place, stages: &'a mut dyn Stages, state: &'a mut BackwardState) -> Self {
        Self { place, stages, state }
    }

    /// Returns the action: `B` or `I`, also if it is a part of an overlap.
    pub fn action(&self) -> Action {
        self.place.action
    }

    /// Returns the stage.
    pub fn stage(&self) -> StageIndex {
        self.place.action.stage()
    }

    /// Returns the microbatch.
    pub fn microbatch(&self) -> Microbatch {
        self.state.microbatch
    }

    /// Returns the block whose backward runs next; `None` if all have run.
    pub fn next_block(&self) -> Option<usize> {
        self.state.next_block()
    }

    /// Returns the gradients of the outputs of the next block, in their order; `None` for outputs without
    /// one. They are the gradients of the stage's outputs before the last block, and of its inputs after the
    /// first one. A stage with a loss starts with none.
    pub fn gradients(&self) -> &OptionalTensors {
        &self.state.gradients
    }

    /// Replaces the gradients. Each must have the shape and the type of the value that the block, or the
    /// stage before, returned.
    pub fn set_gradients(&mut self, gradients: OptionalTensors) {
        self.state.set_gradients(gradients);
    }

    /// Runs the backward of the next block. Does nothing if all have run.
    ///
    /// # Errors
    /// When the gradients do not fit the block's outputs, or the block cannot be computed again.
    pub fn run_block(&mut self) -> Result<(), StageError> {
        let Some(block) = self.next_block() else { return Ok(()) };
        let stage = self.stage();
        let outcome = self.stages.stage_mut(stage).backward_block(self.state);
        outcome.map_err(self.place.in_block(block))
    }

    /// Runs the backwards of the blocks that are left.
    ///
    /// # Errors
    /// As [`BackwardRun::run_block`].
    pub fn run_all(&mut self) -> Result<(), StageError> {
        let stage = self.stage();
        self.stages.stage_mut(stage).backward(self.state)
    }

    /// Computes the weight gradients of the blocks that have run, with the stage's own runner if it has one
    /// ([`Stage::with_weight_runner`](crate::stage::Stage::with_weight_runner)). The `W` of an `I` then has
    /// less to do.
    ///
    /// # Errors
    /// When a layer returns a gradient of another shape than its weight.
    pub fn run_weights(&mut self) -> Result<(), StageError> {
        let (stage, microbatch) = (self.stage(), self.microbatch());
        let stage = self.stages.stage_mut(stage);
        stage.backward_weights(microbatch, &mut |_| ()).map(drop)
    }
}

/// Methods that both have.
macro_rules! of_a_stage {
    ($run:ident) => {
        impl $run<'_> {
            /// Returns the rank that runs the action.
            pub fn rank(&self) -> WorldRank {
                self.place.rank
            }

            /// Returns the device on which the stage computes.
            pub fn device(&self) -> &Device {
                self.compute().device()
            }

            /// Returns the stage's module if it is an `M`: the type that
            /// [`Stage::new`](crate::stage::Stage::new) got, or `Vec<L>` if the pipeline is a list or a graph
            /// of layers `L`.
            pub fn module<M: 'static>(&self) -> Option<&M> {
                self.compute().module().downcast_ref()
            }

            /// Adds a named span of time to the timeline of the step
            /// ([`Timeline::scopes`](pipewright_schedule::Timeline::scopes)).
            pub fn scope(&mut self, name: &str, start: Instant, end: Instant) {
                self.stages.note_scope(name, start, end);
            }

            fn compute(&self) -> &dyn StageCompute {
                self.stages.stage(self.place.action.stage())
            }
        }
    };
}

of_a_stage!(ForwardRun);
of_a_stage!(BackwardRun);

/// A forward and a backward of different microbatches that run together.
pub struct OverlapRun<'a> {
    rank: WorldRank,
    parts: [Action; 2],
    stages: &'a mut dyn Stages,
    forward: &'a mut ForwardState,
    backward: &'a mut BackwardState,
}

impl<'a> OverlapRun<'a> {
    pub(crate) fn new(
        rank: WorldRank,
        parts: [Action; 2],
        stages: &'a mut dyn Stages,
        forward: &'a mut ForwardState,
        backward: &'a mut BackwardState,
    ) -> Self {
        Self { rank, parts, stages, forward, backward }
    }

    /// Returns the forward.
    pub fn forward(&mut self) -> ForwardRun<'_> {
        let place = Place { rank: self.rank, action: self.parts[0] };
        self.stages.begin_half(Direction::Forward);
        ForwardRun::new(place, &mut *self.stages, self.forward)
    }

    /// Returns the backward.
    pub fn backward(&mut self) -> BackwardRun<'_> {
        let place = Place { rank: self.rank, action: self.parts[1] };
        self.stages.begin_half(Direction::Backward);
        BackwardRun::new(place, &mut *self.stages, self.backward)
    }
}
