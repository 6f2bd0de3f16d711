//! [`GraphLayer`], which users implement, and [`GraphStage`], which runs the layers of one stage.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn::module::{Module, ModuleDisplay, ModuleVisitor, Param};
use burn::tensor::Tensor;
use pipewright_schedule::words::counted;

use super::builder::ValueId;
use super::plan::{Parcel, Plan};
use crate::autodiff::branch;
use crate::stage::{ModulePlace, Skips, Stage, StageBody, StageContext, StageError, any, any_mut, in_layer};
use crate::tensor::{Boundary, BoundaryError, Value, Values, unpack};

/// A layer of a graph. [`AnyLayer`](super::AnyLayer) is one for layers of different types; an enum of all
/// kinds of layers that the model has is another.
pub trait GraphLayer: Module + ModuleDisplay + 'static {
    /// Returns the layer's outputs for one microbatch. `inputs` are the tensors of the nodes that the graph
    /// names, in that order. [`unpack`](crate::tensor::unpack) and [`pack`](crate::tensor::pack) convert from
    /// and to ordinary tensors.
    ///
    /// # Errors
    /// When the layer takes other tensors.
    fn forward(&self, inputs: Values, context: &StageContext) -> Result<Values, BoundaryError>;

    /// Returns why the layer cannot run slices of microbatches; `None` if it can. See
    /// [`StageModule::refuses_slices`](crate::stage::StageModule::refuses_slices).
    fn refuses_slices(&self) -> Option<String> {
        Some("it does not say that it can (`GraphLayer::refuses_slices`)".to_owned())
    }
}

/// The layers of one stage. A parameter's global path is `node.parameter`, whatever the cut.
#[derive(Module, Debug)]
pub struct GraphStage<L: Module> {
    layers: Vec<L>,
    #[module(skip)]
    plan: Plan,
    /// The values before each layer and after the last one ([`Plan::uses`]).
    #[module(skip)]
    uses: Vec<BTreeMap<ValueId, usize>>,
    /// The prefix that Burn adds to the parameter paths of a layer that is an enum: the variant's name.
    #[module(skip)]
    variants: Vec<Option<String>>,
}

impl<L: Module> GraphStage<L> {
    pub(super) fn new(layers: Vec<L>, plan: Plan) -> Self {
        let variants = layers.iter().map(variant_of).collect();
        Self { layers, uses: plan.uses(), plan, variants }
    }

    /// Returns the index of a node among the layers.
    fn node(&self, place: &ModulePlace) -> Option<usize> {
        match place {
            ModulePlace::Node(name) => self.plan.steps.iter().position(|step| step.name == *name),
            _ => None,
        }
    }
}

impl<L: GraphLayer> GraphStage<L> {
    /// Returns the stage's outputs for one microbatch.
    ///
    /// # Errors
    /// When the stage takes other inputs, or a layer's inputs or outputs differ from the graph.
    pub fn forward(&self, inputs: Values, context: &StageContext) -> Result<Values, StageError> {
        (0..self.layers.len()).try_fold(inputs, |values, layer| self.run_layer(layer, values, context))
    }

    /// Runs a layer. The first takes the inputs of the stage, and the last returns its outputs. Between two
    /// layers there are the values that later layers or the outputs of the stage use, and then the values
    /// that only pass through the stage.
    fn run_layer(&self, index: usize, inputs: Values, context: &StageContext) -> Result<Values, StageError> {
        let (layer, step) = (&self.layers[index], &self.plan.steps[index]);
        let (mut live, passing) = self.live_before(index, inputs)?;
        let inputs = live.take(&step.inputs);
        let run = || context.run_layer(&step.name, || layer.forward(inputs, context));
        let outputs = in_layer(&step.name, run)?
            .map_err(|source| StageError::Layer { layer: step.name.clone(), source })?;
        if outputs.len() != step.outputs.len() {
            return Err(StageError::Mistake(format!(
                "the layer `{}` returned {}, and the graph says {}: see `node_with_outputs`",
                step.name,
                counted(outputs.len(), "tensor"),
                step.outputs.len()
            )));
        }
        live.add(&step.outputs, outputs);
        if index + 1 < self.layers.len() {
            let between = self.uses[index + 1].keys().map(|id| live.pass_on(*id));
            return Ok(between.chain(passing).collect());
        }
        let mut parcels: HashMap<Parcel, Value> = self.plan.passing().zip(passing).collect();
        parcels.extend(self.plan.sends.iter().map(|&parcel| (parcel, live.take_one(parcel.value))));
        let given = self.plan.gives.iter().map(|parcel| parcels.remove(parcel));
        let given: Values =
            given.map(|parcel| parcel.expect("a stage gives values that came in or that it sends")).collect();
        Ok(given.into_iter().chain(live.take(&self.plan.outputs)).collect())
    }

