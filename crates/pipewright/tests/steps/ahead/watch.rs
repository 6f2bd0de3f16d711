//! A hook that watches the actions of both ranks, and lets one of them wait or fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use pipewright::hook::ActionHook;
use pipewright::ids::WorldRank;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright_schedule::{Action, Rank};

use super::launch;
use crate::support::config;

/// The actions of the ranks, and what one of them waits for.
#[derive(Default)]
pub(super) struct Watch {
    /// The actions of all ranks that have begun.
    pub(super) begun: AtomicU32,
    /// The actions that each rank has begun.
    pub(super) by_rank: [AtomicU32; 2],
    /// The action of a rank, counted over all batches, that panics; if the other rank waits, only when it does.
    pub(super) panics: Option<(u32, u32)>,
    /// The action of a rank that waits until `released`.
    pub(super) waits: Option<(u32, u32)>,
    pub(super) released: AtomicBool,
}

impl ActionHook for Watch {
    fn before(&self, rank: WorldRank, _action: Action) {
        let own = self.by_rank[rank.index()].fetch_add(1, Ordering::SeqCst);
        self.begun.fetch_add(1, Ordering::SeqCst);
        let at = Some((rank.get(), own));
        if at == self.waits {
            wait_until(|| self.released.load(Ordering::SeqCst));
        }
        if at == self.panics {
            if let Some((other, action)) = self.waits.filter(|(other, _)| *other != rank.get()) {
                self.wait_for(other as usize, action);
            }
            panic!("it has to fail");
        }
    }
}

impl Watch {
    /// Launches a pipeline of two ranks with this hook.
    pub(super) fn launch(self) -> (Arc<Self>, Pipeline, PipelineConfig) {
        self.launch_with(config())
    }

    pub(super) fn launch_with(self, config: PipelineConfig) -> (Arc<Self>, Pipeline, PipelineConfig) {
        let watch = Arc::new(self);
        let config = PipelineConfig { hook: Some(watch.clone()), ..config };
        let pipeline = launch("1f1b", 2, &config);
        (watch, pipeline, config)
    }

    /// Waits until a rank has begun more than `actions` actions.
    pub(super) fn wait_for(&self, rank: usize, actions: u32) {
        wait_until(|| self.by_rank[rank].load(Ordering::SeqCst) > actions);
    }

    /// Lets the rank continue that waits.
    pub(super) fn release(&self) {
        self.released.store(true, Ordering::SeqCst);
    }
}

pub(crate) fn wait_until(condition: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < until, "it does not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the number of actions of each rank.
pub(super) fn actions(pipeline: &Pipeline) -> [u32; 2] {
    [0, 1].map(|rank| pipeline.program().row(Rank::new(rank)).len() as u32)
}
