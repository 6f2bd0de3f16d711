//! A stage of a model: any contiguous range of its layers.

use std::cell::LazyCell;
use std::ops::Range;

use burn::module::Module;
use burn::tensor::Tensor;
use pipewright::nn::{CausalAttention, Mamba2};
use pipewright::stage::{StageContext, StageModule};
use pipewright::tensor::{BoundaryError, Placement, Values, pack, unpack};
use pipewright_schedule::ModelDesc;
use pipewright_shapes::family;
use pipewright_shapes::nemotron_h::{BlockKind, NemotronHConfig};

use super::block::Block;
use super::describe::describe_layers;
use super::initial::InitialParameters;
use crate::decoder::{DecoderConfig, DecoderInput};
use crate::documents::given_scope;
use crate::error::ConfigError;
use crate::family::ModelFamily;
use crate::generation_stage::row_context;
use crate::head_form::{FurtherPredictions, HeadForm};
use crate::mamba::{NO_SLICES, is_of_scan};
use crate::norm::NormForm;
use crate::parameter::{Builder, ParameterSource, without_variants};
use crate::path_names::PathNames;
use crate::router::is_of_router;
use crate::split::{Place, SplitStage};
use crate::stage_layers::{Layer, held_layers, stage_layers};
use crate::training_module::{Loss, TrainingModule, loss_of_logits};
use crate::vocabulary::{OutputHead, TokenTable, vocabulary_path};
use pipewright_shapes::key_table::KeyTable;

/// The path of the embedding.
const EMBEDDING: &str = "backbone.embeddings";
/// The path of the last norm.
const NORM: &str = "backbone.norm_f";

/// A contiguous range of layers. As in a [`DecoderStage`](crate::decoder::DecoderStage), parameters have the
/// paths of a Hugging Face directory, so the struct has fields for the whole model.
#[derive(Module, Debug)]
pub struct NemotronHStage {
    backbone: Backbone,
    pub(super) head: Option<OutputHead>,
    /// The width of the heads that the attention computes with, which is even.
    #[module(skip)]
    pub(super) head_dim: usize,
    #[module(skip)]
    pub(super) split: SplitStage,
}

#[derive(Module, Debug)]
struct Backbone {
    embeddings: Option<TokenTable>,
    /// One entry for each block of the whole model.
    layers: Vec<Option<Block>>,
}

impl NemotronHStage {
    /// Runs the stage without a pipeline, and returns hidden states `[batch, sequence, hidden]`, or logits
    /// `[batch, sequence, vocabulary]` on the last stage.
    ///
    /// # Panics
    /// When the input is not of the kind that the stage takes, or a token id is outside the vocabulary.
    pub fn run(&self, input: DecoderInput) -> Tensor<3> {
        self.forward(input, &row_context())
    }

    /// Returns the hidden states before the first block of the stage.
    pub(super) fn enter(&self, input: DecoderInput) -> Tensor<3> {
        input.embed(self.backbone.embeddings.as_ref(), &self.split)
    }

    /// Returns the blocks of the stage.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &Block> {
        self.backbone.layers.iter().flatten()
    }

    /// Returns the layers that the stage has, in order.
    fn layers(&self) -> Vec<Layer> {
        held_layers(self.backbone.embeddings.is_some(), &self.backbone.layers, self.head.is_some())
    }

    /// Runs consecutive layers of the stage.
    fn run_in(&self, layers: &[Layer], input: DecoderInput, context: &StageContext) -> Tensor<3> {
        let tensor = &self.split.tensor;
        let hidden = match layers.first() {
            Some(Layer::Embedding) => self.enter(input),
            _ => input.embed(None, &self.split),
        };
        let [batch, sequence, width] = hidden.dims();
        let device = hidden.device();
        // Made for the layers that need them: a block that is recomputed by itself may have neither.
        let scope = LazyCell::new(|| given_scope(context, [batch, sequence]));
        let attention = LazyCell::new(|| {
            let attention = CausalAttention::new(sequence, self.head_dim, &device);
            match &*scope {
                Some(scope) => attention.with_scope(scope),
                None => attention,
            }
        });
        let scan = |mixer: &Mamba2, x: Tensor<2>| {
            mixer.forward(x, sequence, scope.as_ref().map(|scope| &scope.documents))
        };
        let attend = |[q, k, v]: [Tensor<2>; 3]| attention.forward(q, k, v);
        let mut hidden = hidden.reshape([batch * sequence, width]);
        for layer in layers {
            match layer {
                Layer::Embedding => {}
                Layer::Block(index) => {
                    let block =
                        self.backbone.layers[*index].as_ref().expect("the block is one of this stage's");
                    hidden = block.forward(hidden, sequence, scan, attend, tensor, context);
                }
                Layer::Head => {
                    let head = self.head.as_ref().expect("the head is one of this stage's layers");
                    hidden = head.forward(hidden, tensor);
                }
            }
        }
        let width = hidden.dims()[1];
        hidden.reshape([batch, sequence, width])
    }
}

impl StageModule for NemotronHStage {
    type Input = DecoderInput;
    type Output = Tensor<3>;

    fn forward(&self, input: DecoderInput, context: &StageContext) -> Tensor<3> {
        self.run_in(&self.layers(), input, context)
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
        Ok(pack(self.run_in(&self.layers()[block..=block], unpack(input)?, context)))
    }

