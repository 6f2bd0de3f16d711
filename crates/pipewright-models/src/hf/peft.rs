//! Reads the adapters of a PEFT directory: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! The tensors say which layers have an adapter. They have the paths of this crate behind a prefix.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use pipewright::bounded_file::SMALL_TEXT;
use serde_json::{Map, Value};

use super::file::{WeightFile, require_finite};
use super::fingerprint::Fingerprint;
use super::json_file::{parse, read_bytes};
use super::layout::{file_shape, from_file};
use super::other_form::ADAPTER;
use super::peft_experts::{ExpertPart, PREFIX, module_of_experts};
use crate::error::ModelError;
use crate::lora::{
    DOWN, GATE_UP, HEAD, LoraConfig, LoraTargets, is_of_adapter, is_of_experts, layer_of_first,
    layer_of_magnitudes, layer_of_second, module_of,
};
use crate::lora_target::{LoraTarget, is_named};
use crate::parameter::{ParameterSource, ParameterSpec};

/// The file with the weights of an adapter.
pub(super) const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";
/// The key with the paths of weights that have an adapter.
pub(super) const TARGET_PARAMETERS: &str = "target_parameters";
/// The key that says that a tied head is saved with the embedding.
pub(super) const TIES: &str = "ensure_weight_tying";
/// The key with the names of modules that are trained whole.
const MODULES: &str = "modules_to_save";
/// The end of the path of a linear layer's weight.
pub(super) const WEIGHT: &str = ".weight";

/// Keys that say where an adapter comes from or how it was made, which does not change what it computes. PEFT
/// corrects `fan_in_fan_out` by the layer.
const HARMLESS: [&str; 21] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    TIES,
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "loftq_config",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    // The tensors say which modules are saved.
    MODULES,
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "exclude_modules",
];
/// The keys that are read.
const READ: [&str; 6] = ["peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"];
/// The beginnings of values of `init_lora_weights` with which PEFT changes the weights of the base too.
const CHANGE_BASE: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

/// The parts of a model that adapters can change.
#[derive(Clone, Copy)]
pub(crate) struct Adaptable<'a> {
    /// The paths of the layers that can have an adapter.
    pub(crate) layers: &'a [String],
    /// All parameters.
    pub(crate) parameters: &'a [ParameterSpec],
    /// The path of the table of the embedding, if the head multiplies by it.
    pub(crate) tied_table: Option<&'a str>,
}

/// Reads the settings of the adapters in `dir`, and opens their weights.
///
/// # Errors
/// When a file is missing, cut short or not what its name says, when the configuration asks for anything that
/// the adapters here do not compute, or when a tensor belongs to no adapter of one of the layers.
pub(crate) fn read_adapter(
    dir: &Path,
    model: Adaptable<'_>,
) -> Result<(LoraConfig, AdapterWeights), ModelError> {
    let layers = model.layers;
    let path = dir.join(ADAPTER);
    if !path.is_file() {
        return Err(no_adapter(dir));
    }
    let keys: Map<String, Value> = parse(&path, &read_bytes(&path, SMALL_TEXT)?)?;
    require_known_parameters(&path, &keys, layers)?;
    require_supported(&path, &keys)?;
    let settings = AdapterKeys { path: &path, keys: &keys };
    let rank =
        |value: &Value| value.as_u64().and_then(|rank| u32::try_from(rank).ok()).filter(|&rank| rank > 0);
    let positive = |value: &Value| value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
    let share = |value: &Value| value.as_f64().filter(|share| (0.0..1.0).contains(share));
    let weights = AdapterWeights::open(dir)?;
    let dora = settings.optional("use_dora", Value::as_bool)?.unwrap_or(false);
    let (targets, own_experts) = targets_of(&weights, dora, model)?;
    let lora = LoraConfig {
        rank: settings.required("r", rank)?,
        alpha: settings.required("lora_alpha", positive)?,
        dropout: settings.optional("lora_dropout", share)?.unwrap_or(0.0),
        rslora: settings.optional("use_rslora", Value::as_bool)?.unwrap_or(false),
        dora,
        own_experts,
        targets,
        modules_to_save: modules_of(&weights, model),
    };
    require_modules(&path, &keys, &lora)?;
    let is_split = model.tied_table.is_some_and(|table| lora.saves(table));
    if is_split && settings.optional(TIES, Value::as_bool)? != Some(true) {
        let advice = "the embedding is saved without the head, which multiplies by its table in this model: train the adapter with \
                      `ensure_weight_tying=True` of PEFT";
        return Err(refused_key(&path, TIES, "not true", advice));
    }
    let shares_adapter = model.tied_table.is_some_and(|table| lora.adapts(module_of(table)));
    if shares_adapter && settings.optional(TIES, Value::as_bool)? == Some(true) {
        let advice = "the head has the adapter of the embedding, which is not supported: train the adapter without this key";
        return Err(refused_key(&path, TIES, "true", advice));
    }
    Ok((lora, weights))
}

