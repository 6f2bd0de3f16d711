//! Writes models and adapters as GGUF files, tensor by tensor.
//!
//! ```text
//! f32, f16, bf16   matrices in this type, vectors in single precision
//! q8_0             matrices whose rows are a multiple of 32 elements
//! q4_k             the same for 256, and the embedding and the head as Q6_K; other rows as q8_0, and those as f16
//! ```

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use pipewright::bounded_file::SMALL_TEXT;
use pipewright::nn::TensorParallel;
use pipewright::train::data::SpecialTokens;
use pipewright_gguf::config::ModelMetadata;
use pipewright_gguf::write::{Entry, header, padding};
use pipewright_gguf::{
    TensorKind, config, files, name_in_gguf, offset_in_gguf, rows_in_gguf, tokenizer_metadata,
};
use pipewright_kernel::quantised::block_codes::quantise;
use pipewright_kernel::quantised::{BlockKind, Form, QuantisedMatrix};
use serde_json::Value;

use super::directory::resolve;
use super::json_file::{parse, read_bytes};
use super::layout::{file_shape, outputs_first, to_file};
use super::origin::{TOKENIZER, WeightTypes, with_original_keys};
use super::quantise::Quantised;
use super::weight_type::WeightType;
use super::weights::Weights;
use super::write::{Scratch, require_vacant};
use crate::error::ModelError;
use crate::family::{ModelFamily, file_json};
use crate::lora::LoraConfig;
use crate::parameter::{ParameterSource, ParameterSpec};

/// The file in a folder that is written.
const FILE: &str = "model.gguf";
/// The largest file of a tokenizer that is read.
const LARGEST_TOKENIZER: u64 = 1 << 29;
/// The parts of adapters, with the ends of their names in GGUF.
const ADAPTERS: [(&str, &str); 2] = [(".lora_A.weight", "lora_a"), (".lora_B.weight", "lora_b")];

/// The matrices that are in single precision in every form: routers and vectors of positions.
const SMALL: [&str; 2] = ["ffn_gate_inp", "position_embd"];

/// Returns whether a matrix is in single precision in every form.
fn is_small(name: &str) -> bool {
    SMALL.iter().any(|small| name.contains(small))
}

/// The form of the matrices in a GGUF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufForm {
    /// One type for all matrices.
    Plain(WeightType),
    /// Eight bits.
    Q8_0,
    /// Four bits.
    Q4K,
}

impl GgufForm {
    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain(kind) => kind.name(),
            Self::Q8_0 => "q8_0",
            Self::Q4K => "q4_k",
        }
    }

    /// Returns the number that other programs show for the whole file.
    fn number(self) -> u32 {
        match self {
            Self::Plain(WeightType::Float32) => 0,
            Self::Plain(WeightType::Float16) => 1,
            Self::Plain(WeightType::Bfloat16) => 32,
            Self::Q8_0 => 7,
            Self::Q4K => 14,
        }
    }

    /// Returns the type of a tensor.
    fn kind_of(self, name: &str, shape: &[usize]) -> TensorKind {
        let columns = shape.last().copied().unwrap_or(0);
        let fits = |kind: &BlockKind| columns.is_multiple_of(kind.elements());
        if shape.len() == 1 || is_small(name) {
            return TensorKind::F32;
        }
        let is_table = ["token_embd.weight", "output.weight"].contains(&name);
        let wanted: &[BlockKind] = match self {
            Self::Plain(WeightType::Float32) => return TensorKind::F32,
            Self::Plain(WeightType::Float16) => return TensorKind::F16,
            Self::Plain(WeightType::Bfloat16) => return TensorKind::Bf16,
            Self::Q8_0 => &[BlockKind::Q8_0],
            Self::Q4K if is_table => &[BlockKind::Q6K, BlockKind::Q8_0],
            Self::Q4K => &[BlockKind::Q4K, BlockKind::Q8_0],
        };
        wanted.iter().copied().find(fits).map_or(TensorKind::F16, TensorKind::Blocks)
    }
}

/// The written file.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufWritten {
    /// The file.
    pub path: PathBuf,
    /// The form of most matrices.
    pub form: GgufForm,
    /// The quantised matrices, with their errors.
    pub quantised: Quantised,
    /// The matrices in another form, because their rows are not whole blocks.
    pub others: usize,
    /// Whether the file has a tokenizer.
    pub has_tokenizer: bool,
}

/// A tensor of the file.
struct Planned {
    name: String,
    kind: TensorKind,
    shape: Vec<usize>,
    /// The tensor of the model whose order of rows it has.
    like: String,
    /// The parameters in it, one for each expert.
    specs: Vec<ParameterSpec>,
}

