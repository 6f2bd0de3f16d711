//! Writes the model of a directory with matrices that are quantised as NF4, in the form of bitsandbytes
//! ([`bitsandbytes`](super::bitsandbytes)), tensor by tensor. All other tensors are copied as they are. Tensors of a GGUF file get
//! the names and the order of safetensors, and the ones in blocks are decoded to bfloat16.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use burn::tensor::Device;
use pipewright_kernel::quantised::nf4::{self, BLOCK, NESTED_BLOCK, NF4};
use pipewright_kernel::quantised::{Codebook, Form, QuantisedMatrix, Scales};
use safetensors::Dtype;
use serde_json::{Value, json};

use super::directory::is_gguf;
use super::json_file::read_json;
use super::layout::{CONFIG, file_shape, outputs_first, to_file};
use super::origin::{copy_files, with_original_keys};
use super::rewritten::{Announced, rewrite};
use super::weight_type::WeightType;
use super::weights::Weights;
use super::write::{Scratch, require_vacant};
use crate::error::ModelError;
use crate::family::{ModelFamily, file_json};
use crate::lora::SCORE;
use crate::mamba::is_projection_of_mamba;
use crate::outline::Outline;
use crate::parameter::{ParameterKind, ParameterSource, ParameterSpec};
use crate::split::Place;
use crate::vocabulary::HEAD;

/// The length of the description of a matrix, with spaces at the end. The number in it has up to 25 digits.
const STATE_BYTES: usize = 256;

/// What was quantised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quantised {
    /// The number of matrices.
    pub matrices: usize,
    /// The bytes of all tensors before.
    pub before: u64,
    /// The bytes of all tensors after.
    pub after: u64,
    /// The root of the sum of the squares of the errors of the matrices' elements, divided by the norm of the elements.
    pub error: f64,
}

/// Writes the model in `from` with quantised matrices of linear layers into `dir`, which must not exist or must be
/// empty. The embedding, the head, norms, routers, the experts that routers choose and Mamba-2 stay as they are. The
/// errors of matrices of a GGUF file count from their decoded elements.
///
/// # Errors
/// When a file of the model is missing or damaged, its matrices are quantised already or none can be, or when the
/// system reports an error.
pub fn quantise(from: &Path, config: &dyn ModelFamily, dir: &Path) -> Result<Quantised, ModelError> {
    let target = std::path::absolute(dir).map_err(ModelError::io("resolve", dir))?;
    require_vacant(&target)?;
    let mut weights = Weights::open(from)?;
    let is_gguf = is_gguf(weights.directory());
    if weights.has_quantised() && !is_gguf {
        return Err(ModelError::at(
            from,
            "the model is quantised already: name the model from which it was made",
        ));
    }
    let mut others = if is_gguf { others(&mut weights, config)? } else { BTreeMap::new() };
    let matrices = matrices(&weights, config)?;
    others.retain(|tensor, _| !matrices.contains_key(tensor));
    if matrices.is_empty() {
        return Err(ModelError::at(
            from,
            "the model has no matrix that can be quantised: its family has no such layers",
        ));
    }
    let mut scratch = Scratch::create(&target)?;
    let mut squares = [0.0; 2];
    let [before, after] = rewrite(
        &mut weights,
        &scratch,
        |(tensor, ..)| match (matrices.get(tensor), others.get(tensor)) {
            (Some(spec), _) => Some(parts(tensor, file_shape(spec).iter().product())),
            (_, Some(other)) => Some(other.announced().into_iter().collect()),
            _ => None,
        },
        |weights, tensor| {
            let Some(spec) = matrices.get(tensor) else {
                let other = others.get(tensor).map(|other| other.bytes(weights).map(Vec::from_iter));
                return other.transpose();
            };
            let (own, parts) = quantised(weights, tensor, spec)?;
            squares = [squares[0] + own[0], squares[1] + own[1]];
            Ok(Some(parts.into()))
        },
    )?;
    scratch.write_json(CONFIG, &described(weights.directory(), config, &matrices)?)?;
    copy_files(weights.directory(), scratch.path())?;
    require_vacant(&target)?;
    scratch.rename_to(&target)?;
    let error = (squares[0] / squares[1].max(f64::MIN_POSITIVE)).sqrt();
    Ok(Quantised { matrices: matrices.len(), before, after, error })
}

