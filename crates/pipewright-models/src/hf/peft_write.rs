//! Writes adapters as a PEFT directory, which PEFT and [`super::peft`] read.
//!
//! In a family with routed experts, PEFT (0.21, with transformers 5) takes an entry of `target_modules` that ends
//! in one of [`EXPERT_LAYERS`] for the experts' layers and ignores the layer of that path, because transformers 5
//! has the matrices of all experts of a block in two tensors. Such layers are written as `target_parameters`, which
//! name the weights of layers, and which PEFT uses as they are.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use serde_json::{Value, json};

use super::file::bad_header;
use super::layout::to_file;
use super::other_form::ADAPTER;
use super::peft::{ADAPTER_WEIGHTS, TARGET_PARAMETERS, TIES, WEIGHT, name_of as tensor_of, tied_head};
use super::peft_experts::ExpertPart;
use super::weight_type::WeightType;
use super::write::{Scratch, Typed, header, require_vacant};
use crate::error::ModelError;
use crate::lora::{DOWN, LoraConfig, LoraTargets, SCORE, is_of_experts, name_of};
use crate::parameter::ParameterKind;
use crate::parameter::{ParameterSource, ParameterSpec};

/// The names of layers that PEFT takes for layers of routed experts, in a family that has such experts.
const EXPERT_LAYERS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// A part of an adapter's training that PEFT does not support for the layers of the adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PeftLimit {
    /// PEFT refuses the directory.
    Dora {
        /// The number of layers with an adapter that PEFT cannot have with DoRA.
        layers: usize,
    },
    /// PEFT reads the directory, but cannot train it with its dropout.
    Dropout {
        /// The share of inputs that was dropped.
        share: f64,
    },
}

impl fmt::Display for PeftLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dora { layers } => write!(
                f,
                "PEFT with transformers 5 refuses these adapters, because it has no DoRA for the {layers} adapted feed-forward layers \
                 of a family with experts"
            ),
            Self::Dropout { share } => write!(
                f,
                "lora_dropout is written as 0 instead of {share}, because PEFT has no dropout for adapted feed-forward layers of a \
                 family with experts"
            ),
        }
    }
}

/// The layers of an adapter as `adapter_config.json` names them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PeftTargets {
    /// The names or paths of layers.
    modules: Vec<String>,
    /// The paths of weights.
    parameters: Vec<String>,
}

impl PeftTargets {
    /// Returns the targets that mean the layers `adapted` of a model with the linear layers `layers`, and the part
    /// of the training that PEFT does not support for them. `has_experts` says whether the family has routed
    /// experts.
    pub(crate) fn of(
        lora: &LoraConfig,
        adapted: BTreeSet<String>,
        layers: &[String],
        has_experts: bool,
    ) -> (Self, Option<PeftLimit>) {
        // Only transformers 4 reads adapters of an expert's own layers, and it has the other layers as layers too.
        let has_stacks = has_experts && !lora.own_experts;
        let is_taken =
            |layer: &String| is_of_experts(layer) || (has_stacks && EXPERT_LAYERS.contains(&name_of(layer)));
        let taken = adapted.iter().filter(|layer| is_taken(layer)).count();
        if taken == 0 || lora.dora {
            let modules = LoraTargets::short_names(&adapted, layers);
            let limit = (taken > 0).then_some(PeftLimit::Dora { layers: taken });
            return (Self { modules, parameters: Vec::new() }, limit);
        }
        let (taken, others): (BTreeSet<_>, BTreeSet<_>) = adapted.into_iter().partition(is_taken);
        let parameter =
            |layer: String| if is_of_experts(&layer) { layer } else { format!("{layer}{WEIGHT}") };
        let parameters = taken.into_iter().map(parameter).collect();
        let limit = (lora.dropout > 0.0).then_some(PeftLimit::Dropout { share: lora.dropout });
        (Self { modules: LoraTargets::short_names(&others, layers), parameters }, limit)
    }
}

