//! Quantised models of each form, in which numbers of the parts of a matrix, of their descriptions and of the header of the file
//! were changed: each is read or refused with a sentence that names the file.

use std::fs;

use safetensors::Dtype;
use serde_json::{Value, json};

use super::model_copy::Copy;
use super::quantised::{DOWN, LLAMA, NF4, logits, quantise, quantise_in_eight_bits, quantise_in_groups};
use super::quantised_experts::MXFP4;

/// Returns numbers below a bound, in no order.
fn random(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed | 1;
    move |below| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 16) as usize % below
    }
}

/// Returns a model of each form, with the beginning of the names of the tensors of one quantised matrix.
fn models() -> Vec<(&'static str, Copy)> {
    let layer = DOWN.strip_suffix(".weight").expect("a matrix");
    let of = |quantise: &dyn Fn(&Copy)| {
        let copy = Copy::of(LLAMA);
        quantise(&copy);
        copy
    };
    let mut models = vec![
        (DOWN, Copy::of(NF4)),
        (DOWN, of(&|copy| quantise(copy, DOWN))),
        (DOWN, of(&|copy| quantise_in_eight_bits(copy, DOWN, [16, 32]))),
    ];
    models.push(("model.layers.1.mlp.experts.down_proj", Copy::of(MXFP4)));
    models.extend(
        ["gptq", "awq"].map(|method| (layer, of(&|copy| quantise_in_groups(copy, DOWN, method, false)))),
    );
    models
}

/// Checks that a model is read, or refused with a sentence that names a file.
fn check(copy: &Copy, what: &str) {
    let Err(error) = logits(copy) else { return };
    let names = ["model.safetensors", "config.json", "model.layers"];
    assert!(names.iter().any(|name| error.contains(name)), "{what}: {error}");
    assert!(!error.contains("panicked"), "{what}: {error}");
}

#[test]
fn spoiled_parts_of_matrices_are_refused_in_a_sentence() {
    let mut next = random(3);
    let floats = [f32::NAN, f32::INFINITY, f32::MAX, -0.0, 1e-45];
    for (index, (matrix, copy)) in models().iter().enumerate() {
        let sound = copy.tensors();
        let parts: Vec<usize> = (0..sound.len()).filter(|&part| sound[part].0.starts_with(matrix)).collect();
        for round in 0..60 {
            let mut tensors = sound.clone();
            let part = parts[next(parts.len())];
            let (name, dtype, shape, bytes) = &mut tensors[part];
            let what = format!("model {index}, round {round}, {name}");
            match next(5) {
                // A number that is not finite or very large.
                0 if bytes.len() >= 4 => {
                    let place = next(bytes.len() / 4) * 4;
                    bytes[place..place + 4].copy_from_slice(&floats[next(floats.len())].to_le_bytes());
                }
                // Another shape with as many elements.
                1 => shape.push(1),
                2 => shape.reverse(),
                // Another element type.
                3 if *dtype != Dtype::U8 => {
                    *shape = vec![bytes.len()];
                    *dtype = Dtype::U8;
                }
                // Fewer elements.
                _ => {
                    let size = bytes.len() / shape.iter().product::<usize>();
                    let count = next(shape.iter().product());
                    *shape = vec![count];
                    bytes.truncate(count * size);
                }
            }
            copy.store("model.safetensors", &tensors);
            check(copy, &what);
        }
    }
}

#[test]
fn spoiled_descriptions_are_refused_in_a_sentence() {
    let mut next = random(5);
    let values = [
        json!(0),
        json!(-1),
        json!(1),
        json!(3),
        json!(1u64 << 62),
        json!(u64::MAX),
        json!(1e300),
        json!(0.5),
        json!(null),
        json!("x"),
        json!([]),
        json!([0, 0]),
        json!([1u64 << 40, 1u64 << 40]),
        json!({}),
        json!(true),
    ];
    for (index, (matrix, copy)) in models().iter().enumerate() {
        let sound = copy.tensors();
        let config: Value =
            serde_json::from_slice(&fs::read(copy.path("config.json")).expect("a file")).expect("JSON");
        for round in 0..40 {
            // The description is in the file of the weights, or in config.json.
            let state =
                sound.iter().position(|(name, ..)| name.starts_with(matrix) && name.contains("quant_state"));
            let value = values[next(values.len())].clone();
            let spoil = |description: &mut Value, key: usize| {
                let description = description.as_object_mut().expect("a table");
                let key = description.keys().nth(key % description.len()).expect("a key").clone();
                description.insert(key.clone(), value.clone());
                format!("model {index}, round {round}: `{key}` is {value}")
            };
            let key = next(32);
            let what = match state {
                Some(state) => {
                    let mut tensors = sound.clone();
                    let (.., shape, bytes) = &mut tensors[state];
                    let mut json: Value = serde_json::from_slice(bytes).expect("JSON");
                    let what = spoil(&mut json, key);
                    *bytes = json.to_string().into_bytes();
                    *shape = vec![bytes.len()];
                    copy.store("model.safetensors", &tensors);
                    what
                }
                None => {
                    let mut config = config.clone();
                    let what = spoil(&mut config["quantization_config"], key);
                    copy.write("config.json", config.to_string());
                    what
                }
            };
            check(copy, &what);
        }
    }
}

#[test]
fn spoiled_headers_are_refused_in_a_sentence() {
    let mut next = random(7);
    let copy = Copy::of(NF4);
    let whole = fs::read(copy.path("model.safetensors")).expect("a file");
    let length = u64::from_le_bytes(whole[..8].try_into().expect("eight bytes")) as usize;
    let header = String::from_utf8(whole[8..8 + length].to_vec()).expect("JSON");
    let digits: Vec<usize> =
        header.char_indices().filter(|(_, char)| char.is_ascii_digit()).map(|(place, _)| place).collect();
    for round in 0..150 {
        let mut bytes = whole.clone();
        match round % 5 {
            0 => bytes.truncate(next(whole.len())),
            1 => {
                let number = [0, 1, 7, 1 << 20, 1 << 40, u64::MAX][next(6)];
                bytes[..8].copy_from_slice(&number.to_le_bytes());
            }
            _ => bytes[8 + digits[next(digits.len())]] = b'0' + next(10) as u8,
        }
        fs::write(copy.path("model.safetensors"), bytes).expect("it is writable");
        check(&copy, &format!("round {round}"));
    }
}