/// The keys of an `adapter_config.json`.
struct AdapterKeys<'a> {
    path: &'a Path,
    keys: &'a Map<String, Value>,
}

impl AdapterKeys<'_> {
    /// Reads a key that must be there.
    fn required<T>(&self, key: &'static str, read: impl Fn(&Value) -> Option<T>) -> Result<T, ModelError> {
        self.optional(key, read)?.ok_or_else(|| self.unusable(key, "missing".to_owned()))
    }

    /// Reads a key; `None` if it is missing or null. Any other value must be one that `read` accepts.
    fn optional<T>(
        &self,
        key: &'static str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        match self.keys.get(key).filter(|value| !value.is_null()) {
            None => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| self.unusable(key, value.to_string())),
        }
    }

    fn unusable(&self, key: &'static str, value: String) -> ModelError {
        let advice = "correct it, or write the adapter again with `save_pretrained` of PEFT";
        refused_key(self.path, key, &value, advice)
    }
}

/// Returns the error of a folder without an adapter of PEFT, or of a file without its tensors.
fn no_adapter(path: &Path) -> ModelError {
    let fault = "there is no PEFT adapter here: name a folder with adapter_config.json and adapter_model.safetensors, which \
                 `save_pretrained` of PEFT and `pipewright export` write";
    ModelError::at(path, fault)
}

/// Returns the error of a key that asks for something that adapters here do not compute.
fn refused_key(path: &Path, key: &str, value: &str, advice: &str) -> ModelError {
    ModelError::at(path, format!("`{key}` is {value}: {advice}"))
}

/// Returns a hash of the names, element types and shapes of an adapter's tensors, and of the first and last
/// 4 KiB of each.
///
/// # Errors
/// When the file with the weights is missing or not a safetensors file, or cannot be read.
pub fn adapter_fingerprint(dir: &Path) -> Result<String, ModelError> {
    let AdapterWeights { mut file, .. } = AdapterWeights::open(dir)?;
    let mut tensors = file.tensors();
    tensors.sort_unstable();
    let mut sampled = Fingerprint::default();
    tensors.iter().try_for_each(|tensor| sampled.add(tensor, &mut file))?;
    Ok(sampled.text())
}

/// Refuses adapters on other parameters than the weights of `layers`, such as those of routers. PEFT writes further
/// keys next to these adapters, which would be the first to be refused.
fn require_known_parameters(
    path: &Path,
    keys: &Map<String, Value>,
    layers: &[String],
) -> Result<(), ModelError> {
    let is_known = |parameter: &str| {
        if layers.iter().any(|layer| is_of_experts(layer) && is_named(parameter, layer)) {
            return true;
        }
        let target = parameter.strip_suffix(WEIGHT).filter(|target| !target.is_empty());
        target.is_some_and(|target| layers.iter().any(|layer| is_named(target, layer)))
    };
    let unknown = match keys.get(TARGET_PARAMETERS) {
        None | Some(Value::Null) => None,
        Some(Value::Array(parameters)) => {
            parameters.iter().find(|parameter| !parameter.as_str().is_some_and(is_known))
        }
        Some(other) => Some(other),
    };
    unknown.map_or(Ok(()), |parameter| {
        Err(refused_key(
            path,
            TARGET_PARAMETERS,
            &parameter.to_string(),
            "this is not the weight of a linear layer or of experts that can have an adapter here; routers cannot have one: train \
                     the adapter without it, or merge it into its model with PEFT",
        ))
    })
}

/// Refuses what the adapters here do not compute. Keys of later versions of PEFT are accepted as long as they
/// are switched off.
fn require_supported(path: &Path, keys: &Map<String, Value>) -> Result<(), ModelError> {
    let refused = |key: &str, advice| {
        let value = keys.get(key).map_or_else(|| "missing".to_owned(), Value::to_string);
        Err(refused_key(path, key, &value, advice))
    };
    if keys.get("peft_type").and_then(Value::as_str) != Some("LORA") {
        return refused("peft_type", "only LORA is supported");
    }
    let start = keys.get("init_lora_weights").and_then(Value::as_str).unwrap_or_default().to_lowercase();
    if CHANGE_BASE.iter().any(|name| start.starts_with(name)) {
        return refused(
            "init_lora_weights",
            "the adapter belongs to changed weights of the base: convert it with `save_pretrained(DIR, \
             path_initial_model_for_weight_conversion=...)` of PEFT",
        );
    }
    let is_off = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text == "none" || text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(keys) => keys.is_empty(),
        Value::Bool(true) | Value::Number(_) => false,
    };
    let known = |key: &str| READ.contains(&key) || HARMLESS.contains(&key) || key == TARGET_PARAMETERS;
    let other = keys.iter().find(|(key, value)| !known(key) && !is_off(value));
    other.map_or(Ok(()), |(key, _)| {
        refused(
            key,
            "this is not supported: train the adapter without it, or merge it into its model with PEFT",
        )
    })
}

