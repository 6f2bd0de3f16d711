//! A stage of a Llama model: any contiguous range of its layers.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use pipewright::boundary::{Boundary, BoundaryError, Unpack};
use pipewright::nn::{CausalAttention, Embedding, Linear, RmsNorm};
use pipewright::stage::{StageContext, StageModule};
use pipewright::value::{ValueKind, Values};
use pipewright_schedule::ModelDesc;
use serde_json::{Value, json};

use super::LlamaConfig;
use super::block::LlamaBlock;
use super::describe::describe;
use crate::family::{ConfigError, ModelFamily};
use crate::parameter::{Builder, ParameterSource};

/// A contiguous range of layers.
///
/// Parameters of every stage have the global paths of the checkpoint, `model.layers.3.mlp.up_proj.weight` and so on:
/// layers that belong to other stages leave their places empty.
#[derive(Module, Debug)]
pub struct LlamaStage {
    model: LlamaModel,
    lm_head: Option<Linear>,
    #[module(skip)]
    attention: AttentionCache,
}

#[derive(Module, Debug)]
struct LlamaModel {
    embed_tokens: Option<Embedding>,
    /// One place for each block of the whole model.
    layers: Vec<Option<LlamaBlock>>,
    norm: Option<RmsNorm>,
}

/// What a stage takes: token ids `[batch, sequence]` if it holds the embedding, else hidden states
/// `[batch, sequence, hidden]`.
#[derive(Debug, Clone)]
pub enum LlamaInput {
    /// Token ids.
    Tokens(Tensor<2, Int>),
    /// Hidden states, as the stage before returns them.
    Hidden(Tensor<3>),
}

impl LlamaStage {
    /// Hidden states `[batch, sequence, hidden]`, or logits `[batch, sequence, vocabulary]` on the last stage.
    ///
    /// # Panics
    /// When the input is not of the kind that the stage takes, or a token id lies beyond the vocabulary.
    pub fn run(&self, input: LlamaInput) -> Tensor<3> {
        let hidden = match (&self.model.embed_tokens, input) {
            (Some(embedding), LlamaInput::Tokens(tokens)) => embedding.forward(tokens),
            (None, LlamaInput::Hidden(hidden)) => hidden,
            (Some(_), LlamaInput::Hidden(_)) => panic!("the first stage takes token ids, not hidden states"),
            (None, LlamaInput::Tokens(_)) => {
                panic!("a stage without the embedding takes hidden states, not token ids")
            }
        };
        let [batch, sequence, width] = hidden.dims();
        let attention = self.attention.get(sequence, &hidden.device());

        let mut hidden = hidden.reshape([batch * sequence, width]);
        for block in self.model.layers.iter().flatten() {
            hidden = block.forward(hidden, &attention);
        }
        if let (Some(norm), Some(head)) = (&self.model.norm, &self.lm_head) {
            hidden = head.forward(norm.forward(hidden));
        }
        let width = hidden.dims()[1];
        hidden.reshape([batch, sequence, width])
    }
}

impl StageModule for LlamaStage {
    type Input = LlamaInput;
    type Output = Tensor<3>;

    fn forward(&self, input: LlamaInput, _context: &StageContext) -> Tensor<3> {
        self.run(input)
    }
}

/// Integers are token ids, anything else must be hidden states.
impl Boundary for LlamaInput {
    fn pack(self, into: &mut Values) {
        match self {
            Self::Tokens(tokens) => tokens.pack(into),
            Self::Hidden(hidden) => hidden.pack(into),
        }
    }

    fn unpack(from: &mut Unpack) -> Result<Self, BoundaryError> {
        match from.peek().map(pipewright::value::Value::kind) {
            Some(ValueKind::Int) => Tensor::unpack(from).map(Self::Tokens),
            _ => Tensor::unpack(from).map(Self::Hidden),
        }
    }
}

impl ModelFamily for LlamaConfig {
    const MODEL_TYPE: &'static str = "llama";
    const ARCHITECTURE: &'static str = "LlamaForCausalLM";
    type Stage = LlamaStage;

    fn from_json(json: Value) -> Result<Self, ConfigError> {
        Ok(serde_json::from_value(json)?)
    }

    fn to_json(&self) -> Value {
        let mut json = json!(self);
        json["model_type"] = Self::MODEL_TYPE.into();
        json["architectures"] = json!([Self::ARCHITECTURE]);
        json["dtype"] = "float32".into();
        json
    }

    fn describe(&self, sequence: usize) -> ModelDesc {
        describe(self, sequence)
    }

    fn initializer_range(&self) -> f64 {
        self.initializer_range
    }

    fn build_stage<S>(
        &self,
        layers: Range<usize>,
        source: &mut S,
        device: &Device,
    ) -> Result<LlamaStage, S::Error>
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
        let mut stage = LlamaStage {
            model: LlamaModel { embed_tokens: None, layers: vec![None; self.num_hidden_layers], norm: None },
            lm_head: None,
            attention: AttentionCache::new(self),
        };
        for layer in start..end {
            if layer == 0 {
                let table = builder.embedding("model.embed_tokens", self.vocab_size, self.hidden_size)?;
                stage.model.embed_tokens = Some(table);
            } else if layer == head {
                stage.model.norm = Some(builder.norm("model.norm", self.hidden_size, self.rms_norm_eps)?);
                stage.lm_head = Some(builder.linear("lm_head", self.hidden_size, self.vocab_size)?);
            } else {
                let index = layer - 1;
                let block = LlamaBlock::build(self, &format!("model.layers.{index}"), &mut builder)?;
                stage.model.layers[index] = Some(block);
            }
        }
        Ok(stage)
    }
}

/// The attention, with its tables, of the sequence length that was met last; a run meets one.
#[derive(Debug, Clone)]
struct AttentionCache {
    head_dim: usize,
    theta: f64,
    latest: Arc<Mutex<Option<(Device, Arc<CausalAttention>)>>>,
}

impl AttentionCache {
    fn new(config: &LlamaConfig) -> Self {
        Self { head_dim: config.head_dim(), theta: config.rope_theta, latest: Arc::default() }
    }

    fn get(&self, sequence: usize, device: &Device) -> Arc<CausalAttention> {
        // A panic under the lock can leave nothing half-made behind: the entry is replaced whole.
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, attention)) = latest.as_ref()
            && of == device
            && attention.sequence() == sequence
        {
            return Arc::clone(attention);
        }
        let attention = Arc::new(CausalAttention::rotary(sequence, self.head_dim, self.theta, device));
        *latest = Some((device.clone(), Arc::clone(&attention)));
        attention
    }
}
