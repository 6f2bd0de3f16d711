//! The settings of low-rank adapters (LoRA; Hu et al., 2021, <https://arxiv.org/abs/2106.09685>), and the
//! layers that have one.
//!
//! A linear layer `y = x w + b` with an adapter computes `x w + b + scale * dropout(x) a b'`, with
//! `a [inputs, rank]` and `b' [rank, outputs]`. Only `a` and `b'` are trained. They are the parameters
//! `lora_A.weight` and `lora_B.weight` of the layer, as PEFT names them.
//!
//! With DoRA (Liu et al., 2024, <https://arxiv.org/abs/2402.09353>) the layer computes `(x v) m / |v| + b`,
//! in which `v = w + scale * a b'`, `|v|` has the norm of each column of `v`, and the magnitudes `m
//! [outputs]` are trained too. The gradient does not go through `|v|`. `m` is the parameter
//! `lora_magnitude_vector`.

use std::collections::BTreeSet;

use pipewright_shapes::ShapeError;
use pipewright_shapes::training::AdapterSizes;
use serde::{Deserialize, Serialize};

use crate::error::ModelError;
use crate::lora_target::LoraTarget;

/// The path of an output head that has a matrix of its own.
pub(crate) const HEAD: &str = "lm_head";
/// The path of the matrix of a head of labels, which adapters save as a whole.
pub(crate) const SCORE: &str = "score";
/// The names of an adapter's two matrices in the path of a parameter.
const MATRICES: [&str; 2] = [".lora_A.", ".lora_B."];
/// The names of both matrices of the adapter of a table, which are not layers in PEFT.
pub(crate) const TABLE_MATRICES: [&str; 2] = ["lora_embedding_A", "lora_embedding_B"];
/// The name of the list of experts, and of the matrices of all experts of a block in PEFT.
const EXPERTS: &str = "experts";
pub(crate) const GATE_UP: &str = "gate_up_proj";
pub(crate) const DOWN: &str = "down_proj";
/// The names of the tables of the token embeddings in files.
pub(crate) const TABLES: [&str; 3] = ["embed_tokens", "wte", "embeddings"];
/// The name of an adapter's magnitudes in the path of a parameter.
pub(crate) const MAGNITUDES: &str = "lora_magnitude_vector";

/// The settings of a model's adapters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraConfig {
    /// The number of columns of `a` and rows of `b'`.
    pub rank: u32,
    /// The factor of the adapter's output, before it is divided.
    pub alpha: f64,
    /// The probability with which an element of the adapter's input is dropped in training.
    pub dropout: f64,
    /// Whether `alpha` is divided by the root of the rank instead of the rank (Kalajdzievski, 2023,
    /// <https://arxiv.org/abs/2312.03732>).
    pub rslora: bool,
    /// Whether the norms of the columns of the layer's matrix are trained apart from their directions (DoRA).
    #[serde(default)]
    pub dora: bool,
    /// Whether the gate and `up` of an expert have a first matrix each, as PEFT has put adapters on models of transformers 4,
    /// whose experts are layers. Otherwise they share one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub own_experts: bool,
    /// The layers that have an adapter.
    pub targets: LoraTargets,
    /// The modules whose own parameters are trained too, and saved with the adapters. They have no adapter.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub modules_to_save: Vec<LoraTarget>,
}

impl Default for LoraConfig {
    /// Adapters of rank 8 with the scale 1 and without dropout, on all linear layers.
    fn default() -> Self {
        Self {
            rank: 8,
            alpha: 8.0,
            dropout: 0.0,
            rslora: false,
            dora: false,
            own_experts: false,
            targets: LoraTargets::AllLinear,
            modules_to_save: Vec::new(),
        }
    }
}