/// The description of the adapters in a directory.
#[derive(Clone, Debug)]
pub(crate) struct Described<'a> {
    /// The settings.
    pub(crate) lora: &'a LoraConfig,
    /// The layers that have an adapter.
    pub(crate) targets: &'a PeftTargets,
    /// The paths of the modules that are trained whole.
    pub(crate) saved: BTreeSet<&'a str>,
    /// The table of the embedding, if it is trained whole and the head multiplies by it. PEFT has a copy of it as the head.
    pub(crate) tied_table: Option<&'a ParameterSpec>,
    /// The folder of the model that the adapters change, if it is known.
    pub(crate) base: Option<&'a Path>,
    /// Whether files of the model have the matrices of these layers as `[inputs, outputs]`.
    pub(crate) inputs_first: bool,
}

/// Writes the adapters that consist of the parameters `specs` into `dir`, which must not exist or must be
/// empty. It appears only when it is complete.
pub(crate) fn write_adapter(
    dir: &Path,
    described: Described<'_>,
    specs: &[ParameterSpec],
    source: &mut dyn ParameterSource,
) -> Result<(), ModelError> {
    let target = std::path::absolute(dir).map_err(ModelError::io("resolve", dir))?;
    require_vacant(&target)?;
    let head = described.tied_table.map(|table| (tensor_of(&tied_head(table)), table));
    let of_layers = specs.iter().filter(|spec| ExpertPart::of(spec).is_none());
    let named = of_layers.map(|spec| (tensor_of(spec), spec)).chain(head);
    let named: Vec<(String, &ParameterSpec)> = named.collect();
    let of_experts = tensors_of_experts(specs);
    let mut scratch = Scratch::create(&target)?;
    let path = scratch.path().join(ADAPTER_WEIGHTS);
    let stacked = of_experts.iter().map(|(name, parts)| {
        let shape = parts.first().map_or_else(Vec::new, |(_, part)| part.tensor_shape());
        // A table has the same dimensions in files.
        ParameterSpec::new(name.clone(), shape, ParameterKind::Table)
    });
    let tensors: Vec<Typed> = named
        .iter()
        .map(|(path, spec)| ParameterSpec { path: path.clone(), ..(*spec).clone() })
        .chain(stacked)
        .map(|spec| Typed { spec, kind: WeightType::Float32 })
        .collect();
    let (header, _) = header(&tensors).map_err(|source| bad_header(&path, source))?;
    let mut file = File::create_new(&path).map_err(ModelError::io("write", &path))?;
    file.write_all(&header).map_err(ModelError::io("write", &path))?;
    let mut write = |values: Vec<f32>| {
        let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
        file.write_all(&bytes).map_err(ModelError::io("write", &path))
    };
    for (_, spec) in named {
        write(to_file(spec, &source.parameter(spec)?))?;
    }
    for parts in of_experts.values() {
        let mut values = Vec::new();
        for (spec, part) in parts {
            values.resize(part.tensor_shape().iter().product(), 0.0);
            let own = source.parameter(spec)?;
            part.indices().zip(own).for_each(|(index, value)| values[index] = value);
        }
        write(values)?;
    }
    file.sync_all().map_err(ModelError::io("write", &path))?;
    scratch.write_json(ADAPTER, &config_json(described))?;
    require_vacant(&target)?;
    scratch.rename_to(&target)
}

/// Returns the tensors of the adapters of experts, by name, with their parts.
fn tensors_of_experts(specs: &[ParameterSpec]) -> BTreeMap<String, Vec<(&ParameterSpec, ExpertPart<'_>)>> {
    let parts = || specs.iter().filter_map(|spec| Some((spec, ExpertPart::of(spec)?)));
    let targets: BTreeSet<&str> = parts().map(|(_, part)| part.target()).collect();
    let mut tensors: BTreeMap<String, Vec<_>> = BTreeMap::new();
    for (spec, part) in parts() {
        let mut names = part.tensors();
        let other = part.target().rsplit_once('.').map(|(module, _)| format!("{module}.{DOWN}"));
        let is_inner = names.len() > 1 && other.is_some_and(|other| targets.contains(&*other));
        let name = names.swap_remove(if is_inner { 0 } else { names.len() - 1 });
        tensors.entry(name).or_default().push((spec, part));
    }
    tensors
}

