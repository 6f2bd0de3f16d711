//! A stage whose parameters are sharded over its replicas.
//!
//! While the stage does not compute, the module's parameters are this replica's rows. The optimizer,
//! checkpoints and reports see these rows. A stage computes with whole parameters: [`Shards::gather`] puts
//! them into the module, and
//! [`Shards::release`] puts the rows back. Both keep the parameters' ids. Parameters that are not trained (frozen
//! weights, running statistics) stay whole on every replica: a module may change them itself, and this file
//! could not detect that.
//!
//! A microbatch may be in flight while the module has only its rows. So a forward must not keep any large
//! parameter: each parameter is on the tape as a [`catch`] of its own, and the backward looks up the matrices
//! and tables of
//! [`crate::nn`]. Burn's own layers keep the weights that they need, and their memory, until their backward.

use std::collections::{HashMap, HashSet};

use burn::backend::autodiff::NodeId;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::Tensor;

use super::module_parameters::device_of;
use super::module_parameters::{NamedTensor, parameters_of, with_values};
use crate::autodiff::{Caught, catch};
use crate::nn::{Deferred, WeightStore, node_of};
use crate::tensor::shard::RowShard;
use crate::tensor::{OptionalTensors, Value};

/// The state of a stage with sharded parameters, in addition to its module.
#[derive(Debug)]
pub(super) struct Shards {
    /// The rows of each parameter that the replica has.
    row_shards: Vec<RowShard>,
    /// Whether each parameter is sharded.
    spread: Vec<bool>,
    /// The module's own rows while it has the whole parameters; `None` for parameters that are not sharded.
    rows: Option<OptionalTensors>,
    store: WeightStore,
}

/// The gradients that a microbatch's backward catches, with the indices of their parameters.
pub(super) type Catches = Vec<(usize, Caught)>;

impl Shards {
    /// Reduces each parameter of `module` to the rows that `row_shard` returns for its index. Parameters in
    /// `frozen` were trained before, and count as trained.
    pub(super) fn cut<M: Module>(
        module: M,
        row_shard: impl Fn(usize) -> RowShard,
        frozen: &HashSet<ParamId>,
    ) -> (M, Self) {
        let found = parameters_of(&module);
        let row_shards: Vec<RowShard> = (0..found.len()).map(row_shard).collect();
        let is_spread = |found: &NamedTensor| found.is_trained || frozen.contains(&found.id);
        let own = |(found, row_shard): (&NamedTensor, &RowShard)| {
            is_spread(found).then(|| own_rows(*row_shard, &found.value))
        };
        let rows = found.iter().zip(&row_shards).map(own).collect();
        let spread = found.iter().map(is_spread).collect();
        drop(found);
        (with_values(module, rows), Self { row_shards, spread, rows: None, store: WeightStore::default() })
    }

    /// Returns the state of another module with the same rows, while neither is gathered.
    pub(super) fn released_copy(&self) -> Self {
        let (row_shards, spread) = (self.row_shards.clone(), self.spread.clone());
        Self { row_shards, spread, rows: None, store: WeightStore::default() }
    }

    /// Returns the rows of a parameter that the replica has; the whole parameter if it is not sharded.
    pub(super) fn row_shard(&self, index: usize) -> RowShard {
        if self.is_spread(index) { self.row_shards[index] } else { RowShard::WHOLE }
    }

    /// Returns whether the module has the whole parameters.
    pub(super) fn is_gathered(&self) -> bool {
        self.rows.is_some()
    }

    /// Returns whether the parameter at `index` is sharded. Integer and boolean parameters come after the
    /// others and are not sharded.
    fn is_spread(&self, index: usize) -> bool {
        self.spread.get(index).copied().unwrap_or(false)
    }

