//! The names of architectures and tensors in GGUF and in the files of transformers, from the table of `gguf-py` (constants and
//! tensor mapping, <https://github.com/ggml-org/llama.cpp/tree/master/gguf-py>).

use std::path::PathBuf;

use serde_json::{Map, Value};

use crate::container::Gguf;
use crate::error::GgufError;
use crate::tensor::{Tensor, TensorKind};

/// A family of models with its name in GGUF.
#[derive(Debug)]
pub(crate) struct Architecture {
    /// The name in GGUF.
    pub(crate) name: &'static str,
    /// The `model_type` of `config.json`.
    pub(crate) model_type: &'static str,
    /// The names of tensors outside of blocks.
    whole: &'static [(&'static str, &'static str)],
    /// The path of the list of blocks.
    blocks: &'static str,
    /// Names of tensors of a block that differ from [`LAYER`].
    layer: &'static [(&'static str, &'static str)],
    /// Whether the rows of queries and keys have their pairs of rotary positions next to each other.
    has_interleaved_heads: bool,
    /// The number by which the weights of norms are larger than in the files of transformers.
    norm_offset: f32,
}

/// The names of tensors outside of blocks.
const WHOLE: [(&str, &str); 3] = [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];

/// The names of tensors of a block, without `.weight` and `.bias`.
const LAYER: [(&str, &str); 12] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
];

/// The ends of names of tensors with the matrices of all experts.
const EXPERTS: [(&str, &str); 3] =
    [("ffn_gate_exps", "gate_proj"), ("ffn_up_exps", "up_proj"), ("ffn_down_exps", "down_proj")];

const GEMMA: &[(&str, &str)] = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

const GPT2_WHOLE: &[(&str, &str)] = &[
    ("token_embd.weight", "transformer.wte.weight"),
    ("position_embd.weight", "transformer.wpe.weight"),
    ("output_norm.weight", "transformer.ln_f.weight"),
    ("output_norm.bias", "transformer.ln_f.bias"),
    ("output.weight", "lm_head.weight"),
];

const GPT2: &[(&str, &str)] = &[
    ("attn_norm", "ln_1"),
    ("attn_qkv", "attn.c_attn"),
    ("attn_output", "attn.c_proj"),
    ("ffn_norm", "ln_2"),
    ("ffn_up", "mlp.c_fc"),
    ("ffn_down", "mlp.c_proj"),
];

/// Tensors that follow from the configuration, or that it is read from.
pub(crate) const OF_POSITIONS: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

const PLAIN: Architecture = Architecture {
    name: "llama",
    model_type: "llama",
    whole: &WHOLE,
    blocks: "model.layers",
    layer: &[],
    has_interleaved_heads: false,
    norm_offset: 0.0,
};

const ARCHITECTURES: [Architecture; 8] = [
    Architecture { has_interleaved_heads: true, ..PLAIN },
    Architecture { name: "qwen2", model_type: "qwen2", ..PLAIN },
    Architecture { name: "qwen3", model_type: "qwen3", ..PLAIN },
    Architecture { name: "qwen3moe", model_type: "qwen3_moe", ..PLAIN },
    Architecture { name: "gemma2", model_type: "gemma2", layer: GEMMA, norm_offset: 1.0, ..PLAIN },
    Architecture { name: "gemma3", model_type: "gemma3_text", layer: GEMMA, norm_offset: 1.0, ..PLAIN },
    Architecture {
        name: "phi3",
        model_type: "phi3",
        layer: &[("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")],
        ..PLAIN
    },
    Architecture {
        name: "gpt2",
        model_type: "gpt2",
        whole: GPT2_WHOLE,
        blocks: "transformer.h",
        layer: GPT2,
        ..PLAIN
    },
];

