//! A stage of a decoder-only model: any contiguous range of its layers.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::nn::{CausalAttention, Embedding};
use pipewright::stage::{StageContext, StageModule};
use pipewright::tensor::{
    Boundary, BoundaryError, Placement, Unpack, Value, ValueKind, Values, pack, unpack,
};

use super::attentions::{BlockAttentions, MicrobatchAttentions};
use super::block::{DecoderBlock, scaled};
use crate::documents::given_scope;
use crate::generation_stage::row_context;
use crate::lora::is_of_adapter;
use crate::parameter::without_variants;
use crate::path_names::PathNames;
use crate::router::is_of_router;
use crate::split::SplitStage;
use crate::stage_layers::{Layer, held_layers};
use crate::valid_tokens::reach;
use crate::vocabulary::{OutputHead, TokenTable, vocabulary_path};

/// The path of the embedding.
pub(super) const EMBEDDING: &str = "model.embed_tokens";
/// The path of the table of positions.
pub(super) const POSITION_TABLE: &str = "model.embed_positions";
/// The path of the last norm.
pub(super) const NORM: &str = "model.norm";

/// A contiguous range of layers.
///
/// Parameters of every stage have the global paths of a Hugging Face directory, such as
/// `model.layers.3.mlp.up_proj.weight`. For this reason the struct has fields for the whole model. The fields
/// of layers that belong to other stages are `None`.
#[derive(Module, Debug)]
pub struct DecoderStage {
    pub(super) model: DecoderModel,
    pub(super) head: Option<OutputHead>,
    #[module(skip)]
    pub(super) attentions: BlockAttentions,
    /// The factor of the embeddings.
    #[module(skip)]
    pub(super) embedding_factor: f64,
    /// The names of parts of paths in files.
    #[module(skip)]
    pub(super) names: PathNames,
    #[module(skip)]
    pub(super) split: SplitStage,
}

#[derive(Module, Debug)]
pub(super) struct DecoderModel {
    pub(super) embed_tokens: Option<TokenTable>,
    /// The vectors of positions, in a family that has them.
    pub(super) embed_positions: Option<Embedding>,
    /// One entry for each block of the whole model.
    pub(super) layers: Vec<Option<DecoderBlock>>,
}

/// The input of a stage: token ids `[batch, sequence]` if it holds the embedding, otherwise hidden states
/// `[batch, sequence, hidden]`.
#[expect(
    clippy::large_enum_variant,
    reason = "an input lives for one call, and a box would cost an allocation"
)]
#[derive(Debug, Clone)]
pub enum DecoderInput {
    /// Token ids.
    Tokens(Tensor<2, Int>),
    /// Hidden states from the previous stage.
    Hidden(Tensor<3>),
    /// Token ids, and the rows of the embedding's table `[batch, sequence, hidden]` that earlier parts of the
    /// embedding have found for them. The stage holds the last part.
    Rows(Tensor<3>, Tensor<2, Int>),
}

impl DecoderStage {
    /// Runs the stage outside a pipeline, and returns hidden states `[batch, sequence, hidden]`, or logits
    /// `[batch, sequence, vocabulary]` on the last stage. Auxiliary losses are lost.
    ///
    /// # Panics
    /// When the input is not of the kind that the stage takes, or a token id is outside the vocabulary.
    pub fn run(&self, input: DecoderInput) -> Tensor<3> {
        self.forward(input, &row_context())
    }

    /// Returns the layers that the stage has, in order.
    fn layers(&self) -> Vec<Layer> {
        held_layers(self.model.embed_tokens.is_some(), &self.model.layers, self.head.is_some())
    }

