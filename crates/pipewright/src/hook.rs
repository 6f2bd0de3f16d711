//! What a user may hang onto the actions of a step: profiler scopes, counters, logs.
//!
//! ```
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicUsize, Ordering};
//!
//! use pipewright::hook::ActionHook;
//! use pipewright::pipeline::PipelineConfig;
//! use pipewright_schedule::{Action, Rank};
//!
//! #[derive(Default)]
//! struct Count(AtomicUsize);
//!
//! impl ActionHook for Count {
//!     fn after(&self, _rank: Rank, _action: Action) {
//!         self.0.fetch_add(1, Ordering::Relaxed);
//!     }
//! }
//!
//! let count = Arc::new(Count::default());
//! let config = PipelineConfig { hook: Some(count.clone()), ..PipelineConfig::default() };
//! ```

use pipewright_schedule::{Action, Rank};

/// Called by every rank on the thread that runs it, for each action. A panic in it fails the step as one of a stage
/// does.
pub trait ActionHook: Send + Sync {
    /// Around the action, once its tensors are here: calls `run`, which does the action. For scopes that are left as
    /// they were entered, and for what is to be done in the place of waiting.
    fn around(&self, _rank: Rank, _action: Action, run: &mut dyn FnMut()) {
        run();
    }

    /// In the place of `OVERLAP_F_B`: calls `run` for each of its parts, a forward and a backward, in the order that it
    /// likes. Both can start at once. A program has no overlaps after [`pipewright_schedule::lower::send_early`].
    fn overlap(&self, _rank: Rank, parts: [Action; 2], run: &mut dyn FnMut(Action)) {
        parts.into_iter().for_each(run);
    }

    /// Before the action is first tried; it may then wait for its tensors.
    fn before(&self, _rank: Rank, _action: Action) {}

    /// When the action is done. A receive is done when it is announced: the computation that uses its message waits.
    fn after(&self, _rank: Rank, _action: Action) {}
}
