//! A stage of a decoder-only model: any contiguous range of its layers.

use std::cell::OnceCell;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use pipewright::nn::{CausalAttention, Embedding, KeyValueCache};
use pipewright::stage::{StageContext, StageModule};
use pipewright::tensor::{Boundary, BoundaryError, Placement, Unpack, ValueKind, Values, pack, unpack};
use pipewright_schedule::{Microbatch, StageIndex};

use super::block::DecoderBlock;
use super::config::DecoderConfig;
use crate::documents::given_scope;
use crate::error::SplitModel;
use crate::lora::is_of_adapter;
use crate::next_token::{CachedModel, NextToken, device_of, ids, last_row};
use crate::split::SplitStage;
use crate::stage_layers::Layer;
use crate::vocabulary::OutputHead;

/// The path of the embedding.
pub(super) const EMBEDDING: &str = "model.embed_tokens";
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
    pub(super) attention: AttentionCache,
    #[module(skip)]
    pub(super) split: SplitStage,
}

#[derive(Module, Debug)]
pub(super) struct DecoderModel {
    pub(super) embed_tokens: Option<Embedding>,
    /// One entry for each block of the whole model.
    pub(super) layers: Vec<Option<DecoderBlock>>,
}

/// The input of a stage: token ids `[batch, sequence]` if it holds the embedding, otherwise hidden states
/// `[batch, sequence, hidden]`.
#[derive(Debug, Clone)]
pub enum DecoderInput {
    /// Token ids.
    Tokens(Tensor<2, Int>),
    /// Hidden states from the previous stage.
    Hidden(Tensor<3>),
}

impl DecoderStage {
    /// Runs the stage outside a pipeline, and returns hidden states `[batch, sequence, hidden]`, or logits
    /// `[batch, sequence, vocabulary]` on the last stage. Auxiliary losses are lost.
    ///
    /// # Panics
    /// When the input is not of the kind that the stage takes, or a token id is outside the vocabulary.
    pub fn run(&self, input: DecoderInput) -> Tensor<3> {
        self.forward(input, &StageContext::new(StageIndex::new(0), Microbatch::new(0)))
    }

    /// Returns the layers that the stage has, in order.
    fn layers(&self) -> Vec<Layer> {
        let embedding = self.model.embed_tokens.iter().map(|_| Layer::Embedding);
        let blocks = (0..self.model.layers.len()).filter(|&index| self.model.layers[index].is_some());
        let head = self.head.iter().map(|_| Layer::Head);
        embedding.chain(blocks.map(Layer::Block)).chain(head).collect()
    }

    /// Runs a layer. It returns hidden states `[batch, sequence, hidden]`, or logits `[batch, sequence,
    /// vocabulary]`.
    fn run_layer(
        &self,
        layer: Layer,
        input: DecoderInput,
        attention: &MicrobatchAttention,
        context: &StageContext,
    ) -> Tensor<3> {
        if layer == Layer::Embedding {
            return input.embed(self.model.embed_tokens.as_ref(), &self.split);
        }
        let hidden = input.embed(None, &self.split);
        let [batch, sequence, width] = hidden.dims();
        let device = hidden.device();
        let mut hidden = hidden.reshape([batch * sequence, width]);
        match layer {
            Layer::Embedding => {}
            Layer::Block(index) => {
                if let Some(block) = &self.model.layers[index] {
                    let attention = attention.get_or_init(|| {
                        let length = sequence * context.slice().1.get() as usize;
                        let whole = self.attention.get(length, &device);
                        match given_scope(context, [batch, sequence]) {
                            Some(scope) => Arc::new(whole.with_scope(&scope)),
                            None => whole,
                        }
                    });
                    let attend = |[q, k, v]: [Tensor<2>; 3]| {
                        if context.slice().1.is_one() {
                            attention.forward(q, k, v)
                        } else {
                            attend_to_slices(attention, [q, k, v], [batch, sequence], index, context)
                        }
                    };
                    hidden = block.forward(hidden, batch, attend, &self.split.tensor, context);
                }
            }
            Layer::Head => hidden = self.logits(hidden),
        }
        let width = hidden.dims()[1];
        hidden.reshape([batch, sequence, width])
    }