/// The facts of the model that the order of rows depends on.
struct Order {
    architecture: &'static str,
    heads: [usize; 2],
}

impl Order {
    fn of(architecture: &'static str, json: &Value) -> Self {
        let count = |key: &str| json[key].as_u64().and_then(|count| usize::try_from(count).ok());
        let heads = count("num_attention_heads").unwrap_or(1);
        Self { architecture, heads: [heads, count("num_key_value_heads").unwrap_or(heads)] }
    }
}

/// Writes the model in `from` as a GGUF file with quantised matrices.
///
/// # Errors
/// When a file of the model is missing or damaged, its matrices are quantised already, GGUF has no such model, or the system
/// reports an error.
pub fn quantise_gguf(
    from: &Path,
    config: &dyn ModelFamily,
    form: GgufForm,
    out: &Path,
) -> Result<GgufWritten, ModelError> {
    let mut weights = Weights::open(from)?;
    if weights.has_quantised() {
        let fault = "the model is quantised already: name the model from which it was made";
        return Err(ModelError::at(from, fault));
    }
    let folder = resolve(from)?;
    let mut before = 0;
    for tensor in weights.tensors().map(str::to_owned).collect::<Vec<_>>() {
        before += weights.describe(&tensor)?.2 as u64;
    }
    let mut written = write_gguf(&mut weights, config, Some(&folder), form, out)?;
    written.quantised.before = before;
    Ok(written)
}

/// Returns the form in which a run's model is written if none is asked for.
pub(crate) fn form_of(origin: Option<&Path>) -> Result<GgufForm, ModelError> {
    let types = origin.map(WeightTypes::read).transpose()?.unwrap_or_default();
    Ok(GgufForm::Plain(types.default))
}

/// Writes the parameters of any source as a GGUF file, with the tokenizer and the keys of the folder `origin`.
pub(crate) fn write_gguf(
    source: &mut dyn ParameterSource,
    config: &dyn ModelFamily,
    origin: Option<&Path>,
    form: GgufForm,
    out: &Path,
) -> Result<GgufWritten, ModelError> {
    if !config.labels().is_empty() {
        return Err(ModelError::new("GGUF has no head of labels here: write a Hugging Face directory"));
    }
    let mut json = file_json(config);
    if let Some(origin) = origin {
        json = with_original_keys(json, origin, config.family().renamed)?;
    }
    let ModelMetadata { architecture, mut entries, frequencies } =
        config::metadata(&json).map_err(ModelError::new)?;
    entries.push(("general.type".to_owned(), Entry::Text("model".to_owned())));
    entries.push(("general.file_type".to_owned(), Entry::U32(form.number())));
    entries.push(("general.quantization_version".to_owned(), Entry::U32(2)));
    let tokenizer =
        origin.map(|origin| tokenizer_entries(origin, config.vocab_size())).transpose()?.unwrap_or_default();
    let has_tokenizer = !tokenizer.is_empty();
    entries.extend(tokenizer);
    let mut planned: Vec<Planned> = Vec::new();
    let mut places = HashMap::new();
    for spec in config.outline(0..config.layers(), &TensorParallel::default())? {
        let Some((name, expert)) = name_in_gguf(architecture, spec.tensor()) else {
            return Err(ModelError::new(format!(
                "tensor `{}` has no name in GGUF: write a Hugging Face directory",
                spec.tensor()
            )));
        };
        let place = *places.entry(name.clone()).or_insert_with(|| {
            let (like, shape) = (name.clone(), file_shape(&outputs_first(&spec)));
            planned.push(Planned { kind: form.kind_of(&name, &shape), name, shape, like, specs: Vec::new() });
            planned.len() - 1
        });
        let tensor = &mut planned[place];
        // A head that is tied to the embedding is the same tensor.
        if expert.is_none() && !tensor.specs.is_empty() {
            continue;
        }
        tensor.specs.push(spec);
        if expert.is_some() {
            let count = tensor.specs.len();
            let matrix = tensor.shape[tensor.shape.len() - 2..].to_vec();
            tensor.shape = [vec![count], matrix].concat();
        }
    }
    let (path, mut quantised) =
        write_file(out, &entries, &planned, frequencies, &Order::of(architecture, &json), source)?;
    let wanted = |tensor: &&Planned| tensor.shape.len() > 1 && !is_small(&tensor.name);
    let is_other = |tensor: &&Planned| match form {
        GgufForm::Plain(_) => false,
        GgufForm::Q8_0 => tensor.kind == TensorKind::F16,
        GgufForm::Q4K => [TensorKind::F16, TensorKind::Blocks(BlockKind::Q8_0)].contains(&tensor.kind),
    };
    let others = planned.iter().filter(wanted).filter(is_other).count();
    quantised.matrices = planned.iter().filter(|tensor| matches!(tensor.kind, TensorKind::Blocks(_))).count();
    Ok(GgufWritten { path, form, quantised, others, has_tokenizer })
}

