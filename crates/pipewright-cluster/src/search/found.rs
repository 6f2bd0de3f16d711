//! The plans that the search found.

use serde::Serialize;

use crate::layout::Layout;
use crate::parts::Parts;
use crate::predict::Prediction;
use crate::search::request::Request;

/// The result of a search.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterReport {
    /// The plans, the fastest first; at least one. Any two differ in the mesh or the schedule.
    pub plans: Vec<ClusterPlan>,
    /// The most bytes that a rank of a plan may need.
    pub memory_limit: f64,
    /// Seconds of a step that no plan can be faster than ([`lower_bound`](crate::search::lower_bound)).
    pub lower_bound_s: f64,
    /// The layouts that were estimated.
    pub estimated: usize,
    /// The layouts that were simulated.
    pub simulated: usize,
}

/// A layout with its prediction.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterPlan {
    /// The mesh, the batch, the schedule, the cut, and what is recomputed and sharded.
    /// [`Prediction::blocks`] has the number of blocks of each stage.
    pub layout: Layout,
    /// The predicted step: its seconds, tokens per second of each GPU, operations of the model per second on
    /// each GPU, and the memory of each rank of a pipeline.
    pub prediction: Prediction,
    /// The shares of the step.
    pub shares: Shares,
    /// Model FLOP utilization: operations of the model per second on each GPU, divided by the dense peak of
    /// the precision of the products. Attention counts with the pairs that are used, and what is computed
    /// again does not count.
    pub mfu: f64,
    /// The predicted seconds divided by [`ClusterReport::lower_bound_s`], minus 1.
    pub gap: f64,
    /// The time and the energy of the training, if the request has a goal.
    pub goal: Option<Goal>,
}

/// The shares of a step on the busiest rank, from 0 to 1. Their sum is 1. Communication counts as far as
/// computation does not hide it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shares {
    /// Products with matrices of parameters, without products that are computed again.
    pub products: f64,
    /// Scores, softmax and weighted values, or scans, unless they are computed again.
    pub attention: f64,
    /// Norms, activations, residual sums, casts and the loss, unless they are computed again.
    pub elementwise: f64,
    /// Collectives of tensor groups.
    pub tensor: f64,
    /// Exchange of tokens between the ranks of experts.
    pub experts: f64,
    /// Exchange of keys and values between the ranks of a sequence.
    pub context: f64,
    /// Gathers of parameters and reductions of gradients among replicas.
    pub data: f64,
    /// Computation that the backward repeats.
    pub recompute: f64,
    /// Time in which the rank waits for other ranks of its pipeline, or for their messages.
    pub bubble: f64,
    /// The update of the parameters.
    pub optimizer: f64,
}

/// The time and the energy of a training.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Goal {
    /// The tokens.
    pub tokens: u64,
    /// The steps, rounded up.
    pub steps: u64,
    /// Days without interruptions.
    pub days: f64,
    /// Hours of all GPUs together.
    pub gpu_hours: f64,
    /// Kilowatt hours if each GPU takes its board power all the time; `None` if the machine's board power is
    /// not known. Hosts, networks and cooling are not included.
    pub kilowatt_hours: Option<f64>,
}

impl Shares {
    fn of(prediction: &Prediction) -> Self {
        let &Prediction { parts, again, bubble, optimizer, seconds, .. } = prediction;
        let Parts { tensor, experts, context, data, .. } = parts;
        let share = |part: f64| part / seconds;
        Self {
            products: share(parts.products - again.products),
            attention: share(parts.attention - again.attention),
            elementwise: share(parts.elementwise - again.elementwise),
            tensor: share(tensor),
            experts: share(experts),
            context: share(context),
            data: share(data),
            recompute: share(again.computation()),
            bubble: share(bubble),
            optimizer: share(optimizer),
        }
    }

    /// Returns the names of the shares with their values, in a fixed order.
    pub fn named(&self) -> [(&'static str, f64); 10] {
        [
            ("products", self.products),
            ("attention", self.attention),
            ("elementwise", self.elementwise),
            ("tensor", self.tensor),
            ("experts", self.experts),
            ("context", self.context),
            ("data", self.data),
            ("recompute", self.recompute),
            ("bubble", self.bubble),
            ("optimizer", self.optimizer),
        ]
    }
}

impl Goal {
    fn of(tokens: f64, request: &Request, step_seconds: f64) -> Self {
        let steps = (tokens / (f64::from(request.batch) * f64::from(request.sequence))).ceil();
        let hours = steps * step_seconds / 3600.0;
        let gpu_hours = hours * f64::from(request.gpus);
        let kilowatt_hours = request.machine.board_power.map(|watts| gpu_hours * watts / 1000.0);
        Self { tokens: tokens as u64, steps: steps as u64, days: hours / 24.0, gpu_hours, kilowatt_hours }
    }
}

impl ClusterPlan {
    /// Makes the plan of a layout from its prediction and the [`ClusterReport::lower_bound_s`] of its request.
    pub(crate) fn new(request: &Request, lower_bound_s: f64, layout: Layout, prediction: Prediction) -> Self {
        Self {
            shares: Shares::of(&prediction),
            mfu: prediction.operations_per_gpu / request.machine.peak(request.precision),
            gap: prediction.seconds / lower_bound_s - 1.0,
            goal: request.goal_tokens.map(|tokens| Goal::of(tokens, request, prediction.seconds)),
            layout,
            prediction,
        }
    }
}
