//! [`RunModel`]: the model of a run, with its layers, its stages and its data.
//!
//! The families of [`pipewright_models`] implement it ([`CutModel`]). Implement it for a type of your own to train
//! another model with everything that a run has ([`Run`](crate::run::Run) has an example).

use std::ops::Range;

use pipewright::nn::TensorParallel;
use pipewright::stage::Stage;
use pipewright::train::data::{SideRows, TokenRows};
use pipewright::train::{TOKENS, Validation};
use pipewright_models::{Adapter, CutModel, InitialParameters, ParameterGroup, ParameterSpec, Place};
use pipewright_schedule::error_text::with_causes;
use pipewright_schedule::{ModelDesc, Partition, TrainedStages};
use serde_json::Value;

use crate::error::RunError;
use crate::run_data::{self, DataModel, open_data};
use crate::settings::Settings;

/// A model that a run can train.
pub trait RunModel: Send + Sync {
    /// Returns what identifies the model, an object. Checkpoints store it, and a run resumes only from a checkpoint
    /// of an equal model. `model_type` is its name for people.
    fn to_json(&self) -> Value;

    /// Returns the layers in order, with their costs for rows of `tokens` tokens.
    fn describe(&self, tokens: usize) -> ModelDesc;

    /// Returns the parameters of the stage that holds `layers`, with the shapes of the shards of the rank `tensor`.
    ///
    /// # Errors
    /// When the layers cannot be split over the tensor ranks.
    fn outline(&self, layers: Range<usize>, tensor: &TensorParallel) -> Result<Vec<ParameterSpec>, RunError>;

    /// Builds the stage that holds `layers`. The last stage computes the loss. If all parameters are drawn from
    /// the seed of `initial` and the paths of the parameters, the cut does not change a bit.
    ///
    /// # Errors
    /// The sentence says why the stage cannot be built.
    fn stage(&self, layers: Range<usize>, initial: &InitialParameters, place: Place)
    -> Result<Stage, String>;

    /// Returns the number of token ids. All ids of the data are below it.
    fn vocab_size(&self) -> usize;

    /// Returns what the numbers of a row are, in the plural. The metrics, the display and the pages of a run name it. By
    /// default they are `tokens` of text, whose loss is in nats per token. The losses of other models have no unit.
    fn unit(&self) -> &str {
        TOKENS
    }

    /// Returns whether targets are labels of sequences in place of tokens.
    fn has_labels(&self) -> bool {
        false
    }

    /// Opens the training data and the data of evaluations. By default they are the files of `data` in the settings.
    ///
    /// # Errors
    /// When the data cannot be read, or is too short.
    fn open_data(&self, settings: &Settings) -> Result<(TokenRows, Option<Validation>), RunError> {
        let check_side = |side: &SideRows| self.check_side(side, settings.data.seq_len as usize);
        open_data(settings, DataModel { vocab_size: self.vocab_size(), check_side: &check_side })
    }

    /// Checks that the model takes these side inputs, for rows of `tokens` tokens. By default it takes all.
    ///
    /// # Errors
    /// When it does not.
    fn check_side(&self, _side: &SideRows, _tokens: usize) -> Result<(), RunError> {
        Ok(())
    }

    /// Returns the boundaries between stages that the model itself asks for (`pipeline.partition = "pattern"`).
    fn cuts(&self) -> Option<Vec<usize>> {
        None
    }

    /// Returns the adapters, if only these are trained.
    fn adapter(&self) -> Option<&Adapter> {
        None
    }

    /// Returns whether the frozen matrices of a stage are in memory only while it computes.
    fn streams(&self) -> bool {
        false
    }

    /// Returns whether training changes a parameter, given by its path.
    fn is_trained(&self, _parameter: &str) -> bool {
        true
    }

    /// Returns the stages of a partition that have trained parameters.
    ///
    /// # Errors
    /// When the parameters are not known.
    fn trained_stages(&self, _partition: &Partition) -> Result<TrainedStages, RunError> {
        Ok(TrainedStages::ALL)
    }

    /// Returns all parameters of the model itself, in whole.
    ///
    /// # Errors
    /// As [`RunModel::outline`].
    fn parameters(&self) -> Result<Vec<ParameterSpec>, RunError> {
        self.outline(0..self.describe(1).layers.len(), &TensorParallel::default())
    }