/// Refuses names of modules to save without tensors. PEFT means every module whose path ends in a name.
fn require_modules(path: &Path, keys: &Map<String, Value>, lora: &LoraConfig) -> Result<(), ModelError> {
    let Some(modules) = keys.get(MODULES).filter(|value| !value.is_null()) else { return Ok(()) };
    let is_saved = |module: &Value| {
        let Some(name) = module.as_str() else { return false };
        // PEFT lists it for every model with labels. These models have no such module.
        if name == "classifier" {
            return true;
        }
        lora.modules_to_save.iter().any(|saved| {
            let parents = saved.as_str().match_indices('.').map(|(end, _)| &saved.as_str()[..end]);
            parents.chain([saved.as_str()]).any(|path| path.ends_with(name))
        })
    };
    if modules.as_array().is_some_and(|modules| modules.iter().all(is_saved)) {
        return Ok(());
    }
    let advice =
        "the adapter has no tensors of one of these modules: write it again with `save_pretrained` of PEFT";
    Err(refused_key(path, MODULES, &modules.to_string(), advice))
}

/// Returns the modules of the model whose own parameters are among the tensors.
fn modules_of(weights: &AdapterWeights, model: Adaptable<'_>) -> Vec<LoraTarget> {
    let tensors = weights.file.tensors();
    let saved = model.parameters.iter().filter(|spec| tensors.contains(&name_of(spec)));
    let modules: BTreeSet<&str> = saved.map(|spec| module_of(&spec.path)).collect();
    modules.into_iter().map(|module| module.to_owned().into()).collect()
}

/// Returns the layers that the tensors belong to, as short as they can be named, and whether the layers of each expert have
/// adapters of their own. Only adapters with `dora` have magnitudes.
fn targets_of(
    weights: &AdapterWeights,
    dora: bool,
    Adaptable { layers, parameters, tied_table }: Adaptable<'_>,
) -> Result<(LoraTargets, bool), ModelError> {
    let mut adapted = BTreeSet::new();
    let stack = |spec: &ParameterSpec| {
        Some((module_of(&spec.path).to_owned(), spec.layout.stack_of_experts()?.to_owned()))
    };
    let stacks: BTreeMap<String, String> = parameters.iter().filter_map(stack).collect();
    let [mut has_own, mut has_stacks] = [false; 2];
    let tied = parameters.iter().find(|spec| Some(&*spec.path) == tied_table).map(tied_head);
    let saved: BTreeSet<String> = parameters.iter().chain(&tied).map(name_of).collect();
    // PEFT also writes the own matrix of a head with an adapter, which does not change.
    let is_own = |tensor: &String| saved.contains(&tensor.replace(".base_layer.", "."));
    for tensor in weights.file.tensors().into_iter().filter(|tensor| !is_own(tensor)) {
        let path = tensor.strip_prefix(PREFIX).filter(|path| is_of_adapter(path));
        let layer = path.and_then(|path| match layer_of_magnitudes(path) {
            Some(layer) => dora.then_some(layer),
            None => layer_of_first(path).or_else(|| layer_of_second(path)),
        });
        let own = layer.and_then(|layer| stacks.get(layer));
        has_own |= own.is_some();
        let of_experts = match own {
            Some(own) => Some(own.clone()),
            None => layer.and_then(|layer| weights.target_of_experts(layer, parameters)),
        };
        has_stacks |= own.is_none() && of_experts.is_some();
        match of_experts.as_deref().or(layer).filter(|layer| layers.iter().any(|known| known == layer)) {
            Some(layer) => drop(adapted.insert(layer.to_owned())),
            None if tensor.split('.').any(|name| name == "experts") => {
                let fault = format!(
                    "tensor `{tensor}` is an adapter of experts that a router chooses in a form that is not read: train the adapter \
                     on all experts' own layers or with `target_parameters`, or merge it into its model with PEFT"
                );
                return Err(ModelError::at(&weights.path, fault));
            }
            None => {
                let fault = format!(
                    "tensor `{tensor}` is not a matrix of an adapter on one of the {} layers of this model that can have one, such as `{}`: \
                     name the adapter of this model",
                    layers.len(),
                    layers.first().map_or("", String::as_str)
                );
                return Err(ModelError::at(&weights.path, fault));
            }
        }
    }
    if adapted.is_empty() {
        return Err(no_adapter(&weights.path));
    }
    if has_own && has_stacks {
        let fault = "the experts that a router chooses have adapters in two forms: merge one of them into the model with PEFT";
        return Err(ModelError::at(&weights.path, fault));
    }
    let is_usual = |layer: &&String| LoraConfig::default().adapts(layer);
    if adapted.iter().eq(layers.iter().filter(is_usual).collect::<BTreeSet<_>>()) {
        return Ok((LoraTargets::AllLinear, false));
    }
    Ok((LoraTargets::named(LoraTargets::short_names(&adapted, layers)), has_own))
}

