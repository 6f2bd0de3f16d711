//! Weight gradients that wait: what a backward pass leaves for `W`.
//!
//! A stage runs its forward inside [`Deferred::collect`]. Layers that can put off their weight gradients find the
//! collector there, keep it in their operation, and lay a [`WeightTask`] down in it when the backward pass comes by,
//! instead of computing the gradient. So a stage's `I` yields input gradients alone, and its `W` works the tasks off.
//!
//! The collector is found through the thread, because a module's forward has no other argument to carry it in; it is
//! set for the length of one forward, and an inner one hides the outer.
//!
//! # Weights that come and go
//!
//! Where parameters are sharded, a stage has its weights only for a while. The layers of such a stage keep no weight
//! for their backward pass: they look it up in the stage's [`WeightStore`], which has it again by then. Nor are the
//! weights on the tape: the collector's anchor, a scalar, stands for them, so that the backward pass comes by.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::NodeId;
use burn::module::ParamId;
use burn::tensor::Tensor;

use super::operation::{CpuTensor, Tape, node_of};

thread_local! {
    static CURRENT: RefCell<Option<Deferred>> = const { RefCell::new(None) };
}

/// A weight gradient that is still to be computed.
#[derive(Clone, Debug)]
pub(crate) enum WeightTask {
    /// `xᵀ gradient`, for `x [rows, inputs]` and `gradient [rows, outputs]`.
    Product { weight: ParamId, x: CpuTensor, gradient: CpuTensor },
    /// Row `i` of the gradient goes to row `ids[i]` of the table.
    Rows { weight: ParamId, ids: Arc<[usize]>, gradient: CpuTensor },
}

/// The tasks of one stage and microbatch, in the order in which the backward pass met them.
#[derive(Clone, Debug)]
pub(crate) struct Deferred {
    tasks: Arc<Mutex<Vec<WeightTask>>>,
    /// The stage's own parameters: the gradient of any other weight is the tape's business.
    parameters: Arc<HashSet<ParamId>>,
    /// Of a stage that has its weights only for a while.
    passing: Option<Arc<Passing>>,
}

/// How layers of a stage with sharded parameters find their weights.
#[derive(Debug)]
struct Passing {
    store: WeightStore,
    /// Stands on the tape for weights whose gradients wait.
    anchor: Tensor<1>,
    /// The places on the tape of the stage's parameters in this forward.
    nodes: HashMap<ParamId, NodeId>,
}

/// A stage's weights on the CPU back end, while it has them. Sharing is by clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct WeightStore(Arc<Mutex<HashMap<ParamId, CpuTensor>>>);

impl WeightStore {
    /// Takes weights in.
    pub(crate) fn fill(&self, weights: impl IntoIterator<Item = (ParamId, CpuTensor)>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(weights);
    }

    /// Gives all weights up.
    pub(crate) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn get(&self, id: ParamId) -> CpuTensor {
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
    Controlled(CpuTensor),
    LookedUp(WeightStore, ParamId),
}

impl KeptWeight {
    /// `weight`, kept by an operation that puts off its gradient into `deferred`, if it does.
    pub(super) fn new(weight: CpuTensor, id: ParamId, deferred: Option<&Deferred>) -> Self {
        match deferred.and_then(|deferred| deferred.passing.as_ref()) {
            Some(passing) => Self::LookedUp(passing.store.clone(), id),
            None => Self::Controlled(weight),
        }
    }

    pub(super) fn get(self) -> CpuTensor {
        match self {
            Self::Controlled(weight) => weight,
            Self::LookedUp(store, id) => store.get(id),
        }
    }
}

impl Deferred {
    /// A collector for the weights of a stage that has `parameters`.
    pub(crate) fn new(parameters: Arc<HashSet<ParamId>>) -> Self {
        Self { tasks: Arc::default(), parameters, passing: None }
    }

    /// The same for a stage that finds its weights in `store`, and whose parameters stand at `nodes` of the tape that
    /// `anchor` is on.
    pub(crate) fn passing(
        self,
        store: WeightStore,
        anchor: Tensor<1>,
        nodes: HashMap<ParamId, NodeId>,
    ) -> Self {
        Self { passing: Some(Arc::new(Passing { store, anchor, nodes })), ..self }
    }

    /// Runs `forward` so that its layers put off their weight gradients into `self`.
    pub(crate) fn collect<R>(&self, forward: impl FnOnce() -> R) -> R {
        let _outer = Restore(CURRENT.replace(Some(self.clone())));
        forward()
    }

    /// The collector of the forward that runs on this thread, if the gradient of `weight` may be left in it. A weight
    /// that is computed from parameters (an adapter's, say) needs its gradient on the tape.
    pub(super) fn current<const D: usize>(weight: &Tensor<D>, id: ParamId) -> Option<Self> {
        let current = CURRENT.with_borrow(Clone::clone)?;
        let is_parameter = match &current.passing {
            None => weight.is_require_grad(),
            Some(passing) => node_of(weight).is_some_and(|node| passing.nodes.get(&id) == Some(&node)),
        };
        (is_parameter && current.parameters.contains(&id)).then_some(current)
    }

    pub(super) fn push(&self, task: WeightTask) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).push(task);
    }

    /// Takes the tasks out.
    pub(crate) fn take(&self) -> Vec<WeightTask> {
        std::mem::take(&mut self.tasks.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Where an operation is recorded that has a weight at `place` of its inputs and puts its gradient off into `deferred`,
/// if it does.
pub(super) fn recorded_on<const N: usize>(
    tape: Tape<N>,
    place: usize,
    deferred: Option<&Deferred>,
) -> Tape<N> {
    match deferred.and_then(|deferred| deferred.passing.as_ref()) {
        Some(passing) => tape.with_parent(place, passing.anchor.clone()),
        None => tape,
    }
}

/// Puts the outer collector back, also when a forward panics.
struct Restore(Option<Deferred>);

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}
