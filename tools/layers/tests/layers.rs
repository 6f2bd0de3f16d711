//! The order of the modules of all crates.

use std::path::Path;

/// The crates, and their folders whose files import each other in circles, with the reason.
const CRATES: &[(&str, &[&str])] = &[
    ("crates/pipewright-schedule", &[]),
    ("crates/pipewright-page", &[]),
    ("crates/pipewright-shapes", &[]),
    ("crates/pipewright-system", &[]),
    ("crates/pipewright-document", &[]),
    ("crates/pipewright-data", &[]),
    ("crates/pipewright-python", &[]),
    ("crates/pipewright-cluster", &[]),
    ("crates/pipewright-kernel", &[]),
    ("crates/pipewright-gguf", &[]),
    // The files of `stage::training` have the methods of one type, and see its private fields.
    ("crates/pipewright", &["stage::training"]),
    ("crates/pipewright-planning", &[]),
    ("crates/pipewright-models", &[]),
    ("crates/pipewright-run", &[]),
    ("crates/pipewright-cli", &[]),
    ("tools/book", &[]),
    ("tools/features", &[]),
    ("tools/layers", &[]),
    ("tools/prose", &[]),
    ("bench", &[]),
];

#[test]
fn modules_are_in_layers() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for (folder, circular) in CRATES {
        pipewright_layers::assert_layers(&workspace.join(folder), circular);
    }
}
