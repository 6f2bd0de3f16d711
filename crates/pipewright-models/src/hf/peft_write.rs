//! Writes adapters as a PEFT directory, which PEFT and [`super::peft`] read.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use serde_json::{Value, json};

use super::error::HfError;
use super::layout::to_file;
use super::other_form::ADAPTER;
use super::peft::{ADAPTER_WEIGHTS, name_of};
use super::weight_type::WeightType;
use super::write::{Scratch, Typed, header, require_vacant};
use crate::lora::LoraConfig;
use crate::parameter::{ParameterSource, ParameterSpec};

/// The description of the adapters in a directory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Described<'a> {
    /// The settings.
    pub(crate) lora: &'a LoraConfig,
    /// The names or paths of the layers that have an adapter.
    pub(crate) targets: &'a [String],
    /// The folder of the model that the adapters change, if it is known.
    pub(crate) base: Option<&'a Path>,
    /// Whether files of the model have the matrices of these layers as `[inputs, outputs]`.
    pub(crate) inputs_first: bool,
}

/// Writes the adapters that consist of the parameters `specs` into `dir`, which must not exist or must be
/// empty. It appears only when it is complete.
pub(crate) fn write_adapter<S: ParameterSource<Error = HfError>>(
    dir: &Path,
    described: Described<'_>,
    specs: &[ParameterSpec],
    source: &mut S,
) -> Result<(), HfError> {
    let target = std::path::absolute(dir).map_err(HfError::io("resolve", dir))?;
    require_vacant(&target)?;
    let named = |spec: &ParameterSpec| ParameterSpec { path: name_of(spec), ..spec.clone() };
    let mut scratch = Scratch::create(&target)?;
    let path = scratch.path().join(ADAPTER_WEIGHTS);
    let tensors: Vec<Typed> =
        specs.iter().map(|spec| Typed { spec: named(spec), kind: WeightType::Float32 }).collect();
    let (header, _) = header(&tensors).map_err(|source| HfError::Header { path: path.clone(), source })?;
    let mut file = File::create_new(&path).map_err(HfError::io("write", &path))?;
    file.write_all(&header).map_err(HfError::io("write", &path))?;
    for spec in specs {
        let values = to_file(spec, &source.parameter(spec)?);
        let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
        file.write_all(&bytes).map_err(HfError::io("write", &path))?;
    }
    file.sync_all().map_err(HfError::io("write", &path))?;
    scratch.write_json(ADAPTER, &config_json(described))?;
    require_vacant(&target)?;
    scratch.rename_to(&target)
}

/// Returns the content of `adapter_config.json`.
fn config_json(Described { lora, targets, base, inputs_first }: Described<'_>) -> Value {
    // A whole number is written as PEFT writes it.
    let alpha = if lora.alpha.fract() == 0.0 && lora.alpha < 1e15 {
        json!(lora.alpha as u64)
    } else {
        json!(lora.alpha)
    };
    json!({
        "base_model_name_or_path": base.map(|base| base.display().to_string()),
        "bias": "none",
        "fan_in_fan_out": inputs_first,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": alpha,
        "lora_bias": false,
        "lora_dropout": lora.dropout,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": lora.dora,
        "use_rslora": lora.rslora,
    })
}
