//! Files in which a tensor has the matrices of all experts of a layer, as transformers stores them with
//! `save_original_format=False`: they are read as the files with a tensor for each matrix, to the bit.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor, bf16, f16};
use pipewright::nn::TensorParallel;
use pipewright::tensor::TensorRank;
use pipewright_models::hf::{self, WeightType};
use pipewright_models::{ModelConfig, ModelFamily, Place};
use safetensors::Dtype;
use serde_json::{Value, json};

use super::model_copy::{Copy, Stored};

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data");

/// Returns the matrices of a layer's experts in the order of transformers, and the tensor that has them.
fn place_of(projection: &str, has_gate: bool) -> (usize, &'static str) {
    match (projection, has_gate) {
        ("gate_proj" | "w1", _) => (0, "gate_up_proj"),
        ("up_proj" | "w3", true) => (1, "gate_up_proj"),
        ("up_proj", false) => (0, "up_proj"),
        ("down_proj" | "w2", _) => (0, "down_proj"),
        (other, _) => panic!("an expert has no `{other}`"),
    }
}

/// Returns the tensors with the matrices of experts in the form of transformers.
fn stacked(tensors: Vec<Stored>) -> Vec<Stored> {
    let has_gate = tensors.iter().any(|(name, ..)| name.contains("gate_proj") || name.contains(".w1."));
    let mut stacks: BTreeMap<String, BTreeMap<(usize, usize), Stored>> = BTreeMap::new();
    let mut others = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let name = name.replace("block_sparse_moe", "mlp").replace("backbone.", "model.");
        let Some((mixture, matrix)) = name.split_once(".experts.") else {
            others.push((name, dtype, shape, bytes));
            continue;
        };
        let [expert, projection, "weight"] = *matrix.split('.').collect::<Vec<_>>() else { panic!("{name}") };
        let (index, tensor) = place_of(projection, has_gate);
        let key = (expert.parse().expect("a number"), index);
        let tensor = format!("{mixture}.experts.{tensor}");
        stacks.entry(tensor).or_default().insert(key, (name, dtype, shape, bytes));
    }
    let stack = |(tensor, matrices): (String, BTreeMap<(usize, usize), Stored>)| {
        let experts = 1 + matrices.keys().map(|(expert, _)| *expert).max().expect("there are some");
        let (_, dtype, shape, _) = &matrices[&(0, 0)];
        let shape = vec![experts, matrices.len() / experts * shape[0], shape[1]];
        let dtype = *dtype;
        (tensor, dtype, shape, matrices.into_values().flat_map(|(.., bytes)| bytes).collect())
    };
    others.extend(stacks.into_iter().map(stack));
    others
}

/// Returns tensors in single precision as tensors of this type.
fn in_type(kind: WeightType, tensors: Vec<Stored>) -> Vec<Stored> {
    let convert = |(name, _, shape, bytes): Stored| {
        let values = bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes);
        let (dtype, bytes) = match kind {
            WeightType::Float32 => (Dtype::F32, values.flat_map(f32::to_le_bytes).collect()),
            WeightType::Bfloat16 => {
                (Dtype::BF16, values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect())
            }
            WeightType::Float16 => {
                (Dtype::F16, values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect())
            }
        };
        (name, dtype, shape, bytes)
    };
    tensors.into_iter().map(convert).collect()
}

/// Returns the bits of all parameters of some layers.
fn bits_of<F: ModelFamily>(copy: &Copy, config: &F, layers: Range<usize>, place: Place) -> Vec<u32> {
    struct Collect(Vec<u32>);
    impl ModuleVisitor for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.extend(param.val().into_data().iter::<f32>().map(f32::to_bits));
        }
    }
    let stage = hf::load_stage(copy.dir(), config, layers, place).expect("it loads");
    let mut bits = Collect(Vec::new());
    stage.visit(&mut bits);
    bits.0
}

