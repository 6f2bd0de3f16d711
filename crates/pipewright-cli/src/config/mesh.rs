//! The `[mesh]` section: the number of replicas of the pipeline. The replicas train together, each on its share of the
//! batch.

use pipewright::mesh::DataParallelMode;
use pipewright_schedule::lower::UnshardConfig;
use serde::Serialize;

use crate::config::document::Document;
use crate::config::paths::Surroundings;
use crate::config::section::Section;

/// The replicas of the pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct MeshSettings {
    /// The number of replicas of the pipeline.
    pub(crate) data_parallel: u32,
    /// Whether each replica holds all parameters or only its part.
    pub(crate) data_parallel_mode: DataParallelMode,
    /// The number of stages of a rank whose parameters are gathered at the same time, if they are sharded.
    pub(crate) unshard_window: u32,
}

impl MeshSettings {
    /// Returns whether each replica holds only a part of the parameters.
    pub(crate) fn is_sharded(&self) -> bool {
        self.data_parallel_mode.shards(self.data_parallel)
    }
}

/// Reads the section.
pub(super) fn read(document: &mut Document, surroundings: &Surroundings) -> MeshSettings {
    const MODES: [(&str, DataParallelMode); 2] =
        [("replicated", DataParallelMode::Replicated), ("sharded", DataParallelMode::Sharded)];
    let mut section = Section::new(document, surroundings, "mesh");
    MeshSettings {
        data_parallel: section.count("data_parallel", 1),
        data_parallel_mode: section.choice("data_parallel_mode", DataParallelMode::default(), &MODES),
        unshard_window: section.count("unshard_window", UnshardConfig::default().window.get()),
    }
}
