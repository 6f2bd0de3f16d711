//! Builds a [`Graph`] from named nodes and values, and reports every mistake in the names.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use pipewright_schedule::StageIndex;

/// A model as named layers; `C` is the configuration of a layer. See [the module](super).
#[derive(Clone, Debug)]
pub struct Graph<C> {
    /// The names of the inputs.
    pub(super) inputs: Vec<Arc<str>>,
    /// Ordered so that each node follows the nodes whose values it takes.
    pub(super) nodes: Vec<Node<C>>,
    pub(super) outputs: Vec<ValueId>,
    /// The first node of every stage but stage 0, ascending.
    pub(crate) splits: Vec<usize>,
    /// Tied parameters: their own path, and the path of the original.
    pub(super) tied: Arc<BTreeMap<String, String>>,
}

/// A tensor of the graph: first the graph's inputs, then the outputs of the nodes in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct ValueId(pub(super) u32);

/// A layer with its connections.
#[derive(Clone, Debug)]
pub(super) struct Node<C> {
    pub(super) name: Arc<str>,
    pub(super) made_from: C,
    pub(super) inputs: Vec<ValueId>,
    pub(super) outputs: Vec<ValueId>,
}

/// Names nodes and their connections, in any order; [`GraphBuilder::build`] checks them.
#[derive(Clone, Debug)]
pub struct GraphBuilder<C> {
    inputs: Vec<String>,
    nodes: Vec<Named<C>>,
    outputs: Vec<String>,
    splits: Vec<String>,
    tied: BTreeMap<String, String>,
}

/// A node as the user named it.
#[derive(Clone, Debug)]
struct Named<C> {
    name: String,
    made_from: C,
    inputs: Vec<String>,
    outputs: u32,
}

/// Why the names do not form a graph, or the graph does not match a placement.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GraphError(pub(super) String);

pipewright_schedule::message_as_debug!(GraphError);

impl<C> GraphBuilder<C> {
    /// Adds an input: one tensor of a microbatch. Inputs are ordered as they are named.
    pub fn input(mut self, name: &str) -> Self {
        self.inputs.push(name.to_owned());
        self
    }