/// Returns the bits of a model: those of the whole one, of its shards on two tensor ranks, and of each second
/// layer.
fn bits(copy: &Copy) -> Vec<Vec<u32>> {
    fn of<F: ModelFamily>(copy: &Copy, config: &F) -> Vec<Vec<u32>> {
        let (device, layers) = (Device::flex(), config.layers());
        let rank = |index| TensorParallel::unconnected(TensorRank { index, of: 2 });
        let parts = [TensorParallel::default(), rank(0), rank(1), rank(1).with_whole_experts(true)];
        let place = |tensor| Place { tensor, ..(&device).into() };
        let whole = parts.map(|tensor| bits_of(copy, config, 0..layers, place(tensor)));
        let alone =
            (1..layers).step_by(2).map(|layer| bits_of(copy, config, layer..layer + 1, (&device).into()));
        whole.into_iter().chain(alone).collect()
    }
    match ModelConfig::read(copy.dir()).expect("a configuration") {
        ModelConfig::Qwen2Moe(config) => of(copy, &config),
        ModelConfig::Qwen3Moe(config) => of(copy, &config),
        ModelConfig::Mixtral(config) => of(copy, &config),
        ModelConfig::DeepseekV2(config) => of(copy, &config),
        ModelConfig::DeepseekV3(config) => of(copy, &config),
        ModelConfig::NemotronH(config) => of(copy, &config),
        ModelConfig::GraniteHybrid(config) => of(copy, &config),
        other => panic!("{other:?} has no such experts"),
    }
}

/// Checks that a reference model has the same bits in both forms, in every element type.
fn check_forms(name: &str) {
    for kind in WeightType::ALL {
        let copy = Copy::of(&format!("{DATA}/{name}"));
        copy.edit(|tensors| *tensors = in_type(kind, std::mem::take(tensors)));
        let (expected, plain) = (bits(&copy), copy.check().expect("it is sound"));
        assert!(expected[0] != expected[1] && expected[1] != expected[2], "the ranks have shards");
        copy.edit(|tensors| *tensors = stacked(std::mem::take(tensors)));
        assert!(copy.tensors().iter().any(|(_, _, shape, _)| shape.len() == 3 && shape[0] > 1));
        assert_eq!(copy.check(), Ok(plain), "{name}");
        assert!(bits(&copy) == expected, "{name}, {kind:?}");
    }
}

#[test]
fn stacked_experts_of_qwen_have_the_bits_of_separate_ones() {
    check_forms("qwen2-moe-tiny");
    check_forms("qwen3-moe-window-tiny");
}

/// The name of the router differs too.
#[test]
fn stacked_experts_of_mixtral_have_the_bits_of_separate_ones() {
    check_forms("mixtral-tiny");
}

#[test]
fn stacked_experts_of_deepseek_have_the_bits_of_separate_ones() {
    check_forms("deepseek-v2-tiny");
    check_forms("deepseek-v3-tiny");
}

/// The experts have no gate, and all names have another prefix.
#[test]
fn stacked_experts_of_nemotron_have_the_bits_of_separate_ones() {
    check_forms("nemotron-h-tiny");
}

/// Files of the family have stacks in any case, and transformers may write them under the names that it computes with.
#[test]
fn experts_of_granite_are_read_under_both_names() {
    let copy = Copy::of(&format!("{DATA}/granite-hybrid-rope-tiny"));
    let (expected, plain) = (bits(&copy), copy.check().expect("it is sound"));
    let names = [
        ("input_linear.weight", "experts.gate_up_proj"),
        ("output_linear.weight", "experts.down_proj"),
        ("router.layer.weight", "router.weight"),
    ];
    copy.edit(|tensors| {
        for (name, ..) in tensors.iter_mut().filter(|(name, ..)| name.contains("block_sparse_moe")) {
            let found = names.iter().find(|(end, _)| name.ends_with(end)).expect("a part of the experts");
            *name = name.replace(found.0, found.1);
        }
    });
    assert_eq!(copy.check(), Ok(plain));
    assert!(bits(&copy) == expected);
}

