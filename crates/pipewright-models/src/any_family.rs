//! A model of any family: the functions of [`ModelFamily`], and of the modules that work with a family,
//! without the types of the family.

use std::ops::Range;
use std::path::{Path, PathBuf};

use burn::tensor::Device;
use pipewright::checkpoint::Checkpoint;
use pipewright::nn::TensorParallel;
use pipewright::stage::{Stage, StageModule};
use pipewright::train::data::{DataError, SideRows};
use pipewright_schedule::ModelDesc;
use serde_json::Value;

use crate::adapter::{AdaptedSource, Adapter};
use crate::cut_stage;
use crate::embedding_form::VocabularyCut;
use crate::error::ConfigError;
use crate::family::ModelFamily;
use crate::generation_stage::GenerationStage;
use crate::head_form::HeadForm;
use crate::hf::{self, ExportOptions, HfError, Stored, WeightType};
use crate::lora::{LoraConfig, is_of_adapter};
use crate::merged::MergedSource;
use crate::parameter::{Outline, ParameterSource, ParameterSpec};
use crate::parameter_group::{self, ParameterGroup};
use crate::split::Place;

/// The source of the parameters with which training starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InitialParameters {
    /// Random parameters that depend on a seed.
    Seed(u64),
    /// The parameters in a Hugging Face directory.
    Directory(PathBuf),
}

/// The source of the parameters of a trained model.
#[derive(Clone, Copy, Debug)]
pub enum ModelSource<'a> {
    /// A Hugging Face directory.
    Directory(&'a Path),
    /// A checkpoint.
    Checkpoint(&'a Checkpoint),
    /// The adapters of a checkpoint, merged into their base.
    Adapted(AdaptedCheckpoint<'a>),
}

/// A checkpoint of a run that trained adapters, with the weights that they change.
#[derive(Clone, Copy, Debug)]
pub struct AdaptedCheckpoint<'a> {
    /// The checkpoint, which has the adapters alone.
    pub checkpoint: &'a Checkpoint,
    /// The settings of the adapters.
    pub lora: &'a LoraConfig,
    /// The Hugging Face directory of the base.
    pub base: &'a Path,
}

/// A model of any family. [`ModelConfig`](crate::ModelConfig) and [`CutModel`](crate::CutModel) describe the
/// functions that they pass on.
pub(crate) trait AnyFamily {
    fn to_json(&self) -> Value;
    fn vocab_size(&self) -> usize;
    fn describe(&self, sequence: usize) -> ModelDesc;
    fn layers(&self) -> usize;
    fn check_side(&self, side: &SideRows, sequence: usize) -> Result<(), DataError>;
    fn cuts(&self) -> Option<Vec<usize>>;
    fn longest(&self) -> Option<usize>;
    fn positions(&self) -> Option<usize>;
    fn has_unused_window(&self) -> bool;
    fn head(&self) -> HeadForm;
    /// Returns whether the linear layers of the blocks can have adapters.
    fn adapts(&self) -> bool;
    /// Returns whether the family computes with a key of `config.json`.
    fn computes(&self, key: &str) -> bool;
    fn outline(
        &self,
        cut: &VocabularyCut,
        layers: Range<usize>,
        tensor: &TensorParallel,
        lora: Option<&LoraConfig>,
    ) -> Result<Vec<ParameterSpec>, ConfigError>;
    fn training_stage(
        &self,
        cut: &VocabularyCut,
        layers: Range<usize>,
        initial: &InitialParameters,
        adapter: Option<&Adapter>,
        place: &Place,
    ) -> Result<Stage, HfError>;
    fn group_paths(&self, groups: &[ParameterGroup]) -> Result<Vec<String>, ConfigError>;
    fn refuses_slices(&self) -> Result<Option<String>, ConfigError>;
    fn generation_stage(
        &self,
        layers: Range<usize>,
        source: ModelSource<'_>,
        place: &Place,
    ) -> Result<Box<dyn GenerationStage>, HfError>;
    fn export(
        &self,
        checkpoint: &Checkpoint,
        options: &ExportOptions<'_>,
        dir: &Path,
    ) -> Result<WeightType, HfError>;
    fn export_merged(
        &self,
        adapted: AdaptedCheckpoint<'_>,
        options: &ExportOptions<'_>,
        dir: &Path,
    ) -> Result<WeightType, HfError>;
}

impl<F: ModelFamily<Stage: 'static>> AnyFamily for F {
    fn to_json(&self) -> Value {
        ModelFamily::to_json(self)
    }

    fn vocab_size(&self) -> usize {
        ModelFamily::vocab_size(self)
    }

    fn describe(&self, sequence: usize) -> ModelDesc {
        ModelFamily::describe(self, sequence)
    }

    fn layers(&self) -> usize {
        ModelFamily::layers(self)
    }

    fn check_side(&self, side: &SideRows, sequence: usize) -> Result<(), DataError> {
        ModelFamily::check_side(self, side, sequence)
    }

    fn cuts(&self) -> Option<Vec<usize>> {
        ModelFamily::cuts(self)
    }

    fn longest(&self) -> Option<usize> {
        ModelFamily::longest(self)
    }

    fn has_unused_window(&self) -> bool {
        ModelFamily::has_unused_window(self)
    }

    fn positions(&self) -> Option<usize> {
        ModelFamily::positions(self)
    }

    fn head(&self) -> HeadForm {
        ModelFamily::head(self)
    }

    fn computes(&self, key: &str) -> bool {
        F::TABLE.computes(key)
    }

    fn adapts(&self) -> bool {
        F::ADAPTS
    }

    fn outline(
        &self,
        cut: &VocabularyCut,
        layers: Range<usize>,
        tensor: &TensorParallel,
        lora: Option<&LoraConfig>,
    ) -> Result<Vec<ParameterSpec>, ConfigError> {
        cut_stage::outline(self, cut, layers, tensor, lora)
    }

    fn training_stage(
        &self,
        cut: &VocabularyCut,
        layers: Range<usize>,
        initial: &InitialParameters,
        adapter: Option<&Adapter>,
        place: &Place,
    ) -> Result<Stage, HfError> {
        match initial {
            InitialParameters::Seed(seed) => {
                stage_from(self, cut, layers, self.initial(*seed), adapter, place)
            }
            InitialParameters::Directory(directory) => {
                stage_from(self, cut, layers, hf::open_weights(directory, self)?, adapter, place)
            }
        }
    }

    fn group_paths(&self, groups: &[ParameterGroup]) -> Result<Vec<String>, ConfigError> {
        Ok(parameter_group::group_paths(&outlined(self)?, groups))
    }

    fn refuses_slices(&self) -> Result<Option<String>, ConfigError> {
        Ok(outlined(self)?.refuses_slices())
    }

    fn generation_stage(
        &self,
        layers: Range<usize>,
        source: ModelSource<'_>,
        place: &Place,
    ) -> Result<Box<dyn GenerationStage>, HfError> {
        let config = self.for_generation();
        Ok(Box::new(match source {
            ModelSource::Directory(directory) => hf::load_stage(directory, &config, layers, place.clone())?,
            ModelSource::Checkpoint(checkpoint) => {
                hf::restore_stage(checkpoint, &config, layers, place.clone())?
            }
            ModelSource::Adapted(adapted) => {
                config.build_stage(layers, &mut merged(&config, adapted)?, place)?
            }
        }))
    }

    fn export(
        &self,
        checkpoint: &Checkpoint,
        options: &ExportOptions<'_>,
        dir: &Path,
    ) -> Result<WeightType, HfError> {
        hf::export(checkpoint, self, options, dir)
    }

    fn export_merged(
        &self,
        adapted: AdaptedCheckpoint<'_>,
        options: &ExportOptions<'_>,
        dir: &Path,
    ) -> Result<WeightType, HfError> {
        hf::export_from(&mut merged(self, adapted)?, self, options, dir)
    }
}

