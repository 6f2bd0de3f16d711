//! A stage of a model whose embedding or head is cut along the vocabulary: any contiguous range of its layers,
//! where each part is a layer.
//!
//! Every part of the embedding but the last looks up the rows of its token ids, and passes them on with the
//! ids. Each further part puts its rows in their places. The last part is the family's embedding layer.
//!
//! The first part of the head normalises the hidden states. Every part computes its logits from them, adds
//! them to the statistics of the parts before it ([`vocabulary_statistics`]), and returns the normalised hidden
//! states with the statistics. The last part returns the statistics only, which give the loss. Each part looks
//! up the target ids as a side input ([`TARGETS`]).
//!
//! If the head predicts further tokens, the states of these predictions follow the hidden states as further
//! rows, and go the same way. The token ids go with them if the loss finds the documents in them.
//!
//! A part of a tied head holds a copy of its rows of the embedding's table. The layers that have the table
//! hold it in as many shards ([`Place::table_parts`]), so a part shares one shard as a whole. Its gradients
//! are added like the gradients of any shared parameter.

use std::ops::Range;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use pipewright::batch::TARGETS;
use pipewright::nn::{
    TensorParallel, cut_statistics, join_statistics, statistics_loss, vocabulary_statistics,
};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::{Boundary, BoundaryError, Placement, Values, pack, unpack};

use crate::embedding_form::VocabularyCut;
use crate::error::ConfigError;
use crate::family::ModelFamily;
use crate::head_form::{CutHead, HeadForm};
use crate::lora::LoraConfig;
use crate::parameter::{Builder, Outline, ParameterSource, ParameterSpec};
use crate::predictions::{loss_of_all, take_ids, targets_of_each};
use crate::split::{Place, shard_of_table};
use crate::training_module::TrainingModule;
use crate::vocabulary::{HeadMatrix, HeadNorms, TokenTable};

/// Why the parts of a head cannot run slices of microbatches.
pub(crate) const NO_SLICES: &str = "the parts of its head take the targets of whole microbatches";

/// A contiguous range of the layers of a model whose embedding or head is cut. `M` is the module of the layers
/// of the family, which come after the first parts of the embedding and before the parts of the head.
#[derive(Module, Debug)]
pub(crate) struct CutStage<M: Module> {
    /// The parts of the embedding before its last one, each a shard of the table.
    embedding: TokenTable,
    /// The layers of the family.
    body: Option<M>,
    /// The norms in front of the head, which a stage with the first part has.
    norms: Option<HeadNorms>,
    /// One entry for each part of the head.
    parts: Vec<Option<HeadMatrix>>,
    #[module(skip)]
    cut: VocabularyCut,
    /// The form of the head before it is cut.
    #[module(skip)]
    form: HeadForm,
}

/// Builds the stage of a model that holds `layers`, for training. The model's embedding and head are in the
/// parts of `cut`, each of them a layer.
pub(crate) fn training_stage<F: ModelFamily, S: ParameterSource>(
    config: &F,
    cut: &VocabularyCut,
    layers: Range<usize>,
    source: &mut S,
    place: &Place,
) -> Result<Stage, S::Error> {
    if *cut == VocabularyCut::default() {
        let is_last = layers.end == config.layers();
        return Ok(config.build_stage(layers, source, place)?.into_stage(is_last));
    }
    let is_last = layers.end == count_layers(config, cut);
    let stage = build_stage(config, cut, layers, source, place)?;
    if !is_last {
        return Ok(Stage::new(stage));
    }
    if let Some(head) = cut.head {
        let loss = move |statistics, targets: Tensor<2, Int>, context: &StageContext| {
            loss(&head, statistics, &targets, context)
        };
        return Ok(Stage::with_context_loss(stage, loss));
    }
    let loss = stage.body.as_ref().expect("the last stage has the family's head").loss();
    let loss = move |output, targets: Tensor<2, Int>, context: &StageContext| {
        loss(unpack(output).expect("the stage returns what its last layer does"), targets, context)
    };
    Ok(Stage::with_context_loss(stage, loss).with_half_precision_loss())
}

