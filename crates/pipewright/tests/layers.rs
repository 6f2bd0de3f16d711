//! The order of the crate's modules: each imports only the modules before it. The rules are in `tools/layers`.

const LAYERS: &[&str] = &[
    "ids",
    "bounded_file",
    "device",
    // Tensors and batches.
    "tensor",
    "batch",
    // The state of a run.
    "memory",
    "loss_scale",
    "checkpoint",
    // Arithmetic.
    "random",
    "autodiff",
    "nn",
    "optimizer",
    // Models.
    "stage",
    "graph",
    // The vocabulary of the transports.
    "message",
    "failure",
    "progress",
    // How messages move.
    "transport",
    "collective",
    "mesh",
    // A rank's step.
    "hook",
    "config",
    "executor",
    "driver",
    // All ranks together.
    "pipeline",
    "profile",
    "train",
    "prelude",
];

#[test]
fn no_module_imports_a_later_one() {
    pipewright_layers::assert_layers(env!("CARGO_MANIFEST_DIR"), LAYERS);
}
