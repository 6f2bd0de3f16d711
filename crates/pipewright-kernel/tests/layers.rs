//! The order of the crate's modules: a module imports only modules before it. The rules are in `tools/layers`.

const LAYERS: &[&str] = &[
    "half",
    "simd",
    "exp",
    "product",
    "adamw",
    "squares",
    "rms_norm",
    "gated_norm",
    "relu_squared",
    "swiglu",
    "cross_entropy",
    "vocabulary_part",
    "rotary",
    "attention",
    "cached_attention",
    "convolution",
    "routing",
    "router_losses",
    "grouped",
    "scan",
];

#[test]
fn no_module_imports_a_later_one() {
    pipewright_layers::assert_layers(env!("CARGO_MANIFEST_DIR"), LAYERS);
}
