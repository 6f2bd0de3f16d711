//! A stage of a decoder-only model: any contiguous range of its layers.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use pipewright::nn::{CausalAttention, Embedding, Linear, RmsNorm, TiedHead};
use pipewright::stage::{StageContext, StageModule};
use pipewright::tensor::{Boundary, BoundaryError, Unpack, ValueKind, Values, pack, unpack};

use super::block::{AttentionBias, DecoderBlock};
use super::config::DecoderConfig;
use crate::error::ConfigError;
use crate::parameter::{Builder, ParameterSource};

/// A contiguous range of layers.
///
/// Parameters of every stage have the global paths of the checkpoint, such as `model.layers.3.mlp.up_proj.weight`. For
/// this reason the struct has fields for the whole model. The fields of layers that belong to other stages are `None`,
/// and so is the kind of head that the model does not have.
#[derive(Module, Debug)]
pub struct DecoderStage {
    model: DecoderModel,
    lm_head: Option<Linear>,
    /// The head of a model with tied embeddings, with a copy of the embedding's table.
    tied_head: Option<TiedHead>,
    #[module(skip)]
    attention: AttentionCache,
}

#[derive(Module, Debug)]
struct DecoderModel {
    embed_tokens: Option<Embedding>,
    /// One entry for each block of the whole model.
    layers: Vec<Option<DecoderBlock>>,
    norm: Option<RmsNorm>,
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
    /// Runs the stage, and returns hidden states `[batch, sequence, hidden]`, or logits `[batch, sequence, vocabulary]`
    /// on the last stage.
    ///
    /// # Panics
    /// When the input is not of the kind that the stage takes, or a token id is outside the vocabulary.
    pub fn run(&self, input: DecoderInput) -> Tensor<3> {
        let hidden = match (&self.model.embed_tokens, input) {
            (Some(embedding), DecoderInput::Tokens(tokens)) => embedding.forward(tokens),
            (None, DecoderInput::Hidden(hidden)) => hidden,
            (Some(_), DecoderInput::Hidden(_)) => {
                panic!("the first stage takes token ids, not hidden states")
            }
            (None, DecoderInput::Tokens(_)) => {
                panic!("a stage without the embedding takes hidden states, not token ids")
            }
        };
        self.layers()
            .into_iter()
            .filter(|layer| *layer != Layer::Embedding)
            .fold(hidden, |hidden, layer| self.run_layer(layer, hidden))
    }

    /// Returns the layers that the stage has, in order.
    fn layers(&self) -> Vec<Layer> {
        let embedding = self.model.embed_tokens.iter().map(|_| Layer::Embedding);
        let blocks = (0..self.model.layers.len()).filter(|&index| self.model.layers[index].is_some());
        let head = self.model.norm.iter().map(|_| Layer::Head);
        embedding.chain(blocks.map(Layer::Block)).chain(head).collect()
    }

    /// Runs a layer other than the embedding; shapes `[batch, sequence, hidden]` in and out, or
    /// `[batch, sequence, vocabulary]` out of the head.
    fn run_layer(&self, layer: Layer, hidden: Tensor<3>) -> Tensor<3> {
        let [batch, sequence, width] = hidden.dims();
        let device = hidden.device();
        let mut hidden = hidden.reshape([batch * sequence, width]);
        match layer {
            Layer::Embedding => {}
            Layer::Block(index) => {
                let attention = self.attention.get(sequence, &device);
                if let Some(block) = &self.model.layers[index] {
                    hidden = block.forward(hidden, &attention);
                }
            }
            Layer::Head => {
                if let Some(norm) = &self.model.norm {
                    hidden = norm.forward(hidden);
                }
                if let Some(head) = &self.lm_head {
                    hidden = head.forward(hidden);
                }
                if let Some(head) = &self.tied_head {
                    hidden = head.forward(hidden);
                }
            }
        }
        let width = hidden.dims()[1];
        hidden.reshape([batch, sequence, width])
    }
}

/// A layer of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layer {
    Embedding,
    /// A block, by its index in the whole model.
    Block(usize),
    /// The last norm and the head.
    Head,
}

impl StageModule for DecoderStage {
    type Input = DecoderInput;
    type Output = Tensor<3>;

