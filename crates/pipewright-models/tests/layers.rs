//! The order of the crate's modules: a module imports only modules before it. The rules are in `tools/layers`.

const LAYERS: &[&str] = &[
    "error",
    "parameter",
    "init",
    "cost",
    "mamba",
    "decoder::defaults",
    "decoder::rope",
    "decoder::config",
    "decoder::json",
    "decoder::mixture",
    "decoder::form",
    "decoder::feed_forward",
    "decoder::block",
    "decoder::describe",
    "decoder::stage",
    "decoder",
    "family",
    "llama",
    "nemotron_h::config",
    "nemotron_h::json",
    "nemotron_h::experts",
    "nemotron_h::block",
    "nemotron_h::describe",
    "nemotron_h::initial",
    "nemotron_h::stage",
    "nemotron_h",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "loss",
    "hf",
    "model_config",
];

#[test]
fn no_module_imports_a_later_one() {
    pipewright_layers::assert_layers(env!("CARGO_MANIFEST_DIR"), LAYERS);
}