    /// Returns the values that a layer and those after it use, and the values that pass through the stage.
    fn live_before(&self, index: usize, inputs: Values) -> Result<(Live, Values), StageError> {
        let uses = self.uses[index].iter().chain(&self.uses[index + 1]);
        // A value from before this layer has more uses before it than after it.
        let uses = uses.rev().map(|(id, uses)| (*id, *uses)).collect();
        let mut live = Live { uses, values: HashMap::new() };
        if index > 0 {
            let ids: Vec<ValueId> = self.uses[index].keys().copied().collect();
            check_count(inputs.len(), ids.len() + self.plan.passing().count())?;
            let mut inputs = inputs.into_iter();
            live.add(&ids, inputs.by_ref().take(ids.len()).collect());
            return Ok((live, inputs.collect()));
        }
        check_count(inputs.len(), self.plan.takes.len())?;
        let mut passing = Values::new();
        for (parcel, input) in self.plan.takes.iter().zip(inputs) {
            if parcel.target == self.plan.stage {
                live.add(&[parcel.value], vec![input]);
            } else {
                passing.push(input);
            }
        }
        Ok((live, passing))
    }
}

impl<L: GraphLayer> StageBody for GraphStage<L> {
    type Output = Values;

    fn forward(&self, inputs: Values, context: &StageContext) -> Result<Values, StageError> {
        GraphStage::forward(self, inputs, context)
    }

    fn layers(&self) -> usize {
        self.layers.len()
    }

    fn forward_layer(
        &self,
        layer: usize,
        inputs: Values,
        context: &StageContext,
    ) -> Result<Values, StageError> {
        self.run_layer(layer, inputs, context)
    }

    fn layer_name(&self, layer: usize) -> Option<Arc<str>> {
        self.plan.steps.get(layer).map(|step| step.name.clone())
    }

    fn part(&self, place: &ModulePlace) -> Option<(&dyn Any, &'static str)> {
        self.layers.get(self.node(place)?).map(any)
    }

    fn part_mut(&mut self, place: &ModulePlace) -> Option<(&mut dyn Any, &'static str)> {
        let node = self.node(place)?;
        self.layers.get_mut(node).map(any_mut)
    }

    fn parts_changed(&mut self) {
        self.variants = self.layers.iter().map(variant_of).collect();
    }

    fn exposed(&self) -> &dyn Any {
        &self.layers
    }

    fn parameter_path(&self, local: &str) -> String {
        let mut parts = local.splitn(3, '.').skip(1);
        let index = parts.next().and_then(|index| index.parse::<usize>().ok());
        let (Some(index), Some(rest)) = (index, parts.next()) else { return local.to_owned() };
        let rest = match &self.variants[index] {
            Some(variant) => rest.strip_prefix(&format!("{variant}.")).unwrap_or(rest),
            None => rest,
        };
        let path = format!("{}.{rest}", self.plan.steps[index].name);
        self.plan.tied.get(&path).cloned().unwrap_or(path)
    }

    fn stays_in_single_precision(&self, _local: &str) -> bool {
        false
    }

    fn refuses_slices(&self) -> Option<String> {
        let mut layers = self.layers.iter().zip(&self.plan.steps);
        layers.find_map(|(layer, step)| refusal_of(&step.name, layer.refuses_slices()))
    }

