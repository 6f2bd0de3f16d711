//! Experts and tables of tokens whose matrices are quantised: their bits, their memory, and what is refused.

use pipewright::nn::TensorParallel;
use pipewright_models::{CutModel, ModelConfig, hf};
use safetensors::Dtype;

use super::model_copy::{Copy, Stored};
use super::quantised::{LLAMA, decoded_logits, logits, quantise, quantise_in_eight_bits};

const QWEN3_MOE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/qwen3-moe-tiny");
const TIED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/llama-tied-tiny");
pub(crate) const MXFP4: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/gpt-oss-mxfp4");

/// Matrices of several forms, each alone, among the experts and in the table.
#[test]
fn experts_and_tables_stay_quantised() {
    const EXPERT: &str = "model.layers.1.mlp.experts.2.";
    for name in ["gate_proj", "up_proj", "down_proj"] {
        let copy = Copy::of(QWEN3_MOE);
        let before = logits(&copy).expect("it loads");
        quantise(&copy, &format!("{EXPERT}{name}.weight"));
        let found = logits(&copy).expect("it loads");
        assert!(found == decoded_logits(&copy) && found != before, "{name}");
        let copy = Copy::of(QWEN3_MOE);
        quantise_in_eight_bits(&copy, &format!("{EXPERT}{name}.weight"), [5, 7]);
        let found = logits(&copy).expect("it loads");
        assert!(found == decoded_logits(&copy) && found != before, "{name} in eight bits");
    }
    for (model, table) in [(LLAMA, "model.embed_tokens.weight"), (TIED, "model.embed_tokens.weight")] {
        let copy = Copy::of(model);
        let before = logits(&copy).expect("it loads");
        quantise(&copy, table);
        assert_eq!(copy.check(), Ok(Vec::new()));
        let found = logits(&copy).expect("it loads");
        assert!(found == decoded_logits(&copy) && found != before, "{model}");
    }
}

/// transformers has written the model, and its own dequantisation is compared in `tests/references/quantised.rs`.
#[test]
fn experts_in_mxfp4_are_read() {
    let copy = Copy::of(MXFP4);
    assert_eq!(copy.check(), Ok(Vec::new()));
    assert!(logits(&copy) == Ok(decoded_logits(&copy)));
    let config = ModelConfig::read(MXFP4.as_ref()).expect("a model");
    let specs = config.parameters().expect("it has layers");
    let sizes = hf::quantised_sizes(MXFP4.as_ref(), &specs).expect("they are known");
    let model = CutModel::from(config).with_quantised(sizes);
    let specs = model.outline(1..2, &TensorParallel::default()).expect("a block");
    let bytes: Vec<u64> = specs.iter().filter_map(|spec| spec.quantised_bytes).collect();
    assert_eq!(bytes, [32 * 32 / 2 + 32; 3 * 4]);
    let blocks = "model.layers.1.mlp.experts.down_proj_blocks";
    let refused = |part: &str, edit: &dyn Fn(&mut Stored)| {
        let copy = Copy::of(MXFP4);
        copy.edit(|tensors| {
            edit(tensors.iter_mut().find(|(name, ..)| name == blocks).expect("it has the tensor"));
        });
        let error = logits(&copy).expect_err("it is refused");
        assert!(error.contains("model.layers.1.mlp.experts.down_proj") && error.contains(part), "{error}");
    };
    refused("its shape is [4, 32, 16, 1]", &|(_, _, shape, _)| shape.swap(2, 3));
    refused("its elements are I8, and U8 is needed", &|(_, dtype, ..)| *dtype = Dtype::I8);
    let copy = Copy::of(MXFP4);
    copy.edit(|tensors| {
        let scales = tensors.iter_mut().find(|(name, ..)| name.ends_with(".down_proj_scales"));
        scales.expect("it has scales").3[0] = 255;
    });
    let error = logits(&copy).expect_err("it is refused");
    assert!(error.contains("is not finite"), "{error}");
}