/// The linear layers that have an adapter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LoraTargets {
    /// All linear layers of attention and feed-forward, and of experts that every token goes through. In a
    /// dense model, PEFT calls this `all-linear`; in a mixture, its `all-linear` also means routers and all
    /// experts.
    AllLinear,
    /// The layers with these names, with these paths, or whose paths match these patterns.
    Named(Vec<LoraTarget>),
}

impl LoraConfig {
    /// Returns the settings on which the costs of the adapters depend.
    pub fn sizes(&self) -> AdapterSizes {
        AdapterSizes { rank: self.rank.into(), has_magnitudes: self.dora, has_dropout: self.dropout > 0.0 }
    }

    /// Returns the factor of the adapter's output.
    pub fn scale(&self) -> f64 {
        let rank = f64::from(self.rank);
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    /// Checks the settings by themselves: a rank above 0, a finite scale, and a target.
    ///
    /// # Errors
    /// With the first setting that cannot be used.
    pub fn check(&self) -> Result<(), ShapeError> {
        let refuse = |key, value: String, supported| Err(ShapeError::not_supported(key, &value, supported));
        if self.rank == 0 {
            return refuse("rank", "0".to_owned(), "a number from 1");
        }
        if !self.scale().is_finite() {
            return refuse("alpha", self.alpha.to_string(), "a finite number");
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return refuse("dropout", self.dropout.to_string(), "a number from 0 to below 1");
        }
        match &self.targets {
            LoraTargets::Named(targets) if targets.is_empty() => {
                refuse("targets", "[]".to_owned(), "a list with a layer")
            }
            LoraTargets::Named(_) | LoraTargets::AllLinear => Ok(()),
        }
    }

    /// Returns whether the linear layer, the table of the token embeddings or the matrices of all experts at a path have an
    /// adapter. A table and experts have one only if they are named.
    pub(crate) fn adapts(&self, layer: &str) -> bool {
        if self.saves_module(layer) {
            return false;
        }
        match &self.targets {
            LoraTargets::AllLinear => {
                ![HEAD, SCORE].contains(&layer) && !is_table(layer) && !is_of_experts(layer)
            }
            LoraTargets::Named(targets) if is_table(layer) => {
                targets.iter().any(|target| !target.is_pattern() && target.means(layer))
            }
            LoraTargets::Named(targets) if is_of_experts(layer) => {
                let names_experts = |target: &LoraTarget| {
                    !target.is_pattern() && target.as_str().split('.').any(|name| name == EXPERTS)
                };
                targets.iter().any(|target| names_experts(target) && target.means(layer))
            }
            LoraTargets::Named(targets) => targets.iter().any(|target| target.means(layer)),
        }
    }

    /// Returns whether a module, or one that it is a part of, is trained whole.
    pub(crate) fn saves_module(&self, module: &str) -> bool {
        if self.modules_to_save.is_empty() {
            return false;
        }
        let parents = module.match_indices('.').map(|(end, _)| &module[..end]);
        let mut modules = parents.chain([module]);
        modules.any(|module| self.modules_to_save.iter().any(|target| target.means(module)))
    }

    /// Returns whether a parameter of the model belongs to a module that is trained whole.
    pub(crate) fn saves(&self, parameter: &str) -> bool {
        self.saves_module(module_of(parameter))
    }

    /// Returns whether training changes a parameter: one of an adapter, or of a module that is trained whole.
    pub(crate) fn trains(&self, parameter: &str) -> bool {
        is_of_adapter(parameter) || self.saves(parameter)
    }

    /// Returns the paths of the modules with parameters of their own among `parameters` that are trained whole.
    pub fn saved_modules<'a>(&self, parameters: impl IntoIterator<Item = &'a str>) -> BTreeSet<&'a str> {
        let saved = parameters.into_iter().filter(|path| !is_of_adapter(path) && self.saves(path));
        saved.map(module_of).collect()
    }

    /// Checks that each module to save has some of the model's `parameters`, given as paths.
    pub(crate) fn require_modules(&self, parameters: &[String]) -> Result<(), ModelError> {
        let one = |target: &LoraTarget| Self { modules_to_save: vec![target.clone()], ..Self::default() };
        let is_unknown = |target: &&LoraTarget| !parameters.iter().any(|path| one(target).saves(path));
        self.modules_to_save.iter().find(is_unknown).map_or(Ok(()), |target| {
            let names = parameters.iter().map(|path| name_of(module_of(path))).collect::<BTreeSet<_>>();
            Err(ModelError::new(format!(
                "`adapter.modules_to_save`: `{}` is not a module of the model with parameters: write names of {}, a path or a pattern \
                 of paths",
                target.as_str(),
                names.into_iter().collect::<Vec<_>>().join(", ")
            )))
        })
    }

    /// Returns whether a matrix of latents has an adapter, which attentions for generation read as a matrix.
    pub(crate) fn adapts_latents<'a>(&self, parameters: impl Iterator<Item = &'a str>) -> bool {
        let mut layers = parameters.filter_map(|path| path.strip_suffix(".weight"));
        layers.any(|layer| name_of(layer) == "kv_b_proj" && self.adapts(layer))
    }

    /// Checks that each target means at least one of the model's `layers`, given as paths.
    pub(crate) fn require_targets(&self, layers: &[String]) -> Result<(), ModelError> {
        let LoraTargets::Named(targets) = &self.targets else { return Ok(()) };
        for target in targets {
            target.check().map_err(|source| {
                let fault = "is not a pattern: correct it, or write the name of a layer";
                ModelError::new(format!("`adapter.targets`: `{}` {fault}", target.as_str())).because(source)
            })?;
        }
        let unknown = |target: &&LoraTarget| !layers.iter().any(|layer| target.means(layer));
        targets.iter().find(unknown).map_or(Ok(()), |target| {
            let name = |layer: &String| match name_of(layer) {
                name if is_of_experts(layer) => format!("{EXPERTS}.{name}"),
                name => name.to_owned(),
            };
            let names = layers.iter().map(name).collect::<BTreeSet<_>>();
            let names = names.into_iter().collect::<Vec<_>>().join(", ");
            Err(ModelError::new(format!(
                "`adapter.targets`: `{}` is not a linear layer of the model: write names of {names}, or \"all-linear\"",
                target.as_str()
            )))
        })
    }
}

