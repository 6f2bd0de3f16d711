//! A stage whose parameters are spread over its replicas.
//!
//! Between two uses the module's parameters are this replica's rows of them: what the optimizer, checkpoints and reports
//! see. [`Shards::gather`] puts the whole parameters into the module, for a stage cannot compute without them, and
//! [`Shards::release`] the rows again. Both keep the parameters' ids.
//!
//! In between a microbatch may be in flight. So a forward leaves nothing of the parameters behind: each stands on the
//! tape as a [`catch`] of its own, and layers of [`crate::nn`] look their weights up when the backward comes. Other layers
//! hold on to the weights that they need, and with them to the memory, until their backward.

use std::collections::HashMap;

use burn::backend::Flex;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{DType, Tensor};

use super::state::{Found, parameters_of, with_values};
use crate::autodiff::{Caught, catch};
use crate::nn::{Deferred, WeightStore, node_of, row_major};
use crate::shard::Part;
use crate::stage::Gradient;
use crate::value::Value;

/// What a stage with sharded parameters keeps beside its module.
#[derive(Debug)]
pub(super) struct Shards {
    part: Part,
    /// The module's own rows, while it has the whole parameters.
    rows: Option<Vec<Value>>,
    store: WeightStore,
}

/// The gradients that a microbatch's backward catches, with their places among the parameters.
pub(super) type Catches = Vec<(usize, Caught)>;

impl Shards {
    /// Leaves `module` the rows of `part`.
    pub(super) fn cut<M: Module>(module: M, part: Part) -> (M, Self) {
        let rows = parameters_of(&module).into_iter().map(|found| own_rows(part, &found.value)).collect();
        let shards = Self { part, rows: None, store: WeightStore::default() };
        (with_values(module, rows), shards)
    }

    pub(super) fn part(&self) -> Part {
        self.part
    }

    /// The replica's rows of each parameter; none where it has no rows.
    pub(super) fn rows<M: Module>(&self, module: &M) -> Vec<Gradient> {
        let rows = match &self.rows {
            Some(rows) => rows.clone(),
            None => parameters_of(module).into_iter().map(|found| found.value).collect(),
        };
        rows.into_iter().map(|value| Some(value).filter(|value| value.shape()[0] > 0)).collect()
    }

    /// Puts the whole parameters into `module`.
    pub(super) fn gather<M: Module>(&mut self, module: M, whole: Vec<Value>) -> M {
        let found = parameters_of(&module);
        let on_cpu = |(Found { id, .. }, value): (&Found, &Value)| Some((*id, cpu(value)?));
        self.store.fill(found.iter().zip(&whole).filter_map(on_cpu));
        self.rows = Some(found.into_iter().map(|found| found.value).collect());
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
        let anchor = anchor(&module);
        let mut catcher = Catcher { anchor, place: 0, catches: Vec::new(), nodes: HashMap::new() };
        let module = module.map(&mut catcher);
        let Catcher { anchor, catches, nodes, .. } = catcher;
        (module, catches, deferred.passing(self.store.clone(), anchor, nodes))
    }
}

/// This replica's rows in storage of their own; a tensor without rows where it has none.
pub(super) fn own_rows(part: Part, whole: &Value) -> Value {
    let rows = part.rows(whole.shape()[0]);
    whole.narrow(0, rows.start, rows.end).copied()
}

/// The tensor of the CPU back end, if it is one that layers compute with there.
fn cpu(value: &Value) -> Option<burn::backend::tensor::FloatTensor<Flex>> {
    // Rank plays no part here, so any may stand in the type.
    let tensor = Tensor::<1>::from_dispatch(value.clone().into_dispatch());
    let tensor = (tensor.dtype() == DType::F32).then_some(tensor)?;
    tensor.try_into_primitive::<Flex>().ok().map(row_major)
}

/// A scalar leaf on the module's device.
fn anchor<M: Module>(module: &M) -> Tensor<1> {
    let device = super::runner::device_of(module).inner();
    Tensor::zeros([1], &device).autodiff().require_grad()
}

struct Catcher {
    anchor: Tensor<1>,
    place: usize,
    catches: Catches,
    nodes: HashMap<ParamId, burn::backend::autodiff::NodeId>,
}

impl ModuleMapper for Catcher {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let place = self.place;
        self.place += 1;
        let (id, tensor, mapper) = param.consume();
        // Nobody asks for the gradient of a frozen one.
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
