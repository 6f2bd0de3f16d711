//! The order of the binary's modules: each imports only the modules before it. The rules are in `tools/layers`.

const LAYERS: &[&str] = &[
    "quiet",
    "schedule_file",
    "config",
    "display",
    "failure",
    "exhaustion",
    "panic",
    "output",
    "run_folder",
    "run_record",
    "run_report",
    "tensorboard",
    "signal",
    // Parts that several commands share.
    "commands::schedule_file",
    "commands::schedule_size",
    "commands::drawing",
    "commands::plan_choice",
    "commands::plan_print",
    "commands::timed_program",
    "commands::simulation_text",
    "commands::layer_weights",
    "commands::run_arguments",
    "commands::prepare",
    "commands::other_sizes",
    "commands::layer_sizes",
    "commands::recorded_run",
    "commands::memory",
    "commands::plan_config",
    "commands::overview",
    "commands::run_identity",
    "commands::process_group",
    "commands::checkpoint_path",
    "commands::origin",
    "commands::trained_model",
    "commands::launch",
    "commands::step_prediction",
    "commands::timeline_recorder",
    "commands::evaluations",
    "commands::training_loop",
    "commands",
    "arguments",
];

#[test]
fn no_module_imports_a_later_one() {
    pipewright_layers::assert_layers(env!("CARGO_MANIFEST_DIR"), LAYERS);
}
