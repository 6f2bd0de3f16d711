//! A stage of a model of any family: any contiguous range of its layers.
//!
//! The layers are the embedding, one for each block and each further prediction, and the last norm with the
//! head. The embedding and the head may be cut along the vocabulary into several layers.
//!
//! Every part of the embedding but the last looks up the rows of its token ids, and passes them on with the
//! ids. Each further part puts its rows in their places. The last part is the family's embedding layer.
//!
//! The first part of the head normalises the hidden states. Every part computes its logits from them, adds
//! them to the statistics of the parts before it ([`smoothed_vocabulary_statistics`]), and returns the normalised hidden
//! states with the statistics. The last part returns the statistics only, which give the loss. Each part looks
//! up the target ids as a side input ([`TARGETS`]).
//!
//! If the head predicts further tokens, the states of these predictions follow the hidden states as further
//! rows, and go the same way. The token ids go with them if the loss finds the documents in them.
//!
//! A part of a tied head holds a copy of its rows of the embedding's table. The layers that have the table
//! hold it in as many shards ([`Place::table_parts`](crate::Place::table_parts)), so a part shares one shard as a
//! whole. Its gradients are added like the gradients of any shared parameter.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Int, Tensor, TensorData};
use pipewright::batch::TARGETS;
use pipewright::memory::StreamedMatrix;
use pipewright::nn::{
    PREDICTED_TARGETS, TensorParallel, cut_statistics, join_statistics, predicted_targets,
    smoothed_split_cross_entropy, smoothed_vocabulary_statistics, split_token_losses, statistics_loss,
    statistics_token_losses,
};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::{BoundaryError, EdgePlacement, Placement, Values, pack, unpack};
use pipewright_schedule::{Microbatch, StageIndex};

use crate::block::Block;
use crate::boundary::StageTensors;
use crate::decoder::BlockAttentions;
use crate::embedding_layer::EmbeddingLayer;
use crate::head_form::{CutHead, FurtherPredictions, HeadForm, STATISTICS};
use crate::hybrid::{HybridConfig, RELATION_BIAS};
use crate::lora::is_of_adapter;
use crate::mamba::is_of_scan;
use crate::parameter::{BuiltParameter, BuiltParameters, FrozenMatrices, ParameterSpec, is_in};
use crate::prediction::Prediction;
use crate::predictions::{loss_of_all, targets_of_each};
use crate::preference::{PreferenceKind, PreferenceLoss};
use crate::reward;
use crate::router::is_of_router;
use crate::rows::Rows;
use crate::split::SplitStage;
use crate::training_form::TrainingForm;
use crate::vocabulary::{HeadMatrix, HeadNorms, OutputHead, TokenTable};

/// A contiguous range of the layers of a model.
#[derive(Module, Debug)]
pub struct ModelStage {
    pub(crate) layers: Vec<StageLayer>,
    #[module(skip)]
    pub(crate) split: SplitStage,
    #[module(skip)]
    pub(crate) facts: Arc<StageFacts>,
    #[module(skip)]
    form: TrainingForm,
    /// The parameters by the paths that Burn gives them.
    #[module(skip)]
    parameters: Arc<HashMap<String, BuiltParameter>>,
    /// The matrices that are not parameters of the module.
    #[module(skip)]
    pub(crate) frozen: Arc<FrozenMatrices>,
}

/// A layer of a stage.
#[derive(Module, Debug)]
pub(crate) enum StageLayer {
    /// A part of the embedding before its last one.
    TablePart(TablePart),
    Embedding(EmbeddingLayer),
    Block(Block),
    Prediction(Prediction),
    Head(OutputHead),
    HeadPart(HeadPart),
}

/// A part of the embedding before its last one: a shard of the table.
#[derive(Module, Debug)]
pub(crate) struct TablePart {
    pub(crate) table: TokenTable,
    #[module(skip)]
    pub(crate) index: usize,
}

/// A part of the head.
#[derive(Module, Debug)]
pub(crate) struct HeadPart {
    /// The norms in front of the head, which the first part has.
    pub(crate) norms: Option<HeadNorms>,
    pub(crate) matrix: HeadMatrix,
    #[module(skip)]
    pub(crate) head: CutHead,
    #[module(skip)]
    pub(crate) index: u32,
}

/// The facts about a model that its stages need.
#[derive(Clone, Debug)]
pub(crate) struct StageFacts {
    pub(crate) head: HeadForm,
    pub(crate) attentions: BlockAttentions,
    /// Why the model cannot run slices of microbatches.
    pub(crate) refuses_slices: Option<String>,
    /// The configuration of a hybrid, whose layers pass the token ids on.
    pub(crate) hybrid: Option<HybridConfig>,
}