/// Writes the adapters that consist of the parameters `specs` as a GGUF file.
pub(crate) fn write_gguf_adapter(
    out: &Path,
    config: &dyn ModelFamily,
    lora: &LoraConfig,
    specs: &[ParameterSpec],
    source: &mut dyn ParameterSource,
) -> Result<PathBuf, ModelError> {
    if lora.dora {
        return Err(ModelError::new(
            "GGUF has no magnitudes of DoRA: write a PEFT directory, or the whole model with --merge",
        ));
    }
    let json = file_json(config);
    let ModelMetadata { architecture, .. } = config::metadata(&json).map_err(ModelError::new)?;
    let text = |text: &str| Entry::Text(text.to_owned());
    // Programs scale by `alpha / rank`, also for rank-stabilised adapters.
    let alpha = lora.scale() * f64::from(lora.rank);
    let entries = [
        ("general.architecture", text(architecture)),
        ("general.type", text("adapter")),
        ("adapter.type", text("lora")),
        ("adapter.lora.alpha", Entry::F32(alpha as f32)),
    ]
    .map(|(key, entry)| (key.to_owned(), entry));
    let planned = specs.iter().map(|spec| {
        let part = ADAPTERS.iter().find_map(|(end, part)| Some((spec.path.strip_suffix(end)?, *part)));
        let named = part.and_then(|(layer, part)| {
            Some((name_in_gguf(architecture, &format!("{layer}.weight")).filter(|(_, expert)| expert.is_none())?.0, part))
        });
        let Some((name, part)) = named else {
            return Err(ModelError::new(format!(
                "the adapter `{}` has no name in GGUF: write a PEFT directory, or the whole model with --merge",
                spec.path
            )));
        };
        let like = if part == "lora_b" { name.clone() } else { String::new() };
        let (name, shape) = (format!("{name}.{part}"), file_shape(spec));
        Ok(Planned { name, kind: TensorKind::F32, shape, like, specs: vec![spec.clone()] })
    });
    let planned = planned.collect::<Result<Vec<_>, _>>()?;
    Ok(write_file(out, &entries, &planned, None, &Order::of(architecture, &json), source)?.0)
}

/// Writes a file. It appears only when it is complete.
fn write_file(
    out: &Path,
    entries: &[(String, Entry)],
    planned: &[Planned],
    frequencies: Option<Vec<f32>>,
    order: &Order,
    source: &mut dyn ParameterSource,
) -> Result<(PathBuf, Quantised), ModelError> {
    let target = std::path::absolute(out).map_err(ModelError::io("resolve", out))?;
    let is_file = target.extension().is_some_and(|ending| ending == "gguf");
    if !is_file {
        require_vacant(&target)?;
    } else if target.exists() {
        return Err(ModelError::at(out, "the file exists; choose another name"));
    }
    let mut scratch = Scratch::create(&target)?;
    let path = scratch.path().join(FILE);
    let failed = |source| ModelError::io("write", &path)(source);
    let file = File::create_new(&path).map_err(failed)?;
    let mut file = BufWriter::new(file);
    let mut tensors: Vec<(String, TensorKind, Vec<usize>)> =
        planned.iter().map(|tensor| (tensor.name.clone(), tensor.kind, tensor.shape.clone())).collect();
    if let Some(frequencies) = &frequencies {
        tensors.push(("rope_freqs.weight".to_owned(), TensorKind::F32, vec![frequencies.len()]));
    }
    file.write_all(&header(entries, &tensors)).map_err(failed)?;
    let (mut squares, mut after) = ([0.0; 2], 0);
    let mut finish = |file: &mut BufWriter<File>, bytes: u64| {
        after += bytes;
        file.write_all(&vec![0; padding(bytes)])
    };
    for tensor in planned {
        let mut bytes = 0;
        for spec in &tensor.specs {
            let mut values = in_order(to_file(&outputs_first(spec), &source.parameter(spec)?), tensor, order);
            let offset = offset_in_gguf(order.architecture, &tensor.name);
            values.iter_mut().for_each(|value| *value += offset);
            let encoded = encode(&values, tensor, spec, &mut squares)?;
            bytes += encoded.len() as u64;
            file.write_all(&encoded).map_err(failed)?;
        }
        finish(&mut file, bytes).map_err(failed)?;
    }
    if let Some(frequencies) = frequencies {
        let bytes: Vec<u8> = frequencies.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        file.write_all(&bytes).map_err(failed)?;
        finish(&mut file, bytes.len() as u64).map_err(failed)?;
    }
    let file = file.into_inner().map_err(|error| failed(error.into_error()))?;
    file.sync_all().map_err(failed)?;
    let error = (squares[0] / squares[1].max(f64::MIN_POSITIVE)).sqrt();
    let quantised = Quantised { matrices: 0, before: 0, after, error };
    if is_file {
        fs::rename(&path, &target).map_err(ModelError::io("write to", &target))?;
        return Ok((out.to_owned(), quantised));
    }
    require_vacant(&target)?;
    scratch.rename_to(&target)?;
    Ok((out.join(FILE), quantised))
}

