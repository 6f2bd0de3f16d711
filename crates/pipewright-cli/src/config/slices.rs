//! Checks the keys that a schedule with slices of the sequence needs, and those that need whole microbatches.

use pipewright_schedule::{Recompute, Slices};

use crate::config::data::DataSettings;
use crate::config::document::Document;
use crate::config::mesh::MeshSettings;
use crate::config::paths::Surroundings;
use crate::config::pipeline::PipelineSettings;
use crate::config::problem::ProblemKind;
use crate::config::section::Section;

/// Refuses rows that do not divide into slices, and settings that need whole microbatches.
pub(super) fn check(
    document: &mut Document,
    surroundings: &Surroundings,
    slices: Slices,
    (data, pipeline, mesh): (&DataSettings, &PipelineSettings, &MeshSettings),
) {
    if !document.problems.is_empty() || slices.is_one() {
        return;
    }
    if !data.seq_len.is_multiple_of(slices.get()) {
        let range = format!("a multiple of {slices}, the number of slices,");
        let kind = ProblemKind::OutOfRange { key: "seq_len", value: data.seq_len.to_string(), range };
        let mut of_data = Section::new(document, surroundings, "data");
        if of_data.is_written("seq_len") {
            of_data.report("seq_len", kind);
        } else {
            let mut of_pipeline = Section::new(document, surroundings, "pipeline");
            of_pipeline.report_at_first_of(&["slices", "schedule"], kind);
        }
    }
    let needs_whole = [
        ("data", "packed", data.packed),
        ("data", "side", data.side.is_some()),
        ("pipeline", "recompute", pipeline.recompute != Recompute::None),
        ("mesh", "tensor_parallel", mesh.tensor_parallel > 1),
    ];
    for (section, key, _) in needs_whole.into_iter().filter(|(_, _, is_set)| *is_set) {
        Section::new(document, surroundings, section).report(key, ProblemKind::BesideSlices { key });
    }
}