impl ModelStage {
    /// Returns the stage with these layers.
    pub(crate) fn new(
        mut layers: Vec<StageLayer>,
        split: SplitStage,
        facts: StageFacts,
        built: &BuiltParameters,
    ) -> Self {
        let blocks = layers.iter_mut().filter_map(|layer| match layer {
            StageLayer::Block(block) => Some(block),
            StageLayer::Prediction(prediction) => Some(prediction.block_mut()),
            _ => None,
        });
        for branch in blocks.flat_map(|block| &mut block.branches) {
            let path = path_of(&branch.mixer, built);
            // Quantised matrices are not parameters, so parameters may have a longer path than the mixer, or none.
            if !branch.path.is_empty()
                && (path.is_empty() || *path == *branch.path || is_in(&path, &branch.path))
            {
                continue;
            }
            branch.path = if path.is_empty() { path_of(&*branch, built) } else { path }.into();
        }
        let (facts, parameters) = (Arc::new(facts), Arc::default());
        let form = TrainingForm::default();
        let stage = Self { layers, split, facts, form, parameters, frozen: Arc::default() };
        let mut parameters = HashMap::new();
        let visit = |local: String, id: ParamId, _: &dyn Fn() -> TensorData| {
            if let Some(built) = built.get(&id) {
                parameters.insert(local, built.clone());
            }
        };
        stage.visit(&mut Parameters { names: Vec::new(), visit });
        Self { parameters: Arc::new(parameters), ..stage }
    }

    /// Returns the stage, which has these matrices.
    pub(crate) fn with_frozen(self, frozen: FrozenMatrices) -> Self {
        Self { frozen: Arc::new(frozen), ..self }
    }

    /// Returns the stage with what training changes.
    pub(crate) fn with_form(self, form: TrainingForm) -> Self {
        Self { form, ..self }
    }

    /// Runs the stage outside a pipeline, and returns hidden states `[batch, sequence, hidden]`, or logits
    /// `[batch, sequence, vocabulary]` on the last stage. Auxiliary losses are lost.
    ///
    /// # Panics
    /// When the input is not of the kind that the stage takes, or a token id is outside the vocabulary.
    pub fn run(&self, input: impl Into<StageTensors>) -> Tensor<3> {
        self.forward(input.into(), &row_context()).first()
    }

    /// Runs consecutive layers of the stage.
    fn run_layers(&self, layers: &[StageLayer], input: StageTensors, context: &StageContext) -> StageTensors {
        let rows = self.rows(&input, context);
        layers.iter().fold(input, |input, layer| self.run_layer(layer, input, &rows))
    }

    /// Returns what layers make of the rows of an input.
    pub(crate) fn rows<'a>(&'a self, input: &StageTensors, context: &'a StageContext) -> Rows<'a> {
        Rows::new(input, (&self.facts.attentions, self.facts.hybrid.as_ref()), &self.split, context)
    }

    /// Runs a layer.
    pub(crate) fn run_layer(&self, layer: &StageLayer, input: StageTensors, rows: &Rows<'_>) -> StageTensors {
        let split = &self.split;
        match layer {
            StageLayer::TablePart(TablePart { table, index }) => {
                let ids = input.ids.expect("a part of the embedding takes token ids");
                let earlier = input.floats.into_iter().next();
                let found = table.forward_shard(*index, earlier, ids.clone(), split.vocabulary);
                StageTensors { floats: vec![found], ids: Some(ids) }
            }
            StageLayer::Embedding(embedding) => {
                let ids = input.ids.clone().filter(|_| self.facts.hybrid.is_some());
                let hidden = self.form.with_noise(embedding.forward(input, rows), rows);
                let hidden = rows.context.watched("embedding", hidden);
                StageTensors { floats: vec![hidden], ids }
            }
            StageLayer::Block(block) => {
                let has_tokens = self.facts.hybrid.is_none() || input.ids.is_some();
                assert!(has_tokens, "the blocks of a hybrid take token ids with the hidden states");
                with_hidden(input, |hidden| block.forward(hidden, rows, None))
            }
            StageLayer::Prediction(prediction) => {
                let ids = input.ids.clone().expect("a prediction takes token ids");
                with_hidden(input, |states| prediction.forward(states, &ids, rows))
            }
            StageLayer::Head(head) => {
                let StageTensors { floats, ids } = self.run_head(head, input, rows.shape, rows.context);
                let floats = floats.into_iter().map(|logits| rows.context.watched("head", logits)).collect();
                StageTensors { floats, ids }
            }
            StageLayer::HeadPart(part) => {
                part.forward(input, self.form.smoothing(rows.context), rows.context)
            }
        }
    }

