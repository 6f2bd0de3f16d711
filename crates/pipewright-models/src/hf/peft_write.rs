//! Writes adapters as a PEFT directory, which PEFT and [`super::peft`] read.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Write;
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize};
use serde_json::{Value, json};

use super::error::HfError;
use super::layout::{file_shape, to_file};
use super::other_form::ADAPTER;
use super::peft::{ADAPTER_WEIGHTS, name_of};
use super::write::{Scratch, require_vacant};
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
    let mut tensors = BTreeMap::new();
    for spec in specs {
        let values = to_file(spec, &source.parameter(spec)?);
        let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
        tensors.insert(name_of(spec), (file_shape(spec), bytes));
    }
    let mut scratch = Scratch::create(&target)?;
    let path = scratch.path().join(ADAPTER_WEIGHTS);
    let unrepresentable =
        |error| HfError::Io { action: "write", path: path.clone(), source: std::io::Error::other(error) };
    let views = tensors.iter().map(|(name, (shape, bytes))| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytes).map_err(unrepresentable)?;
        Ok((name.as_str(), view))
    });
    let views = views.collect::<Result<Vec<_>, HfError>>()?;
    // PEFT's reader asks for the framework of the layout.
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let bytes = serialize(views, Some(format)).map_err(unrepresentable)?;
    let written = File::create_new(&path).and_then(|mut file| {
        file.write_all(&bytes)?;
        file.sync_all()
    });
    written.map_err(HfError::io("write", &path))?;
    scratch.write_json(ADAPTER, &config_json(described))?;
    require_vacant(&target)?;
    scratch.rename_to(&target)
}

/// Returns the content of `adapter_config.json`.
fn config_json(Described { lora, targets, base }: Described<'_>) -> Value {
    // A whole number is written as PEFT writes it.
    let alpha = if lora.alpha.fract() == 0.0 && lora.alpha < 1e15 {
        json!(lora.alpha as u64)
    } else {
        json!(lora.alpha)
    };
    json!({
        "base_model_name_or_path": base.map(|base| base.display().to_string()),
        "bias": "none",
        "fan_in_fan_out": false,
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
        "use_dora": false,
        "use_rslora": lora.rslora,
    })
}
