//! A model as a pipeline trains it: its head may be cut along the vocabulary into several layers.

use std::ops::Range;

use pipewright::nn::TensorParallel;
use pipewright::stage::Stage;
use pipewright_schedule::ModelDesc;

use crate::any_family::InitialParameters;
use crate::cut_stage::NO_SLICES;
use crate::error::ConfigError;
use crate::head_form::CutHead;
use crate::hf::HfError;
use crate::model_config::ModelConfig;
use crate::parameter::ParameterSpec;
use crate::split::Place;

/// A model whose output head is cut along the vocabulary into parts, each of them a layer. With one part it
/// is the model itself.
///
/// All parts together compute the loss of the whole head, and have its parameters: a checkpoint has the whole
/// head, and a run resumes with another number of parts. With several parts, the steps of its pipeline need
/// the targets as a side input
/// ([`PipelineConfig::targets_for_all`](pipewright::pipeline::PipelineConfig::targets_for_all)). The last
/// stage returns no logits.
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
    /// The head, if it has several parts.
    head: Option<CutHead>,
}

impl From<ModelConfig> for CutModel {
    /// Returns the model with its head in one part.
    fn from(model: ModelConfig) -> Self {
        Self { model, head: None }
    }
}

impl CutModel {
    /// Returns `model` with its head in `parts` parts.
    ///
    /// # Errors
    /// When the family's head cannot be cut, when it uses the table of the embedding, or when a part would
    /// have no token.
    pub fn new(model: ModelConfig, parts: u32) -> Result<Self, ConfigError> {
        if parts == 1 {
            return Ok(model.into());
        }
        let families = ModelConfig::families_with_parts;
        let form =
            model.family().head().ok_or_else(|| ConfigError::WholeHead { parts, families: families() })?;
        Ok(Self { head: Some(CutHead::new(form, parts)?), model })
    }

    /// Returns the model with its head in one part.
    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// Returns the number of parts.
    pub fn parts(&self) -> u32 {
        self.head.map_or(1, |head| head.parts())
    }

    /// Returns whether stages need the targets as a side input
    /// ([`PipelineConfig::targets_for_all`](pipewright::pipeline::PipelineConfig::targets_for_all)).
    pub fn needs_targets(&self) -> bool {
        self.head.is_some()
    }

    /// Returns why stages of the model cannot run slices of microbatches; `None` if they can.
    ///
    /// # Errors
    /// As [`ModelConfig::refuses_slices`].
    pub fn refuses_slices(&self) -> Result<Option<String>, ConfigError> {
        if self.head.is_some() { Ok(Some(NO_SLICES.to_owned())) } else { self.model.refuses_slices() }
    }

    /// Returns the layers in order; see [`ModelFamily::describe`](crate::ModelFamily::describe).
    pub fn describe(&self, sequence: usize) -> ModelDesc {
        let whole = self.model.describe(sequence);
        match &self.head {
            Some(head) => head.describe(whole, sequence as u64),
            None => whole,
        }
    }

    /// Returns the parameters of the stage that holds `layers`, without their values and with the shapes of
    /// the shards of the rank `tensor`.
    ///
    /// # Errors
    /// When `layers` is not a range of the layers, when a layer cannot be split over the tensor ranks, or
    /// when there are several of them and the head has several parts.
    pub fn outline(
        &self,
        layers: Range<usize>,
        tensor: &TensorParallel,
    ) -> Result<Vec<ParameterSpec>, ConfigError> {
        self.model.family().outline(self.head.as_ref(), layers, tensor)
    }

    /// Builds the stage that holds `layers`, for training. The last stage computes the loss.
    ///
    /// # Errors
    /// As [`CutModel::outline`], and when the files of [`InitialParameters::Directory`] cannot be read or do
    /// not fit the model.
    pub fn training_stage(
        &self,
        layers: Range<usize>,
        initial: &InitialParameters,
        place: impl Into<Place>,
    ) -> Result<Stage, HfError> {
        self.model.family().training_stage(self.head.as_ref(), layers, initial, &place.into())
    }
}