    /// Runs a layer. It returns hidden states `[batch, sequence, hidden]`, or logits `[batch, sequence,
    /// vocabulary]`.
    fn run_layer(
        &self,
        layer: Layer,
        input: DecoderInput,
        attentions: &mut MicrobatchAttentions,
        context: &StageContext,
    ) -> Tensor<3> {
        if layer == Layer::Embedding {
            return self.embed_in(input, context);
        }
        let hidden = input.embed(None, &self.split);
        let [batch, sequence, width] = hidden.dims();
        let device = hidden.device();
        let mut hidden = hidden.reshape([batch * sequence, width]);
        match layer {
            Layer::Embedding => {}
            Layer::Block(index) => {
                let block = self.model.layers[index].as_ref().expect("the block is one of this stage's");
                let attention = self.attentions.of_microbatch(index, attentions, || {
                    self.attention_of(index, [batch, sequence], &device, context)
                });
                let attend = |[q, k, v]: [Tensor<2>; 3], sinks: Option<Tensor<1>>| {
                    let attention = attention.with_sinks(sinks);
                    if context.slice().1.is_one() {
                        attention.forward(q, k, v)
                    } else {
                        attend_to_slices(&attention, [q, k, v], [batch, sequence], index, context)
                    }
                };
                hidden = block.forward(hidden, batch, attend, &self.split.tensor, context);
            }
            Layer::Head => hidden = self.logits(hidden),
        }
        let width = hidden.dims()[1];
        hidden.reshape([batch, sequence, width])
    }

    /// Returns a block's attention for a microbatch of `batch` rows, or for a slice of it of `sequence`
    /// tokens.
    fn attention_of(
        &self,
        block: usize,
        [batch, sequence]: [usize; 2],
        device: &Device,
        context: &StageContext,
    ) -> Arc<CausalAttention> {
        let length = sequence * context.slice().1.get() as usize;
        let scope = given_scope(context, [batch, sequence]);
        let reach = if self.attentions.depend_on_length() && context.slice().1.is_one() {
            reach(context, scope.as_ref(), [batch, sequence])
        } else {
            length
        };
        let whole = self.attentions.get(block, length, &self.attentions.positions(reach), device);
        match scope {
            Some(scope) => Arc::new(whole.with_scope(&scope)),
            None => whole,
        }
    }

    /// Returns the hidden states of the token ids of a microbatch, or of a slice of it.
    fn embed_in(&self, input: DecoderInput, context: &StageContext) -> Tensor<3> {
        self.embed(input, |[rows, length]| match given_scope(context, [rows, length]) {
            Some(scope) => scope.positions.to_vec(),
            None => {
                let first = context.slice().0.get() * length as u32;
                (0..rows).flat_map(|_| first..first + length as u32).collect()
            }
        })
    }

    /// Returns the hidden states of token ids. `positions` returns the position of each token of rows of this
    /// length, if the model adds vectors of positions.
    ///
    /// # Panics
    /// When a position has no vector.
    pub(super) fn embed(
        &self,
        input: DecoderInput,
        positions: impl FnOnce([usize; 2]) -> Vec<u32>,
    ) -> Tensor<3> {
        let hidden = input.embed(self.model.embed_tokens.as_ref(), &self.split);
        let hidden = scaled(hidden, self.embedding_factor);
        let Some(table) = &self.model.embed_positions else { return hidden };
        let [rows, length, _] = hidden.dims();
        let (positions, [count, _]) = (positions([rows, length]), table.weight.dims());
        // Devices do not check the rows that they select.
        assert!(
            positions.iter().all(|&position| (position as usize) < count),
            "a position lies outside the table of {count} (`n_positions`): use shorter rows"
        );
        let ids: Vec<i32> = positions.into_iter().map(|position| position as i32).collect();
        let vectors =
            table.forward(Tensor::from_data(TensorData::new(ids, [rows, length]), &hidden.device()));
        hidden + vectors
    }

    /// Returns the logits of hidden states after the last block.
    pub(super) fn logits(&self, hidden: Tensor<2>) -> Tensor<2> {
        let head = self.head.as_ref().expect("the layer is one of this stage's");
        head.forward(hidden, &self.split.tensor)
    }
}

/// Runs the attention of a block for a slice: over the keys and values of this slice and of those before it.
fn attend_to_slices(
    attention: &CausalAttention,
    inputs: [Tensor<2>; 3],
    [batch, length]: [usize; 2],
    block: usize,
    context: &StageContext,
) -> Tensor<2> {
    let [q, k, v] = inputs.map(|x| {
        let width = x.dims()[1];
        x.reshape([batch, length, width])
    });
    let up_to_this = |what: &str, own: Tensor<3>| {
        let name = format!("model.layers.{block}.self_attn.{what}");
        let mut slices = context.earlier_slices(&name);
        context.keep_for_later_slices(&name, &own);
        slices.push(own);
        slices
    };
    let attended = attention.forward_slice(q, up_to_this("keys", k), up_to_this("values", v));
    let width = attended.dims()[2];
    attended.reshape([batch * length, width])
}