    /// Returns the parameters that training changes.
    ///
    /// # Errors
    /// As [`RunModel::outline`].
    fn trained_parameters(&self) -> Result<Vec<ParameterSpec>, RunError> {
        Ok(self.parameters()?.into_iter().filter(|spec| self.is_trained(&spec.path)).collect())
    }

    /// Returns the paths of the parameters of some named groups (`optimizer.no_decay`).
    ///
    /// # Errors
    /// By default a model has no named groups.
    fn group_paths(&self, groups: &[ParameterGroup]) -> Result<Vec<String>, RunError> {
        match groups {
            [] => Ok(Vec::new()),
            _ => Err(RunError::input(
                "the model has no named groups of parameters: leave them out of [optimizer], or name parameters by \
                 patterns of their paths",
            )),
        }
    }

    /// Returns whether all stages need the targets as a side input
    /// ([`PipelineConfig::targets_for_all`](pipewright::pipeline::PipelineConfig::targets_for_all)).
    fn needs_targets(&self) -> bool {
        false
    }

    /// Returns why stages cannot run slices of microbatches; `None` if they can.
    ///
    /// # Errors
    /// When the parameters are not known.
    fn refuses_slices(&self) -> Result<Option<String>, RunError> {
        Ok(Some("its stages keep nothing of earlier slices; write a schedule without slices".to_owned()))
    }
}

/// Opens the training data of the settings for a model, without the rows that are held out.
///
/// # Errors
/// When the data cannot be read, or has fewer than `batch_rows` rows.
pub fn open_training(
    settings: &Settings,
    model: &dyn RunModel,
    batch_rows: usize,
) -> Result<TokenRows, RunError> {
    let check_side = |side: &SideRows| model.check_side(side, settings.data.seq_len as usize);
    let model = DataModel { vocab_size: model.vocab_size(), check_side: &check_side };
    run_data::open_training(settings, model, batch_rows)
}

impl RunModel for CutModel {
    fn to_json(&self) -> Value {
        self.model().to_json()
    }

    fn describe(&self, tokens: usize) -> ModelDesc {
        self.describe(tokens)
    }

    fn outline(&self, layers: Range<usize>, tensor: &TensorParallel) -> Result<Vec<ParameterSpec>, RunError> {
        self.outline(layers, tensor).map_err(RunError::input)
    }

    fn stage(
        &self,
        layers: Range<usize>,
        initial: &InitialParameters,
        place: Place,
    ) -> Result<Stage, String> {
        self.training_stage(layers, initial, place).map_err(|error| with_causes(&error))
    }

    fn vocab_size(&self) -> usize {
        self.model().vocab_size()
    }

    fn has_labels(&self) -> bool {
        !self.model().labels().is_empty()
    }

    fn check_side(&self, side: &SideRows, tokens: usize) -> Result<(), RunError> {
        self.model().check_side(side, tokens).map_err(RunError::input)
    }

    fn cuts(&self) -> Option<Vec<usize>> {
        // The cuts equal the cuts of a model with its embedding in one part.
        let before = self.embedding_parts() as usize - 1;
        Some(self.model().cuts()?.into_iter().map(|cut| cut + before).collect())
    }

    fn adapter(&self) -> Option<&Adapter> {
        self.adapter()
    }

    fn streams(&self) -> bool {
        self.streams()
    }

    fn is_trained(&self, parameter: &str) -> bool {
        self.is_trained(parameter)
    }

    fn trained_stages(&self, partition: &Partition) -> Result<TrainedStages, RunError> {
        self.trained_stages(partition).map_err(RunError::input)
    }

    fn parameters(&self) -> Result<Vec<ParameterSpec>, RunError> {
        self.model().parameters().map_err(RunError::input)
    }

    fn trained_parameters(&self) -> Result<Vec<ParameterSpec>, RunError> {
        self.trained_parameters().map_err(RunError::input)
    }

    fn group_paths(&self, groups: &[ParameterGroup]) -> Result<Vec<String>, RunError> {
        self.model().group_paths(groups).map_err(RunError::input)
    }

    fn needs_targets(&self) -> bool {
        self.needs_targets()
    }

    fn refuses_slices(&self) -> Result<Option<String>, RunError> {
        Ok(self.refuses_slices())
    }
}
