//! Describes a layout and its memory for people.

use pipewright_cluster::layout::Layout;
use pipewright_cluster::memory::RankMemory;
use pipewright_schedule::words::counted;
use pipewright_shapes::model::Model;

use crate::display::bytes;

/// Describes a layout of a model. Groups of one rank are left out.
pub(super) fn layout(layout: &Layout, model: &Model) -> String {
    let groups = [
        ("tensor", layout.tensor),
        ("pipeline", layout.pipeline),
        ("data", layout.data()),
        ("context", layout.context),
        ("expert", layout.expert),
    ];
    let mut mesh: Vec<String> = groups
        .iter()
        .filter(|(_, ranks)| *ranks > 1)
        .map(|(name, ranks)| format!("{name} {ranks}"))
        .collect();
    if mesh.is_empty() {
        mesh.push("one GPU".to_owned());
    }
    let mut mesh = mesh.join(" x ");
    if layout.sequence_parallel && layout.tensor > 1 {
        mesh.push_str(", sequence parallel");
    }
    if layout.tensor > 1 && model.has_experts() {
        let ranks = counted(layout.expert_tensor, "rank");
        mesh.push_str(&format!(", each expert on {ranks}"));
    }
    let has_schedule = layout.pipeline > 1 || layout.chunks > 1 || layout.schedule.is_some();
    let schedule = if has_schedule {
        format!("; {} with {} per rank", layout.schedule_name(), counted(layout.chunks, "stage"))
    } else {
        String::new()
    };
    let (microbatches, rows) =
        (counted(layout.microbatches(), "microbatch"), counted(layout.microbatch, "row"));
    format!(
        "{mesh}{schedule}; {microbatches} of {rows}; recompute {}; shard {}",
        layout.recompute.name(),
        layout.sharding.name()
    )
}

/// Names the parts of a rank's memory that are not empty.
pub(super) fn memory_parts(memory: &RankMemory) -> String {
    let parts = memory.named().into_iter().filter(|(_, size)| *size >= 1.0);
    parts.map(|(name, size)| format!("{name} {}", bytes(size as u64))).collect::<Vec<_>>().join(", ")
}
