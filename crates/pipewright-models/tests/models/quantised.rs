//! Models whose matrices bitsandbytes has quantised: what is refused, what they need in memory, and generation
//! with the bits of the decoded model.

use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::nn::TensorParallel;
use pipewright::tensor::{TensorRank, pack, unpack};
use pipewright_models::training_memory::{OptimizerState, StateRule};
use pipewright_models::{Adapter, AdapterStart, CutModel, LoraConfig, ModelConfig, ModelSource, Place, hf};
use pipewright_schedule::error_text::with_causes;
use safetensors::Dtype;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::model_copy::{Copy, Stored};

pub(crate) const LLAMA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/llama-tiny");
pub(crate) const NF4: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/llama-nf4");
const FP4: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/llama-fp4");
const PHI3: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/phi3-tiny");
const GPT2: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/gpt2-tiny");
const GPT2_NF4: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/gpt2-nf4");
pub(crate) const DOWN: &str = "model.layers.2.mlp.down_proj.weight";

/// Returns the logits of a row, of a model whose matrices stay quantised.
pub(crate) fn logits(copy: &Copy) -> Result<Vec<f32>, String> {
    let config = ModelConfig::read(copy.dir()).map_err(|error| with_causes(&error))?;
    let stage = config.whole(ModelSource::Directory(copy.dir()), &Device::flex());
    let stage = stage.map_err(|error| with_causes(&error))?;
    let ids: Vec<i32> = (0..64).map(|index| index * 37 % 48).collect();
    let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, 64]), &Device::flex());
    let logits: Tensor<3> = unpack(stage.compute(pack(ids)).expect("ids")).expect("logits");
    Ok(logits.into_data().iter().collect())
}

/// Returns the logits of the same row, of the model whose matrices are decoded and written again.
pub(crate) fn decoded_logits(copy: &Copy) -> Vec<f32> {
    let config = ModelConfig::read(copy.dir()).expect("a model");
    let stage = hf::load_stage(copy.dir(), &*config, 0..config.layers(), Place::from(Device::flex()));
    let folder = TempDir::new().expect("a folder");
    let dir = folder.path().join("decoded");
    hf::save(&dir, &*config, &[&stage.expect("it loads")]).expect("it is written");
    logits(&Copy::of(&dir.display().to_string())).expect("it loads")
}

/// Replaces a matrix by elements of four bits in blocks of 16, with a scale that is a number for each.
pub(crate) fn quantise(copy: &Copy, tensor: &str) {
    copy.edit(|tensors| {
        let index = tensors.iter().position(|(name, ..)| name == tensor).expect("it has the matrix");
        let (_, _, shape, _) = tensors.remove(index);
        let count: usize = shape.iter().product();
        let floats =
            |numbers: Vec<f32>| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>();
        let state =
            json!({"quant_type": "nf4", "blocksize": 16, "dtype": "float32", "shape": shape}).to_string();
        let codes = (0..count / 2).map(|index| (index * 37 % 251) as u8).collect();
        let scales = (0..count / 16).map(|index| (index % 11) as f32 / 97.0).collect();
        let table = (0..16).map(|index| index as f32 / 7.3 - 1.0).collect();
        tensors.push((tensor.to_owned(), Dtype::U8, vec![count / 2, 1], codes));
        tensors.push((format!("{tensor}.absmax"), Dtype::F32, vec![count / 16], floats(scales)));
        tensors.push((format!("{tensor}.quant_map"), Dtype::F32, vec![16], floats(table)));
        let name = format!("{tensor}.quant_state.bitsandbytes__nf4");
        tensors.push((name, Dtype::U8, vec![state.len()], state.into_bytes()));
    });
}

#[test]
fn generation_has_the_bits_of_the_decoded_model() {
    for model in [NF4, FP4] {
        let copy = Copy::of(model);
        assert_eq!(copy.check(), Ok(Vec::new()));
        assert!(logits(&copy) == Ok(decoded_logits(&copy)));
    }
}