/// Returns the parameters of the stage that holds `layers`, with adapters; see [`ModelFamily::outline`].
pub(crate) fn outline<F: ModelFamily>(
    config: &F,
    cut: &VocabularyCut,
    layers: Range<usize>,
    tensor: &TensorParallel,
    lora: Option<&LoraConfig>,
) -> Result<Vec<ParameterSpec>, ConfigError> {
    let mut outline = Outline::with(lora);
    let place = Place { tensor: tensor.clone(), ..Device::flex().into() };
    if *cut == VocabularyCut::default() {
        config.build_stage(layers, &mut outline, &place)?;
    } else {
        build_stage(config, cut, layers, &mut outline, &place)?;
    }
    Ok(outline.specs)
}

/// Returns the layers of the family that are layers of a model with such a cut: all but a head in parts. They
/// are counted in the layers of the whole model.
fn layers_of_family<F: ModelFamily>(config: &F, cut: &VocabularyCut) -> usize {
    config.layers() - usize::from(cut.head.is_some())
}

/// Returns the number of layers of a model with its embedding and head in parts.
fn count_layers<F: ModelFamily>(config: &F, cut: &VocabularyCut) -> usize {
    let head = cut.head.map_or(0, |head| head.parts() as usize);
    cut.layers_before() + layers_of_family(config, cut) + head
}

/// Returns an error if several ranks compute the stages together.
fn require_one_rank(cut: &VocabularyCut, ranks: u32) -> Result<(), ConfigError> {
    match (cut.head, cut.embedding) {
        _ if ranks == 1 => Ok(()),
        (Some(head), _) => Err(ConfigError::HeadPartsOfRanks { parts: head.parts(), ranks }),
        (None, Some(embedding)) => {
            Err(ConfigError::EmbeddingPartsOfRanks { parts: embedding.parts(), ranks })
        }
        (None, None) => Ok(()),
    }
}

/// Builds the stage that holds `layers`.
fn build_stage<F: ModelFamily, S: ParameterSource>(
    config: &F,
    cut: &VocabularyCut,
    layers: Range<usize>,
    source: &mut S,
    place: &Place,
) -> Result<CutStage<F::Stage>, S::Error> {
    require_one_rank(cut, place.tensor.ranks())?;
    let (Range { start, end }, count) = (layers, count_layers(config, cut));
    if start >= end || end > count {
        return Err(ConfigError::LayerRange { start, end, layers: count }.into());
    }
    let embedding_is_cut = cut.embedding.is_some();
    let place = &Place { table_parts: cut.table_parts(), embedding_is_cut, ..place.clone() };
    let (first, form) = (cut.layers_before(), config.head());
    let last = first + layers_of_family(config, cut);
    let mut stage = CutStage {
        embedding: TokenTable::empty(cut.table_parts()),
        body: None,
        norms: None,
        parts: vec![None; cut.head.map_or(0, |head| head.parts() as usize)],
        cut: *cut,
        form,
    };
    let mut builder = Builder::new(source, place).with_names(form.names);
    for part in start..end.min(first) {
        let shape = [form.vocabulary, form.width];
        stage.embedding.add(part, builder.table_shard(form.embedding, shape, part as u32)?);
    }
    let own = start.max(first)..end.min(last);
    if !own.is_empty() {
        stage.body = Some(config.build_stage(own.start - first..own.end - first, source, place)?);
    }
    let mut builder = Builder::new(source, place).with_names(form.names);
    for part in start.max(last)..end.max(last) {
        let index = part - last;
        if index == 0 {
            stage.norms = Some(HeadNorms::build(&form, &mut builder)?);
        }
        let parts = stage.parts.len() as u32;
        stage.parts[index] = Some(HeadMatrix::part(&form, index as u32, parts, &mut builder)?);
    }
    Ok(stage)
}

