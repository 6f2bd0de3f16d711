//! Groups of parameters by their use, for optimizers that treat them differently.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use pipewright::stage::StageModule;
use serde::{Deserialize, Serialize};

use crate::stage::ModelStage;

/// A group of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ParameterGroup {
    /// The factors of normalisations, and of the bounded function that may take their place.
    Norm,
    /// Summands: of linear layers, convolutions and steps, and of the scores of related tokens.
    Bias,
    /// Tables of embeddings, and heads that use such a table.
    Embedding,
}

impl ParameterGroup {
    /// All groups.
    pub const ALL: [Self; 3] = [Self::Norm, Self::Bias, Self::Embedding];

    /// Returns the name of the group in a configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Norm => "norm",
            Self::Bias => "bias",
            Self::Embedding => "embedding",
        }
    }

    /// Returns the group of the parameter `name` in a module of this type, as Burn's visitors name it.
    fn of(container: &str, name: &str) -> Option<Self> {
        match (container.strip_prefix("Struct:").unwrap_or(container), name) {
            ("RelationBias" | "RelationCopy", _) => Some(Self::Bias),
            (_, name) if name.ends_with("bias") => Some(Self::Bias),
            ("Norm" | "RmsNorm" | "GroupNormWeight" | "DynamicTanh", _) => Some(Self::Norm),
            ("Embedding" | "TiedHead", _) => Some(Self::Embedding),
            _ => None,
        }
    }
}

/// Returns the global paths of the parameters of these groups.
pub(crate) fn group_paths(stage: &ModelStage, groups: &[ParameterGroup]) -> Vec<String> {
    let mut visitor = GroupVisitor { groups, names: Vec::new(), owners: Vec::new(), paths: Vec::new() };
    stage.visit(&mut visitor);
    visitor.paths.iter().map(|local| stage.parameter_path(local)).collect()
}

struct GroupVisitor<'a> {
    groups: &'a [ParameterGroup],
    names: Vec<String>,
    owners: Vec<String>,
    paths: Vec<String>,
}

impl ModuleVisitor for GroupVisitor<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.names.push(name.to_owned());
        self.owners.push(container_type.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.names.pop();
        self.owners.pop();
    }

    fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
        let (Some(owner), Some(name)) = (self.owners.last(), self.names.last()) else { return };
        if ParameterGroup::of(owner, name).is_some_and(|group| self.groups.contains(&group)) {
            self.paths.push(self.names.join("."));
        }
    }
}
