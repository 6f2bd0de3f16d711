//! The parameters of a stage's module: their paths, shapes and placements. They change only with the module.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::module::ParamId;
use burn::tensor::DType;
use pipewright_schedule::words::counted;

use super::body::StageBody;
use super::error::StageError;
use super::module_parameters::{NamedTensor, discrete_of, parameters_of};
use crate::tensor::{Placement, float_type_of};

/// The parameters of a module. Float parameters have an index, in the order in which Burn visits them; the
/// indices of integer and boolean parameters follow.
#[derive(Debug)]
pub(crate) struct ParameterTable {
    /// The global path of each float parameter.
    pub(crate) paths: Vec<Arc<str>>,
    /// The shape of each whole float parameter.
    pub(crate) shapes: Vec<Vec<usize>>,
    indices: HashMap<ParamId, usize>,
    /// The ids of the float parameters.
    pub(super) ids: Arc<HashSet<ParamId>>,
    placements: Vec<Placement>,
    /// For each float parameter that is a copy of an earlier one of the module, the index of the first copy.
    originals: Vec<Option<usize>>,
    /// Whether each float parameter has single precision in a pipeline of half precision.
    stay_single: Vec<bool>,
    /// The element type of all float parameters; `None` if they differ or there are none.
    pub(super) float_type: Option<DType>,
    /// Whether some float parameters are not trained, such as running statistics.
    pub(super) has_buffers: bool,
    /// Whether some of these are on all replicas, which average what forwards change of them.
    pub(super) has_statistics: bool,
    /// Whether other replicas do not have some of the float parameters.
    pub(crate) has_own_experts: bool,
    /// The path of each integer and boolean parameter.
    pub(super) discrete: Vec<Arc<str>>,
    /// The number of ranks that compute the stage together.
    tensor_ranks: u32,
    /// The number of replicas that hold the experts together.
    expert_ranks: u32,
}

impl ParameterTable {
    /// Lists the parameters of `module`, with these prefixes in front of their paths, the innermost first.
    /// Paths that the module declares as shared have no prefix.
    ///
    /// # Errors
    /// When two places of the module hold one parameter, or the ranks of a tensor group cannot hold a
    /// parameter as the module says.
    pub(super) fn new<M: StageBody>(
        module: &M,
        prefixes: &[String],
        tensor_ranks: u32,
        expert_ranks: u32,
    ) -> Result<Self, StageError> {
        let shared = module.shared_parameters();
        let global = |local: &str| -> Arc<str> {
            let add = |path: String, prefix: &String| {
                if shared.contains(&path) { path } else { format!("{prefix}.{path}") }
            };
            prefixes.iter().fold(module.parameter_path(local), add).into()
        };
        let floats = parameters_of(module);
        let paths: Vec<_> = floats.iter().map(|parameter| global(&parameter.local)).collect();
        let mut indices = HashMap::new();
        let twice =
            |(index, parameter): (usize, &NamedTensor)| Some((indices.insert(parameter.id, index)?, index));
        if let Some((first, second)) = floats.iter().enumerate().filter_map(twice).last() {
            return Err(StageError::Mistake(format!(
                "`{}` and `{}` are one parameter at two places of the stage: give each place a parameter of its own, and the \
                 same path and `shared_parameters` if they are to stay equal",
                paths[first], paths[second]
            )));
        }
        let placements: Vec<_> = floats.iter().map(|parameter| module.placement(&parameter.local)).collect();
        let mut table = Self {
            originals: originals(&paths, &placements),
            shapes: floats.iter().map(|parameter| parameter.value.shape().to_vec()).collect(),
            ids: Arc::new(indices.keys().copied().collect()),
            placements,
            stay_single: floats
                .iter()
                .map(|parameter| module.stays_in_single_precision(&parameter.local))
                .collect(),
            float_type: float_type_of(floats.iter().map(|parameter| &parameter.value)),
            has_buffers: floats.iter().any(|parameter| !parameter.is_trained),
            has_statistics: false,
            has_own_experts: false,
            discrete: discrete_of(module).iter().map(|parameter| global(&parameter.local)).collect(),
            paths,
            indices,
            tensor_ranks,
            expert_ranks,
        };
        table.check_placements()?;
        let is_expert = |index: &usize| table.is_on_one_replica(*index);
        let is_double = |index: &usize| floats[*index].value.dtype() == DType::F64;
        if let Some(index) = (0..floats.len()).filter(is_expert).find(is_double) {
            return Err(StageError::Mistake(format!(
                "the expert parameter `{}` has double precision, and replicas that hold experts together \
                 (`expert_parallel`) exchange rows of at most single precision: make it a parameter of single precision, or \
                 set `expert_parallel` to 1",
                table.paths[index]
            )));
        }
        let is_statistic = |index: usize| !floats[index].is_trained && !table.is_on_one_replica(index);
        table.has_statistics = (0..floats.len()).any(is_statistic);
        table.has_own_experts = (0..floats.len()).any(|index| table.is_on_one_replica(index));
        Ok(table)
    }

