//! The `[mesh]` section: how often the pipeline stands side by side, each replica with its share of the batch.

use serde::Serialize;

use crate::config::document::Document;
use crate::config::paths::Surroundings;
use crate::config::section::Section;

/// How ranks stand beside those of the pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct MeshSettings {
    /// Replicas of the pipeline.
    pub(crate) data_parallel: u32,
    /// What each replica holds.
    pub(crate) data_parallel_mode: DataParallelMode,
}

/// What each replica holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DataParallelMode {
    /// All parameters.
    Replicated,
}

/// Reads the section.
pub(super) fn read(document: &mut Document, surroundings: &Surroundings) -> MeshSettings {
    const MODES: [(&str, DataParallelMode); 1] = [("replicated", DataParallelMode::Replicated)];
    let mut section = Section::new(document, surroundings, "mesh");
    MeshSettings {
        data_parallel: section.count("data_parallel", 1),
        data_parallel_mode: section.choice("data_parallel_mode", DataParallelMode::Replicated, &MODES),
    }
}
