//! The model that a [`PipelineBuilder`](super::PipelineBuilder) cuts into stages: a list of layers, or a graph of them.
//!
//! [`Layers`] says how many layers there are and how each is made. Each rank makes the layers of its own stages, so no
//! process ever holds the whole model.

use std::convert::Infallible;
use std::fmt::Display;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{Module, ModuleDisplay, ModuleVisitor, Param};
use burn::tensor::{Bool, Device, Int, Tensor};
use pipewright_schedule::{Partition, Placement, StageIndex};

use crate::graph::{Graph, GraphError, GraphLayer, MixedChain, TypedChain};
use crate::stage::{Stage, StageBody, StageContext, StageError, StageModule};
use crate::tensor::Values;

/// The layers of a model, before they are cut into stages.
///
/// Layers are numbered from 0 in the order in which the data meets them. The parameter that layer 3 calls
/// `linear.weight` has the path `layers.3.linear.weight`, whatever the cut, so a checkpoint resumes under any. A layer
/// that is an enum leaves its variant out of the path. A layer's shared parameters
/// ([`StageModule::shared_parameters`]) keep the paths that the layer gives them. A graph names its parameters after its
/// nodes.
pub struct Layers {
    pub(super) count: usize,
    /// What each layer costs, in any unit.
    pub(super) weights: Option<Vec<u64>>,
    /// The first layer of each stage but the first, if the model itself says where it is split.
    pub(super) splits: Vec<usize>,
    place: Box<dyn FnOnce(Cut) -> Result<MakeStage, GraphError> + Send>,
}

/// Where layers go.
pub(super) struct Cut {
    pub(super) partition: Partition,
    pub(super) placement: Placement,
    /// From which the initial parameters follow.
    pub(super) seed: Option<u64>,
}

/// A loss with its types erased, which several replicas use.
pub(super) type SharedLoss =
    Arc<dyn Fn(Values, Values, &StageContext) -> Result<Tensor<1>, StageError> + Send + Sync>;

/// Makes a stage on its rank's thread; with a loss, the last one.
pub(super) type MakeStage =
    Box<dyn Fn(StageIndex, Option<SharedLoss>) -> Result<Stage, String> + Send + Sync>;

impl Layers {
    /// As many layers as `count`; `make` makes the one at a place. It is called on the thread of the rank that has the
    /// layer, once in each replica.
    pub fn new<L, F>(count: usize, make: F) -> Self
    where
        L: StageModule + ModuleDisplay,
        F: Fn(usize) -> L + Send + Sync + 'static,
    {
        Self::try_new(count, move |place| Ok::<_, Infallible>(make(place)))
    }

    /// As [`Layers::new`], for layers whose making may fail: because their parameters are read from a file, for example.
    pub fn try_new<L, E, F>(count: usize, make: F) -> Self
    where
        L: StageModule + ModuleDisplay,
        E: Display,
        F: Fn(usize) -> Result<L, E> + Send + Sync + 'static,
    {
        Self::chain(count, make, TypedChain::new)
    }

    /// As [`Layers::try_new`], for layers between which different kinds of tensors pass, as token ids before an
    /// embedding and activations after it: usually an enum of all kinds of layers.
    pub fn mixed<L, E, F>(count: usize, make: F) -> Self
    where
        L: GraphLayer,
        E: Display,
        F: Fn(usize) -> Result<L, E> + Send + Sync + 'static,
    {
        Self::chain(count, make, MixedChain::new)
    }

    /// The nodes of a graph; `make` makes a layer from a node's name and what the node is made from. If the graph says
    /// where it is split, stages begin there unless the builder is given a partition.
    pub fn graph<C, L, F>(graph: Graph<C>, make: F) -> Self
    where
        C: Send + Sync + 'static,
        L: GraphLayer,
        F: Fn(&str, &C) -> L + Send + Sync + 'static,
    {
        let (count, splits) = (graph.len(), graph.splits().to_vec());
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
        Self { count, weights: None, splits, place: Box::new(place) }
    }

    /// Says what each layer costs, in any unit; without it, all cost the same.
    /// [`Method::Optimal`](pipewright_schedule::Method::Optimal) and
    /// [`Method::Weighted`](pipewright_schedule::Method::Weighted) balance stages by it.
    pub fn with_weights(self, weights: impl Into<Vec<u64>>) -> Self {
        Self { weights: Some(weights.into()), ..self }
    }

    pub(super) fn place(self, cut: Cut) -> Result<MakeStage, GraphError> {
        (self.place)(cut)
    }

    /// `join` makes a stage of its first layer's place and its layers.
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
        Self { count, weights: None, splits: Vec::new(), place: Box::new(place) }
    }
}

impl<L: StageModule + ModuleDisplay> From<Vec<L>> for Layers {
    /// Layers that exist already: for models of which every process can hold the whole. Each stage gets a copy of its
    /// layers.
    fn from(layers: Vec<L>) -> Self {
        let count = layers.len();
        // A module may be sent to another thread, but not shared.
        let layers = Mutex::new(layers);
        Self::new(count, move |place| {
            let layer = layers.lock().unwrap_or_else(PoisonError::into_inner)[place].clone();
            match layer.devices().first() {
                // Parameters of its own, which share no tape with those of other replicas.
                Some(device) => layer.fork(device),
                None => layer,
            }
        })
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

/// The layer that `make` makes, with parameters drawn from the seed and the layer's place: the same on whichever rank
/// the layer is, in whichever order ranks make their layers, and in every replica.
fn drawn<L: Module, E>(seed: Option<u64>, place: usize, make: impl FnOnce() -> Result<L, E>) -> Result<L, E> {
    /// The generator belongs to the whole process: one layer is drawn at a time.
    static DRAWING: Mutex<()> = Mutex::new(());
    let Some(seed) = seed else { return make() };
    let _drawing = DRAWING.lock().unwrap_or_else(PoisonError::into_inner);
    Device::flex().seed(mixed(seed, place as u64));
    let layer = make()?;
    layer.visit(&mut Draw);
    Ok(layer)
}

/// Two numbers as one, in which every bit of both counts (the finalizer of `SplitMix64`; Steele, Lea and Flood, 2014).
fn mixed(seed: u64, place: u64) -> u64 {
    let mut bits = seed ^ place.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// Computes initial values, which Burn puts off until they are first used.
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
