//! A stage of a model: any contiguous range of its layers.

use std::cell::LazyCell;
use std::ops::Range;

use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor};
use pipewright::nn::split_cross_entropy;
use pipewright::stage::{StageContext, StageModule};
use pipewright::tensor::{Boundary, BoundaryError, Placement, Values, pack, unpack};
use pipewright::train::data::{DataError, SideRows};
use pipewright_schedule::ModelDesc;
use pipewright_shapes::family;
use pipewright_shapes::hybrid::{HybridConfig, Pattern};

use super::block::{Block, RELATION_BIAS, relation_table};
use super::boundary::{HybridInput, HybridOutput};
use super::depths::Choice;
use super::describe::describe_layers;
use super::embedding::{FurtherEmbeddings, with_zero_gradient};
use super::initial::InitialParameters;
use super::prediction::Prediction;
use super::side_inputs::check_side;
use super::sizes::further;
use super::tokens::Tokens;
use crate::decoder::DecoderConfig;
use crate::error::ConfigError;
use crate::family::ModelFamily;
use crate::head_form::{FurtherPredictions, HeadForm, prediction_path};
use crate::mamba::{NO_SLICES, is_of_scan};
use crate::norm::NormForm;
use crate::parameter::{Builder, ParameterSource, without_variants};
use crate::path_names::PathNames;
use crate::predictions::{loss_of_all, take_ids, targets_of_each};
use crate::split::{Place, SplitStage};
use crate::stage_layers::{Layer, stage_layers};
use crate::training_module::{Loss, TrainingModule};
use crate::vocabulary::{OutputHead, TokenTable, vocabulary_path};
use pipewright_shapes::key_table::KeyTable;

/// The path of the embedding.
const EMBEDDING: &str = "model.embed_tokens";
/// The path of the last norm.
const NORM: &str = "model.norm";

/// A contiguous range of layers. As in a [`DecoderStage`](crate::decoder::DecoderStage), the struct has
/// fields for the whole model.
#[derive(Module, Debug)]
pub struct HybridStage {
    model: HybridModel,
    /// One entry for each further prediction of the whole model.
    mtp: Vec<Option<Prediction>>,
    pub(super) head: Option<OutputHead>,
    #[module(skip)]
    pub(super) config: HybridConfig,
    #[module(skip)]
    pub(super) split: SplitStage,
}

#[derive(Module, Debug)]
struct HybridModel {
    embed_tokens: Option<TokenTable>,
    further: Option<FurtherEmbeddings>,
    relation_bias: Option<RelationBias>,
    /// One entry for each block of the whole model.
    layers: Vec<Option<Block>>,
}

/// The table of the relations, `[relations, heads]`.
#[derive(Module, Debug)]
struct RelationBias {
    weight: Param<Tensor<2>>,
}

impl HybridStage {
    /// Runs the stage for a microbatch.
    ///
    /// # Panics
    /// When the input is not of the kind that the stage takes, or an id lies outside its table.
    pub fn run(&self, input: HybridInput, context: &StageContext) -> HybridOutput {
        self.run_layers(&self.layers(), input, Choice::Largest, context)
    }

    /// Runs the stage for a text, whose later tokens are not known.
    ///
    /// # Panics
    /// As [`HybridStage::run`].
    pub(super) fn run_text(&self, input: HybridInput, context: &StageContext) -> HybridOutput {
        self.run_layers(&self.layers(), input, Choice::Positive, context)
    }