/// The weights of an adapter in a PEFT directory, as a source of parameters.
pub(crate) struct AdapterWeights {
    path: PathBuf,
    file: WeightFile,
    /// The tensors of the experts of one block that were read last, by name. The parameters of an expert alternate between
    /// them.
    of_experts: (String, BTreeMap<String, Vec<f32>>),
}

impl AdapterWeights {
    /// Opens the file with the weights.
    pub(crate) fn open(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join(ADAPTER_WEIGHTS);
        if !path.exists() {
            return Err(no_adapter(dir));
        }
        Ok(Self { file: WeightFile::open(path.clone())?, path, of_experts: Default::default() })
    }

    /// Returns the name of the tensor of all experts that has a part.
    fn tensor_of(&self, part: &ExpertPart<'_>) -> String {
        let mut names = part.tensors();
        let index = names.iter().position(|name| self.file.shape_of(name).is_some());
        names.swap_remove(index.unwrap_or(names.len() - 1))
    }

    /// Returns the matrices of all experts of a block to which an adapter of PEFT's layer belongs.
    fn target_of_experts(&self, layer: &str, parameters: &[ParameterSpec]) -> Option<String> {
        let (module, is_inner) = module_of_experts(layer)?;
        let [first, second] = ["lora_A", "lora_B"].map(|part| format!("{PREFIX}{module}.{part}.weight"));
        let down = format!("{module}.{DOWN}");
        let is_down = |spec: &&ParameterSpec| spec.layout.stack_of_experts() == Some(&*down);
        let &[inner, width] = parameters.iter().find(is_down)?.shape.as_slice() else { return None };
        let size = |tensor: &str, dimension: usize| self.file.shape_of(tensor)?.get(dimension).copied();
        let has_inner = self.file.shape_of(&first.replace(".experts.", ".experts.base_layer.")).is_some();
        let is_of_down = has_inner || (size(&first, 1), size(&second, 0)) == (Some(inner), Some(width));
        Some(if is_of_down && !is_inner { down } else { format!("{module}.{GATE_UP}") })
    }

    /// Returns whether the file has a parameter.
    pub(crate) fn has(&self, spec: &ParameterSpec) -> bool {
        self.file.shape_of(&name_of(spec)).is_some()
    }

    /// Checks that the file has these parameters of adapters.
    pub(crate) fn require(&self, specs: &[ParameterSpec]) -> Result<(), ModelError> {
        specs.iter().try_for_each(|spec| {
            let (tensor, expected) = match ExpertPart::of(spec) {
                Some(part) => (self.tensor_of(&part), part.tensor_shape()),
                None => (name_of(spec), file_shape(spec)),
            };
            match self.file.shape_of(&tensor) {
                Some(found) if found != expected => {
                    let fault = format!(
                        "tensor `{tensor}` has shape {found:?}, and its layer, with the rank in adapter_config.json, needs \
                         {expected:?}: name the adapter of this model"
                    );
                    Err(ModelError::at(&self.path, fault))
                }
                _ => self.file.check(&tensor, &expected),
            }
        })
    }
}

/// Returns the head that a table is, as PEFT has it.
pub(super) fn tied_head(table: &ParameterSpec) -> ParameterSpec {
    ParameterSpec { path: format!("{HEAD}{WEIGHT}"), ..table.clone() }
}

/// Returns the name of a parameter's tensor.
pub(super) fn name_of(spec: &ParameterSpec) -> String {
    format!("{PREFIX}{}", spec.path)
}

impl ParameterSource for AdapterWeights {
    fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, ModelError> {
        if let Some(part) = ExpertPart::of(spec) {
            let tensor = self.tensor_of(&part);
            let (module, tensors) = &mut self.of_experts;
            if module != part.module() {
                *module = part.module().to_owned();
                tensors.clear();
            }
            let values = match tensors.entry(tensor) {
                Entry::Occupied(read) => read.into_mut(),
                Entry::Vacant(place) => {
                    let values = self.file.read(place.key(), &part.tensor_shape())?;
                    let values = require_finite(&self.path, place.key(), values)?;
                    place.insert(values)
                }
            };
            return Ok(part.indices().map(|index| values[index]).collect());
        }
        let tensor = name_of(spec);
        let values = self.file.read(&tensor, &file_shape(spec))?;
        Ok(from_file(spec, require_finite(&self.path, &tensor, values)?))
    }
}
