//! Deferred weight gradients: the tasks that a backward pass leaves for `W`.
//!
//! A stage runs its forward inside [`Deferred::collect`]. A layer that can defer its weight gradient finds
//! the collector there and keeps it in its operation. In the backward pass the operation adds a
//! [`WeightTask`] to the collector instead of computing the gradient. So the action `I` computes input
//! gradients only, and `W` runs the tasks.
//!
//! In a whole backward (`B`) the tasks run next, and the stage says so ([`Deferred::run_at_once`]). An operation
//! that computes the gradients of its input and its weight faster in one pass then does so.
//!
//! The collector is a thread-local variable, because a module's forward has no argument for it. It is set for
//! the duration of one forward; a nested collector hides the outer one.
//!
//! # Sharded weights
//!
//! With sharded parameters, a stage has its whole weights only part of the time. The layers of such a stage
//! keep no weight for their backward pass: they look it up in the stage's [`WeightStore`], which holds it
//! again by then. The weights are not on the tape either: the collector's anchor, a scalar leaf, is recorded
//! in their place, so that the backward pass reaches the operation.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::NodeId;
use burn::module::ParamId;
use burn::tensor::{Int, Tensor};
use pipewright_kernel::convolution::{Dims, WeightInputs, add_weight_gradient, add_weight_gradient_bf16};

use super::operation::{CpuTensor, Tape, cpu, elements, in_bf16, node_of};
use crate::tensor::{Value, Values};

thread_local! {
    static CURRENT: RefCell<Option<Deferred>> = const { RefCell::new(None) };
}

/// A weight gradient that has not been computed yet. Its tensors are off the tape.
#[derive(Debug)]
pub(crate) enum WeightTask {
    /// `xᵀ gradient`, for `x [rows, inputs]` and `gradient [rows, outputs]`. `source` is the replica of the
    /// rows, of the replicas that hold the experts together; 0 for other weights. The gradients of each source
    /// have a sum of their own.
    Product { weight: ParamId, source: usize, x: Box<Tensor<2>>, gradient: Tensor<2> },
    /// Row `i` of the gradient is added to row `ids[i]` of the table.
    Rows { weight: ParamId, ids: RowIds, gradient: Tensor<2> },
    /// The taps of a depthwise convolution of the CPU back end.
    Convolution(ConvolutionTask),
    /// One of the two matrices of an adapter, on the CPU back end.
    LowRank(LowRankTask),
    /// Weights whose gradients a function returns: all weights of a layer of the user's, a bias, or the
    /// factors of a norm.
    Split(SplitTask),
}

/// The gradient of a matrix of an adapter that has not been computed yet: `xᵀ gradient`. One of the two
/// operands has as many columns as the adapter's rank, in single precision.
#[derive(Clone, Debug)]
pub(crate) struct LowRankTask {
    pub weight: ParamId,
    /// The rows that the matrix multiplied.
    pub x: CpuTensor,
    /// The gradient of their products.
    pub gradient: CpuTensor,
}

/// The gradient of a convolution's weight that has not been computed yet.
#[derive(Clone, Debug)]
pub(crate) struct ConvolutionTask {
    pub weight: ParamId,
    pub dims: Dims,
    /// Rows that hold the convolution's input.
    pub input: CpuTensor,
    pub documents: Option<Arc<[u32]>>,
    /// The gradient of the sums before the activation.
    pub gradient: CpuTensor,
}

impl ConvolutionTask {
    /// Adds the gradient to `sum`, in the layout of the weight.
    pub(crate) fn add_to(&self, sum: &mut [f32]) {
        let (dims, documents, gradient) = (self.dims, self.documents.as_deref(), elements(&self.gradient));
        let gradient = &*gradient;
        match in_bf16([&self.input]) {
            Some([v]) => add_weight_gradient_bf16(WeightInputs { dims, v, documents, gradient }, sum),
            None => {
                let v = &elements(&self.input);
                add_weight_gradient(WeightInputs { dims, v, documents, gradient }, sum);
            }
        }
    }
}

