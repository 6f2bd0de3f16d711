//! The plans that the search found.

use pipewright_schedule::held_bytes::HeldBytes;
use serde::Serialize;

use crate::accuracy::Accuracy;
use crate::layout::Layout;
use crate::machine::Machine;
use crate::parts::Parts;
use crate::placed::kinds_of_ranks;
use crate::predict::Prediction;
use crate::search::request::Request;

/// The result of a search.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterReport {
    /// The plans, the fastest first; at least one. Any two differ in the mesh or the schedule. A plan with more usual
    /// parts may be in front of faster ones ([`Self::preferred`]).
    pub plans: Vec<ClusterPlan>,
    /// Why the first plan is not the fastest one, as a sentence; `None` if it is.
    pub preferred: Option<String>,
    /// How well predictions of the first plan's kind were judged.
    pub accuracy: Accuracy,
    /// The most bytes that a rank of a plan may need, on the kind of machine with the least memory.
    pub memory_limit: f64,
    /// Seconds of a step that no plan can be faster than ([`lower_bound`](crate::search::lower_bound)).
    pub lower_bound_s: f64,
    /// The layouts that were estimated.
    pub estimated: usize,
    /// The layouts that were simulated.
    pub simulated: usize,
}

impl ClusterReport {
    /// Returns the fastest plan, which is not the first one if a plan with more usual parts is preferred.
    pub fn fastest(&self) -> &ClusterPlan {
        let by_seconds = |one: &&ClusterPlan, other: &&ClusterPlan| {
            one.prediction.seconds.total_cmp(&other.prediction.seconds)
        };
        self.plans.iter().min_by(by_seconds).unwrap_or(&self.plans[0])
    }
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
    /// The kinds of machines, in the order of their ranks of the pipeline.
    pub machines: Vec<MachineRanks>,
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

/// The ranks of a pipeline that are on one kind of machine.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MachineRanks {
    /// The name of the machine.
    pub name: String,
    /// All GPUs of this kind.
    pub gpus: u32,
    /// The GPUs of a node.
    pub gpus_per_node: u32,
    /// The first rank.
    pub first_rank: usize,
    /// The number of ranks.
    pub ranks: usize,
    /// The bytes of the rank that needs most.
    #[serde(rename = "memory_bytes", serialize_with = "whole")]
    pub memory: f64,
    /// The most bytes that a rank may need.
    #[serde(rename = "memory_limit_bytes", serialize_with = "whole")]
    pub memory_limit: f64,
    /// The mean share of the step in which a rank waits for other ranks of its pipeline and their messages.
    pub idle: f64,
}

/// Writes bytes as a whole number.
fn whole<S: serde::Serializer>(bytes: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(*bytes as u64)
}

impl MachineRanks {
    /// Returns the kinds of machines of a plan.
    fn of(request: &Request, layout: &Layout, prediction: &Prediction) -> Vec<Self> {
        let kinds = request.kinds();
        let kind_of_rank = kinds_of_ranks(&kinds, layout);
        let machine = |(index, (machine, gpus)): (usize, (&Machine, u32))| {
            let own = |&rank: &usize| kind_of_rank[rank] == index;
            let own: Vec<usize> = (0..kind_of_rank.len()).filter(own).collect();
            let memory = own.iter().filter_map(|&rank| prediction.memory.get(rank)).map(HeldBytes::total);
            let waits = own.iter().filter_map(|&rank| prediction.waits.get(rank)).sum::<f64>();
            Self {
                name: machine.name.clone(),
                gpus,
                gpus_per_node: machine.gpus_per_node,
                first_rank: own.first().copied().unwrap_or(0),
                ranks: own.len(),
                memory: memory.fold(0.0, f64::max),
                memory_limit: request.limit_on(machine),
                idle: waits / own.len().max(1) as f64 / prediction.seconds,
            }
        };
        kinds.into_iter().enumerate().map(machine).collect()
    }
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
    /// Waiting of the GPU for kernels that the host launches.
    pub launches: f64,
    /// Collectives of tensor groups.
    pub tensor: f64,
    /// Exchange of tokens between the ranks of experts.
    pub experts: f64,
    /// Exchange of keys and values between the ranks of a sequence.
    pub context: f64,
    /// Waiting for activations on their way to the memory of the host and back.
    pub offload: f64,
    /// Gathers of parameters and reductions of gradients among replicas.
    pub data: f64,
    /// Computation that the backward repeats.
    pub recompute: f64,
    /// Time in which the rank waits for other ranks of its pipeline, or for their messages.
    pub bubble: f64,
    /// The update of the parameters.
    pub optimizer: f64,
}

/// The smallest share of a step that is worth naming as a saving.
const LEAST_SAVING: f64 = 0.005;

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
        let Parts { tensor, experts, context, offload, data, .. } = parts;
        let share = |part: f64| part / seconds;
        Self {
            products: share(parts.products - again.products),
            attention: share(parts.attention - again.attention),
            elementwise: share(parts.elementwise - again.elementwise),
            launches: share(parts.launches - again.launches),
            tensor: share(tensor),
            experts: share(experts),
            context: share(context),
            offload: share(offload),
            data: share(data),
            recompute: share(again.computation()),
            bubble: share(bubble),
            optimizer: share(optimizer),
        }
    }

    /// Returns what a plan with the shares `to` saves of a step of `from`, by names, the largest saving first: shares
    /// of the step of `from`. `ratio` is the time of the faster step, divided by the slower one's.
    pub fn savings(from: &Self, to: &Self, ratio: f64) -> Vec<(&'static str, f64)> {
        let pairs = from.named().into_iter().zip(to.named());
        let mut savings: Vec<_> =
            pairs.map(|((name, before), (_, after))| (name, before - after * ratio)).collect();
        savings.retain(|(_, saved)| *saved >= LEAST_SAVING);
        savings.sort_by(|(_, one), (_, other)| other.total_cmp(one));
        savings
    }

    /// Returns the names of the shares with their values, in a fixed order.
    pub fn named(&self) -> [(&'static str, f64); 12] {
        [
            ("products", self.products),
            ("attention", self.attention),
            ("elementwise", self.elementwise),
            ("launches", self.launches),
            ("tensor", self.tensor),
            ("experts", self.experts),
            ("context", self.context),
            ("offload", self.offload),
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
        let is_known = request.kinds().iter().all(|(machine, _)| machine.board_power.is_some());
        let watts = is_known.then(|| request.mean(|machine| machine.board_power.unwrap_or(0.0)));
        let kilowatt_hours = watts.map(|watts| gpu_hours * watts / 1000.0);
        Self { tokens: tokens as u64, steps: steps as u64, days: hours / 24.0, gpu_hours, kilowatt_hours }
    }
}

impl ClusterPlan {
    /// Makes the plan of a layout from its prediction and the [`ClusterReport::lower_bound_s`] of its request.
    pub(crate) fn new(request: &Request, lower_bound_s: f64, layout: Layout, prediction: Prediction) -> Self {
        Self {
            machines: MachineRanks::of(request, &layout, &prediction),
            shares: Shares::of(&prediction),
            mfu: prediction.operations_per_gpu / request.mean(|machine| machine.peak(request.precision)),
            gap: prediction.seconds / lower_bound_s - 1.0,
            goal: request.goal_tokens.map(|tokens| Goal::of(tokens, request, prediction.seconds)),
            layout,
            prediction,
        }
    }
}