    /// Runs the head. The token ids follow the logits if the loss needs them.
    pub(crate) fn run_head(
        &self,
        head: &OutputHead,
        input: StageTensors,
        [batch, sequence]: [usize; 2],
        context: &StageContext,
    ) -> StageTensors {
        let ids = input.ids.clone().filter(|_| self.facts.head.further.needs_ids());
        let in_rows = |logits: Tensor<2>| {
            let part = logits.dims()[1];
            logits.reshape([batch, sequence, part])
        };
        let logits = head.forward(flat(input.hidden()), &self.split.tensor.region(batch), context);
        StageTensors { floats: logits.into_iter().map(in_rows).collect(), ids }
    }

    /// Returns the stage for training. The last stage of a model computes the loss, and takes outputs in half
    /// precision as they are.
    pub fn into_stage(self, is_last: bool) -> Stage {
        if !is_last {
            return Stage::new(self);
        }
        if let Some(StageLayer::HeadPart(part)) = self.layers.last() {
            let further = part.head.form().further;
            return Stage::with_context_loss(self, move |output: StageTensors, targets, context| {
                let of = |statistics, targets| statistics_loss(statistics, targets);
                loss(further, output, &targets, context, of)
            });
        }
        let (facts, form, labels) = (Arc::clone(&self.facts), self.form, self.facts.head.labels);
        // Each rank has the outputs of all labels.
        let split = match labels {
            Some(labels) => SplitStage { tensor: TensorParallel::default(), vocabulary: labels },
            None => self.split.clone(),
        };
        let loss = move |output: StageTensors, targets: Tensor<2, Int>, context: &StageContext| {
            let SplitStage { tensor, vocabulary } = &split;
            let share = form.smoothing(context);
            let of =
                |logits, targets| smoothed_split_cross_entropy(logits, targets, share, *vocabulary, tensor);
            context.count_in_evaluation(PREDICTED_TARGETS, || {
                let targets =
                    targets_of_each(&targets, None, FurtherPredictions::default(), context).remove(0);
                let logits = flat(output.floats[0].clone());
                predicted_targets(logits, targets.flatten(0, 1), *vocabulary, tensor).to_vec()
            });
            if let Some(labels) = labels {
                reward::report_accuracy(
                    flat(output.floats[0].clone()),
                    targets.clone().flatten(0, 1),
                    labels,
                    context,
                );
            }
            if facts.hybrid.is_some() {
                return loss(facts.head.further, output, &targets, context, of);
            }
            of(flat(output.first()), targets.flatten(0, 1))
        };
        Stage::with_context_loss(self, loss).with_half_precision_loss()
    }

    /// Returns the last stage for preference training with a loss.
    pub fn into_preference_stage(self, preference: PreferenceLoss) -> Stage {
        if preference.kind == PreferenceKind::Reward {
            return Stage::with_context_loss(
                self,
                move |output: StageTensors, targets: Tensor<2, Int>, context: &StageContext| {
                    reward::loss(&preference, flat(output.first()), targets.dims()[1], context)
                },
            );
        }
        let has_statistics = matches!(self.layers.last(), Some(StageLayer::HeadPart(_)));
        let SplitStage { tensor, vocabulary } = self.split.clone();
        let loss = move |output: StageTensors, targets: Tensor<2, Int>, context: &StageContext| {
            let output = output.floats.into_iter().next().expect("the head returns logits or statistics");
            let losses = if has_statistics {
                statistics_token_losses(flat(output))
            } else {
                split_token_losses(flat(output), targets.clone().flatten(0, 1), vocabulary, &tensor)
            };
            preference.of(losses, &targets, context)
        };
        let stage = Stage::with_context_loss(self, loss);
        if has_statistics { stage } else { stage.with_half_precision_loss() }
    }

    /// Returns how the ranks have the hidden states `[batch, sequence, hidden]` between two layers.
    fn hidden_placement(&self) -> EdgePlacement {
        if self.split.tensor.shares_tokens() { EdgePlacement::split(1) } else { EdgePlacement::WHOLE }
    }

    /// Returns the parameter that Burn has at `local`.
    fn parameter(&self, local: &str) -> Option<&BuiltParameter> {
        self.parameters.get(local)
    }
}