#[test]
fn heads_and_joined_projections_may_be_quantised() {
    let copy = Copy::of(NF4);
    quantise(&copy, "lm_head.weight");
    assert_eq!(copy.check(), Ok(Vec::new()));
    assert!(logits(&copy) == Ok(decoded_logits(&copy)));
    let copy = Copy::of(PHI3);
    let expected = logits(&copy).expect("it loads");
    for name in ["self_attn.qkv_proj", "mlp.gate_up_proj"] {
        quantise(&copy, &format!("model.layers.1.{name}.weight"));
    }
    assert_eq!(copy.check(), Ok(Vec::new()));
    let found = logits(&copy);
    assert!(found == Ok(decoded_logits(&copy)));
    assert!(found != Ok(expected), "the matrices have other elements");
}

#[test]
fn elements_may_be_stored_as_any_type() {
    let copy = Copy::of(NF4);
    let expected = logits(&copy);
    copy.edit(|tensors| {
        for (name, dtype, shape, bytes) in tensors {
            if name.ends_with("_proj.weight") {
                (*dtype, *shape) = (Dtype::BF16, vec![bytes.len() / 2, 1]);
            }
        }
    });
    assert!((copy.check(), logits(&copy)) == (Ok(Vec::new()), expected));
}

/// Replaces a matrix by elements of FP8 in blocks.
pub(crate) fn quantise_in_eight_bits(copy: &Copy, tensor: &str, [rows, columns]: [usize; 2]) {
    copy.configure(&json!({"quantization_config": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [rows, columns]
    }}));
    copy.edit(|tensors| {
        let (_, dtype, shape, bytes) =
            tensors.iter_mut().find(|(name, ..)| name == tensor).expect("it has the matrix");
        *dtype = Dtype::F8_E4M3;
        *bytes = (0..shape.iter().product()).map(|index| (index * 37 % 251) as u8 & 0xbf).collect();
        let blocks = [shape[0].div_ceil(rows), shape[1].div_ceil(columns)];
        let scales = (0..blocks[0] * blocks[1]).flat_map(|index| ((index % 11) as f32 / 97.0).to_le_bytes());
        tensors.push((format!("{tensor}_scale_inv"), Dtype::F32, blocks.to_vec(), scales.collect()));
    });
}

