//! How a pipeline runs, and what of it the processes of a run must agree on.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use burn::optim::ModuleOptimizer;
use pipewright_schedule::ValidatedProgram;

use crate::hook::ActionHook;
use crate::mesh::DataParallelMode;
use crate::tensor::{CheckMetadata, Metadata};
use crate::transport::Fields;

/// How a pipeline runs.
#[derive(Clone)]
pub struct PipelineConfig {
    /// Takes the gradients of every stage; none for a pipeline that only evaluates.
    pub optimizer: Option<ModuleOptimizer>,
    /// Gradients are scaled down to this global norm when theirs is greater.
    pub clip_norm: Option<f64>,
    /// Threads for the tensor operations of one rank.
    pub threads_per_rank: usize,
    /// When no rank moves for so long, the step fails.
    pub deadline: Duration,
    /// Replicas of the pipeline, each with its share of every batch. The world has as many ranks as the program, times
    /// this.
    pub data_parallel: u32,
    /// What each replica holds. Sharded, the program must be at level `full`, and the optimizer one that works element
    /// by element.
    pub data_parallel_mode: DataParallelMode,
    /// How it is known what crosses the boundaries between stages; the same on all ranks.
    pub metadata: Metadata,
    /// When boundaries are checked against it.
    pub check_metadata: CheckMetadata,
    /// The seed of the random numbers that layers draw in training ([`StageContext::random`](crate::stage::StageContext::random));
    /// the same on all ranks.
    pub seed: u64,
    /// Called around every action.
    pub hook: Option<Arc<dyn ActionHook>>,
    /// Raised by whoever wants training to end: each rank looks at the end of a step, and the step's report says
    /// whether any found it raised. So the processes of a run agree on their last step.
    pub interrupt: Option<Arc<AtomicBool>>,
}

impl Default for PipelineConfig {
    /// No optimizer, no clipping, one thread a rank, a minute, no replicas, metadata found out and checked in the first
    /// step.
    fn default() -> Self {
        Self {
            optimizer: None,
            clip_norm: None,
            threads_per_rank: 1,
            deadline: Duration::from_secs(60),
            data_parallel: 1,
            data_parallel_mode: DataParallelMode::default(),
            metadata: Metadata::default(),
            check_metadata: CheckMetadata::default(),
            seed: 0,
            hook: None,
            interrupt: None,
        }
    }
}

impl PipelineConfig {
    /// Whether each replica holds a part of the parameters.
    pub(crate) fn is_sharded(&self) -> bool {
        self.data_parallel_mode.shards(self.data_parallel)
    }
}

/// What must be the same on every process for its ranks to fit together.
pub(super) fn identity(program: &ValidatedProgram, config: &PipelineConfig) -> Fields {
    let placement = program.placement();
    let mut rows = DefaultHasher::new();
    placement.all_ranks().for_each(|rank| program.row(rank).hash(&mut rows));
    let stages = placement.all_ranks().map(|rank| {
        let stages = placement.stages_of(rank).iter().map(ToString::to_string);
        stages.collect::<Vec<_>>().join("+")
    });
    let fields = [
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ("program", format!("{:016x}", rows.finish())),
        ("placement", stages.collect::<Vec<_>>().join(" ")),
        ("microbatches", program.microbatches().to_string()),
        ("metadata", config.metadata.fingerprint()),
        ("clip norm", format!("{:?}", config.clip_norm)),
        ("seed", config.seed.to_string()),
        ("replicas", config.data_parallel.to_string()),
        ("data parallel mode", format!("{:?}", config.data_parallel_mode)),
        ("trains", config.optimizer.is_some().to_string()),
    ];
    fields.map(|(name, value)| (name.to_owned(), value)).into()
}
