//! A stage whose parameters are spread over its replicas.
//!
//! Between two uses the module's parameters are this replica's rows of them: what the optimizer, checkpoints and
//! reports see. [`Shards::gather`] puts the whole parameters into the module, for a stage cannot compute without them,
//! and [`Shards::release`] the rows again. Both keep the parameters' ids. What is not trained (frozen weights, running
//! statistics) stays whole on every replica: a module may change it by itself, and nobody here would know.
//!
//! In between a microbatch may be in flight. So a forward leaves no large parameter behind: each stands on the tape as
//! a [`catch`] of its own, and the matrices and tables of [`crate::nn`] are looked up when the backward comes. Burn's
//! own layers hold on to the weights that they need, and with them to the memory, until their backward.

use std::collections::HashMap;

use burn::backend::Flex;
use burn::backend::autodiff::NodeId;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{DType, Tensor};

use super::runner::device_of;
use super::state::{Found, parameters_of, with_values};
use crate::autodiff::{Caught, catch};
use crate::nn::{CpuTensor, Deferred, WeightStore, node_of, row_major};
use crate::tensor::shard::RowShard;
use crate::tensor::{OptionalTensors, Value};

/// What a stage with sharded parameters keeps beside its module.
#[derive(Debug)]
pub(super) struct Shards {
    part: RowShard,
    /// Whether each parameter is spread.
    spread: Vec<bool>,
    /// The module's own rows, while it has the whole parameters; none of what is not spread.
    rows: Option<OptionalTensors>,
    store: WeightStore,
}

/// The gradients that a microbatch's backward catches, with their places among the parameters.
pub(super) type Catches = Vec<(usize, Caught)>;

impl Shards {
    /// Leaves `module` the rows of `part`.
    pub(super) fn cut<M: Module>(module: M, part: RowShard) -> (M, Self) {
        let found = parameters_of(&module);
        let own = |found: &Found| found.is_trained.then(|| own_rows(part, &found.value));
        let rows = found.iter().map(own).collect();
        let spread = found.iter().map(|found| found.is_trained).collect();
        drop(found);
        (with_values(module, rows), Self { part, spread, rows: None, store: WeightStore::default() })
    }

    /// Which part of the parameter at `place` the replica has: all of what is not spread.
    pub(super) fn part_of(&self, place: usize) -> RowShard {
        if self.is_spread(place) { self.part } else { RowShard::WHOLE }
    }

    /// Whether the parameter at `place` is spread; integer and boolean ones, which stand behind the others, are not.
    fn is_spread(&self, place: usize) -> bool {
        self.spread.get(place).copied().unwrap_or(false)
    }

    pub(super) fn part(&self) -> RowShard {
        self.part
    }

    /// Whether this replica's parameter at `place` belongs to the state of all: its rows do, and of what every replica
    /// has whole the first one's.
    pub(super) fn counts(&self, place: usize) -> bool {
        self.is_spread(place) || self.part.index == 0
    }

    /// The replica's rows of each parameter; none where it has none, or the parameter is not spread.
    pub(super) fn rows<M: Module>(&self, module: &M) -> OptionalTensors {
        let rows = match &self.rows {
            Some(rows) => rows.clone(),
            None => self.spread_of(parameters_of(module)),
        };
        rows.into_iter().map(|rows| rows.filter(|rows| rows.shape()[0] > 0)).collect()
    }

    fn spread_of(&self, found: Vec<Found>) -> OptionalTensors {
        found
            .into_iter()
            .zip(&self.spread)
            .map(|(found, &is_spread)| is_spread.then_some(found.value))
            .collect()
    }

    /// Puts the whole parameters into `module`, as far as they are spread.
    pub(super) fn gather<M: Module>(&mut self, module: M, whole: OptionalTensors) -> M {
        let found = parameters_of(&module);
        let on_cpu = |(found, whole): (&Found, &Option<Value>)| Some((found.id, cpu(whole.as_ref()?)?));
        self.store.fill(found.iter().zip(&whole).filter_map(on_cpu));
        self.rows = Some(self.spread_of(found));
        with_values(module, whole)
    }

    /// Leaves `module` the replica's rows again, if it has more.
    pub(super) fn release<M: Module>(&mut self, module: M) -> M {
        self.store.clear();
        match self.rows.take() {
            Some(rows) => with_values(module, rows),
            None => module,
        }
    }

    /// The module as one forward sees it, where its gradients are caught, and a collector that goes with it.
    pub(super) fn forward<M: Module>(&self, module: M, deferred: Deferred) -> (M, Catches, Deferred) {
        let anchor = Tensor::zeros([1], &device_of(&module).inner()).autodiff().require_grad();
        let mut catcher = Catcher { anchor, place: 0, catches: Vec::new(), nodes: HashMap::new() };
        let module = module.map(&mut catcher);
        let Catcher { anchor, catches, nodes, .. } = catcher;
        (module, catches, deferred.passing(self.store.clone(), anchor, nodes))
    }
}

/// A replica's rows in storage of their own; a tensor without rows where it has none.
fn own_rows(part: RowShard, whole: &Value) -> Value {
    let rows = part.rows(whole.shape()[0]);
    whole.narrow(0, rows.start, rows.end).copied()
}

/// The tensor of the CPU back end, if it is one that layers compute with there.
fn cpu(value: &Value) -> Option<CpuTensor> {
    // The number of dimensions does not matter here; 1 is arbitrary.
    let tensor = Tensor::<1>::from_dispatch(value.clone().into_dispatch());
    let tensor = (tensor.dtype() == DType::F32).then_some(tensor)?;
    tensor.try_into_primitive::<Flex>().ok().map(row_major)
}

struct Catcher {
    /// A scalar leaf, so that what is caught is on a tape.
    anchor: Tensor<1>,
    place: usize,
    catches: Catches,
    nodes: HashMap<ParamId, NodeId>,
}

impl ModuleMapper for Catcher {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let place = self.place;
        self.place += 1;
        let (id, tensor, mapper) = param.consume();
        if !tensor.is_require_grad() {
            return Param::from_mapped_value(id, tensor, mapper);
        }
        let caught = Caught::default();
        let tensor = catch(&self.anchor, tensor, caught.clone());
        self.nodes.extend(node_of(&tensor).map(|node| (id, node)));
        self.catches.push((place, caught));
        Param::from_mapped_value(id, tensor, mapper)
    }
}
