//! A split graph whose stages are on ranks.

use burn::module::Module;
use pipewright_schedule::costs::{SkipTransfer, StageSizes};
use pipewright_schedule::{Costs, Placement, StageIndex};

use super::builder::{Graph, GraphError, Node};
use super::layer::GraphStage;
use super::plan::{Parcel, Plan, plans};

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
        let skips_of = |(source, plan): (u32, &Plan)| {
            let skips = plan.skips.outputs.clone();
            skips.into_iter().map(move |skip| (StageIndex::new(source), skip.stage, skip.tensors))
        };
        (0..).zip(&self.plans).flat_map(skips_of).collect()
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
    /// Places the stages on ranks, which decides the route of each value.
    ///
    /// # Errors
    /// When the placement has another number of stages.
    pub fn place(&self, placement: &Placement) -> Result<PlacedGraph<'_, C>, GraphError> {
        if placement.stages() != self.stages() {
            return Err(GraphError(format!(
                "the graph is split into {} stages, the placement has {}",
                self.stages(),
                placement.stages()
            )));
        }
        Ok(PlacedGraph { graph: self, plans: plans(self, placement) })
    }

    /// Returns the whole model as one stage, for runs on one device.
    pub fn whole<L>(&self, make: impl FnMut(&str, &C) -> L) -> GraphStage<L>
    where
        L: Module,
        C: Clone,
    {
        let whole = Self { splits: Vec::new(), ..self.clone() };
        let placement = Placement::explicit(vec![0.into()]).expect("one stage on one rank");
        let plans = plans(&whole, &placement);
        PlacedGraph { graph: &whole, plans }.stage(StageIndex::new(0), make)
    }

    /// Returns the name of each value, in the order of their ids.
    fn value_names(&self) -> Vec<String> {
        let names_of = |node: &Node<C>| -> Vec<String> {
            match node.outputs.len() {
                1 => vec![node.name.to_string()],
                outputs => (0..outputs).map(|index| format!("{}:{index}", node.name)).collect(),
            }
        };
        let inputs = self.inputs.iter().map(ToString::to_string);
        inputs.chain(self.nodes.iter().flat_map(names_of)).collect()
    }
}
