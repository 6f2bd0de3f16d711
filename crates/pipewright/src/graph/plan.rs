//! Plans each stage of a split graph: its inputs, layers and outputs under a placement.

use std::collections::BTreeMap;
use std::sync::Arc;

use pipewright_schedule::{Placement, StageIndex};

use super::builder::{Graph, ValueId};
use super::route::{Holder, Hop, hops};
use crate::stage::{Skip, Skips};

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

impl Plan {
    /// Returns the values that exist before each layer and after the last one, with the number of their uses
    /// from there on. Values without a use are left out.
    pub(super) fn uses(&self) -> Vec<BTreeMap<ValueId, usize>> {
        let mut uses: BTreeMap<ValueId, usize> = BTreeMap::new();
        for value in self.sends.iter().map(|parcel| parcel.value).chain(self.outputs.iter().copied()) {
            *uses.entry(value).or_default() += 1;
        }
        let mut before = vec![uses.clone()];
        for Step { inputs, outputs, .. } in self.steps.iter().rev() {
            uses.retain(|value, _| !outputs.contains(value));
            inputs.iter().for_each(|value| *uses.entry(*value).or_default() += 1);
            before.push(uses.clone());
        }
        before.reverse();
        before
    }

    /// Returns the values that only pass through the stage.
    pub(super) fn passing(&self) -> impl Iterator<Item = Parcel> {
        self.takes.iter().copied().filter(|parcel| parcel.target != self.stage)
    }
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