/// Weight gradients that have not been computed yet, of a [`SplitBackward`](super::SplitBackward) layer or of a
/// [`DeferredWeight`].
pub(crate) struct SplitTask {
    /// The layer's type.
    pub(crate) layer: &'static str,
    /// The parameters that need a gradient, by the weight's index.
    pub(crate) wanted: Arc<[Option<ParamId>]>,
    /// Returns the gradient of each weight, off the tape.
    pub(crate) compute: Box<dyn FnOnce() -> Values + Send>,
}

impl fmt::Debug for SplitTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SplitTask").field("layer", &self.layer).finish_non_exhaustive()
    }
}

/// The rows of a table that a forward selected.
#[derive(Clone, Debug)]
pub(crate) enum RowIds {
    /// For a gradient of the CPU back end.
    Host(Arc<[usize]>),
    /// On the device of the gradient.
    Device(Box<Tensor<1, Int>>),
}

/// The tasks of one stage and microbatch, in the order in which the backward pass reached the layers.
#[derive(Clone, Debug)]
pub(crate) struct Deferred {
    tasks: Arc<Mutex<Vec<WeightTask>>>,
    /// The stage's own parameters. The tape computes the gradient of any other weight.
    parameters: Arc<HashSet<ParamId>>,
    /// For a stage with sharded parameters.
    sharded: Option<Arc<ShardedWeights>>,
    /// Whether the tasks run right after the backward pass.
    at_once: Arc<AtomicBool>,
}

/// A weight whose gradient is deferred as a function.
#[derive(Clone, Debug)]
pub(super) struct DeferredWeight {
    pub(super) deferred: Deferred,
    id: ParamId,
}

impl DeferredWeight {
    /// Returns `None` if the gradient of `weight` cannot be deferred ([`Deferred::current`]).
    pub(super) fn of<const D: usize>(weight: &Tensor<D>, id: ParamId) -> Option<Self> {
        Some(Self { deferred: Deferred::current(weight, id)?, id })
    }

    /// Returns whether the backward pass leaves the gradient to a later action. Otherwise it may compute the
    /// gradient too.
    pub(super) fn waits(&self) -> bool {
        !self.deferred.at_once.load(Ordering::Relaxed)
    }

    /// Leaves the gradient, which `compute` returns off the tape, for `W`. `layer` is the type of the layer.
    pub(super) fn leave(&self, layer: &'static str, compute: impl FnOnce() -> Value + Send + 'static) {
        self.deferred.leave(self.id, layer, compute);
    }
}

/// How layers of a stage with sharded parameters find their weights.
#[derive(Debug)]
struct ShardedWeights {
    store: WeightStore,
    /// The leaf that is recorded on the tape in place of weights whose gradients are deferred.
    anchor: Tensor<1>,
    /// The tape's nodes of the stage's parameters in this forward.
    nodes: HashMap<ParamId, NodeId>,
}

/// A stage's weights while they are gathered, off the tape. Clones share the store.
#[derive(Clone, Debug, Default)]
pub(crate) struct WeightStore(Arc<Mutex<HashMap<ParamId, Value>>>);

impl WeightStore {
    /// Stores weights.
    pub(crate) fn fill(&self, weights: impl IntoIterator<Item = (ParamId, Value)>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(weights);
    }

    /// Removes all weights.
    pub(crate) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn get(&self, id: ParamId) -> Value {
        let weights = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        weights
            .get(&id)
            .cloned()
            .expect("a validated program gathers a stage's parameters before its backward")
    }
}

/// A weight that a backward pass needs.
#[derive(Clone, Debug)]
pub(super) enum KeptWeight {
    Owned(Box<Tensor<2>>),
    InStore(WeightStore, ParamId),
}

impl KeptWeight {
    /// Returns how an operation keeps `weight`; `deferred` is the collector if the gradient is deferred.
    pub(super) fn new(weight: Tensor<2>, id: ParamId, deferred: Option<&Deferred>) -> Self {
        match deferred.and_then(|deferred| deferred.sharded.as_ref()) {
            Some(sharded) => Self::InStore(sharded.store.clone(), id),
            None => Self::Owned(Box::new(weight)),
        }
    }