impl Architecture {
    /// Returns the architecture that a file names.
    pub(crate) fn of(gguf: &Gguf) -> Result<&'static Self, GgufError> {
        let name = gguf.metadata.get("general.architecture").and_then(Value::as_str).unwrap_or_default();
        Self::named(name).ok_or_else(|| {
            let names = ARCHITECTURES.map(|known| known.name).join(", ");
            GgufError::at(
                &gguf.path,
                format!("the architecture `{name}` is not read from GGUF; {names} are: use the model as safetensors"),
            )
        })
    }

    fn named(name: &str) -> Option<&'static Self> {
        ARCHITECTURES.iter().find(|known| known.name == name)
    }

    fn pairs(&self) -> impl Iterator<Item = &(&'static str, &'static str)> {
        self.layer.iter().chain(&LAYER)
    }

    /// Returns the heads of a tensor of queries or keys whose rows have another order than in the files of transformers.
    fn interleaved_heads(&self, layer: &str, [heads, of_keys]: [usize; 2]) -> Option<usize> {
        match layer {
            _ if !self.has_interleaved_heads => None,
            "attn_q" => Some(heads),
            "attn_k" => Some(of_keys),
            _ => None,
        }
    }
}

/// Returns the name in GGUF of the architecture of a `model_type`.
pub(crate) fn architecture_of(model_type: &str) -> Option<&'static str> {
    // Mistral without windows computes what Llama does.
    let model_type = if model_type == "mistral" { "llama" } else { model_type };
    ARCHITECTURES.iter().find(|known| known.model_type == model_type).map(|known| known.name)
}

/// Returns the name in GGUF of a tensor of a family, with the index of the expert if the tensor has the matrices of all
/// experts.
pub fn name_in_gguf(architecture: &str, tensor: &str) -> Option<(String, Option<usize>)> {
    let known = Architecture::named(architecture)?;
    if let Some((name, _)) = known.whole.iter().find(|(_, of_family)| *of_family == tensor) {
        return Some(((*name).to_owned(), None));
    }
    let (layer, rest) = tensor.strip_prefix(known.blocks)?.strip_prefix('.')?.split_once('.')?;
    let (name, ending) = rest.rsplit_once('.')?;
    if let Some((expert, matrix)) = name.strip_prefix("mlp.experts.").and_then(|rest| rest.split_once('.')) {
        let (name, _) = EXPERTS.iter().find(|(_, of_family)| *of_family == matrix)?;
        return Some((format!("blk.{layer}.{name}.{ending}"), Some(expert.parse().ok()?)));
    }
    let (name, _) = known.pairs().find(|(_, of_family)| *of_family == name)?;
    Some((format!("blk.{layer}.{name}.{ending}"), None))
}

/// Returns the rows of a tensor in the order that the tensor `name` of GGUF has, if it is another one than in the files of
/// transformers. `heads` are the numbers for queries and for keys.
pub fn rows_in_gguf(architecture: &str, name: &str, rows: usize, heads: [usize; 2]) -> Option<Vec<usize>> {
    let heads = Architecture::named(architecture)?.interleaved_heads(name.rsplit('.').nth(1)?, heads)?;
    are_of_heads(rows, heads).then(|| interleaved(rows, heads))
}

/// Returns the number by which the elements of the tensor `name` of GGUF are larger than in the files of transformers.
pub fn offset_in_gguf(architecture: &str, name: &str) -> f32 {
    let is_norm = name.ends_with("norm.weight");
    Architecture::named(architecture).filter(|_| is_norm).map_or(0.0, |known| known.norm_offset)
}

/// Returns whether rows belong to so many heads of an even width.
fn are_of_heads(rows: usize, heads: usize) -> bool {
    heads > 0 && rows.is_multiple_of(heads) && rows > 0 && (rows / heads).is_multiple_of(2)
}

/// Returns the rows of transformers in the order of GGUF. A head's row `2 i + j` is its row `i + j width / 2`.
fn interleaved(rows: usize, heads: usize) -> Vec<usize> {
    let width = rows / heads.max(1);
    let row = |row: usize| {
        let (head, place) = (row / width, row % width);
        head * width + place / 2 + place % 2 * (width / 2)
    };
    (0..rows).map(row).collect()
}

/// A tensor with the name of its family, or a part of one.
#[derive(Clone, Debug, PartialEq)]
pub struct FamilyTensor {
    /// The name in the files of transformers.
    pub name: String,
    /// The element type.
    pub kind: TensorKind,
    /// The sizes; the last one is of neighbouring elements.
    pub shape: Vec<usize>,
    /// The position of the first byte in the file.
    pub start: u64,
    /// The number of bytes.
    pub bytes: u64,
    /// The rows in the file in the order of the family, if it is another one.
    pub rows: Option<Vec<usize>>,
    /// The number by which the elements in the file are larger.
    pub offset: f32,
}