    /// Returns the layers that the stage has, in order.
    fn layers(&self) -> Vec<HeldLayer<'_>> {
        let embedding = self.model.embed_tokens.iter().map(|_| HeldLayer::Embedding);
        let blocks = self.blocks().map(HeldLayer::Block);
        let predictions = self.mtp.iter().flatten().map(HeldLayer::Prediction);
        let head = self.head.iter().map(HeldLayer::Head);
        embedding.chain(blocks).chain(predictions).chain(head).collect()
    }

    /// Runs consecutive layers of the stage.
    fn run_layers(
        &self,
        layers: &[HeldLayer<'_>],
        input: HybridInput,
        choice: Choice,
        context: &StageContext,
    ) -> HybridOutput {
        let (hidden, ids) = match input {
            HybridInput::Tokens(ids) => (None, ids),
            HybridInput::Hidden(hidden, ids) => (Some(hidden), ids),
        };
        // The head by itself does not need them.
        let tokens = LazyCell::new(|| Tokens::new(&self.config, &ids, context));
        let hidden = match (layers.first(), hidden) {
            (Some(HeldLayer::Embedding), earlier) => self.embed(earlier, &ids, &tokens, context),
            (_, Some(hidden)) => hidden,
            (_, None) => panic!("layers after the embeddings take hidden states, not token ids"),
        };
        let tensor = &self.split.tensor;
        let ([batch, sequence], [rows, _, width]) = (ids.dims(), hidden.dims());
        let mut hidden = hidden.reshape([rows * sequence, width]);
        for layer in layers {
            hidden = match layer {
                HeldLayer::Block(block) => block.forward(hidden, (&tokens, choice), tensor, context),
                HeldLayer::Prediction(prediction) => {
                    prediction.forward(hidden, &ids, &tokens, &self.split, context)
                }
                HeldLayer::Embedding | HeldLayer::Head(_) => hidden,
            };
        }
        let Some(HeldLayer::Head(head)) = layers.last() else {
            let rows = hidden.dims()[0] / sequence;
            return HybridOutput::Hidden(hidden.reshape([rows, sequence, width]), ids);
        };
        let in_rows = |logits: Tensor<2>| {
            let part = logits.dims()[1];
            logits.reshape([batch, sequence, part])
        };
        let mut each = head.forward_each(hidden, tensor).into_iter().map(in_rows);
        let logits = each.next().expect("a head predicts the next token");
        HybridOutput::Logits { logits, further: each.collect() }
    }

    /// Runs consecutive layers of the stage in training. Returns the ids behind the output if the loss needs them.
    fn run_for_loss(&self, layers: &[HeldLayer<'_>], input: HybridInput, context: &StageContext) -> Values {
        let has_loss = matches!(layers.last(), Some(HeldLayer::Head(_)));
        let ids = (has_loss && further(&self.config).needs_ids()).then(|| input.ids().clone());
        let mut values = pack(self.run_layers(layers, input, Choice::Largest, context));
        if let Some(ids) = ids {
            ids.pack(&mut values);
        }
        values
    }

    /// Returns the blocks of the stage.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &Block> {
        self.model.layers.iter().flatten()
    }

    /// Returns the hidden states before the first block. `earlier` has the rows of the token ids that earlier
    /// parts of the embedding have found, if it is in parts.
    ///
    /// # Panics
    /// When the stage does not have the embeddings.
    pub(super) fn embed(
        &self,
        earlier: Option<Tensor<3>>,
        ids: &Tensor<2, Int>,
        tokens: &Tokens,
        context: &StageContext,
    ) -> Tensor<3> {
        let (Some(table), Some(further)) = (&self.model.embed_tokens, &self.model.further) else {
            panic!("a stage without the embeddings takes hidden states, not token ids")
        };
        let mut x = table.forward(earlier, ids.clone(), &self.split);
        if let Some(table) = &self.model.relation_bias {
            // The attentions have copies of the table, which are all that is read.
            x = with_zero_gradient(x, table.weight.val());
        }
        if self.config.embed_scale {
            x = x.mul_scalar((self.config.hidden_size as f64).sqrt());
        }
        further.forward(x, ids, tokens, context)
    }
}