    /// Returns the logits of hidden states after the last block.
    fn logits(&self, hidden: Tensor<2>) -> Tensor<2> {
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

/// The attention of all blocks of a stage for a microbatch, which the first block makes.
type MicrobatchAttention = OnceCell<Arc<CausalAttention>>;

/// Returns true for the routers of mixtures of experts, and for adapters.
pub(crate) fn stays_in_single_precision(parameter: &str) -> bool {
    parameter.ends_with(".mlp.gate.weight") || is_of_adapter(parameter)
}

impl StageModule for DecoderStage {
    type Input = DecoderInput;
    type Output = Tensor<3>;

    /// Does what [`DecoderStage::run`] does, and adds the auxiliary losses of its blocks to the step.
    fn forward(&self, input: DecoderInput, context: &StageContext) -> Tensor<3> {
        let mut layers = self.layers().into_iter();
        let first = layers.next().expect("a stage has a layer");
        let attention = MicrobatchAttention::new();
        let hidden = self.run_layer(first, input, &attention, context);
        layers.fold(hidden, |hidden, layer| {
            self.run_layer(layer, DecoderInput::Hidden(hidden), &attention, context)
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
        let attention = MicrobatchAttention::new();
        Ok(pack(self.run_layer(self.layers()[block], unpack(input)?, &attention, context)))
    }

    /// Gives the last norm and the head the paths of a Hugging Face directory.
    fn parameter_path(&self, local: &str) -> String {
        OutputHead::parameter_path(local, NORM, EMBEDDING).unwrap_or_else(|| local.to_owned())
    }

    fn placement(&self, local: &str) -> Placement {
        self.split.placement(&self.parameter_path(local))
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
            "the balance loss of the router `{path}.gate` depends on whole microbatches, so set `output_router_logits = false` \
             to train without it"
        ))
    }

    fn stays_in_single_precision(&self, local: &str) -> bool {
        stays_in_single_precision(local)
    }

    /// Returns the path of the embedding's table. A tied head on another stage holds a copy of it.
    fn shared_parameters(&self) -> Vec<String> {
        vec![format!("{EMBEDDING}.weight")]
    }
}

impl NextToken for DecoderStage {
    fn next_token(&self, tokens: &[u32]) -> Result<Vec<f32>, SplitModel> {
        self.split.require_whole()?;
        Ok(last_row(self.run(DecoderInput::Tokens(ids(tokens, &device_of(self))))))
    }

    fn cached(&self) -> Option<Box<dyn CachedModel + '_>> {
        self.split.require_whole().ok()?;
        let cache = KeyValueCache::new(Arc::clone(&self.attention.frequencies));
        Some(Box::new(CachedDecoder { stage: self, caches: vec![cache; self.model.layers.len()] }))
    }
}

/// A whole model with the keys and values of the tokens so far, for each block.
struct CachedDecoder<'a> {
    stage: &'a DecoderStage,
    caches: Vec<KeyValueCache>,
}

impl CachedModel for CachedDecoder<'_> {
    fn extend(&mut self, tokens: &[u32]) -> Vec<f32> {
        let context = StageContext::new(StageIndex::new(0), Microbatch::new(0));
        let DecoderStage { model, split, .. } = self.stage;
        let input = DecoderInput::Tokens(ids(tokens, &device_of(self.stage)));
        let hidden = input.embed(model.embed_tokens.as_ref(), split);
        let [_, count, width] = hidden.dims();
        let mut hidden = hidden.reshape([count, width]);
        for (block, cache) in model.layers.iter().flatten().zip(&mut self.caches) {
            let attend = |[q, k, v]: [Tensor<2>; 3]| cache.attend(q, k, v);
            hidden = block.forward(hidden, 1, attend, &split.tensor, &context);
        }
        let logits = self.stage.logits(hidden.narrow(0, count - 1, 1));
        last_row(logits.unsqueeze())
    }
}

impl DecoderInput {
    /// Returns the hidden states, which a stage with the `table` of the embedding makes from token ids.
    ///
    /// # Panics
    /// When the input is not of the kind that the stage takes, or a token id is outside the vocabulary.
    pub(crate) fn embed(self, table: Option<&Embedding>, split: &SplitStage) -> Tensor<3> {
        match (table, self) {
            (Some(table), Self::Tokens(tokens)) => {
                table.forward_split(tokens, split.vocabulary, &split.tensor)
            }
            (None, Self::Hidden(hidden)) => hidden,
            (Some(_), Self::Hidden(_)) => panic!("the first stage takes token ids, not hidden states"),
            (None, Self::Tokens(_)) => {
                panic!("a stage without the embedding takes hidden states, not token ids")
            }
        }
    }
}

/// An integer tensor holds token ids, any other tensor hidden states.
impl Boundary for DecoderInput {
    fn pack(self, into: &mut Values) {
        match self {
            Self::Tokens(tokens) => tokens.pack(into),
            Self::Hidden(hidden) => hidden.pack(into),
        }
    }

    fn unpack(from: &mut Unpack) -> Result<Self, BoundaryError> {
        match from.peek().map(pipewright::tensor::Value::kind) {
            Some(ValueKind::Int) => Tensor::unpack(from).map(Self::Tokens),
            _ => Tensor::unpack(from).map(Self::Hidden),
        }
    }
}

/// A cache of the attention with its tables for the latest sequence length. A run usually has one length.
#[derive(Debug, Clone)]
pub(super) struct AttentionCache {
    frequencies: Arc<[f32]>,
    latest: Arc<Mutex<Option<Cached>>>,
}

#[derive(Debug)]
struct Cached {
    device: Device,
    attention: Arc<CausalAttention>,
}

impl AttentionCache {
    pub(super) fn new(config: &DecoderConfig) -> Self {
        Self { frequencies: config.rotary_frequencies().into(), latest: Arc::default() }
    }

    fn get(&self, sequence: usize, device: &Device) -> Arc<CausalAttention> {
        // A panic under the lock cannot leave a partial entry, because the entry is replaced as a whole.
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Cached { device: of, attention }) = latest.as_ref()
            && of == device
            && attention.sequence() == sequence
        {
            return Arc::clone(attention);
        }
        let attention = Arc::new(CausalAttention::rotary_with(sequence, &self.frequencies, device));
        *latest = Some(Cached { device: device.clone(), attention: Arc::clone(&attention) });
        attention
    }
}