/// Returns the tensors of a model by the file that has them.
///
/// # Errors
/// When the architecture is not known, or a tensor does not fit the metadata.
pub fn tensors_of(gguf: &Gguf) -> Result<Vec<(PathBuf, Vec<FamilyTensor>)>, GgufError> {
    let known = Architecture::of(gguf)?;
    let mut parts = Vec::new();
    for (path, tensors) in &gguf.parts {
        let mut found = Vec::new();
        for tensor in tensors.iter().filter(|tensor| !OF_POSITIONS.contains(&&*tensor.name)) {
            add_tensor(known, gguf, tensor, &mut found)?;
        }
        parts.push((path.clone(), found));
    }
    Ok(parts)
}

/// The largest number of experts of a layer, which bounds the tensors that a short header names.
const MOST_EXPERTS: usize = 1 << 12;

fn add_tensor(
    known: &Architecture,
    gguf: &Gguf,
    tensor: &Tensor,
    found: &mut Vec<FamilyTensor>,
) -> Result<(), GgufError> {
    let Tensor { name, kind, shape, start, bytes } = tensor.clone();
    let mut own = FamilyTensor { name, kind, shape, start, bytes, rows: None, offset: 0.0 };
    let whole = known.whole.iter().find(|(name, _)| *name == own.name);
    let in_block = own.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let in_block = in_block.and_then(|(layer, rest)| {
        let (name, ending) = rest.rsplit_once('.')?;
        Some((layer.to_owned(), name.to_owned(), ending.to_owned()))
    });
    if let Some((_, name)) = whole {
        (*name).clone_into(&mut own.name);
    } else if let Some((layer, name, ending)) = in_block {
        if let (Some((_, matrix)), [experts, ..]) =
            (EXPERTS.iter().find(|(own, _)| *own == name), &*own.shape)
        {
            if *experts > MOST_EXPERTS || own.shape.len() < 2 {
                let fault = format!(
                    "tensor `{}` does not have the matrices or biases of up to {MOST_EXPERTS} experts",
                    tensor.name
                );
                return Err(GgufError::at(&gguf.path, fault));
            }
            let (experts, each) = (*experts, bytes / (*experts).max(1) as u64);
            for expert in 0..experts {
                let name = format!("{}.{layer}.mlp.experts.{expert}.{matrix}.{ending}", known.blocks);
                let start = start + expert as u64 * each;
                let shape = own.shape[1..].to_vec();
                found.push(FamilyTensor { name, shape, start, bytes: each, ..own.clone() });
            }
            return Ok(());
        }
        if let Some((_, of_family)) = known.pairs().find(|(own, _)| *own == name) {
            own.name = format!("{}.{layer}.{of_family}.{ending}", known.blocks);
        }
        let heads = heads(known.name, &gguf.metadata);
        if let Some(heads) = known.interleaved_heads(&name, heads) {
            let rows = own.shape[0];
            if !are_of_heads(rows, heads) {
                let fault = format!(
                    "tensor `{}` has {rows} rows, which are not {heads} heads of an even width",
                    tensor.name
                );
                return Err(GgufError::at(&gguf.path, fault));
            }
            let mut order = vec![0; rows];
            interleaved(rows, heads).into_iter().enumerate().for_each(|(in_file, row)| order[row] = in_file);
            own.rows = Some(order);
        }
    }
    own.offset = offset_in_gguf(known.name, &tensor.name);
    found.push(own);
    Ok(())
}

/// Returns the numbers of heads of queries and of keys.
fn heads(architecture: &str, metadata: &Map<String, Value>) -> [usize; 2] {
    let number = |key: &str| metadata.get(&format!("{architecture}.attention.{key}")).and_then(Value::as_u64);
    let heads = number("head_count").unwrap_or(0);
    [heads, number("head_count_kv").unwrap_or(heads)].map(|heads| usize::try_from(heads).unwrap_or(0))
}
