//! The `[mesh]` section: the number of replicas of the pipeline, and the number of ranks that compute each stage together.
//! The replicas train together, each on its share of the batch.

use pipewright::mesh::{DataParallelMode, Mesh};
use pipewright_schedule::lower::UnshardConfig;
use serde::Serialize;

use crate::config::document::Document;
use crate::config::paths::Surroundings;
use crate::config::section::Section;

/// The replicas of the pipeline, and the ranks that compute each stage together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct MeshSettings {
    /// The number of replicas of the pipeline.
    pub(crate) data_parallel: u32,
    /// The number of ranks that compute each stage together, each with its slices of the parameters.
    pub(crate) tensor_parallel: u32,
    /// Whether each replica holds all parameters or only its part.
    pub(crate) data_parallel_mode: DataParallelMode,
    /// The number of stages of a rank whose parameters are gathered at the same time, if they are sharded.
    pub(crate) unshard_window: u32,
}

impl MeshSettings {
    /// Returns the mesh of a pipeline of this many ranks.
    pub(crate) fn mesh(&self, pipeline: u32) -> Mesh {
        Mesh { pipeline, data: self.data_parallel, tensor: self.tensor_parallel }
    }

    /// Returns the number of ranks of all replicas of a pipeline of this many ranks; the largest number if there are more.
    pub(crate) fn ranks(&self, pipeline: u32) -> u32 {
        self.mesh(pipeline).ranks().unwrap_or(u32::MAX)
    }

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
        tensor_parallel: section.count("tensor_parallel", 1),
        data_parallel_mode: section.choice("data_parallel_mode", DataParallelMode::default(), &MODES),
        unshard_window: section.count("unshard_window", UnshardConfig::default().window.get()),
    }
}
