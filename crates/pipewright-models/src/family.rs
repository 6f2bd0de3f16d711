//! What a model family offers. The list of families is at [`ModelConfig`](crate::ModelConfig).

use std::ops::Range;

use burn::tensor::{Device, Tensor};
use pipewright::stage::StageModule;
use pipewright_schedule::ModelDesc;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::error::ConfigError;
use crate::init::SeededInit;
use crate::parameter::ParameterSource;

/// A model family: its configuration, and how stages are made from it. The configuration serialises as the keys of
/// `config.json` that bear on the arithmetic.
pub trait ModelFamily: Clone + Send + Sync + Sized + Serialize + DeserializeOwned {
    /// The family's name, which is `model_type` in `config.json`.
    const MODEL_TYPE: &'static str;
    /// The entry of `architectures` in `config.json`.
    const ARCHITECTURE: &'static str;
    /// Hidden states `[batch, sequence, hidden]` leave every stage but the last, and logits
    /// `[batch, sequence, vocabulary]` the last.
    type Stage: StageModule<Output = Tensor<3>>;

    /// The configuration in a parsed `config.json`. Keys that do not bear on the arithmetic are ignored.
    ///
    /// # Errors
    /// When a key is missing, out of range, or asks for what the family cannot compute.
    fn from_json(json: Value) -> Result<Self, ConfigError> {
        Ok(serde_json::from_value(json)?)
    }

    /// The content of `config.json`.
    fn to_json(&self) -> Value {
        let mut json = json!(self);
        json["model_type"] = Self::MODEL_TYPE.into();
        json["architectures"] = json!([Self::ARCHITECTURE]);
        json["dtype"] = "float32".into();
        json
    }

    /// Token ids run from 0 to one below this.
    fn vocab_size(&self) -> usize;

    /// The layers in order, with weights that are the floating point operations of a token's forward and backward at
    /// this sequence length. A stage is a range of this list.
    fn describe(&self, sequence: usize) -> ModelDesc;

    /// The standard deviation of initial parameters.
    fn initializer_range(&self) -> f64;

    /// The stage that holds `layers`, with parameters from `source`, on `device`.
    ///
    /// # Errors
    /// When `layers` is empty or reaches past the last layer, or when the source fails.
    fn build_stage<S>(
        &self,
        layers: Range<usize>,
        source: &mut S,
        device: &Device,
    ) -> Result<Self::Stage, S::Error>
    where
        S: ParameterSource,
        S::Error: From<ConfigError>;

    /// The stage that holds `layers`, with initial parameters: those of a seed are the same however the model is cut.
    ///
    /// # Errors
    /// When `layers` is empty or reaches past the last layer.
    fn init_stage(
        &self,
        layers: Range<usize>,
        seed: u64,
        device: &Device,
    ) -> Result<Self::Stage, ConfigError> {
        let mut source = SeededInit { seed, deviation: self.initializer_range() };
        self.build_stage(layers, &mut source, device)
    }
}