/// A tensor of a GGUF file that is not quantised, with its element type in the new file; nothing is written of a tensor without a
/// parameter.
struct Other(Option<(ParameterSpec, WeightType)>);

impl Other {
    fn announced(&self) -> Option<Announced> {
        let (spec, kind) = self.0.as_ref()?;
        let shape = file_shape(spec);
        let bytes = shape.iter().product::<usize>() * kind.bytes();
        Some((spec.path.clone(), kind.dtype(), shape, bytes))
    }

    fn bytes(&self, weights: &mut Weights) -> Result<Option<Vec<u8>>, ModelError> {
        let Some((spec, kind)) = &self.0 else { return Ok(None) };
        let values = to_file(spec, &weights.parameter(spec)?);
        let too_large =
            || ModelError::new(format!("tensor `{}` is too large for {}", spec.path, kind.name()));
        kind.encode(&values).ok_or_else(too_large).map(Some)
    }
}

/// Returns all tensors of a GGUF file.
fn others(weights: &mut Weights, config: &dyn ModelFamily) -> Result<BTreeMap<String, Other>, ModelError> {
    let mut others: BTreeMap<String, Other> =
        weights.tensors().map(|tensor| (tensor.to_owned(), Other(None))).collect();
    for spec in config.outline(0..config.layers(), &Default::default())? {
        let (place, file) = weights.find(&spec)?;
        let kind = weights.file(file)?.element_type(&place.tensor).unwrap_or(WeightType::Bfloat16);
        others.insert(place.tensor, Other(Some((spec, kind))));
    }
    Ok(others)
}

/// Returns the matrices that are quantised, by the tensor that has them.
fn matrices(
    weights: &Weights,
    config: &dyn ModelFamily,
) -> Result<BTreeMap<String, ParameterSpec>, ModelError> {
    let mut outline = Outline::default();
    config.build_stage(0..config.layers(), &mut outline, &Place::from(Device::flex()))?;
    let paths: BTreeSet<&String> = outline.matrices.iter().collect();
    let mut found = BTreeMap::new();
    for spec in outline.specs.iter().filter(|spec| paths.contains(&spec.path) && is_of_layer(spec)) {
        // Rows of a joined projection are read one by one, so that blocks must end with them.
        let has_whole_blocks = spec.shape[0].is_multiple_of(BLOCK);
        let is_mixed = spec.layout.parts.is_some() && !has_whole_blocks;
        if spec.layout.entry.is_some() || is_mixed {
            continue;
        }
        let (place, _) = weights.find(spec)?;
        found.insert(place.tensor, spec.clone());
    }
    Ok(found)
}

/// Returns whether a parameter is a matrix of a layer that is quantised.
fn is_of_layer(spec: &ParameterSpec) -> bool {
    let is_of_head = spec.path.strip_suffix(".weight").is_some_and(|path| [HEAD, SCORE].contains(&path));
    spec.kind == ParameterKind::Matrix
        && !is_of_head
        && !spec.is_of_routed_expert()
        && !is_projection_of_mamba(&spec.path)
}

/// Returns the tensors of a quantised matrix of `count` elements, in their order in a file.
fn parts(tensor: &str, count: usize) -> Vec<Announced> {
    let named = |part: &str| format!("{tensor}.{part}");
    let (blocks, nested) = (count.div_ceil(BLOCK), count.div_ceil(BLOCK).div_ceil(NESTED_BLOCK));
    vec![
        (tensor.to_owned(), Dtype::U8, vec![count.div_ceil(2), 1], count.div_ceil(2)),
        (named("absmax"), Dtype::U8, vec![blocks], blocks),
        (named("nested_absmax"), Dtype::F32, vec![nested], 4 * nested),
        (named("nested_quant_map"), Dtype::F32, vec![256], 4 * 256),
        (named("quant_map"), Dtype::F32, vec![16], 4 * 16),
        (named("quant_state.bitsandbytes__nf4"), Dtype::U8, vec![STATE_BYTES], STATE_BYTES),
    ]
}