/// Returns the mean cross entropy of the next tokens in nats, and adds the losses of further predictions to the
/// step. `loss_of` computes it from the output `[rows * sequence, numbers]` of a prediction and its targets.
///
/// # Panics
/// When a target lies outside the vocabulary.
fn loss(
    further: FurtherPredictions,
    output: StageTensors,
    targets: &Tensor<2, Int>,
    context: &StageContext,
    loss_of: impl Fn(Tensor<2>, Tensor<1, Int>) -> Tensor<1>,
) -> Tensor<1> {
    let StageTensors { floats, ids } = output;
    let rows = targets.dims()[0];
    let targets = targets_of_each(targets, ids.as_ref(), further, context);
    loss_of_all(further, context, |depth| {
        let own = match floats.get(depth) {
            Some(own) if floats.len() > further.depth => own.clone(),
            // The statistics of all predictions are rows of one tensor.
            _ => floats[0].clone().narrow(0, depth * rows, rows),
        };
        loss_of(flat(own), targets[depth].clone().flatten(0, 1))
    })
}

/// Returns `[rows, sequence, width]` as `[rows * sequence, width]`.
fn flat(x: Tensor<3>) -> Tensor<2> {
    x.flatten(0, 1)
}

/// Returns the tensors with the result of a function of the hidden states `[tokens, hidden]`.
fn with_hidden(input: StageTensors, run: impl FnOnce(Tensor<2>) -> Tensor<2>) -> StageTensors {
    let ids = input.ids.clone();
    let hidden = input.hidden();
    let [_, sequence, width] = hidden.dims();
    let hidden = run(flat(hidden));
    let rows = hidden.dims()[0] / sequence;
    StageTensors { floats: vec![hidden.reshape([rows, sequence, width])], ids }
}

impl HeadPart {
    /// Returns the statistics after this part, for targets with label smoothing.
    fn forward(&self, input: StageTensors, smoothing: f64, context: &StageContext) -> StageTensors {
        let form = self.head.form();
        // Some families send the ids with the hidden states. The head may have no use for them.
        let ids = input.ids.filter(|_| form.further.needs_ids());
        let mut floats = input.floats.into_iter();
        let hidden = floats.next().expect("a part of the head takes hidden states");
        let earlier = (self.index > 0).then(|| {
            floats.next().expect("a later part of the head takes the statistics of the parts before it")
        });
        let [rows, sequence, width] = hidden.dims();
        let mut x = flat(hidden);
        if let Some(norms) = &self.norms {
            x = form.scaled(norms.forward(x));
        }
        let earlier = earlier.map(|pieces| join_statistics(flat(pieces)));
        let range = (self.head.ids(self.index), form.vocabulary);
        let logits = form.bounded(self.matrix.forward(x.clone(), context));
        let targets = targets_of_each(&targets(context), ids.as_ref(), form.further, context);
        let targets = Tensor::cat(targets, 0);
        let later = smoothed_vocabulary_statistics(logits, targets.flatten(0, 1), smoothing, range, earlier);
        let floats = if self.index + 1 == self.head.parts() {
            vec![later.reshape([rows, sequence, STATISTICS])]
        } else {
            let pieces = cut_statistics(later, x.dtype());
            let numbers = pieces.dims()[1];
            vec![x.reshape([rows, sequence, width]), pieces.reshape([rows, sequence, numbers])]
        };
        StageTensors { floats, ids }
    }
}

/// Returns the target ids of the microbatch, `[rows, sequence]`.
///
/// # Panics
/// When the step has no such side input.
fn targets(context: &StageContext) -> Tensor<2, Int> {
    match context.side::<Tensor<2, Int>>(TARGETS) {
        Ok(targets) => targets,
        Err(error) => panic!(
            "a part of the head needs the target ids: {error}; give the batch targets, and call \
             `Batch::with_targets_for_all`"
        ),
    }
}

/// Returns the context of a row outside of a pipeline.
pub(crate) fn row_context() -> StageContext {
    StageContext::new(StageIndex::new(0), Microbatch::new(0))
}

/// Returns whether the parameter at a path keeps single precision in a run of half precision: routers, the numbers of
/// each head of a scan, and adapters do ([`StageModule::stays_in_single_precision`]).
pub(crate) fn stays_in_single_precision(path: &str) -> bool {
    is_of_router(path) || is_of_scan(path) || is_of_adapter(path)
}

impl StageModule for ModelStage {
    type Input = StageTensors;
    type Output = StageTensors;

    fn forward(&self, input: StageTensors, context: &StageContext) -> StageTensors {
        self.run_layers(&self.layers, input, context)
    }

    /// Returns the number of parts that can be recomputed one by one: every layer is one.
    fn blocks(&self) -> usize {
        self.layers.len()
    }