/// The form of the other tests is the one that transformers writes.
#[test]
fn transformers_stacks_experts_in_this_form() {
    fn fnv(bytes: &[u8]) -> String {
        let step = |code: u64, byte: &u8| (code ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        format!("{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, step))
    }
    let text = fs::read(format!("{DATA}/stacked_experts.json")).expect("the reference");
    let expected: Value = serde_json::from_slice(&text).expect("JSON");
    let models = expected["models"].as_object().expect("a table");
    assert_eq!(models.len(), 6);
    for (name, expected) in models {
        let found: BTreeMap<_, _> = stacked(Copy::of(&format!("{DATA}/{name}")).tensors())
            .into_iter()
            .map(|(name, _, shape, bytes)| (name, json!({"shape": shape, "fnv": fnv(&bytes)})))
            .collect();
        for (tensor, expected) in expected.as_object().expect("a table") {
            assert_eq!(found.get(tensor), Some(expected), "{name}, {tensor}");
        }
    }
}

#[test]
fn stacked_experts_may_be_in_several_files() {
    let copy = Copy::of(&format!("{DATA}/mixtral-tiny"));
    let expected = bits(&copy);
    let tensors = stacked(copy.tensors());
    let mut files = BTreeMap::new();
    for (index, part) in (1..).zip(tensors.chunks(tensors.len().div_ceil(3))) {
        let name = format!("model-{index:05}-of-00003.safetensors");
        copy.store(&name, part);
        files.extend(part.iter().map(|(tensor, ..)| (tensor.clone(), name.clone())));
    }
    fs::remove_file(copy.path("model.safetensors")).expect("it is there");
    assert!(bits(&copy) == expected, "without an index");
    copy.write("model.safetensors.index.json", json!({"weight_map": files}).to_string());
    assert!(bits(&copy) == expected, "with an index");
    assert_eq!(copy.check(), Ok(Vec::new()));
}

/// A tensor keeps its element type in an export, also if it was part of another one.
#[test]
fn experts_that_were_stacked_are_exported_in_their_type() {
    let copy = Copy::of(&format!("{DATA}/mixtral-tiny"));
    copy.edit(|tensors| {
        let all = stacked(std::mem::take(tensors));
        let (down, others) = all.into_iter().partition(|(name, ..)| name.ends_with("down_proj"));
        tensors.extend(in_type(WeightType::Bfloat16, down));
        tensors.extend(others);
    });
    let origin = copy.path("origin");
    hf::keep_origin(copy.dir(), &origin).expect("it is copied");
    let Ok(ModelConfig::Mixtral(config)) = ModelConfig::read(copy.dir()) else { panic!("it is a Mixtral") };
    let stage = hf::load_stage(copy.dir(), &config, 0..config.layers(), Device::flex()).expect("it loads");
    let types = serde_json::from_slice(&fs::read(origin.join("weight_types.json")).expect("the types"));
    let (dir, specs) = (copy.path("exported"), pipewright_models::parameter_specs(&stage));
    let types = types.expect("JSON");
    let mut writer = hf::Writer::create_as(&dir, &config, specs, &types, u64::MAX).expect("it starts");
    writer.write_stage(&stage).expect("it is written");
    writer.finish().expect("it is complete");
    fs::copy(dir.join("model.safetensors"), copy.path("model.safetensors")).expect("it is there");
    for (name, dtype, ..) in copy.tensors() {
        assert_eq!(dtype == Dtype::BF16, name.ends_with(".w2.weight"), "{name}");
    }
}

#[test]
fn experts_in_another_form_are_refused_with_the_way_to_read_them() {
    const ADVICE: &str =
        "transformers, and write it with `model.save_pretrained(DIR, save_original_format=False)`";
    let check = |edit: &dyn Fn(&mut Vec<Stored>), parts: &[&str]| {
        let copy = Copy::of(&format!("{DATA}/qwen2-moe-tiny"));
        copy.edit(|tensors| *tensors = stacked(std::mem::take(tensors)));
        copy.edit(edit);
        copy.check_refused(parts);
        let Ok(ModelConfig::Qwen2Moe(config)) = ModelConfig::read(copy.dir()) else { panic!("it is one") };
        let loaded = hf::load_stage(copy.dir(), &config, 0..config.layers(), Device::flex());
        let error = loaded.map(drop).expect_err("it is refused without the check too");
        parts.iter().for_each(|part| assert!(error.to_string().contains(part), "{error}"));
    };
    let rename = |old: &'static str, new: &'static str| {
        move |tensors: &mut Vec<Stored>| {
            tensors.iter_mut().for_each(|(name, ..)| *name = name.replace(old, new));
        }
    };
    // The names of another program.
    let missing = "tensor `model.layers.1.mlp.experts.0.gate_proj.weight` is missing, and \
                   `model.layers.1.mlp.experts.w13_weight` belongs to all experts";
    check(&rename("experts.gate_up_proj", "experts.w13_weight"), &[missing, ADVICE]);
    // The dimensions of gpt-oss.
    let turned = |tensors: &mut Vec<Stored>| {
        let matrices = tensors.iter_mut().filter(|(name, ..)| name.contains("experts.gate_up_proj"));
        matrices.for_each(|(_, _, shape, _)| shape.swap(1, 2));
    };
    let shape = "tensor `model.layers.1.mlp.experts.gate_up_proj` has shape [4, 16, 24], and the configuration asks for [4, 24, 16]";
    check(&turned, &[shape, ADVICE]);
    // Quantised ones.
    let quantised = "tensor `model.layers.1.mlp.experts.gate_up_proj` is quantised, because there is \
                     `model.layers.1.mlp.experts.gate_up_proj_scale_inv` too";
    let scales = |tensors: &mut Vec<Stored>| {
        let name = "model.layers.1.mlp.experts.gate_up_proj_scale_inv".to_owned();
        tensors.push((name, Dtype::F32, vec![1], vec![0; 4]));
    };
    check(&scales, &[quantised]);
    // Another number of experts is a mistake in the configuration.
    let fewer = |tensors: &mut Vec<Stored>| {
        let matrices = tensors.iter_mut().filter(|(name, ..)| name.contains("experts.gate_up_proj"));
        matrices.for_each(|(_, _, shape, bytes)| {
            shape[0] = 3;
            bytes.truncate(3 * 24 * 16 * 4);
        });
    };
    check(&fewer, &["has shape [3, 24, 16], and the configuration asks for [4, 24, 16]"]);
    // One expert of several is missing.
    let copy = Copy::of(&format!("{DATA}/qwen2-moe-tiny"));
    copy.edit(|tensors| tensors.retain(|(name, ..)| !name.contains("layers.1.mlp.experts.2.up_proj")));
    copy.check_refused(&["tensor `model.layers.1.mlp.experts.2.up_proj.weight` is missing"]);
}

/// The stack that exists is in a form that is read, so it does not explain why another one is missing.
#[test]
fn a_missing_stack_is_named_without_the_stacks_that_are_read() {
    let check = |name: &str, stack: &str, tensor: &str| {
        let copy = Copy::of(&format!("{DATA}/{name}"));
        copy.edit(|tensors| *tensors = stacked(std::mem::take(tensors)));
        copy.edit(|tensors| tensors.retain(|(name, ..)| name != stack));
        assert_eq!(copy.check(), Err(format!("DIR/model.safetensors: tensor `{tensor}` is missing")));
    };
    let first = "backbone.layers.3.mixer.experts.0";
    let stacks = "model.layers.3.mixer.experts";
    check("nemotron-h-tiny", &format!("{stacks}.up_proj"), &format!("{first}.up_proj.weight"));
    check("nemotron-h-tiny", &format!("{stacks}.down_proj"), &format!("{first}.down_proj.weight"));
    let (first, stacks) = ("model.layers.1.mlp.experts.0", "model.layers.1.mlp.experts");
    check("qwen2-moe-tiny", &format!("{stacks}.gate_up_proj"), &format!("{first}.gate_proj.weight"));
    check("qwen2-moe-tiny", &format!("{stacks}.down_proj"), &format!("{first}.down_proj.weight"));
}
