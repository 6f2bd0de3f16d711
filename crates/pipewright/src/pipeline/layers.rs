//! The model that a [`PipelineBuilder`](super::PipelineBuilder) cuts into stages: a list of layers, or a
//! graph of them.
//!
//! [`Layers`] holds the number of layers and the function that makes each. Each rank makes the layers of its
//! own stages, so no process ever holds the whole model.

use std::convert::Infallible;
use std::fmt::Display;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{Module, ModuleDisplay, ModuleVisitor, Param};
use burn::tensor::{Bool, Int, Tensor};
use pipewright_kernel::hash::{INDEX, mixed};
use pipewright_schedule::{Partition, Placement, StageIndex};

use super::layer_list::{LayerList, LayerTypes};
use crate::graph::{Chain, Graph, GraphError, GraphLayer, Typed, Untyped};
use crate::random::seeded;
use crate::stage::{Stage, StageBody, StageContext, StageError, StageModule};
use crate::tensor::Values;

/// The layers of a model, before they are cut into stages.
///
/// [`Layers::new`] makes layers of one type, [`LayerList`] layers of different types, and [`Layers::graph`]
/// the nodes of a graph.
///
/// Layers are numbered from 0 in the order of the data flow. The parameter that layer 3 calls `linear.weight`
/// has the path `layers.3.linear.weight` under every cut, so a run can resume from a checkpoint under any
/// cut. If a layer is an enum, the path does not contain the variant. A layer's shared parameters
/// ([`StageModule::shared_parameters`]) keep the paths that the layer gives them. The parameters of a graph
/// have the names of its nodes in their paths.
pub struct Layers {
    pub(super) count: usize,
    /// The cost of each layer, in any unit.
    pub(super) weights: Option<Vec<u64>>,
    /// The first layer of each stage except the first, if the model itself has splits.
    pub(super) splits: Vec<usize>,
    /// The types at the edges of each layer, if layers have different types.
    pub(super) types: Vec<LayerTypes>,
    place: Box<dyn FnOnce(Cut) -> Result<MakeStage, GraphError> + Send>,
}

/// The stages of the layers, and the seed of their parameters.
pub(super) struct Cut {
    pub(super) partition: Partition,
    pub(super) placement: Placement,
    /// The seed of the initial parameters.
    pub(super) seed: Option<u64>,
}

/// A loss without its types, which several replicas use.
pub(super) type SharedLoss =
    Arc<dyn Fn(Values, Values, &StageContext) -> Result<Tensor<1>, StageError> + Send + Sync>;

/// A function that makes a stage on its rank's thread. The last stage gets a loss.
pub(super) type MakeStage =
    Box<dyn Fn(StageIndex, Option<SharedLoss>) -> Result<Stage, String> + Send + Sync>;

impl Layers {
    /// Makes `count` layers; `make` returns the layer at a place. `make` is called on the thread of the rank
    /// that has the layer, once in each replica.
    pub fn new<L, F>(count: usize, make: F) -> Self
    where
        L: StageModule + ModuleDisplay,
        F: Fn(usize) -> L + Send + Sync + 'static,
    {
        Self::try_new(count, move |index| Ok::<_, Infallible>(make(index)))
    }

    /// Like [`Layers::new`], for layers whose construction may fail, for example because their parameters are
    /// read from a file.
    pub fn try_new<L, E, F>(count: usize, make: F) -> Self
    where
        L: StageModule + ModuleDisplay,
        E: Display,
        F: Fn(usize) -> Result<L, E> + Send + Sync + 'static,
    {
        Self::chain(count, make, Chain::<_, Typed>::new)
    }

    /// Like [`Layers::try_new`], for an enum of all kinds of layers that the model has, or another type that
    /// takes different tensors at different places. A [`LayerList`] needs no such type.
    pub fn mixed<L, E, F>(count: usize, make: F) -> Self
    where
        L: GraphLayer,
        E: Display,
        F: Fn(usize) -> Result<L, E> + Send + Sync + 'static,
    {
        Self::chain(count, make, Chain::<_, Untyped>::new)
    }