    /// Returns the weight, off the tape.
    pub(super) fn get(&self) -> Tensor<2> {
        match self {
            Self::Owned(weight) => weight.as_ref().clone(),
            Self::InStore(store, id) => Tensor::from_dispatch(store.get(*id).into_dispatch()),
        }
    }

    /// Like [`KeptWeight::get`], but for a weight that an operation of the CPU back end keeps.
    pub(super) fn get_on_cpu(&self) -> CpuTensor {
        cpu(self.get()).expect("a stage's weights stay on its device")
    }
}

impl Deferred {
    /// Returns a collector for a stage that has `parameters`.
    pub(crate) fn new(parameters: Arc<HashSet<ParamId>>) -> Self {
        Self { tasks: Arc::default(), parameters, sharded: None, at_once: Arc::default() }
    }

    /// Returns a collector for a stage that finds its weights in `store`, and whose parameters are `nodes` of
    /// the tape of `anchor`.
    pub(crate) fn with_sharded_weights(
        self,
        store: WeightStore,
        anchor: Tensor<1>,
        nodes: HashMap<ParamId, NodeId>,
    ) -> Self {
        Self { sharded: Some(Arc::new(ShardedWeights { store, anchor, nodes })), ..self }
    }

    /// Runs `forward`; its layers defer their weight gradients to `self`.
    pub(crate) fn collect<R>(&self, forward: impl FnOnce() -> R) -> R {
        let _outer = Restore(CURRENT.replace(Some(self.clone())));
        forward()
    }

    /// Returns the collector of the forward that runs on this thread, if the gradient of `weight` can be
    /// deferred. A weight that is computed from parameters (as in an adapter) needs its gradient on the tape.
    pub(super) fn current<const D: usize>(weight: &Tensor<D>, id: ParamId) -> Option<Self> {
        let current = CURRENT.with_borrow(Clone::clone)?;
        let is_parameter = match &current.sharded {
            None => weight.is_require_grad(),
            Some(sharded) => node_of(weight).is_some_and(|node| sharded.nodes.get(&id) == Some(&node)),
        };
        (is_parameter && current.parameters.contains(&id)).then_some(current)
    }

    /// Returns the tensor that is recorded on the tape in place of a weight whose gradient is deferred.
    pub(super) fn recorded(&self, weight: Tensor<2>) -> Tensor<2> {
        match &self.sharded {
            Some(sharded) => Tensor::from_dispatch(sharded.anchor.clone().into_dispatch()),
            None => weight,
        }
    }

    /// Says that the tasks run right after the backward pass, in which operations may then compute weight
    /// gradients too.
    pub(crate) fn run_at_once(&self) {
        self.at_once.store(true, Ordering::Relaxed);
    }

    /// Adds the task of computing the gradient of one weight, which `compute` returns off the tape.
    pub(super) fn leave(
        &self,
        weight: ParamId,
        layer: &'static str,
        compute: impl FnOnce() -> Value + Send + 'static,
    ) {
        let compute = Box::new(|| vec![compute()]);
        self.push(WeightTask::Split(SplitTask { layer, wanted: [Some(weight)].into(), compute }));
    }

    pub(super) fn push(&self, task: WeightTask) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).push(task);
    }

    /// Removes and returns the tasks.
    pub(crate) fn take(&self) -> Vec<WeightTask> {
        std::mem::take(&mut self.tasks.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Returns where to record an operation whose input `index` is a weight; `deferred` is the collector if the
/// gradient is deferred.
pub(super) fn recorded_on<const N: usize>(
    tape: Tape<N>,
    index: usize,
    deferred: Option<&Deferred>,
) -> Tape<N> {
    match deferred.and_then(|deferred| deferred.sharded.as_ref()) {
        Some(sharded) => tape.with_parent(index, sharded.anchor.clone()),
        None => tape,
    }
}

/// Restores the outer collector, also if a forward panics.
struct Restore(Option<Deferred>);

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}