    /// Returns whether this replica contributes its parameter at `index` to the state of all replicas. Every
    /// replica contributes its rows of sharded parameters. If several replicas have the same parameter
    /// whole, the first one contributes it. Integer and boolean parameters are on all replicas, like
    /// `others`.
    pub(super) fn counts(&self, index: usize, others: RowShard) -> bool {
        self.is_spread(index) || self.row_shards.get(index).unwrap_or(&others).index == 0
    }

    /// Returns the replica's rows of each parameter; `None` if it has no rows or the parameter is not
    /// sharded.
    pub(super) fn rows<M: Module>(&self, module: &M) -> OptionalTensors {
        let rows = match &self.rows {
            Some(rows) => rows.clone(),
            None => self.spread_of(parameters_of(module)),
        };
        rows.into_iter().map(|rows| rows.filter(|rows| rows.shape()[0] > 0)).collect()
    }

    fn spread_of(&self, found: Vec<NamedTensor>) -> OptionalTensors {
        found
            .into_iter()
            .zip(&self.spread)
            .map(|(found, &is_spread)| is_spread.then_some(found.value))
            .collect()
    }

    /// Puts the whole values of the sharded parameters into `module`.
    pub(super) fn gather<M: Module>(&mut self, module: M, whole: OptionalTensors) -> M {
        let found = parameters_of(&module);
        let with_id = |(found, whole): (&NamedTensor, &Option<Value>)| Some((found.id, whole.clone()?));
        self.store.fill(found.iter().zip(&whole).filter_map(with_id));
        self.rows = Some(self.spread_of(found));
        with_values(module, whole)
    }

    /// Lets the layers find the parameters of `module`, a copy of the module with whole parameters, in their
    /// backward.
    pub(super) fn look_up_in<M: Module>(&self, module: &M) {
        let found = parameters_of(module).into_iter().zip(&self.spread);
        self.store.fill(found.filter(|(_, is_spread)| **is_spread).map(|(found, _)| (found.id, found.value)));
    }

    /// Puts the replica's rows back into `module` if it has the whole parameters.
    pub(super) fn release<M: Module>(&mut self, module: M) -> M {
        self.store.clear();
        let module = self.with_rows(module);
        self.rows = None;
        module
    }

    /// Returns `module` with the replica's rows if it has the whole parameters.
    pub(super) fn with_rows<M: Module>(&self, module: M) -> M {
        match &self.rows {
            Some(rows) => with_values(module, rows.clone()),
            None => module,
        }
    }

    /// Returns the module for one forward, in which gradients are caught, and the collector that belongs to
    /// it.
    pub(super) fn forward<M: Module>(&self, module: M, deferred: Deferred) -> (M, Catches, Deferred) {
        let anchor = Tensor::zeros([1], &device_of(&module)).require_grad();
        let mut catcher = Catcher { anchor, index: 0, catches: Vec::new(), nodes: HashMap::new() };
        let module = module.map(&mut catcher);
        let Catcher { anchor, catches, nodes, .. } = catcher;
        (module, catches, deferred.with_sharded_weights(self.store.clone(), anchor, nodes))
    }
}

/// Returns a copy of a replica's rows; a tensor without rows if the replica has no rows.
fn own_rows(row_shard: RowShard, whole: &Value) -> Value {
    let rows = row_shard.rows(whole.shape()[0]);
    whole.narrow(0, rows.start, rows.end).copied()
}

struct Catcher {
    /// A scalar leaf, which puts the catches on a tape.
    anchor: Tensor<1>,
    index: usize,
    catches: Catches,
    nodes: HashMap<ParamId, NodeId>,
}

impl ModuleMapper for Catcher {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let index = self.index;
        self.index += 1;
        let (id, tensor, mapper) = param.consume();
        if !tensor.is_require_grad() {
            return Param::from_mapped_value(id, tensor, mapper);
        }
        let caught = Caught::default();
        let tensor = catch(&self.anchor, tensor, caught.clone());
        self.nodes.extend(node_of(&tensor).map(|node| (id, node)));
        self.catches.push((index, caught));
        Param::from_mapped_value(id, tensor, mapper)
    }
}
