//! From a split graph and a placement to what each stage takes, computes and hands on.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::Module;
use pipewright_schedule::{Placement, StageIndex};

use super::builder::{Graph, ValueId};
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
    /// The stage, with layers made by `make` from a node's name and what it is made from.
    ///
    /// # Panics
    /// When the graph has no such stage, as indexing does.
    pub fn stage<L: Module>(&self, stage: StageIndex, mut make: impl FnMut(&str, &C) -> L) -> GraphStage<L> {
        let nodes = &self.graph.nodes[self.graph.range(stage)];
        let layers = nodes.iter().map(|node| make(&node.name, &node.made_from)).collect();
        GraphStage::new(layers, self.plans[stage.index()].clone())
    }

    /// How many tensors each stage sends straight to one that is not its neighbour: source, target, tensors.
    pub fn direct(&self) -> Vec<(StageIndex, StageIndex, usize)> {
        let of_stage = |(source, plan): (u32, &Plan)| {
            let skips = plan.skips.outputs.clone();
            skips.into_iter().map(move |skip| (StageIndex::new(source), skip.stage, skip.tensors))
        };
        (0..).zip(&self.plans).flat_map(of_stage).collect()
    }
}

/// A value on its way to a stage that uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Parcel {
    pub(super) value: ValueId,
    pub(super) target: StageIndex,
}

/// What one stage does with values.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) stage: StageIndex,
    /// What comes in: from the stage before (the data for the first stage), then straight from others. What is for
    /// later stages goes out again as it came.
    pub(super) takes: Vec<Parcel>,
    pub(super) steps: Vec<Step>,
    /// What sets out from here, in the order in which its gradients are added.
    pub(super) sends: Vec<Parcel>,
    /// What goes out: to the stage after, then straight to others.
    pub(super) gives: Vec<Parcel>,
    /// What the model returns; empty for every stage but the last.
    pub(super) outputs: Vec<ValueId>,
    pub(super) skips: Skips,
    /// Parameters that are another: their own path, and the other's.
    pub(super) tied: Arc<BTreeMap<String, String>>,
}

/// One layer of a stage.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) name: Arc<str>,
    pub(super) inputs: Vec<ValueId>,
    pub(super) outputs: Vec<ValueId>,
}

/// The plan of every stage.
pub(super) fn plans<C>(graph: &Graph<C>, placement: &Placement) -> Vec<Plan> {
    let mut plans: Vec<Plan> = placement.all_stages().map(|stage| steps_of(graph, stage)).collect();
    let (first, last) = (placement.first_stage(), placement.last_stage());
    let data = (0..graph.inputs).map(|input| Parcel { value: ValueId(input), target: first });
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

/// A stage's layers, before anything travels.
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

/// For each value the stage that makes it, then those that use it. The model's outputs are used by the last stage.
fn holders<C>(graph: &Graph<C>, placement: &Placement) -> BTreeMap<ValueId, Vec<Holder>> {
    let mut uses: BTreeMap<ValueId, BTreeMap<StageIndex, usize>> = BTreeMap::new();
    let mut note = |value, stage, count| *uses.entry(value).or_default().entry(stage).or_default() += count;
    (0..graph.inputs).for_each(|input| note(ValueId(input), placement.first_stage(), 0));
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