    /// Makes the nodes of a graph; `make` makes a layer from a node's name and content. If the graph has
    /// splits, stages begin there unless the builder is given a partition.
    pub fn graph<C, L, F>(graph: Graph<C>, make: F) -> Self
    where
        C: Send + Sync + 'static,
        L: GraphLayer,
        F: Fn(&str, &C) -> L + Send + Sync + 'static,
    {
        let (count, splits) = (graph.len(), graph.splits.to_vec());
        let place = move |Cut { partition, placement, seed }: Cut| -> Result<MakeStage, GraphError> {
            let starts = partition.ranges().skip(1).map(|range| range.start);
            let graph = graph.with_splits(starts.collect());
            graph.place(&placement)?;
            let stage = move |stage, loss| {
                let placed = graph.place(&placement).map_err(|error| error.to_string())?;
                let mut places = graph.range(stage);
                let made = placed.stage(stage, |name, made_from| {
                    let place = places.next().unwrap_or_default();
                    let Ok(layer) = drawn(seed, place, || Ok::<_, Infallible>(make(name, made_from)));
                    layer
                });
                Ok(stage_of(made, loss))
            };
            Ok(Box::new(stage))
        };
        Self { count, weights: None, splits, types: Vec::new(), place: Box::new(place) }
    }

    /// Sets the cost of each layer, in any unit. By default all layers cost the same.
    /// [`Method::Optimal`](pipewright_schedule::Method::Optimal) and
    /// [`Method::Weighted`](pipewright_schedule::Method::Weighted) balance stages by it.
    pub fn with_weights(self, weights: impl Into<Vec<u64>>) -> Self {
        Self { weights: Some(weights.into()), ..self }
    }

    pub(super) fn place(self, cut: Cut) -> Result<MakeStage, GraphError> {
        (self.place)(cut)
    }

    /// Makes stages of consecutive layers; `join` makes a stage from the place of its first layer and its
    /// layers.
    fn chain<L, E, B, F>(count: usize, make: F, join: fn(usize, Vec<L>) -> B) -> Self
    where
        L: Module + 'static,
        E: Display,
        B: StageBody<Output = Values>,
        F: Fn(usize) -> Result<L, E> + Send + Sync + 'static,
    {
        let place = move |Cut { partition, seed, .. }: Cut| -> Result<MakeStage, GraphError> {
            let stage = move |stage, loss| {
                let range = partition.range(stage);
                let layer = |place| {
                    drawn(seed, place, || make(place)).map_err(|error| format!("layer {place}: {error}"))
                };
                let layers = range.clone().map(layer).collect::<Result<_, _>>()?;
                Ok(stage_of(join(range.start, layers), loss))
            };
            Ok(Box::new(stage))
        };
        Self { count, weights: None, splits: Vec::new(), types: Vec::new(), place: Box::new(place) }
    }
}

impl From<LayerList> for Layers {
    fn from(list: LayerList) -> Self {
        let types = list.types();
        Self { types: types.clone(), ..Self::chain(types.len(), list.into_make(), Chain::<_, Typed>::new) }
    }
}

impl<L: StageModule + ModuleDisplay> From<Vec<L>> for Layers {
    /// Makes layers from existing ones, for models that every process can hold as a whole. Each stage gets a
    /// copy of its layers.
    fn from(layers: Vec<L>) -> Self {
        let count = layers.len();
        // A module may be sent to another thread, but not shared.
        let layers = Mutex::new(layers);
        Self::new(count, move |place| layers.lock().unwrap_or_else(PoisonError::into_inner)[place].clone())
    }
}

impl std::fmt::Debug for Layers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Layers").field("count", &self.count).finish_non_exhaustive()
    }
}

fn stage_of<B: StageBody<Output = Values>>(body: B, loss: Option<SharedLoss>) -> Stage {
    match loss {
        None => Stage::of_body(body, None),
        Some(loss) => Stage::of_body(
            body,
            Some(Box::new(move |output, target, context: &StageContext| loss(output, target, context))),
        ),
    }
}

/// Returns the layer that `make` makes, with parameters drawn from the seed and the layer's place. They are
/// the same on every rank, in every order of construction, and in every replica.
fn drawn<L: Module, E>(seed: Option<u64>, index: usize, make: impl FnOnce() -> Result<L, E>) -> Result<L, E> {
    let Some(seed) = seed else { return make() };
    // The generator belongs to the whole process, so one layer is drawn at a time.
    seeded(mixed(seed ^ (index as u64).wrapping_add(1).wrapping_mul(INDEX)), || {
        let layer = make()?;
        layer.visit(&mut Draw);
        Ok(layer)
    })
}

/// Computes initial values, which Burn otherwise computes at their first use.
struct Draw;

impl ModuleVisitor for Draw {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        param.val();
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        param.val();
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        param.val();
    }
}
