//! Who polls the executors: a thread a rank in production, one thread and a seed in tests.

mod seeded;
mod threads;

pub use seeded::SeededPipeline;
pub(crate) use threads::{Command, RankSeed, RankThread, Reply, ThreadSettings};