/// A layer that a stage has.
enum HeldLayer<'a> {
    Embedding,
    Block(&'a Block),
    Prediction(&'a Prediction),
    Head(&'a OutputHead),
}

impl StageModule for HybridStage {
    type Input = HybridInput;
    /// A [`HybridOutput`]. Behind the logits of further predictions, it has the token ids, in which the loss finds
    /// the documents.
    type Output = Values;

    fn forward(&self, input: HybridInput, context: &StageContext) -> Values {
        self.run_for_loss(&self.layers(), input, context)
    }

    /// Returns the number of parts that can be recomputed one by one: every layer is one.
    fn blocks(&self) -> usize {
        self.layers().len()
    }

    fn forward_block(
        &self,
        block: usize,
        input: Values,
        context: &StageContext,
    ) -> Result<Values, BoundaryError> {
        let layer = &self.layers()[block..=block];
        Ok(self.run_for_loss(layer, unpack(input)?, context))
    }

    /// Gives parameters the paths of the checkpoint.
    fn parameter_path(&self, local: &str) -> String {
        if let Some(path) = vocabulary_path(local, NORM, EMBEDDING) {
            return path;
        }
        let local = without_variants(local);
        if let Some(prediction) = local.strip_prefix("mtp.") {
            let (index, name) = prediction.split_once('.').unwrap_or(("0", prediction));
            return format!("{}.{name}", prediction_path(index.parse().unwrap_or(0) + 1));
        }
        if local.ends_with(".relation.weight") {
            return format!("{RELATION_BIAS}.weight");
        }
        let Some(further) = local.strip_prefix("model.further.") else { return local };
        let names: Vec<&str> = further.split('.').collect();
        let path = match names.as_slice() {
            ["rms" | "tanh", name] => Some(format!("model.embed_norm.{name}")),
            [list, index, name] => {
                let tables = self.model.further.as_ref();
                let path = index.parse().ok().and_then(|index| tables?.path(list, index));
                path.map(|path| format!("{path}.{name}"))
            }
            _ => None,
        };
        path.unwrap_or_else(|| format!("model.{further}"))
    }

    fn placement(&self, local: &str) -> Placement {
        self.split.placement(local, &self.parameter_path(local))
    }

    /// The ranks have the logits of their parts of the vocabulary, and all token ids.
    fn output_split(&self, output: usize) -> Option<usize> {
        (output <= self.config.prediction_depth()).then_some(2)
    }

    fn refuses_slices(&self) -> Option<String> {
        Some(NO_SLICES.to_owned())
    }

    fn stays_in_single_precision(&self, local: &str) -> bool {
        HybridConfig::stays_in_single_precision(local)
    }

    /// Returns the paths of the tables that have copies: the table of the embedding and the table of the
    /// relations.
    fn shared_parameters(&self) -> Vec<String> {
        vec![format!("{EMBEDDING}.weight"), format!("{RELATION_BIAS}.weight")]
    }
}

impl TrainingModule for HybridStage {
    fn loss(&self) -> Loss<Values> {
        let (further, split) = (further(&self.config), self.split.clone());
        Box::new(move |output, targets, context| loss(further, output, &targets, &split, context))
    }
}

/// Returns the mean cross entropy of the valid positions, and adds the losses of further predictions. A rank
/// has the logits of its part of the vocabulary.
///
/// # Panics
/// When the output has no logits, or a target lies outside the vocabulary.
fn loss(
    further: FurtherPredictions,
    mut output: Values,
    targets: &Tensor<2, Int>,
    SplitStage { tensor, vocabulary, .. }: &SplitStage,
    context: &StageContext,
) -> Tensor<1> {
    let ids = if further.needs_ids() { take_ids(&mut output) } else { Ok(None) };
    let (Ok(ids), Ok(HybridOutput::Logits { logits, further: further_logits })) = (ids, unpack(output))
    else {
        panic!("the last stage returns logits, not hidden states")
    };
    let targets = targets_of_each(targets, ids.as_ref(), further, context);
    let logits: Vec<Tensor<3>> = std::iter::once(logits).chain(further_logits).collect();
    loss_of_all(further, context, |depth| {
        let (logits, targets) = (logits[depth].clone(), targets[depth].clone());
        split_cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1), *vocabulary, tensor)
    })
}

impl ModelFamily for HybridConfig {
    const MODEL_TYPE: &'static str = "hybrid";
    const ARCHITECTURE: &'static str = "HybridForCausalLM";
    const TABLE: &'static KeyTable = family::HYBRID.keys;
    type Stage = HybridStage;