    fn check_placements(&self) -> Result<(), StageError> {
        let tensor_ranks = self.tensor_ranks;
        for ((placement, path), shape) in self.placements.iter().zip(&self.paths).zip(&self.shapes) {
            let Placement { dimension, shards, of_layer, .. } = *placement;
            let fits = match of_layer {
                None => shards > 0 && tensor_ranks.is_multiple_of(shards),
                Some(index) => index < shards && tensor_ranks == 1,
            };
            if !fits || (shards > 1 && dimension >= shape.len()) {
                let (shards, ranks) = (counted(shards, "shard"), counted(tensor_ranks, "tensor rank"));
                return Err(StageError::Mistake(format!(
                    "the parameter `{path}` of shape {shape:?} is cut into {shards} along dimension {dimension} for {ranks}: \
                     the number of shards must divide the number of ranks, a layer's own shard must be one of them and needs \
                     a single rank, and the dimension must exist (`StageModule::placement`)"
                )));
            }
        }
        Ok(())
    }

    /// Returns the index of a float parameter, if the module has it.
    pub(super) fn index_of(&self, id: ParamId) -> Option<usize> {
        self.indices.get(&id).copied()
    }

    /// Returns the shape of a float parameter, if the module has it.
    pub(super) fn shape_of(&self, id: ParamId) -> Option<&[usize]> {
        self.index_of(id).map(|index| self.shapes[index].as_slice())
    }

    /// Returns how the ranks of a tensor group hold a parameter. Integer and boolean parameters are not
    /// split.
    pub(crate) fn placement(&self, index: usize) -> Placement {
        self.placements.get(index).copied().unwrap_or(Placement::REPLICATED)
    }

    /// Returns whether other ranks of the tensor group hold the same shard of a parameter.
    pub(super) fn is_copied(&self, index: usize) -> bool {
        self.placement(index).copies(self.tensor_ranks) > 1
    }

    /// Returns whether this stage holds only a shard of the parameter, or the ranks of its tensor group may.
    pub(super) fn is_cut(&self, index: usize) -> bool {
        self.tensor_ranks != 1 || self.placement(index).of_layer.is_some()
    }

    /// Returns whether a parameter that is cut has whole rows.
    pub(super) fn is_cut_by_rows(&self, index: usize) -> bool {
        self.tensor_ranks == 1
            && self.placement(index).of_layer.is_some()
            && self.placement(index).dimension == 0
    }

    /// Returns the index of the first copy of a shared parameter in this stage, if the float parameter at `index`
    /// is another one. Copies have the same path, and the same shard if layers have shards.
    pub(super) fn original(&self, index: usize) -> Option<usize> {
        self.originals.get(index).copied().flatten()
    }

    pub(super) fn stays_single(&self, index: usize) -> bool {
        self.stay_single[index]
    }

    /// Returns whether other replicas do not have the parameter, because replicas hold the experts together. A
    /// replica that holds all experts holds it like every other parameter.
    pub(crate) fn is_on_one_replica(&self, index: usize) -> bool {
        self.expert_ranks > 1 && self.placement(index).on_one_replica
    }
}

/// Returns for each parameter the index of the first one with its path and shard, if that is another one.
fn originals(paths: &[Arc<str>], placements: &[Placement]) -> Vec<Option<usize>> {
    let mut firsts = HashMap::new();
    let keys = paths.iter().zip(placements).map(|(path, placement)| (path, placement.of_layer));
    let original = |(index, key)| {
        let first = *firsts.entry(key).or_insert(index);
        (first != index).then_some(first)
    };
    keys.enumerate().map(original).collect()
}