    /// Gives parameters the paths of a Hugging Face directory.
    fn parameter_path(&self, local: &str) -> String {
        vocabulary_path(local, NORM, EMBEDDING).unwrap_or_else(|| without_variants(local))
    }

    fn placement(&self, local: &str) -> Placement {
        self.split.placement(local, &self.parameter_path(local))
    }

    /// The ranks have the logits of their parts of the vocabulary.
    fn output_split(&self, _output: usize) -> Option<usize> {
        Some(2)
    }

    fn refuses_slices(&self) -> Option<String> {
        Some(NO_SLICES.to_owned())
    }

    fn stays_in_single_precision(&self, local: &str) -> bool {
        NemotronHConfig::stays_in_single_precision(local)
    }

    /// Returns the path of the embedding's table. A tied head on another stage holds a copy of it.
    fn shared_parameters(&self) -> Vec<String> {
        vec![format!("{EMBEDDING}.weight")]
    }
}

impl TrainingModule for NemotronHStage {
    fn loss(&self) -> Loss<Tensor<3>> {
        loss_of_logits(&self.split)
    }
}

impl ModelFamily for NemotronHConfig {
    const MODEL_TYPE: &'static str = "nemotron_h";
    const ARCHITECTURE: &'static str = "NemotronHForCausalLM";
    const TABLE: &'static KeyTable = family::NEMOTRON_H.keys;
    const RENAMED: &'static [(&'static str, &'static str)] = family::NEMOTRON_H.renamed;
    type Stage = NemotronHStage;

    /// Returns a model of Mamba-2 mixers and feed-forward layers in turn, with attention in every eighth
    /// block.
    fn of_sizes(sizes: DecoderConfig) -> Self {
        let kind = |index: usize| match index % 8 {
            6 => BlockKind::Attention,
            kind if kind % 2 == 0 => BlockKind::Mamba,
            _ => BlockKind::Mlp,
        };
        let heads = sizes.num_attention_heads;
        Self {
            vocab_size: sizes.vocab_size,
            hidden_size: sizes.hidden_size,
            blocks: (0..sizes.num_hidden_layers).map(kind).collect(),
            layer_norm_epsilon: sizes.rms_norm_eps,
            tie_word_embeddings: sizes.tie_word_embeddings,
            initializer_range: sizes.initializer_range,
            num_attention_heads: heads,
            num_key_value_heads: sizes.num_key_value_heads,
            head_dim: sizes.head_dim(),
            intermediate_size: sizes.intermediate_size,
            mlp_bias: false,
            mamba_num_heads: heads,
            mamba_head_dim: 2 * sizes.hidden_size / heads.max(1),
            n_groups: 1,
            ssm_state_size: 128,
            conv_kernel: 4,
            use_conv_bias: true,
            use_bias: false,
            time_step_limit: (0.0, f64::INFINITY),
            time_step_range: (0.001, 0.1),
            time_step_floor: 1e-4,
            rescale_prenorm_residual: true,
            experts: None,
        }
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn describe(&self, sequence: usize) -> ModelDesc {
        describe_layers(self, sequence)
    }

    fn initializer_range(&self) -> f64 {
        self.initializer_range
    }

    fn head(&self) -> HeadForm {
        HeadForm {
            names: PathNames::default(),
            norm: NORM,
            embedding: EMBEDDING,
            form: NormForm::usual(self.layer_norm_epsilon),
            width: self.hidden_size,
            vocabulary: self.vocab_size,
            is_tied: self.tie_word_embeddings,
            factor: 1.0,
            cap: None,
            further: FurtherPredictions::default(),
        }
    }

    fn initial(&self, seed: u64) -> impl ParameterSource<Error = ConfigError> {
        InitialParameters::new(self, seed)
    }

    /// The routers of experts and the numbers of each head of a scan do.
    fn stays_in_single_precision(parameter: &str) -> bool {
        is_of_router(parameter) || is_of_scan(parameter)
    }

    fn build_stage<S: ParameterSource>(
        &self,
        layers: Range<usize>,
        source: &mut S,
        place: &Place,
    ) -> Result<NemotronHStage, S::Error> {
        self.validate().map_err(ConfigError::from)?;
        let mut builder = Builder::new(source, place);
        let mut stage = NemotronHStage::empty(self);
        for layer in stage_layers(layers, self.blocks.len())? {
            match layer {
                Layer::Embedding => {
                    let table = builder.token_table(EMBEDDING, self.vocab_size, self.hidden_size)?;
                    stage.backbone.embeddings = Some(table);
                }
                Layer::Block(index) => {
                    let path = format!("backbone.layers.{index}");
                    let block = Block::build(self, self.blocks[index], &path, &mut builder)?;
                    stage.backbone.layers[index] = Some(block);
                }
                Layer::Head => stage.head = Some(OutputHead::build(&self.head(), &mut builder)?),
            }
        }
        stage.split = builder.into_split(self.vocab_size);
        Ok(stage)
    }
}

impl NemotronHStage {
    fn empty(config: &NemotronHConfig) -> Self {
        Self {
            backbone: Backbone { embeddings: None, layers: vec![None; config.blocks.len()] },
            head: None,
            // In a model without attention, the width of the heads is not checked.
            head_dim: if config.blocks.contains(&BlockKind::Attention) {
                config.head_dim.next_multiple_of(2)
            } else {
                2
            },
            split: SplitStage::default(),
        }
    }
}