/// Returns the mean cross entropy of the next tokens in nats from what the last part returns, and the target
/// ids. Adds the losses of further predictions to the step.
fn loss(head: &CutHead, mut output: Values, targets: &Tensor<2, Int>, context: &StageContext) -> Tensor<1> {
    let ids = take_ids(&mut output).expect("the last part returns the ids of rows");
    let statistics: Tensor<3> = unpack(output).expect("the last part returns the statistics");
    let ([rows, sequence], further) = (targets.dims(), head.form().further);
    let targets = targets_of_each(targets, ids.as_ref(), further, context);
    loss_of_all(further, context, |depth| {
        let own = statistics.clone().narrow(0, depth * rows, rows);
        statistics_loss(own.reshape([rows * sequence, STATISTICS]), targets[depth].clone().flatten(0, 1))
    })
}

impl<M: TrainingModule> CutStage<M> {
    /// Runs a part of the embedding before its last one.
    fn run_embedding(&self, index: usize, input: Values) -> Result<Values, BoundaryError> {
        let (earlier, ids): (Option<Tensor<3>>, Tensor<2, Int>) = if index == 0 {
            (None, unpack(input)?)
        } else {
            let (earlier, ids) = unpack(input)?;
            (Some(earlier), ids)
        };
        let rows = self.embedding.forward_shard(index, earlier, ids.clone(), self.form.vocabulary);
        Ok(pack((rows, ids)))
    }

    /// Runs a part of the head.
    fn run_part(
        &self,
        index: usize,
        mut input: Values,
        context: &StageContext,
    ) -> Result<Values, BoundaryError> {
        let form = &self.form;
        // Some families send the ids with the hidden states. The head may have no use for them.
        let ids = take_ids(&mut input)?.filter(|_| form.further.needs_ids());
        let (hidden, earlier) = if index == 0 {
            (unpack::<Tensor<3>>(input)?, None)
        } else {
            let (hidden, earlier): (Tensor<3>, Tensor<3>) = unpack(input)?;
            (hidden, Some(earlier))
        };
        let [rows, sequence, width] = hidden.dims();
        let mut x = hidden.reshape([rows * sequence, width]);
        if let (0, Some(norms)) = (index, &self.norms) {
            x = form.scaled(norms.forward(x));
        }
        let earlier = earlier.map(|pieces| join_statistics(pieces.flatten(0, 1)));
        let part = self.parts[index].as_ref().expect("the part is one of this stage's");
        let head = self.cut.head.as_ref().expect("a model with parts of a head has one");
        let range = (head.ids(index as u32), form.vocabulary);
        let logits = form.bounded(part.forward(x.clone()));
        let targets = targets_of_each(&targets(context), ids.as_ref(), form.further, context);
        let targets = Tensor::cat(targets, 0);
        let later = vocabulary_statistics(logits, targets.flatten(0, 1), range, earlier);
        let mut output = if index + 1 == self.parts.len() {
            pack(later.reshape([rows, sequence, STATISTICS]))
        } else {
            let pieces = cut_statistics(later, x.dtype());
            let numbers = pieces.dims()[1];
            pack((x.reshape([rows, sequence, width]), pieces.reshape([rows, sequence, numbers])))
        };
        if let Some(ids) = ids {
            ids.pack(&mut output);
        }
        Ok(output)
    }

    /// Returns the blocks that the stage has, in order.
    fn held(&self) -> impl Iterator<Item = HeldBlock> {
        let embedding = self.embedding.held().map(HeldBlock::Embedding);
        let body = (0..self.body.as_ref().map_or(0, StageModule::blocks)).map(HeldBlock::Body);
        let parts = (0..self.parts.len()).filter(|&index| self.parts[index].is_some());
        embedding.chain(body).chain(parts.map(HeldBlock::Head))
    }

    /// Runs a block.
    fn run_block(
        &self,
        block: HeldBlock,
        input: Values,
        context: &StageContext,
    ) -> Result<Values, BoundaryError> {
        match (block, &self.body) {
            (HeldBlock::Embedding(index), _) => self.run_embedding(index, input),
            (HeldBlock::Body(index), Some(body)) => body.forward_block(index, input, context),
            (HeldBlock::Body(_), None) => Ok(input),
            (HeldBlock::Head(index), _) => self.run_part(index, input, context),
        }
    }