/// Returns a stage for training with the parameters in `source`, which are the base of the adapters if the
/// model has some.
fn stage_from<F: ModelFamily<Stage: 'static>, S: ParameterSource>(
    config: &F,
    cut: &VocabularyCut,
    layers: Range<usize>,
    mut source: S,
    adapter: Option<&Adapter>,
    place: &Place,
) -> Result<Stage, HfError>
where
    HfError: From<S::Error>,
{
    let Some(adapter) = adapter else {
        return Ok(cut_stage::training_stage(config, cut, layers, &mut source, place)?);
    };
    let mut source = AdaptedSource::new(source, adapter, place, F::stays_in_single_precision)?;
    let stage = cut_stage::training_stage(config, cut, layers, &mut source, place)?;
    Ok(stage.with_base(|path| !is_of_adapter(path)))
}

/// Returns the parameters of a model with the adapters of a checkpoint merged into them.
fn merged<F: ModelFamily>(
    config: &F,
    AdaptedCheckpoint { checkpoint, lora, base }: AdaptedCheckpoint<'_>,
) -> Result<impl ParameterSource<Error = HfError>, HfError> {
    let specs = cut_stage::outline(
        config,
        &VocabularyCut::default(),
        0..config.layers(),
        &TensorParallel::default(),
        Some(lora),
    )?;
    Ok(MergedSource::new(hf::open_weights(base, config)?, Stored(checkpoint), lora, &specs))
}

/// Returns the module of the whole model, without the values of its parameters.
fn outlined<F: ModelFamily>(config: &F) -> Result<F::Stage, ConfigError> {
    config.build_stage(0..config.layers(), &mut Outline::default(), &Device::flex().into())
}
