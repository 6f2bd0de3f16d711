//! The cut of a configuration: boundaries, or a layout by hand.

use pipewright_schedule::partition::Layout;

use crate::config::pipeline::{PartitionChoice, PipelineSettings};
use crate::config::problem::ProblemKind;
use crate::config::section::Section;

/// Reads the cut by hand, which determines the partition and its boundaries.
pub(super) fn read_layout(section: &mut Section<'_>, pipeline: &mut PipelineSettings) {
    let Some(text) = section.text("layout") else { return };
    if let Some(&other) = ["partition", "boundaries"].iter().find(|key| section.is_written(key)) {
        section.report("layout", ProblemKind::Twice { what: "the cut", key: "layout", other });
        return;
    }
    match Layout::with_head_parts(&text, pipeline.head_parts) {
        Ok(layout) => {
            pipeline.partition = PartitionChoice::Explicit;
            pipeline.boundaries = Some(layout.boundaries.iter().map(|&layer| layer as u32).collect());
            pipeline.layout = Some(layout);
        }
        Err(error) => section.report("layout", error.into()),
    }
}

/// Refuses boundaries without an explicit partition, and the reverse.
pub(super) fn check_boundaries(section: &mut Section<'_>, pipeline: &PipelineSettings) {
    match (&pipeline.boundaries, pipeline.partition) {
        (None, PartitionChoice::Explicit) => section.report("partition", ProblemKind::NoBoundaries),
        (Some(_), PartitionChoice::Explicit) | (None, _) => {}
        (Some(_), _) => section.report("boundaries", ProblemKind::UnusedBoundaries),
    }
}
