//! The order of the modules of all crates.

use std::path::Path;

/// The crates, and their folders whose files import each other in circles.
const CRATES: &[(&str, &[&str])] = &[
    ("crates/pipewright-schedule", &[]),
    ("crates/pipewright-system", &[]),
    ("crates/pipewright-python", &[]),
    ("crates/pipewright-cluster", &[]),
    ("crates/pipewright-kernel", &["scan"]),
    (
        "crates/pipewright",
        &["device", "graph", "memory", "nn", "random", "stage", "tensor", "train", "transport"],
    ),
    ("crates/pipewright-models", &[]),
    ("crates/pipewright-cli", &["", "config"]),
    ("tools/book", &[]),
    ("tools/layers", &[]),
    ("tools/prose", &[]),
    ("bench", &[""]),
];

#[test]
fn modules_are_in_layers() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for (folder, circular) in CRATES {
        pipewright_layers::assert_layers(&workspace.join(folder), circular);
    }
}
