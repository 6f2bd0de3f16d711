//! [`ActionHook`]: user code that runs around the actions of a step, such as profiler scopes, counters and
//! logs, or in their place.
//!
//! ```
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicUsize, Ordering};
//!
//! use pipewright::hook::ActionHook;
//! use pipewright::ids::WorldRank;
//! use pipewright::pipeline::PipelineConfig;
//! use pipewright_schedule::Action;
//!
//! #[derive(Default)]
//! struct Count(AtomicUsize);
//!
//! impl ActionHook for Count {
//!     fn after(&self, _rank: WorldRank, _action: Action) {
//!         self.0.fetch_add(1, Ordering::Relaxed);
//!     }
//! }
//!
//! let count = Arc::new(Count::default());
//! let config = PipelineConfig { hook: Some(count.clone()), ..PipelineConfig::default() };
//! ```
//!
//! # In the place of an action
//!
//! [`ActionHook::forward`], [`backward`](ActionHook::backward), [`weights`](ActionHook::weights) and
//! [`overlap`](ActionHook::overlap) run the action themselves. They see the module of the stage, the values
//! or gradients of the microbatch, its targets and side inputs, and run the module block by block. Between
//! two blocks they may do anything, such as exchange values with another rank, or run a block of another
//! microbatch. The runtime cannot interrupt a function: one that waits for another rank needs a time limit of
//! its own, below the pipeline's deadline. Each function gets all stages of a rank, and looks at the stage or
//! the action if it is meant for some of them.
//!
//! [`ActionHook::unshard`], [`reshard`](ActionHook::reshard), [`reduce_grad`](ActionHook::reduce_grad) and
//! [`wait_reduce_grad`](ActionHook::wait_reduce_grad) run the actions between replicas. A program has them if
//! the pipeline has replicas.
//!
//! ```
//! use pipewright::hook::{ActionHook, OverlapRun};
//! use pipewright::stage::StageError;
//!
//! /// Runs the blocks of an overlap alternately.
//! struct Alternate;
//!
//! impl ActionHook for Alternate {
//!     fn runs_overlaps(&self) -> bool {
//!         true
//!     }
//!
//!     fn overlap(&self, run: &mut OverlapRun<'_>) -> Result<(), StageError> {
//!         while run.forward().next_block().is_some() || run.backward().next_block().is_some() {
//!             run.backward().run_block()?;
//!             run.forward().run_block()?;
//!         }
//!         Ok(())
//!     }
//! }
//! ```
//!
//! The backward has the blocks of its forward, so [`ActionHook::forward`] must also run block by block for
//! the forwards that are not in an overlap.
//!
//! The ranks that compute a stage together exchange tensors inside its blocks, so their hooks must run the
//! same blocks in the same order.

mod action_run;
mod replica_run;

use pipewright_schedule::Action;

pub use action_run::{BackwardRun, ForwardRun, OverlapRun};
pub(crate) use action_run::{Place, Stages};
pub use replica_run::{ReduceRun, ReshardRun, UnshardRun};
pub(crate) use replica_run::{ReplicaPlace, check_sums};

use crate::ids::{StepNumber, WorldRank};
use crate::stage::{StageError, WeightWork};
use crate::tensor::OptionalTensors;

/// Every rank calls it for each action, on its own thread. A panic in a hook fails the step like a panic in a
/// stage, and so does an error of a function.
pub trait ActionHook: Send + Sync {
    /// Called before the first action of a batch that trains, with the number of its step. Ranks may be in
    /// two consecutive steps at the same time ([`Pipeline::begin`](crate::pipeline::Pipeline::begin)), so a
    /// hook that needs the step keeps it for each rank.
    fn begin_step(&self, _rank: WorldRank, _step: StepNumber) {}

    /// Called in a step that updates, when the rank has the gradient norm and before it updates its parameters.
    /// Other ranks may have updated theirs, so a failure here ends the training
    /// ([`PipelineError::Diverged`](crate::pipeline::PipelineError::Diverged)).
    fn begin_update(&self, _rank: WorldRank) {}

    /// Called between two steps, before the rank sends the layers that leave its stages
    /// ([`Pipeline::move_layers`](crate::pipeline::Pipeline::move_layers)).
    fn begin_move(&self, _rank: WorldRank) {}

    /// Called when the tensors of an action have arrived; for a receive, at once. It must call `run`, which
    /// runs the action. Use it for scopes that end with the action.
    fn around(&self, _rank: WorldRank, _action: Action, run: &mut dyn FnMut()) {
        run();
    }

    /// Runs a forward, alone or in an evaluation. All blocks must have run when it returns. By default the
    /// module runs as a whole.
    ///
    /// # Errors
    /// The errors of the stage, and the function's own ([`StageError::function`]).
    fn forward(&self, run: &mut ForwardRun<'_>) -> Result<(), StageError> {
        run.run_all()
    }