/// Returns the content of `adapter_config.json`.
fn config_json(described: Described<'_>) -> Value {
    let Described { lora, targets, saved, tied_table, base, inputs_first } = described;
    // A whole number is written as PEFT writes it.
    let alpha = if lora.alpha.fract() == 0.0 && lora.alpha < 1e15 {
        json!(lora.alpha as u64)
    } else {
        json!(lora.alpha)
    };
    // PEFT has no dropout for parameters.
    let dropout = if targets.parameters.is_empty() { lora.dropout } else { 0.0 };
    let mut json = json!({
        "base_model_name_or_path": base.map(|base| base.display().to_string()),
        "bias": "none",
        "fan_in_fan_out": inputs_first,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": alpha,
        "lora_bias": false,
        "lora_dropout": dropout,
        "modules_to_save": (!saved.is_empty()).then_some(&saved),
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": targets.modules,
        "task_type": if saved.contains(SCORE) { "SEQ_CLS" } else { "CAUSAL_LM" },
        "use_dora": lora.dora,
        "use_rslora": lora.rslora,
    });
    if tied_table.is_some() {
        json[TIES] = true.into();
    }
    if !targets.parameters.is_empty() {
        json[TARGET_PARAMETERS] = json!(targets.parameters);
    }
    json
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYERS: [&str; 4] = [
        "model.layers.0.self_attn.o_proj",
        "model.layers.1.self_attn.o_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.1.mlp.shared_experts.up_proj",
    ];

    /// Checks the targets of an adapter on these of [`LAYERS`], and the limit of PEFT.
    fn check(
        lora: &LoraConfig,
        adapted: &[usize],
        has_experts: bool,
        [modules, parameters]: [&[&str]; 2],
        limit: Option<PeftLimit>,
    ) {
        let mut layers = LAYERS.map(str::to_owned).to_vec();
        if has_experts {
            layers.push("model.layers.1.mlp.experts.0.up_proj".to_owned());
        }
        let adapted = adapted.iter().map(|&index| LAYERS[index].to_owned()).collect();
        let found = PeftTargets::of(lora, adapted, &layers, has_experts);
        let [modules, parameters] =
            [modules, parameters].map(|names| names.iter().map(|&name| name.to_owned()).collect());
        assert_eq!(found, (PeftTargets { modules, parameters }, limit));
    }

    #[test]
    fn layers_that_peft_takes_for_experts_are_parameters() {
        let lora = LoraConfig::default();
        let [dense, shared] = [LAYERS[2], LAYERS[3]].map(|layer| format!("{layer}.weight"));
        check(&lora, &[0, 1, 2, 3], false, [&["o_proj", "up_proj"], &[]], None);
        check(&lora, &[0, 1, 2, 3], true, [&["o_proj"], &[&dense, &shared]], None);
        check(&lora, &[3], true, [&[], &[&shared]], None);
        check(&lora, &[1], true, [&[LAYERS[1]], &[]], None);
    }

    #[test]
    fn the_limits_of_parameters_are_named() {
        let dora = LoraConfig { dora: true, ..LoraConfig::default() };
        let limit = PeftLimit::Dora { layers: 1 };
        check(&dora, &[0, 1, 2], true, [&[LAYERS[2], LAYERS[0], LAYERS[1]], &[]], Some(limit));
        check(&dora, &[0, 1], true, [&["o_proj"], &[]], None);
        let dropout = LoraConfig { dropout: 0.25, ..LoraConfig::default() };
        let limit = PeftLimit::Dropout { share: 0.25 };
        check(&dropout, &[2], true, [&[], &[&format!("{}.weight", LAYERS[2])]], Some(limit));
        check(&dropout, &[0, 1, 2, 3], false, [&["o_proj", "up_proj"], &[]], None);
    }
}
