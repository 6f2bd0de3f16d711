//! [`ActionHook`]: user code that runs around the actions of a step, such as profiler scopes, counters and logs.
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

use pipewright_schedule::Action;

use crate::ids::WorldRank;

/// Every rank calls it for each action, on its own thread. A panic in a hook fails the step like a panic in a stage.
pub trait ActionHook: Send + Sync {
    /// Called when the tensors of an action have arrived; for a receive, at once. It must call `run`, which runs the
    /// action. Use it for scopes that end with the action.
    fn around(&self, _rank: WorldRank, _action: Action, run: &mut dyn FnMut()) {
        run();
    }

    /// Replaces `OVERLAP_F_B`. It must call `run` for each part, a forward and a backward, in any order. The tensors of
    /// both have arrived. Only a hook can run the parts of an overlap together, for example by the order in which it
    /// submits their work to a device; without a hook, a rank runs the forward and then the backward.
    ///
    /// A program has overlaps only if its lowering keeps them
    /// ([`keep_overlaps`](pipewright_schedule::LowerConfig::keep_overlaps)); see [`ActionHook::runs_overlaps`]. The
    /// command `pipewright train` has no hook and takes every overlap apart.
    fn overlap(&self, _rank: WorldRank, parts: [Action; 2], run: &mut dyn FnMut(Action)) {
        parts.into_iter().for_each(run);
    }

    /// Returns whether [`ActionHook::overlap`] runs both parts together.
    /// [`Pipeline::builder`](crate::pipeline::Pipeline::builder) then keeps overlaps whole. Otherwise it takes them
    /// apart, so that the forward's output leaves before the backward begins.
    fn runs_overlaps(&self) -> bool {
        false
    }

    /// Called before the action is first tried; the action may then wait for its tensors.
    fn before(&self, _rank: WorldRank, _action: Action) {}

    /// Called when the action is done. A receive is done at once: the computation that uses its message waits for it.
    fn after(&self, _rank: WorldRank, _action: Action) {}
}