impl LoraTargets {
    /// Returns the layers with these names, with these paths, or whose paths match these patterns.
    pub fn named(targets: impl IntoIterator<Item: Into<String>>) -> Self {
        Self::Named(targets.into_iter().map(|target| LoraTarget::from(target.into())).collect())
    }

    /// Returns the targets that mean the layers `adapted` and no others of `layers`: their names if these
    /// suffice, and otherwise their paths. Experts have their paths.
    pub(crate) fn short_names(adapted: &BTreeSet<String>, layers: &[String]) -> Vec<String> {
        let (experts, adapted) = adapted.iter().cloned().partition(|layer| is_of_experts(layer));
        let experts: BTreeSet<String> = experts;
        Self::short_names_of_layers(&adapted, layers).into_iter().chain(experts).collect()
    }

    fn short_names_of_layers(adapted: &BTreeSet<String>, layers: &[String]) -> Vec<String> {
        let names: BTreeSet<String> = adapted.iter().map(|layer| name_of(layer).to_owned()).collect();
        let is_named = |layer: &&String| !is_of_experts(layer) && names.contains(name_of(layer));
        let named = layers.iter().filter(is_named).count();
        let shortest = if named == adapted.len() { &names } else { adapted };
        shortest.iter().cloned().collect()
    }
}

/// Returns the last part of a layer's path.
pub(crate) fn name_of(layer: &str) -> &str {
    layer.rsplit('.').next().unwrap_or(layer)
}

/// Returns the path of the module of a parameter.
pub(crate) fn module_of(parameter: &str) -> &str {
    parameter.rsplit_once('.').map_or("", |(module, _)| module)
}