    fn shared_parameters(&self) -> Vec<String> {
        self.plan.tied.values().cloned().collect()
    }

    fn skips(&self) -> &Skips {
        &self.plan.skips
    }
}

/// Returns why a stage with the layer `name` cannot run slices, if this layer cannot.
pub(super) fn refusal_of(name: &str, reason: Option<String>) -> Option<String> {
    reason.map(|reason| format!("of the layer `{name}`: {reason}"))
}

impl Stage {
    /// Returns a stage of a graph that is not the last.
    pub fn of_graph<L: GraphLayer>(stage: GraphStage<L>) -> Self {
        Self::of_body(stage, None)
    }

    /// Returns the last stage of a graph. As in [`Stage::with_loss`], `loss` takes the graph's outputs, in
    /// the order in which they were named.
    pub fn of_graph_with_loss<L, O, T, F>(stage: GraphStage<L>, loss: F) -> Self
    where
        L: GraphLayer,
        O: Boundary,
        T: Boundary,
        F: Fn(O, T) -> Tensor<1> + Send + 'static,
    {
        Self::of_graph_with_context_loss(stage, move |outputs, target, _: &StageContext| {
            loss(outputs, target)
        })
    }

    /// Returns the last stage of a graph with a loss as in [`Stage::with_context_loss`].
    pub fn of_graph_with_context_loss<L, O, T, F>(stage: GraphStage<L>, loss: F) -> Self
    where
        L: GraphLayer,
        O: Boundary,
        T: Boundary,
        F: Fn(O, T, &StageContext) -> Tensor<1> + Send + 'static,
    {
        let loss = move |outputs, target, context: &StageContext| {
            let outputs = unpack(outputs).map_err(StageError::Output)?;
            Ok(loss(outputs, unpack(target).map_err(StageError::Target)?, context))
        };
        Self::of_body(stage, Some(Box::new(loss)))
    }
}

fn check_count(found: usize, expected: usize) -> Result<(), StageError> {
    match found.checked_sub(expected) {
        Some(0) => Ok(()),
        Some(left) => Err(StageError::Input(BoundaryError::LeftOver { taken: expected, left })),
        None => Err(StageError::Input(BoundaryError::Missing { index: found })),
    }
}

/// Values with uses left, and the number of those uses.
struct Live {
    uses: HashMap<ValueId, usize>,
    values: HashMap<ValueId, Value>,
}

impl Live {
    /// Adds values. A value without a use is dropped.
    fn add(&mut self, ids: &[ValueId], values: Values) {
        let used = ids.iter().copied().zip(values).filter(|(id, _)| self.uses.contains_key(id));
        self.values.extend(used);
    }

    /// Takes out a value for the layers after this one, with all its uses.
    fn pass_on(&mut self, id: ValueId) -> Value {
        self.values.remove(&id).expect("nodes run after the nodes whose values they take")
    }

    fn take(&mut self, ids: &[ValueId]) -> Values {
        ids.iter().map(|&id| self.take_one(id)).collect()
    }

    /// Every use but the last gets its own branch, so that the gradients are added in the order of the uses.
    fn take_one(&mut self, id: ValueId) -> Value {
        let left = self.uses.get_mut(&id).expect("every use was counted");
        *left -= 1;
        let value = self.values.remove(&id).expect("nodes run after the nodes whose values they take");
        if *left == 0 {
            return value;
        }
        let rest = branch(&value);
        self.values.insert(id, rest);
        branch(&value)
    }
}

/// Returns the variant of a layer that is an enum; Burn makes it the first part of its parameters' paths.
pub(super) fn variant_of<L: Module>(layer: &L) -> Option<String> {
    #[derive(Default)]
    struct First {
        seen: bool,
        variant: Option<String>,
    }
    impl ModuleVisitor for First {
        fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {}

        fn enter_module(&mut self, name: &str, container_type: &str) {
            if !std::mem::replace(&mut self.seen, true) && container_type.starts_with("Enum:") {
                self.variant = Some(name.to_owned());
            }
        }
    }
    let mut first = First::default();
    layer.visit(&mut first);
    first.variant
}