/// Quantises a matrix. Returns the sums of the squares of its errors and elements, and the bytes of its [`parts`].
fn quantised(
    weights: &mut Weights,
    tensor: &str,
    spec: &ParameterSpec,
) -> Result<([f64; 2], [Vec<u8>; 6]), ModelError> {
    let elements = weights.parameter(spec)?;
    let spec = &outputs_first(spec);
    let shape = file_shape(spec);
    let file = weights.file_of(tensor)?;
    let path = weights.path_of(&file);
    let kind = weights.file(file)?.element_type(tensor).unwrap_or(WeightType::Bfloat16);
    let elements = to_file(spec, &elements);
    let codebook = nf4::quantise(&elements, [shape[0], shape[1]]);
    let codebook: Codebook =
        codebook.map_err(|source| ModelError::at(&path, format!("tensor `{tensor}`")).because(source))?;
    let Scales::Double(scales) = codebook.scales() else { unreachable!("scales are quantised") };
    let floats =
        |numbers: &[f32]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
    let state = json!({
        "quant_type": "nf4", "blocksize": BLOCK, "dtype": kind.name(), "shape": shape,
        "nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": f64::from(scales.offset),
    });
    let mut state = state.to_string().into_bytes();
    state.resize(STATE_BYTES, b' ');
    let parts = [
        codebook.codes().to_vec(),
        scales.codes.clone(),
        floats(&scales.scales),
        floats(&*scales.map),
        floats(&NF4),
        state,
    ];
    let decoded = QuantisedMatrix::new(shape[0], Form::Codebook(codebook)).decoded();
    let square = |number: f32| f64::from(number) * f64::from(number);
    let errors = elements.iter().zip(&decoded).map(|(element, decoded)| square(element - decoded)).sum();
    Ok(([errors, elements.iter().copied().map(square).sum()], parts))
}

/// Returns the `config.json` of the model with a description of the quantisation.
fn described(
    from: &Path,
    config: &dyn ModelFamily,
    matrices: &BTreeMap<String, ParameterSpec>,
) -> Result<Value, ModelError> {
    let mut json: Value = read_json(&from.join(CONFIG))?;
    if is_gguf(from) {
        json = with_original_keys(file_json(config), from, config.family().renamed)?;
        json["dtype"] = WeightType::Bfloat16.name().into();
    }
    let quantised: BTreeSet<&str> = matrices.values().map(|spec| &*spec.path).collect();
    let specs = config.outline(0..config.layers(), &Default::default())?;
    let others = specs.iter().filter(|spec| {
        spec.kind == ParameterKind::Matrix && !quantised.contains(&*spec.path) && !spec.is_of_routed_expert()
    });
    let mut skipped: Vec<String> =
        others.filter_map(|spec| spec.path.strip_suffix(".weight").map(str::to_owned)).collect();
    // A tied head is a linear layer of transformers too, and so is the head of labels.
    let head = if config.labels().is_empty() { HEAD } else { SCORE };
    if !skipped.iter().any(|layer| layer == head) {
        skipped.push(head.to_owned());
    }
    let kind = json["dtype"].as_str().or(json["torch_dtype"].as_str()).unwrap_or("float32").to_owned();
    json["quantization_config"] = json!({
        "_load_in_4bit": true,
        "_load_in_8bit": false,
        "bnb_4bit_compute_dtype": kind,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": true,
        "llm_int8_enable_fp32_cpu_offload": false,
        "llm_int8_has_fp16_weight": false,
        "llm_int8_skip_modules": skipped,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": true,
        "load_in_8bit": false,
        "quant_method": "bitsandbytes",
    });
    Ok(json)
}