    fn forward(&self, input: DecoderInput, _context: &StageContext) -> Tensor<3> {
        self.run(input)
    }

    /// Every layer is a block.
    fn blocks(&self) -> usize {
        self.layers().len()
    }

    fn forward_block(
        &self,
        block: usize,
        input: Values,
        _context: &StageContext,
    ) -> Result<Values, BoundaryError> {
        Ok(pack(match self.layers()[block] {
            Layer::Embedding => match (&self.model.embed_tokens, unpack(input)?) {
                (Some(embedding), DecoderInput::Tokens(tokens)) => embedding.forward(tokens),
                _ => panic!("the embedding takes token ids"),
            },
            layer => self.run_layer(layer, unpack(input)?),
        }))
    }

    /// Gives the table of a tied head the path of the embedding's table.
    fn parameter_path(&self, local: &str) -> String {
        match local {
            "tied_head.weight" => format!("{EMBEDDING}.weight"),
            _ => local.to_owned(),
        }
    }

    /// Returns the path of the embedding's table, of which a tied head on another stage holds a copy.
    fn shared_parameters(&self) -> Vec<String> {
        vec![format!("{EMBEDDING}.weight")]
    }
}

/// The path of the embedding.
const EMBEDDING: &str = "model.embed_tokens";

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

impl DecoderConfig {
    /// Builds the stage that holds `layers`; see [`ModelFamily::build_stage`](crate::ModelFamily::build_stage).
    pub(crate) fn build_stage<S>(
        &self,
        bias: AttentionBias,
        layers: Range<usize>,
        source: &mut S,
        device: &Device,
    ) -> Result<DecoderStage, S::Error>
    where
        S: ParameterSource,
        S::Error: From<ConfigError>,
    {
        self.validate()?;
        let Range { start, end } = layers;
        let head = self.layers() - 1;
        if start >= end || end > self.layers() {
            return Err(ConfigError::LayerRange { start, end, layers: self.layers() }.into());
        }

        let mut builder = Builder::new(source, device);
        let mut stage = DecoderStage::empty(self);
        for layer in start..end {
            if layer == 0 {
                let table = builder.embedding(EMBEDDING, self.vocab_size, self.hidden_size)?;
                stage.model.embed_tokens = Some(table);
            } else if layer == head {
                stage.add_head(self, &mut builder)?;
            } else {
                let index = layer - 1;
                let block = DecoderBlock::build(self, bias, &format!("model.layers.{index}"), &mut builder)?;
                stage.model.layers[index] = Some(block);
            }
        }
        Ok(stage)
    }
}

impl DecoderStage {
    fn empty(config: &DecoderConfig) -> Self {
        let layers = vec![None; config.num_hidden_layers];
        Self {
            model: DecoderModel { embed_tokens: None, layers, norm: None },
            lm_head: None,
            tied_head: None,
            attention: AttentionCache::new(config),
        }
    }

    fn add_head<S: ParameterSource>(
        &mut self,
        config: &DecoderConfig,
        builder: &mut Builder<'_, S>,
    ) -> Result<(), S::Error> {
        let (vocabulary, hidden) = (config.vocab_size, config.hidden_size);
        self.model.norm = Some(builder.norm("model.norm", hidden, config.rms_norm_eps)?);
        if config.tie_word_embeddings {
            self.tied_head = Some(builder.tied_head(EMBEDDING, vocabulary, hidden)?);
        } else {
            self.lm_head = Some(builder.linear("lm_head", hidden, vocabulary)?);
        }
        Ok(())
    }
}

/// A cache of the attention with its tables for the latest sequence length. A run usually has one length.
#[derive(Debug, Clone)]
struct AttentionCache {
    head_dim: usize,
    theta: f64,
    latest: Arc<Mutex<Option<Cached>>>,
}

#[derive(Debug)]
struct Cached {
    device: Device,
    attention: Arc<CausalAttention>,
}

impl AttentionCache {
    fn new(config: &DecoderConfig) -> Self {
        Self { head_dim: config.head_dim(), theta: config.rope_theta, latest: Arc::default() }
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
        let attention = Arc::new(CausalAttention::rotary(sequence, self.head_dim, self.theta, device));
        *latest = Some(Cached { device: device.clone(), attention: Arc::clone(&attention) });
        attention
    }
}