#[test]
fn matrices_of_eight_bits_are_read() {
    let (copy, down) = (Copy::of(LLAMA), DOWN);
    let expected = logits(&copy).expect("it loads");
    quantise_in_eight_bits(&copy, down, [16, 32]);
    assert_eq!(copy.check(), Ok(Vec::new()));
    let found = logits(&copy);
    assert!(found == Ok(decoded_logits(&copy)));
    assert!(found != Ok(expected), "the matrix has other elements");
    let refused = |edit: &dyn Fn(&mut Vec<Stored>), part: &str| {
        let copy = Copy::of(LLAMA);
        quantise_in_eight_bits(&copy, down, [16, 32]);
        copy.edit(edit);
        let error = logits(&copy).expect_err("it is refused");
        assert!(error.contains(down) && error.contains(part), "{error}");
    };
    let spoil = |tensors: &mut Vec<Stored>| bytes_of(tensors, "").3[5] = 0xff;
    refused(&spoil, "is not finite");
    let spoil = |tensors: &mut Vec<Stored>| {
        bytes_of(tensors, "_scale_inv").3[..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    };
    refused(&spoil, "is not finite");
    let shorten = |tensors: &mut Vec<Stored>| {
        let (_, _, shape, bytes) = bytes_of(tensors, "_scale_inv");
        *shape = vec![3, 6];
        bytes.truncate(4 * 18);
    };
    refused(&shorten, "its shape is [3, 6], and [4, 6] is needed");
    let other = |tensors: &mut Vec<Stored>| bytes_of(tensors, "").1 = Dtype::F8_E5M2;
    refused(&other, "its elements are F8_E5M2, and F8_E4M3 is needed");
    // Without the sizes of blocks, the scales could mean anything.
    copy.configure(&json!({"quantization_config": {"quant_method": "fp8"}}));
    copy.check_refused(&["quantised (fp8)"]);
}

/// Replaces a matrix by four bits in groups of 16 inputs, or by the numbers that they mean.
pub(crate) fn quantise_in_groups(copy: &Copy, tensor: &str, method: &str, is_decoded: bool) {
    const GROUP: usize = 16;
    // The outputs of the eight codes in a word of AWQ.
    const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
    let is_awq = method == "awq";
    if !is_decoded {
        let format = if is_awq { "gemm" } else { method };
        let method = if is_awq { "awq" } else { "gptq" };
        copy.configure(&json!({"quantization_config": {
            "quant_method": method, "bits": 4, "group_size": GROUP, "checkpoint_format": format, "version": "gemm"
        }}));
    }
    copy.edit(|tensors| {
        let index = tensors.iter().position(|(name, ..)| name == tensor).expect("it has the matrix");
        let (_, _, shape, _) = tensors.remove(index);
        let (outputs, inputs) = (shape[0], shape[1]);
        let code = |output: usize, input: usize| (output * 7 + input * 5) as u32 % 16;
        let zero = |output: usize, group: usize| (output + 3 * group) as u32 % 16;
        let scale = |output: usize, group: usize| ((output + group) % 9) as f32 / 64.0;
        let groups = inputs / GROUP;
        let bytes = |words: Vec<u32>| words.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<u8>>();
        if is_decoded {
            let number = |index: usize| {
                let (output, input) = (index / inputs, index % inputs);
                let group = input / GROUP;
                (code(output, input) as f32 - zero(output, group) as f32) * scale(output, group)
            };
            let numbers = (0..outputs * inputs).flat_map(|index| number(index).to_le_bytes()).collect();
            return tensors.push((tensor.to_owned(), Dtype::F32, shape, numbers));
        }
        let word =
            |half: &dyn Fn(usize) -> u32| (0..8).fold(0, |word, place| word | half(place) << (4 * place));
        let along_outputs = |lines: usize, value: &dyn Fn(usize, usize) -> u32| {
            let of = |index: usize| {
                let (line, eight) = (index / (outputs / 8), index % (outputs / 8));
                word(&|place| value(8 * eight + if is_awq { ORDER[place] } else { place }, line))
            };
            bytes((0..lines * outputs / 8).map(of).collect())
        };
        let codes = if is_awq {
            along_outputs(inputs, &code)
        } else {
            let of = |index: usize| word(&|place| code(index % outputs, 8 * (index / outputs) + place));
            bytes((0..inputs / 8 * outputs).map(of).collect())
        };
        let layer = tensor.strip_suffix(".weight").expect("a matrix");
        let mut push = |name: &str, dtype, shape: [usize; 2], bytes| {
            tensors.push((format!("{layer}.{name}"), dtype, shape.to_vec(), bytes));
        };
        let packed = if is_awq { [inputs, outputs / 8] } else { [inputs / 8, outputs] };
        push("qweight", Dtype::I32, packed, codes);
        let mut zeros = along_outputs(groups, &zero);
        if method == "gptq" {
            // The first version subtracts 1 from each half of whole words.
            for word in zeros.as_chunks_mut::<4>().0 {
                *word = u32::from_le_bytes(*word).wrapping_sub(0x1111_1111).to_le_bytes();
            }
        }
        push("qzeros", Dtype::I32, [groups, outputs / 8], zeros);
        let scales =
            (0..groups * outputs).flat_map(|index| scale(index % outputs, index / outputs).to_le_bytes());
        push("scales", Dtype::F32, [groups, outputs], scales.collect());
        if !is_awq {
            let order = bytes((0..inputs).map(|input| (input / GROUP) as u32).collect());
            tensors.push((format!("{layer}.g_idx"), Dtype::I32, vec![inputs], order));
        }
    });
}

#[test]
fn matrices_of_gptq_and_awq_are_read() {
    let expected = {
        let copy = Copy::of(LLAMA);
        quantise_in_groups(&copy, DOWN, "", true);
        logits(&copy)
    };
    let layer = DOWN.strip_suffix(".weight").expect("a matrix");
    for method in ["gptq", "gptq_v2", "awq"] {
        let copy = Copy::of(LLAMA);
        quantise_in_groups(&copy, DOWN, method, false);
        assert_eq!(copy.check(), Ok(Vec::new()), "{method}");
        assert!(logits(&copy) == expected, "{method}");
        assert!(decoded_logits(&copy) == *expected.as_ref().expect("it loads"), "{method}");
        for part in ["qzeros", "scales"] {
            let copy = Copy::of(LLAMA);
            quantise_in_groups(&copy, DOWN, method, false);
            copy.edit(|tensors| tensors.retain(|(name, ..)| *name != format!("{layer}.{part}")));
            let error = logits(&copy).expect_err("it is refused");
            assert!(error.contains(&format!("{layer}.{part}")) && error.contains("it is missing"), "{error}");
        }
    }
    // As many words in another arrangement.
    let copy = Copy::of(LLAMA);
    quantise_in_groups(&copy, DOWN, "awq", false);
    copy.edit(|tensors| {
        let name = format!("{layer}.qweight");
        let (.., shape, _) = tensors.iter_mut().find(|(found, ..)| *found == name).expect("the codes");
        shape.reverse();
    });
    let error = logits(&copy).expect_err("it is refused");
    assert!(error.contains(&format!("{layer}.qweight")) && error.contains("its shape is "), "{error}");
    let awq = json!({"quant_method": "awq", "bits": 4, "group_size": 16, "checkpoint_format": "gemv"});
    copy.configure(&json!({"quantization_config": awq}));
    copy.check_refused(&["quantised (awq)"]);
    let copy = Copy::of(LLAMA);
    quantise_in_groups(&copy, DOWN, "gptq", false);
    copy.edit(|tensors| {
        let name = format!("{layer}.g_idx");
        let (.., bytes) = tensors.iter_mut().find(|(found, ..)| *found == name).expect("the order");
        bytes.swap(0, 4 * 20);
    });
    let error = logits(&copy).expect_err("it is refused");
    assert!(
        error.contains("in the order of their activations") && error.contains("without `desc_act`"),
        "{error}"
    );
    copy.configure(&json!({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": true}}));
    copy.check_refused(&["quantised (gptq)"]);
    copy.configure(&json!({"quantization_config": {"quant_method": "gptq", "bits": 3, "group_size": 16}}));
    copy.check_refused(&["quantised (gptq)"]);
}

/// Checks the error after an edit of the parts of a matrix.
fn check_refused(model: &str, edit: impl FnOnce(&mut Vec<Stored>), parts: &[&str]) {
    let copy = Copy::of(model);
    copy.edit(edit);
    let error = logits(&copy).expect_err("it is refused");
    parts.iter().for_each(|part| assert!(error.contains(part), "{error}\nhas not: {part}"));
}

fn bytes_of<'a>(tensors: &'a mut [Stored], part: &str) -> &'a mut Stored {
    let name = format!("{DOWN}{part}");
    tensors.iter_mut().find(|(found, ..)| *found == name).expect("the matrix has the part")
}

#[test]
fn matrices_that_were_cut_or_changed_are_refused() {
    let not_finite = "a scale or a number of its table is not finite";
    for (model, part) in
        [(NF4, ".quant_map"), (NF4, ".nested_quant_map"), (NF4, ".nested_absmax"), (FP4, ".absmax")]
    {
        let spoil = |tensors: &mut Vec<Stored>| {
            bytes_of(tensors, part).3[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        };
        check_refused(model, spoil, &["model.safetensors", DOWN, not_finite, "copy or download"]);
        let remove =
            |tensors: &mut Vec<Stored>| tensors.retain(|(name, ..)| *name != format!("{DOWN}{part}"));
        check_refused(model, remove, &[&format!("{DOWN}{part}"), "it is missing"]);
        let shorten = |tensors: &mut Vec<Stored>| {
            let (_, _, shape, bytes) = bytes_of(tensors, part);
            bytes.extend([0; 4]);
            shape[0] += 1;
        };
        check_refused(model, shorten, &[DOWN]);
    }
    let cut = |tensors: &mut Vec<Stored>| {
        let (_, _, shape, bytes) = bytes_of(tensors, "");
        bytes.truncate(5630);
        *shape = vec![5630, 1];
    };
    check_refused(NF4, cut, &[DOWN, "its elements need 5632 bytes"]);
    let copy = Copy::of(NF4);
    copy.edit(cut);
    copy.check_refused(&["its elements need 5632 bytes"]);
}

#[test]
fn descriptions_that_are_not_known_are_refused() {
    let state = ".quant_state.bitsandbytes__nf4";
    for (change, part) in [
        (json!({"quant_type": "nf3"}), "it describes `nf3`"),
        (json!({"blocksize": 0}), "in blocks of 0"),
        (json!({"shape": [64, 175]}), "its shape is [64, 175], and the configuration asks for [64, 176]"),
        (json!({"nested_blocksize": 0}), "nf4 and fp4 are read"),
        (json!({"blocksize": null}), "it is not the description of a matrix"),
        (json!({"nested_offset": 1e300}), "is not finite"),
    ] {
        let edit = |tensors: &mut Vec<Stored>| {
            let (_, _, shape, bytes) = bytes_of(tensors, state);
            let mut json: Value = serde_json::from_slice(bytes).expect("JSON");
            json.as_object_mut().expect("a table").extend(change.as_object().expect("a table").clone());
            *bytes = json.to_string().into_bytes();
            shape[0] = bytes.len();
        };
        check_refused(NF4, edit, &[DOWN, part]);
    }
}

/// The quantised matrices of GPT-2 have the order of linear layers.
#[test]
fn a_quantised_conv1d_is_transposed() {
    let copy = Copy::of(GPT2);
    quantise(&copy, "transformer.h.1.mlp.c_fc.weight");
    let error = logits(&copy).expect_err("it is refused");
    assert!(error.contains("its shape is [16, 64], and the configuration asks for [64, 16]"), "{error}");
    let copy = Copy::of(GPT2_NF4);
    let config = ModelConfig::read(copy.dir()).expect("a model");
    let stage = hf::load_stage(copy.dir(), &*config, 0..config.layers(), Place::from(Device::flex()));
    let folder = TempDir::new().expect("a folder");
    let [decoded, again] = ["decoded", "again"].map(|name| folder.path().join(name));
    hf::save(&decoded, &*config, &[&stage.expect("it loads")]).expect("it is written");
    // The largest element of each block is the same, and so are all codes.
    let quantised = hf::quantise(&decoded, &*config, &again).expect("it is written");
    assert_eq!(quantised.matrices, 8);
    let ours = Copy::of(&again.display().to_string()).tensors();
    for (name, dtype, shape, bytes) in Copy::of(GPT2_NF4).tensors() {
        let own = ours.iter().find(|(own, ..)| *own == name).expect("the same names");
        let is_state = name.contains(".quant_state.");
        assert!(own.1 == dtype && (is_state || own.2 == shape), "{name}");
        let is_scale = name.ends_with("absmax") || name.contains(".nested_");
        assert!(is_state || is_scale || own.3 == bytes, "{name}");
    }
}

#[test]
fn memory_counts_the_bytes_of_quantised_matrices() {
    let config = ModelConfig::read(NF4.as_ref()).expect("a model");
    let specs = config.parameters().expect("it has layers");
    let sizes = hf::quantised_sizes(NF4.as_ref(), &specs).expect("they are known");
    let lora = LoraConfig { rank: 2, ..LoraConfig::default() };
    let adapter = Adapter { lora, start: AdapterStart::Seed(1) };
    let model = CutModel::from(config).with_adapter(adapter).expect("it has layers");
    let rule = StateRule {
        optimizer: OptimizerState::TwoMoments,
        precision: pipewright::tensor::Precision::Bf16,
        is_corrected: false,
    };
    let parameters = |model: &CutModel| rule.of_layers(model).expect("known")[1].parameters;
    let elements = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 176;
    let halves = parameters(&model);
    let model = model.with_quantised(sizes);
    let quantised = parameters(&model);
    // Half a byte for each element, a byte for each 64, and a table with a number or two for each matrix.
    let bytes = elements / 2 + elements / 64 + 7 * 4 * 256 + 4 * 7;
    assert_eq!(halves - quantised, 2 * elements - bytes);
    // A part of the inputs has all scales, because they are quantised further.
    let rank = TensorParallel::unconnected(TensorRank { index: 0, of: 2 });
    let specs = model.outline(1..2, &rank).expect("a block");
    let bytes = |name: &str| {
        let spec = specs.iter().find(|spec| spec.path == format!("model.layers.0.{name}.weight"));
        spec.expect("it has the matrix").quantised_bytes
    };
    assert_eq!(bytes("mlp.up_proj"), Some(64 * 88 / 2 + (176 + 4) / 2 + 4 * 256));
    assert_eq!(bytes("mlp.down_proj"), Some(64 * 88 / 2 + 176 + 4 + 4 * 256));
}

/// The rows of joined projections have 32 elements, and blocks 64, so they stay as they are.
#[test]
fn joined_projections_are_quantised_if_blocks_end_with_their_rows() {
    let folder = TempDir::new().expect("a folder");
    let (from, to) = (Copy::of(PHI3), folder.path().join("nf4"));
    let config = ModelConfig::read(from.dir()).expect("a model");
    hf::quantise(from.dir(), &*config, &to).expect("it is written");
    let found = Copy::of(&to.display().to_string());
    let is_quantised = |name: &str| {
        found.tensors().iter().any(|(found, ..)| *found == format!("model.layers.0.{name}.weight.absmax"))
    };
    let names = ["self_attn.qkv_proj", "mlp.gate_up_proj", "self_attn.o_proj", "mlp.down_proj"];
    assert_eq!(names.map(is_quantised), [false, false, true, true]);
    assert!(logits(&found) == Ok(decoded_logits(&found)));
}

/// bitsandbytes has made the quantised model from the other one.
#[test]
fn a_model_is_quantised_as_bitsandbytes_does() {
    let folder = TempDir::new().expect("a folder");
    let (from, to) = (Copy::of(LLAMA), folder.path().join("nf4"));
    let config = ModelConfig::read(from.dir()).expect("a model");
    let quantised = hf::quantise(from.dir(), &*config, &to).expect("it is written");
    assert_eq!(quantised.matrices, 56);
    assert!((0.07..0.1).contains(&quantised.error), "{quantised:?}");
    let found = Copy::of(&to.display().to_string());
    assert_eq!(found.check(), Ok(Vec::new()));
    let theirs = Copy::of(NF4).tensors();
    let ours = found.tensors();
    assert_eq!(ours.len(), theirs.len());
    let (mut different, mut scales) = (0, 0);
    for (name, dtype, shape, bytes) in &theirs {
        let (_, own_dtype, own_shape, own) =
            ours.iter().find(|(own, ..)| own == name).expect("the same names");
        if name.contains(".quant_state.") {
            let [own, theirs] = [own, bytes].map(|text| {
                let mut state: Value = serde_json::from_slice(text).expect("JSON");
                let offset = state["nested_offset"].take().as_f64().expect("a number");
                (state, offset)
            });
            assert_eq!(own.0, theirs.0, "{name}");
            assert!((own.1 - theirs.1).abs() < 1e-8, "{name}");
            continue;
        }
        assert_eq!((own_dtype, own_shape), (dtype, shape), "{name}");
        if *dtype == Dtype::F32 {
            // The mean of the scales has another last bit, and so have the differences from it.
            let floats = |bytes: &[u8]| {
                bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes).collect::<Vec<_>>()
            };
            for (own, theirs) in floats(own).into_iter().zip(floats(bytes)) {
                let bound = (1.3e-7 * theirs.abs()).max(1e-8);
                assert!((own - theirs).abs() <= bound, "{name}: {own} {theirs}");
            }
        } else if name.ends_with(".absmax") {
            // A difference between two numbers of bytes may be rounded to the other one.
            assert!(own.iter().zip(bytes).all(|(own, theirs)| own.abs_diff(*theirs) <= 1), "{name}");
            different += own.iter().zip(bytes).filter(|(own, theirs)| own != theirs).count();
            scales += own.len();
        } else {
            assert!(own == bytes, "{name}");
        }
    }
    assert!(400 * different <= scales, "{different} of {scales} scales differ");
    assert!(logits(&found).is_ok());
    let again = hf::quantise(&to, &*config, &folder.path().join("again")).expect_err("it is quantised");
    assert!(again.to_string().contains("quantised already"), "{again}");
    let vacant = hf::quantise(from.dir(), &*config, &to).expect_err("it is not empty");
    assert!(vacant.to_string().contains("not empty"), "{vacant}");
}
