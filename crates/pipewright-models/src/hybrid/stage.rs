//! A stage of a model: any contiguous range of its layers.

use std::ops::Range;

use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor};
use pipewright::nn::Embedding;
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::Placement;
use pipewright::train::data::{SideError, SideRows};
use pipewright_schedule::ModelDesc;

use super::block::{Block, RELATION_BIAS, relation_table};
use super::boundary::{HybridInput, HybridOutput};
use super::config::HybridConfig;
use super::embedding::{FurtherEmbeddings, with_zero_gradient};
use super::head::{SecondHead, loss};
use super::initial::InitialParameters;
use super::pattern::Pattern;
use super::side_inputs::check_side;
use super::tokens::Tokens;
use crate::config_key::KeyTable;
use crate::decoder::DecoderConfig;
use crate::error::ConfigError;
use crate::family::ModelFamily;
use crate::head_form::HeadForm;
use crate::mamba::{NO_SLICES, is_of_scan};
use crate::norm::NormForm;
use crate::parameter::{Builder, ParameterSource, without_variants};
use crate::path_names::PathNames;
use crate::split::{Place, SplitStage};
use crate::stage_layers::{Layer, stage_layers};
use crate::training_module::TrainingModule;
use crate::vocabulary::OutputHead;

/// The path of the embedding.
const EMBEDDING: &str = "model.embed_tokens";
/// The path of the last norm.
const NORM: &str = "model.norm";

/// A contiguous range of layers. As in a [`DecoderStage`](crate::decoder::DecoderStage), the struct has
/// fields for the whole model.
#[derive(Module, Debug)]
pub struct HybridStage {
    model: HybridModel,
    pub(super) head: Option<OutputHead>,
    mtp: Option<SecondHead>,
    #[module(skip)]
    pub(super) config: HybridConfig,
    #[module(skip)]
    pub(super) split: SplitStage,
}

#[derive(Module, Debug)]
struct HybridModel {
    embed_tokens: Option<Embedding>,
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
        let (hidden, ids, tokens) = self.enter(input, context);
        let tensor = &self.split.tensor;
        let [batch, sequence, width] = hidden.dims();
        let mut hidden = hidden.reshape([batch * sequence, width]);
        for block in self.blocks() {
            hidden = block.forward(hidden, &tokens, tensor, context);
        }
        let Some(head) = &self.head else {
            return HybridOutput::Hidden(hidden.reshape([batch, sequence, width]), ids);
        };
        let second = self.mtp.as_ref().map(|second| {
            let table = head.table().expect("a stage with a second head has a copy of the table");
            second.forward(hidden.clone(), &ids, &table, &tokens, &self.split, context)
        });
        let in_rows = |logits: Tensor<2>| {
            let part = logits.dims()[1];
            logits.reshape([batch, sequence, part])
        };
        HybridOutput::Logits {
            logits: in_rows(head.forward(hidden, tensor)),
            second: second.map(|normalised| in_rows(head.logits(normalised, tensor))),
        }
    }

    /// Returns the blocks of the stage.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &Block> {
        self.model.layers.iter().flatten()
    }

    /// Returns the hidden states before the first block of the stage, with the ids and what they say.
    pub(super) fn enter(
        &self,
        input: HybridInput,
        context: &StageContext,
    ) -> (Tensor<3>, Tensor<2, Int>, Tokens) {
        let (Some(table), Some(further)) = (&self.model.embed_tokens, &self.model.further) else {
            let HybridInput::Hidden(hidden, ids) = input else {
                panic!("a stage without the embeddings takes hidden states, not token ids")
            };
            let tokens = Tokens::new(&self.config, &ids, context);
            return (hidden, ids, tokens);
        };
        let HybridInput::Tokens(ids) = input else {
            panic!("the first stage takes token ids, not hidden states")
        };
        let tokens = Tokens::new(&self.config, &ids, context);
        let SplitStage { tensor, vocabulary, .. } = &self.split;
        let mut x = table.forward_split(ids.clone(), *vocabulary, tensor);
        if let Some(table) = &self.model.relation_bias {
            // The attentions have copies of the table, which are all that is read.
            x = with_zero_gradient(x, table.weight.val());
        }
        if self.config.embed_scale {
            x = x.mul_scalar((self.config.hidden_size as f64).sqrt());
        }
        (further.forward(x, &ids, &tokens, context), ids, tokens)
    }
}