/// Returns true for the routers of mixtures of experts, and for adapters.
pub(crate) fn stays_in_single_precision(parameter: &str) -> bool {
    is_of_router(parameter) || is_of_adapter(parameter)
}

impl StageModule for DecoderStage {
    type Input = DecoderInput;
    type Output = Tensor<3>;

    /// Does what [`DecoderStage::run`] does, and adds the auxiliary losses of its blocks to the step.
    fn forward(&self, input: DecoderInput, context: &StageContext) -> Tensor<3> {
        let mut layers = self.layers().into_iter();
        let first = layers.next().expect("a stage has a layer");
        let mut attentions = MicrobatchAttentions::default();
        let hidden = self.run_layer(first, input, &mut attentions, context);
        layers.fold(hidden, |hidden, layer| {
            self.run_layer(layer, DecoderInput::Hidden(hidden), &mut attentions, context)
        })
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
        let mut attentions = MicrobatchAttentions::default();
        Ok(pack(self.run_layer(self.layers()[block], unpack(input)?, &mut attentions, context)))
    }

    /// Gives parameters the paths of a Hugging Face directory, which differ from Burn's for the embedding, the
    /// last norm and the head, and in families with other names.
    fn parameter_path(&self, local: &str) -> String {
        let path_of_ends = vocabulary_path(local, NORM, EMBEDDING);
        self.names.of(&path_of_ends.unwrap_or_else(|| without_variants(local)))
    }

    fn placement(&self, local: &str) -> Placement {
        self.split.placement(local, &self.parameter_path(local))
    }

    /// The ranks have the logits of their parts of the vocabulary.
    fn output_split(&self, _output: usize) -> Option<usize> {
        Some(2)
    }

    /// Returns a reason if the balance loss of routers is part of the loss: it depends on all tokens of a
    /// microbatch together.
    fn refuses_slices(&self) -> Option<String> {
        let path = self.model.layers.iter().flatten().find_map(DecoderBlock::balanced)?;
        Some(format!(
            "the balance loss of the router `{path}` depends on whole microbatches, so set `output_router_logits = false` \
             to train without it"
        ))
    }

    fn stays_in_single_precision(&self, local: &str) -> bool {
        stays_in_single_precision(local)
    }

    /// Returns the path of the embedding's table. A tied head on another stage holds a copy of it.
    fn shared_parameters(&self) -> Vec<String> {
        vec![self.names.of(&format!("{EMBEDDING}.weight"))]
    }
}

impl DecoderInput {
    /// Returns the hidden states, which a stage with the `table` of the embedding makes from token ids.
    ///
    /// # Panics
    /// When the input is not of the kind that the stage takes, or a token id is outside the vocabulary.
    pub(crate) fn embed(self, table: Option<&TokenTable>, split: &SplitStage) -> Tensor<3> {
        match (table, self) {
            (Some(table), Self::Tokens(tokens)) => table.forward(None, tokens, split),
            (Some(table), Self::Rows(rows, tokens)) => table.forward(Some(rows), tokens, split),
            (None, Self::Hidden(hidden)) => hidden,
            (Some(_), Self::Hidden(_)) => panic!("the first stage takes token ids, not hidden states"),
            (None, Self::Tokens(_) | Self::Rows(..)) => {
                panic!("a stage without the embedding takes hidden states, not token ids")
            }
        }
    }
}

/// An integer tensor holds token ids, any other tensor hidden states, or rows of a table if token ids follow.
impl Boundary for DecoderInput {
    fn pack(self, into: &mut Values) {
        match self {
            Self::Tokens(tokens) => tokens.pack(into),
            Self::Hidden(hidden) => hidden.pack(into),
            Self::Rows(rows, tokens) => (rows, tokens).pack(into),
        }
    }

    fn unpack(from: &mut Unpack) -> Result<Self, BoundaryError> {
        let is_int = |from: &Unpack| from.peek().map(Value::kind) == Some(ValueKind::Int);
        if is_int(from) {
            return Tensor::unpack(from).map(Self::Tokens);
        }
        let hidden = Tensor::unpack(from)?;
        if is_int(from) {
            return Tensor::unpack(from).map(|tokens| Self::Rows(hidden, tokens));
        }
        Ok(Self::Hidden(hidden))
    }
}