/// Returns whether a parameter belongs to an adapter.
pub fn is_of_adapter(parameter: &str) -> bool {
    MATRICES.iter().any(|matrix| parameter.contains(matrix))
        || TABLE_MATRICES.contains(&name_of(parameter))
        || layer_of_magnitudes(parameter).is_some()
}

/// Returns whether a path means the matrices of all experts of a block, such as `model.layers.0.mlp.experts.down_proj`.
pub(crate) fn is_of_experts(layer: &str) -> bool {
    layer.rsplit_once('.').is_some_and(|(module, _)| name_of(module) == EXPERTS)
}

/// Returns whether a module is the table of the token embeddings.
pub(crate) fn is_table(module: &str) -> bool {
    TABLES.contains(&name_of(module))
}

/// Returns the path of the layer that the magnitudes of an adapter belong to; `None` for other parameters.
pub(crate) fn layer_of_magnitudes(parameter: &str) -> Option<&str> {
    parameter.strip_suffix(MAGNITUDES)?.strip_suffix('.')
}

/// Returns the path of the layer that an adapter's first matrix belongs to; `None` for other parameters.
pub(crate) fn layer_of_first(parameter: &str) -> Option<&str> {
    parameter.strip_suffix(".lora_A.weight").or_else(|| parameter.strip_suffix(".lora_embedding_A"))
}