impl StageModule for HybridStage {
    type Input = HybridInput;
    type Output = HybridOutput;

    fn forward(&self, input: HybridInput, context: &StageContext) -> HybridOutput {
        self.run(input, context)
    }

    /// Gives parameters the paths of the checkpoint.
    fn parameter_path(&self, local: &str) -> String {
        if let Some(path) = OutputHead::parameter_path(local, NORM, EMBEDDING) {
            return path;
        }
        let local = without_variants(local);
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
        self.split.placement(&self.parameter_path(local))
    }

    /// The ranks have the logits of their parts of the vocabulary.
    fn output_split(&self, _output: usize) -> Option<usize> {
        Some(2)
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
    fn into_stage(self, is_last: bool) -> Stage {
        if !is_last {
            return Stage::new(self);
        }
        let (weight, split) = (self.config.mtp_loss_weight, self.split.clone());
        Stage::with_context_loss(self, move |output, targets: Tensor<2, Int>, context: &StageContext| {
            loss(weight, output, &targets, &split, context)
        })
    }
}

impl ModelFamily for HybridConfig {
    const MODEL_TYPE: &'static str = "hybrid";
    const ARCHITECTURE: &'static str = "HybridForCausalLM";
    const TABLE: &'static KeyTable = &super::config::TABLE;
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
        self.describe_layers(sequence)
    }

    fn initializer_range(&self) -> f64 {
        self.initializer_range
    }

    fn refuses_cache(&self) -> Option<&'static str> {
        let reason = "a further token may change which earlier tokens go through the blocks of `mod_layers`, and a model \
                      without `mod_layers` has a cache";
        (!self.mod_layers.is_empty()).then_some(reason)
    }

    fn check_side(&self, side: &SideRows, sequence: usize) -> Result<(), SideError> {
        check_side(self, side, sequence)
    }

    /// Leaves out the second prediction head, which needs the next token to predict the one after it.
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
        self.validate()?;
        let mut builder = Builder::new(source, place);
        let mut stage = HybridStage::empty(self);
        for layer in stage_layers(layers, self.blocks().len())? {
            match layer {
                Layer::Embedding => stage.add_embeddings(self, &mut builder)?,
                Layer::Block(index) => {
                    stage.model.layers[index] = Some(Block::build(self, index, &mut builder)?);
                }
                Layer::Head => stage.add_head(self, &mut builder)?,
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
            head: None,
            mtp: None,
            config: config.clone(),
            split: SplitStage::default(),
        }
    }

    fn add_embeddings<S: ParameterSource>(
        &mut self,
        config: &HybridConfig,
        builder: &mut Builder<'_, S>,
    ) -> Result<(), S::Error> {
        self.model.embed_tokens = Some(Embedding {
            weight: builder.token_table(EMBEDDING, config.vocab_size, config.hidden_size)?,
        });
        // Every rank has the other tables.
        self.model.further = Some(FurtherEmbeddings::build(config, builder)?);
        if config.num_relations > 0 {
            self.model.relation_bias = Some(RelationBias { weight: relation_table(config, builder)? });
        }
        Ok(())
    }

    fn add_head<S: ParameterSource>(
        &mut self,
        config: &HybridConfig,
        builder: &mut Builder<'_, S>,
    ) -> Result<(), S::Error> {
        let form = HeadForm {
            names: PathNames::default(),
            norm: NORM,
            embedding: EMBEDDING,
            form: NormForm::usual(config.rms_norm_eps),
            width: config.hidden_size,
            vocabulary: config.vocab_size,
            is_tied: config.tie_word_embeddings,
            factor: 1.0,
            cap: None,
        };
        let second = config.second_block();
        self.head = Some(OutputHead::build(&form, second.is_some(), builder)?);
        if let Some(kind) = second {
            self.mtp = Some(SecondHead::build(config, kind, builder)?);
        }
        Ok(())
    }
}