    /// Adds a node that returns one tensor. `inputs` are names of inputs and nodes; the layer gets their
    /// tensors in this order.
    pub fn node<'a>(self, name: &str, made_from: C, inputs: impl IntoIterator<Item = &'a str>) -> Self {
        self.node_with_outputs(name, made_from, inputs, 1)
    }

    /// Adds a node that returns `outputs` tensors: `name` refers to all of them, `name:1` to the second.
    pub fn node_with_outputs<'a>(
        mut self,
        name: &str,
        made_from: C,
        inputs: impl IntoIterator<Item = &'a str>,
        outputs: u32,
    ) -> Self {
        let inputs = inputs.into_iter().map(str::to_owned).collect();
        self.nodes.push(Named { name: name.to_owned(), made_from, inputs, outputs });
        self
    }

    /// Adds an output of the model. Outputs are ordered as they are named.
    pub fn output(mut self, name: &str) -> Self {
        self.outputs.push(name.to_owned());
        self
    }

    /// Begins a stage with the node `name`. Nodes that do not depend on it or on later nodes stay in earlier
    /// stages, in the order in which they were named.
    pub fn split_before(mut self, name: &str) -> Self {
        self.splits.push(name.to_owned());
        self
    }

    /// Ties two parameters: `path` (such as `head.weight`) is a copy of `original` (such as
    /// `embedding.weight`) and is stored under the original's path. The copies must start equal. Their
    /// gradients are summed, so they stay equal on whichever stages they are.
    pub fn tie(mut self, path: &str, original: &str) -> Self {
        self.tied.insert(path.to_owned(), original.to_owned());
        self
    }

    /// Returns the graph.
    ///
    /// # Errors
    /// When a name is used twice, unknown or unused, nodes depend on each other in a cycle, there is no
    /// output, or a split leaves a stage empty.
    pub fn build(self) -> Result<Graph<C>, GraphError> {
        self.check_names()?;
        let order = self.order()?;
        let Self { inputs, nodes, outputs, splits, tied } = self;
        let values = number(&inputs, &nodes, &order);
        let indices: HashMap<&str, usize> =
            (0..).zip(&order).map(|(index, &node)| (nodes[node].name.as_str(), index)).collect();
        let splits = split_indices(&splits, &indices)?;
        let find = |name: &String, user: &str| values.get(name).cloned().ok_or_else(|| unknown(user, name));
        let outputs = outputs.iter().map(|name| find(name, "the graph's output"));
        let outputs = outputs.collect::<Result<Vec<_>, _>>()?.concat();
        let mut taken = Vec::new();
        for node in &nodes {
            let user = format!("node `{}`", node.name);
            taken.push(
                node.inputs.iter().map(|name| find(name, &user)).collect::<Result<Vec<_>, _>>()?.concat(),
            );
        }
        check_used(&inputs, &nodes, &values, taken.iter().flatten().chain(&outputs))?;
        let mut given: Vec<Option<(Named<C>, Vec<ValueId>)>> =
            nodes.into_iter().zip(taken).map(Some).collect();
        let nodes = order.into_iter().map(|index| {
            let (node, inputs) = given[index].take().expect("the order names each node once");
            let outputs = values[&node.name].clone();
            Node { name: node.name.into(), made_from: node.made_from, inputs, outputs }
        });
        let (nodes, tied) = (nodes.collect(), Arc::new(tied));
        let inputs = inputs.into_iter().map(Into::into).collect();
        Ok(Graph { inputs, nodes, outputs, splits, tied })
    }

    fn check_names(&self) -> Result<(), GraphError> {
        let names = self.inputs.iter().chain(self.nodes.iter().map(|node| &node.name));
        let mut seen = HashSet::new();
        if let Some(name) = names.into_iter().find(|name| !seen.insert(name.as_str())) {
            let mistake = format!("two inputs or nodes are called `{name}`: give each a name of its own");
            return Err(GraphError(mistake));
        }
        let belongs = |path: &str| {
            let mut nodes = self.nodes.iter();
            nodes.any(|node| path.strip_prefix(&node.name).is_some_and(|rest| rest.starts_with('.')))
        };
        if let Some(path) =
            self.tied.iter().flat_map(|(path, original)| [path, original]).find(|path| !belongs(path))
        {
            return Err(GraphError(format!(
                "no node has a parameter `{path}` to tie: a parameter's path begins with its node's name"
            )));
        }
        if self.outputs.is_empty() {
            return Err(GraphError("the graph has no output: name at least one with `output`".to_owned()));
        }
        Ok(())
    }

    /// Returns the nodes in an order in which each follows the nodes whose values it takes: always the first
    /// named node whose inputs are available.
    fn order(&self) -> Result<Vec<usize>, GraphError> {
        let indices: HashMap<&str, usize> =
            (0..).zip(&self.nodes).map(|(index, node)| (node.name.as_str(), index)).collect();
        let mut waits_for: Vec<usize> = vec![0; self.nodes.len()];
        let mut users: Vec<Vec<usize>> = vec![Vec::new(); self.nodes.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            // Unknown names are reported when values are looked up.
            for source in node.inputs.iter().filter_map(|name| indices.get(node_of(name))) {
                waits_for[index] += 1;
                users[*source].push(index);
            }
        }
        let mut ready: BTreeSet<usize> =
            (0..self.nodes.len()).filter(|&index| waits_for[index] == 0).collect();
        let mut order = Vec::with_capacity(self.nodes.len());
        while let Some(index) = ready.pop_first() {
            order.push(index);
            for &user in &users[index] {
                waits_for[user] -= 1;
                if waits_for[user] == 0 {
                    ready.insert(user);
                }
            }
        }
        if order.len() < self.nodes.len() {
            let waiting = self.nodes.iter().zip(waits_for).filter(|(_, waits)| *waits > 0);
            let nodes: Vec<&str> = waiting.map(|(node, _)| node.name.as_str()).collect();
            return Err(GraphError(format!(
                "the nodes {} depend on each other in a cycle: a node can only take values of other nodes that do not depend \
                 on it",
                nodes.join(", ")
            )));
        }
        Ok(order)
    }
}