/// Returns the elements of a tensor in the order of its rows in GGUF.
fn in_order(values: Vec<f32>, tensor: &Planned, order: &Order) -> Vec<f32> {
    let rows = tensor.shape[tensor.shape.len().saturating_sub(2)];
    let Some(rows) = rows_in_gguf(order.architecture, &tensor.like, rows, order.heads) else { return values };
    let width = values.len() / rows.len().max(1);
    rows.iter().flat_map(|&row| &values[row * width..][..width]).copied().collect()
}

/// Returns the bytes of elements, and adds the squares of their errors and of themselves if they are quantised.
fn encode(
    values: &[f32],
    tensor: &Planned,
    spec: &ParameterSpec,
    squares: &mut [f64; 2],
) -> Result<Vec<u8>, ModelError> {
    let kind = match tensor.kind {
        TensorKind::F32 => WeightType::Float32,
        TensorKind::F16 => WeightType::Float16,
        TensorKind::Bf16 => WeightType::Bfloat16,
        TensorKind::Blocks(kind) => {
            let columns = tensor.shape.last().copied().unwrap_or(1);
            let rows = values.len() / columns.max(1);
            let blocks = quantise(kind, values, [rows, columns]).map_err(|source| {
                ModelError::new(format!("tensor `{}` cannot be quantised", spec.tensor())).because(source)
            })?;
            let bytes = blocks.storage().to_vec();
            let decoded = QuantisedMatrix::new(rows, Form::Blocks(blocks)).decoded();
            let square = |number: f32| f64::from(number) * f64::from(number);
            squares[0] +=
                values.iter().zip(&decoded).map(|(value, decoded)| square(value - decoded)).sum::<f64>();
            squares[1] += values.iter().copied().map(square).sum::<f64>();
            return Ok(bytes);
        }
    };
    kind.encode(values).ok_or_else(|| {
        let fault = "has values that are too large for";
        ModelError::new(format!(
            "tensor `{}` {fault} {}: choose float32 or bfloat16",
            spec.tensor(),
            kind.name()
        ))
    })
}

/// Returns the metadata of the tokenizer in a folder; nothing if there is none.
fn tokenizer_entries(folder: &Path, vocabulary: usize) -> Result<Vec<(String, Entry)>, ModelError> {
    let path = folder.join(TOKENIZER);
    if !files::exists(&path) {
        return Ok(Vec::new());
    }
    let read = |name: &str| {
        let path = folder.join(name);
        if files::exists(&path) {
            parse(&path, &read_bytes(&path, LARGEST_TOKENIZER)?)
        } else {
            Ok(Value::Null)
        }
    };
    let settings = read("tokenizer_config.json")?;
    let jinja = folder.join("chat_template.jinja");
    let template = if files::exists(&jinja) {
        let text = files::read(&jinja, SMALL_TEXT).map_err(ModelError::io("read", &jinja))?;
        Some(String::from_utf8_lossy(&text).into_owned())
    } else {
        let templates = settings["chat_template"].as_array().into_iter().flatten();
        let default = templates.into_iter().find(|template| template["name"] == "default");
        let text = settings["chat_template"].as_str().or_else(|| default?["template"].as_str());
        text.map(str::to_owned)
    };
    let tokens = SpecialTokens::beside(&path)
        .map_err(|error| ModelError::at(&path, "cannot be used").because(error))?;
    let id = |name: &str| tokens.id(name).ok().flatten();
    let file = read(TOKENIZER)?;
    tokenizer_metadata(&file, &settings, template, vocabulary, id)
        .map_err(|fault| ModelError::at(folder, fault))
}