/// Returns the path of the layer that an adapter's second matrix belongs to; `None` for other parameters.
pub(crate) fn layer_of_second(parameter: &str) -> Option<&str> {
    parameter.strip_suffix(".lora_B.weight").or_else(|| parameter.strip_suffix(".lora_embedding_B"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYERS: [&str; 3] =
        ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"];

    fn config(targets: &[&str]) -> LoraConfig {
        LoraConfig {
            alpha: 16.0,
            targets: LoraTargets::named(targets.iter().copied()),
            ..LoraConfig::default()
        }
    }

    fn check(target: &str, expected: &[usize]) {
        let config = config(&[target]);
        let found: Vec<usize> = (0..LAYERS.len()).filter(|&index| config.adapts(LAYERS[index])).collect();
        assert_eq!(found, expected, "{target}");
    }

    #[test]
    fn targets_are_names_paths_and_patterns() {
        check("q_proj", &[0, 1]);
        check("mlp.up_proj", &[2]);
        check("proj", &[]);
        check("model.layers.1.self_attn.q_proj", &[1]);
        check("*.layers.1.*", &[1, 2]);
        check("*.{up,down}_proj", &[2]);
        assert!(!LoraConfig::default().adapts(HEAD) && config(&["lm_head"]).adapts(HEAD));
        let has_table = |lora: LoraConfig| lora.adapts("model.embed_tokens");
        assert!(has_table(config(&["embed_tokens"])) && !has_table(config(&["*"])));
        assert!(!has_table(LoraConfig::default()));
        let has_experts = |lora: LoraConfig| lora.adapts("model.layers.1.mlp.experts.down_proj");
        assert!(has_experts(config(&["experts.down_proj"])) && !has_experts(config(&["down_proj", "*"])));
        assert!(!has_experts(LoraConfig::default()) && !has_experts(config(&["experts.gate_up_proj"])));
    }

    #[test]
    fn an_unknown_target_is_named_with_the_known_ones() {
        let layers = LAYERS.map(str::to_owned);
        assert!(config(&["q_proj", "*.up_proj"]).require_targets(&layers).is_ok());
        let error = config(&["q_proj", "query"]).require_targets(&layers).expect_err("it is unknown");
        let text = error.to_string();
        assert!(text.contains("`query`") && text.contains("q_proj, up_proj"), "{text}");
    }

    #[test]
    fn a_wrong_pattern_is_refused_as_a_pattern() {
        let layers = LAYERS.map(str::to_owned);
        let error = config(&["q_proj", "*.{q,k_proj"]).require_targets(&layers).expect_err("it has no end");
        let text = error.to_string();
        assert!(text.contains("`*.{q,k_proj` is not a pattern"), "{text}");
        assert!(std::error::Error::source(&error).is_some());
    }

    #[test]
    fn a_name_is_written_if_it_means_the_adapted_layers_alone() {
        let layers = LAYERS.map(str::to_owned);
        let of = |adapted: &[usize], further: &[&str]| {
            let adapted = adapted.iter().map(|&index| layers[index].clone()).collect();
            let further = further.iter().map(|&layer| layer.to_owned());
            LoraTargets::short_names(&adapted, &layers.iter().cloned().chain(further).collect::<Vec<_>>())
        };
        assert_eq!(of(&[0, 1], &[]), ["q_proj"]);
        assert_eq!(of(&[1], &[]), [LAYERS[1]]);
        // PEFT would adapt the layer of the expert too.
        assert_eq!(of(&[2], &["model.layers.0.mlp.experts.0.up_proj"]), [LAYERS[2]]);
        assert_eq!(of(&[0, 1], &["model.layers.0.mlp.experts.0.up_proj"]), ["q_proj"]);
    }

    #[test]
    fn settings_without_a_meaning_are_refused() {
        let good = config(&["q_proj"]);
        assert!(good.check().is_ok());
        let refused = |bad: LoraConfig, key: &str| {
            let text = bad.check().expect_err(key).to_string();
            assert!(text.starts_with(&format!("`{key} = ")), "{text}");
        };
        refused(LoraConfig { rank: 0, ..good.clone() }, "rank");
        refused(LoraConfig { alpha: f64::INFINITY, ..good.clone() }, "alpha");
        refused(LoraConfig { dropout: 1.0, ..good.clone() }, "dropout");
        refused(config(&[]), "targets");
    }

    #[test]
    fn saved_modules_are_trained_whole_and_have_no_adapter() {
        let modules_to_save =
            ["lm_head", "norm", "model.layers.1.mlp"].map(|name| name.to_owned().into()).to_vec();
        let lora = LoraConfig { modules_to_save, ..LoraConfig::default() };
        let saved = ["lm_head.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"];
        assert!(saved.iter().all(|path| lora.saves(path) && lora.trains(path)));
        let others = ["model.layers.1.input_norm.weight", "model.layers.0.mlp.up_proj.weight", LAYERS[0]];
        assert!(!others.iter().any(|path| lora.saves(path)));
        assert!(!lora.adapts(LAYERS[2]) && lora.adapts(LAYERS[1]));
        let parameters: Vec<String> = saved.iter().chain(&others).map(|path| (*path).to_owned()).collect();
        assert!(lora.require_modules(&parameters).is_ok());
        let modules = lora.saved_modules(parameters.iter().map(String::as_str));
        assert_eq!(Vec::from_iter(modules), ["lm_head", "model.layers.1.mlp.up_proj", "model.norm"]);
        let error = lora.require_modules(&parameters[1..]).expect_err("there is no head").to_string();
        assert!(error.contains("`lm_head` is not a module") && error.contains("norm"), "{error}");
    }

    #[test]
    fn matrices_and_magnitudes_are_of_an_adapter() {
        let of = |name: &str| is_of_adapter(&format!("model.layers.0.self_attn.q_proj.{name}"));
        assert!(["lora_A.weight", "lora_B.weight", "lora_magnitude_vector"].map(of).iter().all(|&is| is));
        assert!(!["weight", "bias"].map(of).contains(&true));
        assert!(is_of_adapter("model.embed_tokens.lora_embedding_A"));
    }

    #[test]
    fn the_scale_divides_by_the_rank_or_its_root() {
        let plain = config(&[]);
        assert_eq!(plain.scale(), 2.0);
        assert_eq!(LoraConfig { rank: 16, rslora: true, ..plain }.scale(), 4.0);
    }
}