impl<C> Graph<C> {
    /// Starts a graph.
    pub fn builder() -> GraphBuilder<C> {
        GraphBuilder {
            inputs: Vec::new(),
            nodes: Vec::new(),
            outputs: Vec::new(),
            splits: Vec::new(),
            tied: BTreeMap::new(),
        }
    }

    /// Returns the number of stages.
    pub fn stages(&self) -> u32 {
        self.splits.len() as u32 + 1
    }

    /// Returns the names of the nodes of `stage` in the order in which they run; empty beyond the last stage.
    pub fn nodes_of(&self, stage: StageIndex) -> impl Iterator<Item = &str> {
        self.nodes[self.range(stage)].iter().map(|node| &*node.name)
    }

    /// Returns the number of nodes.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the graph split before the nodes at these indices, which ascend from 1.
    pub(crate) fn with_splits(self, splits: Vec<usize>) -> Self {
        Self { splits, ..self }
    }

    /// Returns the indices of the nodes of `stage`.
    pub(crate) fn range(&self, stage: StageIndex) -> std::ops::Range<usize> {
        let end = self.nodes.len();
        let start = match stage.index() {
            0 => 0,
            stage => self.splits.get(stage - 1).copied().unwrap_or(end),
        };
        start..self.splits.get(stage.index()).copied().unwrap_or(end)
    }
}

/// Returns the node of a reference `node:index`.
fn node_of(reference: &str) -> &str {
    reference.split_once(':').map_or(reference, |(node, _)| node)
}

fn unknown(user: &str, name: &str) -> GraphError {
    GraphError(format!(
        "{user} takes `{name}`, which is neither an input, nor a node, nor `node:place` of a tensor that one returns"
    ))
}

/// Maps each name to its tensors: inputs, then the nodes' outputs in the order in which they run.
fn number<C>(inputs: &[String], nodes: &[Named<C>], order: &[usize]) -> HashMap<String, Vec<ValueId>> {
    let mut ids = (0..).map(ValueId);
    let mut values: HashMap<String, Vec<ValueId>> =
        inputs.iter().cloned().zip(ids.by_ref().map(|id| vec![id])).collect();
    for node in order.iter().map(|&index| &nodes[index]) {
        let outputs: Vec<ValueId> = ids.by_ref().take(node.outputs as usize).collect();
        values.extend((0..).zip(&outputs).map(|(index, &id)| (format!("{}:{index}", node.name), vec![id])));
        values.insert(node.name.clone(), outputs);
    }
    values
}

/// Returns the first node of each stage but stage 0.
fn split_indices(splits: &[String], indices: &HashMap<&str, usize>) -> Result<Vec<usize>, GraphError> {
    let mut found = BTreeSet::new();
    for name in splits {
        let none = || GraphError(format!("`{name}` is not a node: a stage begins before a node"));
        let index = *indices.get(name.as_str()).ok_or_else(none)?;
        if index == 0 || !found.insert(index) {
            return Err(GraphError(format!(
                "the split before `{name}` leaves a stage without a node: it is the first node, or split before already"
            )));
        }
    }
    Ok(found.into_iter().collect())
}

fn check_used<'a, C>(
    inputs: &[String],
    nodes: &[Named<C>],
    values: &HashMap<String, Vec<ValueId>>,
    taken: impl Iterator<Item = &'a ValueId>,
) -> Result<(), GraphError> {
    let taken: HashSet<&ValueId> = taken.collect();
    let mut names = inputs.iter().chain(nodes.iter().map(|node| &node.name));
    let unused = names.find(|name| !values[*name].iter().any(|value| taken.contains(value)));
    match unused {
        Some(name) => Err(GraphError(format!(
            "nothing uses `{name}`: make it an output or an input of a node, or leave it out"
        ))),
        None => Ok(()),
    }
}