    fn forward_block(
        &self,
        block: usize,
        input: Values,
        context: &StageContext,
    ) -> Result<Values, BoundaryError> {
        Ok(pack(self.run_layers(&self.layers[block..=block], unpack(input)?, context)))
    }

    /// Gives parameters the paths of a Hugging Face directory.
    fn parameter_path(&self, local: &str) -> String {
        self.parameter(local).map_or(local, |built| &built.spec.path).to_owned()
    }

    fn placement(&self, local: &str) -> Placement {
        self.parameter(local).map_or(Placement::REPLICATED, |built| built.placement)
    }

    fn input_placement(&self, _input: usize) -> EdgePlacement {
        match self.layers.first() {
            Some(StageLayer::Embedding(_) | StageLayer::TablePart(_)) => EdgePlacement::WHOLE,
            _ => self.hidden_placement(),
        }
    }

    /// The ranks have the logits of their parts of the vocabulary, and all token ids.
    fn output_placement(&self, output: usize) -> EdgePlacement {
        match self.layers.last() {
            Some(StageLayer::Head(_)) if self.facts.head.labels.is_some() => EdgePlacement::WHOLE,
            Some(StageLayer::Head(_)) if output < self.facts.head.predictions() => EdgePlacement::split(2),
            Some(StageLayer::Head(_) | StageLayer::HeadPart(_)) => EdgePlacement::WHOLE,
            _ => self.hidden_placement(),
        }
    }

    fn refuses_slices(&self) -> Option<String> {
        self.facts.refuses_slices.clone()
    }

    fn stays_in_single_precision(&self, local: &str) -> bool {
        stays_in_single_precision(&self.parameter_path(local))
    }

    fn streamed(&self) -> Vec<Arc<StreamedMatrix>> {
        self.frozen.streamed.clone()
    }

    /// Returns the paths of the tables that have copies: the table of the embedding, and in a hybrid the table of
    /// the relations.
    fn shared_parameters(&self) -> Vec<String> {
        let form = &self.facts.head;
        let relations = self.facts.hybrid.as_ref().map(|_| format!("{RELATION_BIAS}.weight"));
        [form.names.of(&format!("{}.weight", form.embedding))].into_iter().chain(relations).collect()
    }
}

/// Returns the parameters that `stage` contributes to a model directory, in the order in which Burn visits
/// them. Copies of tables, such as the table of a tied head, are not among them.
pub fn parameter_specs(stage: &ModelStage) -> Vec<ParameterSpec> {
    let mut specs = Vec::new();
    visit_parameters(stage, |spec, _, _| specs.push(spec));
    specs
}

/// Calls `visit` for each parameter of [`parameter_specs`], with how the ranks of a tensor group hold it, and
/// with a function that copies its elements out.
pub(crate) fn visit_parameters(
    stage: &ModelStage,
    mut visit: impl FnMut(ParameterSpec, Placement, &dyn Fn() -> TensorData),
) {
    let visit = |local: String, _, data: &dyn Fn() -> TensorData| {
        // The original of a copy belongs to the embedding.
        if let Some(BuiltParameter { spec, placement, is_copy: false }) = stage.parameter(&local) {
            let shape = stage.split.tensor.shard(*placement).shape(&spec.shape);
            visit(ParameterSpec { shape, ..spec.clone() }, *placement, data);
        }
    };
    stage.visit(&mut Parameters { names: Vec::new(), visit });
}

/// Returns the common beginning of the paths of a module's parameters, such as `model.layers.3.mlp`.
fn path_of(module: &impl Module, built: &BuiltParameters) -> String {
    let mut common: Option<Vec<String>> = None;
    let visit = |_: String, id: ParamId, _: &dyn Fn() -> TensorData| {
        let Some(BuiltParameter { spec, .. }) = built.get(&id) else { return };
        let mut names: Vec<String> = spec.path.split('.').map(str::to_owned).collect();
        // The last one is the name of the parameter itself.
        names.pop();
        match &mut common {
            Some(common) => {
                let equal = common.iter().zip(&names).take_while(|(a, b)| a == b).count();
                common.truncate(equal);
            }
            None => common = Some(names),
        }
    };
    module.visit(&mut Parameters { names: Vec::new(), visit });
    common.unwrap_or_default().join(".")
}

/// Calls `visit` for each parameter, with the path and the identifier that Burn gives it, and with a function that
/// copies its elements out.
struct Parameters<F> {
    names: Vec<String>,
    visit: F,
}

impl<F: FnMut(String, ParamId, &dyn Fn() -> TensorData)> ModuleVisitor for Parameters<F> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.names.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.names.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        (self.visit)(self.names.join("."), param.id, &|| param.val().to_data());
    }
}
