//! Plans each stage of a split graph: its inputs, layers and outputs under a placement.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::Module;
use pipewright_schedule::costs::{SkipTransfer, StageSizes};
use pipewright_schedule::{Costs, Placement, StageIndex};

use super::builder::{Graph, Node, ValueId};
use super::layer::GraphStage;
use super::route::{Holder, Hop, hops};
use crate::stage::{Skip, Skips};

/// A graph whose stages are on ranks.
#[derive(Clone, Debug)]
pub struct PlacedGraph<'a, C> {
    pub(super) graph: &'a Graph<C>,
    pub(super) plans: Vec<Plan>,
}

impl<C> PlacedGraph<'_, C> {
    /// Returns a stage; `make` makes each layer from the node's name and configuration.
    ///
    /// # Panics
    /// When the graph has no such stage.
    pub fn stage<L: Module>(&self, stage: StageIndex, mut make: impl FnMut(&str, &C) -> L) -> GraphStage<L> {
        let nodes = &self.graph.nodes[self.graph.range(stage)];
        let layers = nodes.iter().map(|node| make(&node.name, &node.made_from)).collect();
        GraphStage::new(layers, self.plans[stage.index()].clone())
    }

    /// Returns the direct skip connections: source stage, target stage, number of tensors.
    pub fn direct(&self) -> Vec<(StageIndex, StageIndex, usize)> {
        let of_stage = |(source, plan): (u32, &Plan)| {
            let skips = plan.skips.outputs.clone();
            skips.into_iter().map(move |skip| (StageIndex::new(source), skip.stage, skip.tensors))
        };
        (0..).zip(&self.plans).flat_map(of_stage).collect()
    }

    /// Returns `costs` with the messages of this graph, for a simulation of the program that it runs: its
    /// skip connections, and the bytes that each stage sends to the next one ([`StageSizes::output`]). Other
    /// sizes are taken from `costs`, or 0.
    ///
    /// `bytes` returns the bytes of a value for one microbatch. A value has the name of its input or node. If
    /// a node returns several tensors, they are called `node:0`, `node:1`, and so on.
    ///
    /// ```
    /// use pipewright::graph::Graph;
    /// use pipewright_schedule::costs::{Link, SkipTransfer};
    /// use pipewright_schedule::{Costs, Placement, StageIndex};
    ///
    /// let graph = Graph::builder().input("x").node("down", (), ["x"]).node("first", (), ["down"]);
    /// let graph = graph.node("middle", (), ["first"]);
    /// let graph = graph.node("up", (), ["middle", "down"]).output("up");
    /// let graph = graph.split_before("middle").split_before("up").build()?;
    /// let placement = Placement::explicit([0, 1, 2].map(Into::into).to_vec())?;
    /// let link = Link { latency: 5e-6, bandwidth: 1e10 };
    /// let costs = Costs { link, ..Costs::default() };
    /// let costs = graph.place(&placement)?.costs(costs, |_value| 4096);
    /// // The value goes to the last stage in a message of its own.
    /// let (from, to) = (StageIndex::new(0), StageIndex::new(2));
    /// assert_eq!(costs.skips, [SkipTransfer { from, to, bytes: 4096 }]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn costs(&self, costs: Costs, bytes: impl Fn(&str) -> u64) -> Costs {
        let names = self.graph.value_names();
        let sum =
            |parcels: &[Parcel]| parcels.iter().map(|parcel| bytes(&names[parcel.value.0 as usize])).sum();
        let last_given = costs.sizes.last().copied().unwrap_or_default();
        let (mut sizes, mut skips) = (Vec::new(), Vec::new());
        for (stage, plan) in self.plans.iter().enumerate() {
            let direct: usize = plan.skips.outputs.iter().map(|skip| skip.tensors).sum();
            let (to_next, mut direct) = plan.gives.split_at(plan.gives.len() - direct);
            let given = costs.sizes.get(stage).copied().unwrap_or(last_given);
            sizes.push(StageSizes { output: sum(to_next), ..given });
            for skip in &plan.skips.outputs {
                let (parcels, rest) = direct.split_at(skip.tensors);
                skips.push(SkipTransfer { from: plan.stage, to: skip.stage, bytes: sum(parcels) });
                direct = rest;
            }
        }
        Costs { sizes, skips, ..costs }
    }
}

impl<C> Graph<C> {
    /// Returns the name of each value, in the order of their ids.
    fn value_names(&self) -> Vec<String> {
        let of_node = |node: &Node<C>| -> Vec<String> {
            match node.outputs.len() {
                1 => vec![node.name.to_string()],
                outputs => (0..outputs).map(|place| format!("{}:{place}", node.name)).collect(),
            }
        };
        let inputs = self.inputs.iter().map(ToString::to_string);
        inputs.chain(self.nodes.iter().flat_map(of_node)).collect()
    }
}