    /// Returns the body and the path inside it of the parameter at `local`; `None` for a parameter of the
    /// parts.
    fn in_body<'a>(&'a self, local: &'a str) -> Option<(&'a M, &'a str)> {
        Some((self.body.as_ref()?, local.strip_prefix("body.")?))
    }

    /// Returns the path of the table of the token embeddings.
    fn table_path(&self) -> String {
        self.form.names.of(&format!("{}.weight", self.form.embedding))
    }
}

/// A part of a stage that runs by itself.
#[derive(Clone, Copy, Debug)]
enum HeldBlock {
    /// A part of the embedding before its last one.
    Embedding(usize),
    /// A block of the layers of the family.
    Body(usize),
    /// A part of the head.
    Head(usize),
}

/// The numbers of a token that parts send on.
const STATISTICS: usize = 2;

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

impl<M: TrainingModule> StageModule for CutStage<M> {
    type Input = Values;
    type Output = Values;

    /// # Panics
    /// When the input is not one that the stage takes, or the step has no targets.
    fn forward(&self, input: Values, context: &StageContext) -> Values {
        let run = |input: Values, block| self.run_block(block, input, context);
        let embedded = self.embedding.held().map(HeldBlock::Embedding).try_fold(input, run);
        // The body as a whole may share work among its blocks.
        let hidden = embedded.and_then(|input| match &self.body {
            None => Ok(input),
            Some(body) => Ok(pack(body.forward(unpack(input)?, context))),
        });
        let mut heads = self.held().filter(|block| matches!(block, HeldBlock::Head(_)));
        let output = hidden.and_then(|input| heads.try_fold(input, run));
        output.expect("the stage takes the input")
    }

    /// Returns the number of blocks of the layers of the family, and one for each part.
    fn blocks(&self) -> usize {
        self.held().count()
    }

    fn forward_block(
        &self,
        block: usize,
        input: Values,
        context: &StageContext,
    ) -> Result<Values, BoundaryError> {
        let block = self.held().nth(block).expect("the block is one of this stage's");
        self.run_block(block, input, context)
    }

    /// Gives every part the path of the whole head, or of the table that it shares.
    fn parameter_path(&self, local: &str) -> String {
        if let Some((body, local)) = self.in_body(local) {
            return body.parameter_path(local);
        }
        if shard_of_table(local).is_some() {
            return self.table_path();
        }
        let form = &self.form;
        let norm_path = local.strip_prefix("norms.").and_then(|local| HeadNorms::path(local, form.norm));
        form.names.of(&norm_path.unwrap_or_else(|| HeadMatrix::path(local, form.embedding)))
    }

    fn placement(&self, local: &str) -> Placement {
        if let Some((body, local)) = self.in_body(local) {
            return body.placement(local);
        }
        if let Some(index) = shard_of_table(local) {
            return Placement::of_layer(0, index, self.cut.table_parts());
        }
        let part = local.strip_prefix("parts.").and_then(|local| local.split('.').next()?.parse().ok());
        let placement_of = |part| HeadMatrix::placement_of_part(&self.form, part, self.parts.len() as u32);
        part.map_or(Placement::REPLICATED, placement_of)
    }

    fn refuses_slices(&self) -> Option<String> {
        match (&self.cut.head, &self.body) {
            (Some(_), _) => Some(NO_SLICES.to_owned()),
            (None, body) => body.as_ref().and_then(StageModule::refuses_slices),
        }
    }

    fn stays_in_single_precision(&self, local: &str) -> bool {
        self.in_body(local).is_some_and(|(body, local)| body.stays_in_single_precision(local))
    }

    /// Returns the paths of the tables that the layers of the family share, and the path of the table of the
    /// token embeddings, which a tied head and predictions share.
    fn shared_parameters(&self) -> Vec<String> {
        let mut paths = self.body.as_ref().map(M::shared_parameters).unwrap_or_default();
        if !paths.contains(&self.table_path()) {
            paths.push(self.table_path());
        }
        paths
    }
}