    /// Runs the backward of a `B` or an `I`. All blocks must have run when it returns. The weight gradients
    /// of a `B` are computed after it, unless it has computed them ([`BackwardRun::run_weights`]).
    ///
    /// # Errors
    /// As [`ActionHook::forward`].
    fn backward(&self, run: &mut BackwardRun<'_>) -> Result<(), StageError> {
        run.run_all()
    }

    /// Computes the weight gradients of a `W`, or at the end of a `B`. The gradients that it leaves go to the
    /// stage's own runner ([`Stage::with_weight_runner`](crate::stage::Stage::with_weight_runner)), and then
    /// the stage computes the rest.
    fn weights(&self, _rank: WorldRank, _action: Action, _work: &mut WeightWork<'_>) {}

    /// Runs an `OVERLAP_F_B`: a forward and a backward. The tensors of both have arrived. Without a hook, a
    /// rank runs the forward and then the backward, or one of them while the other waits for an exchange, if
    /// replicas hold the experts of a stage together.
    ///
    /// A program has overlaps only if its lowering keeps them
    /// ([`keep_overlaps`](pipewright_schedule::LowerConfig::keep_overlaps)); see
    /// [`ActionHook::runs_overlaps`]. The command `pipewright train` has no hook. It takes every overlap apart
    /// unless `mesh.expert_parallel` is above 1.
    ///
    /// # Errors
    /// As [`ActionHook::forward`].
    fn overlap(&self, run: &mut OverlapRun<'_>) -> Result<(), StageError> {
        self.forward(&mut run.forward())?;
        self.backward(&mut run.backward())
    }

    /// Returns whether [`ActionHook::overlap`] runs both parts together.
    /// [`Pipeline::builder`](crate::pipeline::Pipeline::builder) then keeps overlaps whole. Otherwise it
    /// takes them apart, so that the forward's output leaves before the backward begins.
    fn runs_overlaps(&self) -> bool {
        false
    }

    /// Runs an `UNSHARD`. By default the replicas that hold the parameters together exchange their rows. A
    /// function may give the stage parameters that it has gathered in its own way. All replicas must decide
    /// alike.
    ///
    /// # Errors
    /// As [`ActionHook::forward`].
    fn unshard(&self, run: &mut UnshardRun<'_>) -> Result<(), StageError> {
        run.run();
        Ok(())
    }

    /// Runs a `RESHARD`. By default the rows of the other replicas are dropped. A function that leaves them
    /// saves the next exchange. All replicas must decide alike.
    ///
    /// # Errors
    /// As [`ActionHook::forward`].
    fn reshard(&self, run: &mut ReshardRun<'_>) -> Result<(), StageError> {
        run.run();
        Ok(())
    }

    /// Runs a `REDUCE_GRAD`. By default the sum over the replicas begins. A function may change the gradients
    /// before it, or compute the sum itself. All replicas must decide alike.
    ///
    /// If replicas hold experts of the stage together (`PipelineConfig::expert_parallel`), the gradient of an
    /// expert is the sum over the tokens of all these replicas, and a function cannot compute the sum over
    /// the replicas itself: that is an error. In a step that only accumulates, such a stage calls neither
    /// this function nor [`ActionHook::wait_reduce_grad`].
    ///
    /// # Errors
    /// As [`ActionHook::forward`].
    fn reduce_grad(&self, run: &mut ReduceRun<'_>) -> Result<(), StageError> {
        run.run();
        Ok(())
    }

    /// Runs a `WAIT_REDUCE_GRAD`, when the sum of [`ActionHook::reduce_grad`] has arrived. A function may
    /// change it, or put its own in place. All replicas must do the same.
    ///
    /// # Errors
    /// As [`ActionHook::forward`].
    fn wait_reduce_grad(&self, _run: &mut ReduceRun<'_>) -> Result<(), StageError> {
        Ok(())
    }

    /// Called with the tensors of a message between two stages: in a send before they leave, and in a receive
    /// when the message is taken. It may replace them, for example by compressed ones that the receiver
    /// expands again. Stages on the same rank send no message to each other. Messages of skip connections are
    /// not shown, because they are not actions of the program. Each rank of a group that computes a stage together gets the tensors as its stages hold them: whole ones, for which all must put equal ones in their place, because
    /// each sends a part, or parts, for which it must put the same parts
    /// ([`StageModule::output_placement`](crate::stage::StageModule::output_placement)).
    ///
    /// # Errors
    /// As [`ActionHook::forward`].
    fn message(
        &self,
        _rank: WorldRank,
        _action: Action,
        _tensors: &mut OptionalTensors,
    ) -> Result<(), StageError> {
        Ok(())
    }

    /// Called before the action is first tried; the action may then wait for its tensors.
    fn before(&self, _rank: WorldRank, _action: Action) {}

    /// Called when the action is done. A receive is done at once: the computation that uses its message waits
    /// for it.
    fn after(&self, _rank: WorldRank, _action: Action) {}
}
