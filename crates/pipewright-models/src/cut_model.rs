//! A model as a pipeline trains it: its head may be cut along the vocabulary into several layers.

use std::ops::Range;

use burn::tensor::Device;
use pipewright::nn::TensorParallel;
use pipewright::stage::Stage;
use pipewright_schedule::ModelDesc;

use crate::cut_stage::NO_SLICES;
use crate::error::ConfigError;
use crate::hf::HfError;
use crate::model_config::{InitialParameters, ModelConfig};
use crate::parameter::ParameterSpec;

/// A model whose output head is cut along the vocabulary into parts, each of them a layer. With one part it is the model
/// itself.
///
/// All parts together compute the loss of the whole head, and have its parameters: a checkpoint has the whole head, and a run
/// resumes with another number of parts. The steps of its pipeline need the targets as a side input
/// ([`Batch::with_targets_for_all`](pipewright::batch::Batch::with_targets_for_all)), which a
/// [`Trainer`](pipewright::train::Trainer) adds. The last stage returns no logits.
///
/// ```
/// use pipewright_models::decoder::DecoderConfig;
/// use pipewright_models::{CutModel, ModelConfig};
///
/// let model = ModelConfig::of_sizes("llama", DecoderConfig::new(256, 4), Default::default())?;
/// let layers = CutModel::new(model, 3)?.describe(16).layers;
/// let paths: Vec<&str> = layers.iter().skip(3).map(|layer| layer.path.as_str()).collect();
/// assert_eq!(paths, ["lm_head 1/3", "lm_head 2/3", "lm_head 3/3"]);
/// # Ok::<(), pipewright_models::ConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct CutModel {
    model: ModelConfig,
    parts: u32,
}

impl CutModel {
    /// Returns `model` with its head in `parts` parts.
    ///
    /// # Errors
    /// When the family's head cannot be cut, when it uses the table of the embedding, or when a part would have no token.
    pub fn new(model: ModelConfig, parts: u32) -> Result<Self, ConfigError> {
        if parts != 1 {
            let families = ModelConfig::families_with_parts;
            let form = model.head().ok_or_else(|| ConfigError::WholeHead { parts, families: families() })?;
            form.check(parts)?;
        }
        Ok(Self { model, parts })
    }

    /// Returns the model with its head in one part.
    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// Returns the number of parts.
    pub fn parts(&self) -> u32 {
        self.parts
    }

    /// Returns why stages of the model cannot run slices of microbatches; `None` if they can.
    ///
    /// # Errors
    /// As [`ModelConfig::refuses_slices`].
    pub fn refuses_slices(&self) -> Result<Option<String>, ConfigError> {
        match self.parts {
            1 => self.model.refuses_slices(),
            _ => Ok(Some(NO_SLICES.to_owned())),
        }
    }

    /// Returns the layers in order; see [`ModelFamily::describe`](crate::ModelFamily::describe).
    pub fn describe(&self, sequence: usize) -> ModelDesc {
        let whole = self.model.describe(sequence);
        match self.model.head().filter(|_| self.parts > 1) {
            Some(form) => form.describe(whole, self.parts, sequence as u64),
            None => whole,
        }
    }

    /// Returns the parameters of a stage, without their values, with the shapes of the shards that it holds.
    ///
    /// # Errors
    /// When `layers` is not a range of the layers, or a layer cannot be split over the tensor ranks.
    pub fn split_outline(
        &self,
        layers: Range<usize>,
        tensor: &TensorParallel,
    ) -> Result<Vec<ParameterSpec>, ConfigError> {
        self.model.cut_outline(self.parts, layers, tensor)
    }

    /// Builds the stage that holds `layers`, for training on `device`. The last stage computes the loss.
    ///
    /// # Errors
    /// As [`ModelConfig::training_stage`].
    pub fn training_stage(
        &self,
        layers: Range<usize>,
        initial: &InitialParameters,
        device: &Device,
    ) -> Result<Stage, HfError> {
        self.split_training_stage(layers, initial, device, &TensorParallel::default())
    }

    /// As [`CutModel::training_stage`], for a rank that computes the stage together with others.
    ///
    /// # Errors
    /// As [`ModelConfig::split_training_stage`], and when the head has several parts.
    pub fn split_training_stage(
        &self,
        layers: Range<usize>,
        initial: &InitialParameters,
        device: &Device,
        tensor: &TensorParallel,
    ) -> Result<Stage, HfError> {
        self.model.cut_stage(self.parts, layers, initial, (device, tensor))
    }
}