    /// Returns a model of attention and feed-forward layers in turn: `num_hidden_layers` of each.
    fn of_sizes(sizes: DecoderConfig) -> Self {
        let pattern = "AD".repeat(sizes.num_hidden_layers.max(1));
        Self {
            num_attention_heads: sizes.num_attention_heads,
            num_key_value_heads: Some(sizes.num_key_value_heads),
            head_dim: sizes.head_dim,
            intermediate_size: sizes.intermediate_size,
            rms_norm_eps: sizes.rms_norm_eps,
            rope_theta: sizes.rope_theta,
            initializer_range: sizes.initializer_range,
            tie_word_embeddings: sizes.tie_word_embeddings,
            ..Self::new(
                sizes.vocab_size,
                sizes.hidden_size,
                Pattern::new(&pattern).expect("its letters are known"),
            )
        }
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn describe(&self, sequence: usize) -> ModelDesc {
        describe_layers(self, sequence)
    }

    fn head(&self) -> HeadForm {
        HeadForm {
            names: PathNames::default(),
            norm: NORM,
            embedding: EMBEDDING,
            form: NormForm::usual(self.rms_norm_eps),
            width: self.hidden_size,
            vocabulary: self.vocab_size,
            is_tied: self.tie_word_embeddings,
            factor: 1.0,
            cap: None,
            further: further(self),
        }
    }

    fn initializer_range(&self) -> f64 {
        self.initializer_range
    }

    fn check_side(&self, side: &SideRows, sequence: usize) -> Result<(), DataError> {
        check_side(self, side, sequence)
    }

    /// Leaves out the predictions of further tokens, which need the next token to predict the one after it.
    fn for_generation(&self) -> Self {
        Self { mtp_loss_weight: 0.0, ..self.clone() }
    }

    fn cuts(&self) -> Option<Vec<usize>> {
        // The embeddings are the layer before the first block.
        Some(self.pattern.cuts().iter().map(|blocks| blocks + 1).collect())
    }

    fn initial(&self, seed: u64) -> impl ParameterSource<Error = ConfigError> {
        InitialParameters::new(self, seed)
    }

    /// The routers and the numbers of each head of a scan do.
    fn stays_in_single_precision(parameter: &str) -> bool {
        parameter.ends_with("router.weight") || is_of_scan(parameter)
    }

    fn build_stage<S: ParameterSource>(
        &self,
        layers: Range<usize>,
        source: &mut S,
        place: &Place,
    ) -> Result<HybridStage, S::Error> {
        self.validate().map_err(ConfigError::from)?;
        let mut builder = Builder::new(source, place);
        let mut stage = HybridStage::empty(self);
        let (blocks, depth) = (self.blocks().len(), self.prediction_depth());
        for layer in stage_layers(layers, blocks + depth)? {
            match layer {
                Layer::Embedding => stage.add_embeddings(self, &mut builder)?,
                // The further predictions follow the blocks.
                Layer::Block(index) => match (index.checked_sub(blocks), self.prediction_block()) {
                    (Some(index), Some(kind)) => {
                        let prediction = Prediction::build(self, kind, index + 1, EMBEDDING, &mut builder)?;
                        stage.mtp[index] = Some(prediction);
                    }
                    _ => stage.model.layers[index] = Some(Block::build(self, index, &mut builder)?),
                },
                Layer::Head => stage.head = Some(OutputHead::build(&self.head(), &mut builder)?),
            }
        }
        stage.split = builder.into_split(self.vocab_size);
        Ok(stage)
    }
}

impl HybridStage {
    fn empty(config: &HybridConfig) -> Self {
        let layers = vec![None; config.blocks().len()];
        Self {
            model: HybridModel { embed_tokens: None, further: None, relation_bias: None, layers },
            mtp: vec![None; config.prediction_depth()],
            head: None,
            config: config.clone(),
            split: SplitStage::default(),
        }
    }

    fn add_embeddings<S: ParameterSource>(
        &mut self,
        config: &HybridConfig,
        builder: &mut Builder<'_, S>,
    ) -> Result<(), S::Error> {
        self.model.embed_tokens =
            Some(builder.token_table(EMBEDDING, config.vocab_size, config.hidden_size)?);
        // Every rank has the other tables.
        self.model.further = Some(FurtherEmbeddings::build(config, builder)?);
        if config.num_relations > 0 {
            self.model.relation_bias = Some(RelationBias { weight: relation_table(config, builder)? });
        }
        Ok(())
    }
}