/// A value that is sent to a stage that uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Parcel {
    pub(super) value: ValueId,
    pub(super) target: StageIndex,
}

/// The inputs, layers and outputs of one stage.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) stage: StageIndex,
    /// The inputs: from the previous stage (the data for the first stage), then direct ones from other
    /// stages. Values for later stages are passed on unchanged.
    pub(super) takes: Vec<Parcel>,
    pub(super) steps: Vec<Step>,
    /// The values that start here, in the order in which their gradients are added.
    pub(super) sends: Vec<Parcel>,
    /// The outputs: to the next stage, then direct ones to other stages.
    pub(super) gives: Vec<Parcel>,
    /// The outputs of the model; empty for every stage but the last.
    pub(super) outputs: Vec<ValueId>,
    pub(super) skips: Skips,
    /// Tied parameters: their own path, and the path of the original.
    pub(super) tied: Arc<BTreeMap<String, String>>,
}

/// One layer of a stage.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) name: Arc<str>,
    pub(super) inputs: Vec<ValueId>,
    pub(super) outputs: Vec<ValueId>,
}

/// Returns the plan of every stage.
pub(super) fn plans<C>(graph: &Graph<C>, placement: &Placement) -> Vec<Plan> {
    let mut plans: Vec<Plan> = placement.all_stages().map(|stage| steps_of(graph, stage)).collect();
    let (first, last) = (placement.first_stage(), placement.last_stage());
    let data = input_ids(graph).map(|value| Parcel { value, target: first });
    plans[first.index()].takes.extend(data);
    plans[last.index()].outputs.clone_from(&graph.outputs);
    let mut straight: BTreeMap<(StageIndex, StageIndex), Vec<Parcel>> = BTreeMap::new();
    for (value, holders) in holders(graph, placement) {
        for Hop { from, to, is_straight } in hops(&holders, placement) {
            let parcel = Parcel { value, target: to };
            plans[from.index()].sends.push(parcel);
            if is_straight {
                straight.entry((from, to)).or_default().push(parcel);
                continue;
            }
            for stage in from.index()..to.index() {
                plans[stage].gives.push(parcel);
                plans[stage + 1].takes.push(parcel);
            }
        }
    }
    // Sources and targets ascend in the map, as they must in `Skips`.
    for ((source, target), parcels) in straight {
        let tensors = parcels.len();
        let (giver, taker) = (source.index(), target.index());
        plans[giver].skips.outputs.push(Skip { stage: target, tensors });
        plans[giver].gives.extend(&parcels);
        plans[taker].skips.inputs.push(Skip { stage: source, tensors });
        plans[taker].takes.extend(&parcels);
    }
    plans
}

/// Returns the ids of the graph's inputs, which come before all others.
fn input_ids<C>(graph: &Graph<C>) -> impl Iterator<Item = ValueId> + use<C> {
    (0..graph.inputs.len() as u32).map(ValueId)
}

/// Returns a stage's layers, without any communication.
fn steps_of<C>(graph: &Graph<C>, stage: StageIndex) -> Plan {
    let nodes = &graph.nodes[graph.range(stage)];
    let steps = nodes.iter().map(|node| Step {
        name: node.name.clone(),
        inputs: node.inputs.clone(),
        outputs: node.outputs.clone(),
    });
    let (takes, sends, gives, outputs) = Default::default();
    let tied = graph.tied.clone();
    Plan { stage, takes, steps: steps.collect(), sends, gives, outputs, skips: Skips::default(), tied }
}

/// Returns, for each value, the stage that makes it and the stages that use it. The last stage uses the
/// model's outputs.
fn holders<C>(graph: &Graph<C>, placement: &Placement) -> BTreeMap<ValueId, Vec<Holder>> {
    let mut uses: BTreeMap<ValueId, BTreeMap<StageIndex, usize>> = BTreeMap::new();
    let mut note = |value, stage, count| *uses.entry(value).or_default().entry(stage).or_default() += count;
    input_ids(graph).for_each(|input| note(input, placement.first_stage(), 0));
    for stage in placement.all_stages() {
        for node in &graph.nodes[graph.range(stage)] {
            node.outputs.iter().for_each(|&value| note(value, stage, 0));
            node.inputs.iter().for_each(|&value| note(value, stage, 1));
        }
    }
    graph.outputs.iter().for_each(|&value| note(value, placement.last_stage(), 1));
    let holders =
        |uses: BTreeMap<_, _>| uses.into_iter().map(|(stage, uses)| Holder { stage, uses }).collect();
    uses.into_iter().map(|(value, uses)| (value, holders(uses))).collect()
}
