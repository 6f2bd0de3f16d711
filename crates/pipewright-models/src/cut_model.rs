//! A model as a pipeline trains it: its embedding and its head may be cut along the vocabulary into several
//! layers.

use std::ops::Range;

use pipewright::nn::TensorParallel;
use pipewright::stage::Stage;
use pipewright_schedule::{LayerDesc, ModelDesc, Partition, TrainedStages};

use crate::adapter::{AdaptedSource, Adapter};
use crate::cost::{frozen, magnitudes};
use crate::embedding_form::{CutEmbedding, VocabularyCut};
use crate::error::ModelError;
use crate::head_form::CutHead;
use crate::lora::{SCORE, layer_of_first, layer_of_magnitudes};
use crate::model_config::ModelConfig;
use crate::model_source::{InitialParameters, outline};
use crate::parameter::{ParameterSource, ParameterSpec};
use crate::preference::{PreferenceKind, PreferenceLoss};
use crate::quantisation::QuantisedSizes;
use crate::split::Place;
use crate::training_form::TrainingForm;

/// A model whose embedding and output head are cut along the vocabulary into parts, each of them a layer. With
/// one part of each it is the model itself.
///
/// All parts together compute the loss of the whole head, and have its parameters: a checkpoint has the whole
/// head, and a run resumes with another number of parts. The parts of a tied head share the rows of the
/// embedding's table. With several parts of the head, the steps of its pipeline need
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
/// # Ok::<(), pipewright_models::ModelError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct CutModel {
    model: ModelConfig,
    /// The embedding and the head, where they have several parts.
    cut: VocabularyCut,
    /// The adapters, if only these are trained.
    adapter: Option<Adapter>,
    /// The matrices of the base of adapters that are quantised, or that are streamed.
    quantised: QuantisedSizes,
    /// The changes of training.
    form: TrainingForm,
    /// The loss of preference training, in place of the cross entropy.
    preference: Option<PreferenceLoss>,
    /// Whether these matrices are in memory only while their stage computes.
    streams: bool,
}

impl From<ModelConfig> for CutModel {
    /// Returns the model with its embedding and its head in one part each.
    fn from(model: ModelConfig) -> Self {
        let (cut, quantised) = (VocabularyCut::default(), QuantisedSizes::default());
        let form = TrainingForm::default();
        Self { model, cut, adapter: None, quantised, form, preference: None, streams: false }
    }
}

impl CutModel {
    /// Returns `model` with its head in `parts` parts.
    ///
    /// # Errors
    /// When a part would have no token.
    pub fn new(model: ModelConfig, parts: u32) -> Result<Self, ModelError> {
        if parts == 1 {
            return Ok(model.into());
        }
        let cut =
            VocabularyCut { head: Some(CutHead::new(model.head(), parts)?), ..VocabularyCut::default() };
        Ok(Self { cut, ..Self::from(model) })
    }

    /// Returns the model with its embedding in `parts` parts. They compute the bits of the whole embedding.
    ///
    /// # Errors
    /// When a part would have no token, or when the head is tied and has another number of parts, unless
    /// `parts` is 1.
    pub fn with_embedding_parts(&self, parts: u32) -> Result<Self, ModelError> {
        let embedding = (parts != 1).then(|| CutEmbedding::new(self.model.head(), parts)).transpose()?;
        let cut = VocabularyCut { embedding, ..self.cut };
        cut.check()?;
        Ok(Self { cut, ..self.clone() })
    }

    /// Returns the model with adapters, which are trained in place of its own parameters.
    ///
    /// # Errors
    /// When a setting cannot be used ([`LoraConfig::check`](crate::LoraConfig::check)), the family cannot
    /// have adapters, or a target is not one of the model's layers.
    pub fn with_adapter(self, adapter: Adapter) -> Result<Self, ModelError> {
        let mut adapter = adapter;
        if !self.model.labels().is_empty() && !adapter.lora.saves_module(SCORE) {
            adapter.lora.modules_to_save.push(SCORE.to_owned().into());
        }
        adapter.lora.check()?;
        adapter.lora.require_targets(&self.model.adaptable_layers()?)?;
        let parameters = self.model.parameters()?.into_iter().map(|spec| spec.path);
        adapter.lora.require_modules(&parameters.collect::<Vec<_>>())?;
        Ok(Self { adapter: Some(adapter), ..self })
    }

    /// Returns the model with adapters, of whose base these matrices are quantised
    /// ([`hf::quantised_sizes`](crate::hf::quantised_sizes)).
    pub fn with_quantised(self, quantised: QuantisedSizes) -> Self {
        Self { quantised, ..self }
    }

    /// Returns the model with what training changes.
    pub fn with_form(self, form: TrainingForm) -> Self {
        Self { form, ..self }
    }

    /// Returns the model with a loss of preference training.
    ///
    /// # Errors
    /// When the model predicts further tokens than the next one, or its head is not the one that the loss needs.
    pub fn with_preference(self, loss: PreferenceLoss) -> Result<Self, ModelError> {
        let is_reward = loss.kind == PreferenceKind::Reward;
        match (is_reward, self.model.head().labels) {
            (true, Some(1)) | (false, None) => {}
            (true, _) => {
                return Err(ModelError::new(
                    "`preference.loss`: a reward is the output of a head with one label",
                ));
            }
            (false, Some(_)) => {
                return Err(ModelError::new(
                    "`preference.loss`: the model has a head of labels, and only `reward` trains such a model: write \
                     `loss = \"reward\"`, or use a model that continues texts",
                ));
            }
        }
        if self.model.head().further.depth > 0 {
            return Err(ModelError::new(
                "`preference.loss`: the model predicts further tokens than the next one, which preference training does not \
                 train: use a model without these layers",
            ));
        }
        Ok(Self { preference: Some(loss), ..self })
    }

    /// Returns whether matrices of the base of adapters are quantised.
    pub fn is_quantised(&self) -> bool {
        !self.quantised.is_empty()
    }

    /// Returns the model with adapters, of whose base these matrices are in memory only while their stage computes
    /// ([`hf::streamed_sizes`](crate::hf::streamed_sizes)).
    pub fn with_streamed(self, streamed: &QuantisedSizes) -> Self {
        Self { quantised: self.quantised.with_streamed(streamed), streams: true, ..self }
    }

    /// Returns whether matrices of the base of adapters are in memory only while their stage computes.
    pub fn streams(&self) -> bool {
        self.streams
    }

    /// Returns the model, with its adapters and the parts of its embedding, with its head in so many parts.
    ///
    /// # Errors
    /// As [`CutModel::new`] and [`CutModel::with_embedding_parts`].
    pub fn with_parts(&self, parts: u32) -> Result<Self, ModelError> {
        let (adapter, quantised, streams) = (self.adapter.clone(), self.quantised.clone(), self.streams);
        let (form, preference) = (self.form, self.preference);
        let with_head =
            Self { adapter, quantised, streams, form, preference, ..Self::new(self.model.clone(), parts)? };
        with_head.with_embedding_parts(self.embedding_parts())
    }

    /// Returns the adapters, if only these are trained.
    pub fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    /// Returns whether training changes a parameter, given by its path: all of them, or the parameters of the adapters and of the modules that are trained with them.
    pub fn is_trained(&self, parameter: &str) -> bool {
        self.adapter.as_ref().is_none_or(|adapter| adapter.lora.trains(parameter))
    }

    /// Returns the parameters of the whole model that training changes.
    ///
    /// # Errors
    /// As [`ModelConfig::parameters`].
    pub fn trained_parameters(&self) -> Result<Vec<ParameterSpec>, ModelError> {
        match &self.adapter {
            Some(adapter) => self.model.adapter_parameters(&adapter.lora),
            None => self.model.parameters(),
        }
    }

    /// Returns whether each layer has parameters that are trained.
    ///
    /// # Errors
    /// As [`ModelConfig::parameters`].
    pub fn trained_layers(&self) -> Result<Vec<bool>, ModelError> {
        let layers = self.describe_whole(1).layers;
        if self.adapter.is_none() {
            return Ok(vec![true; layers.len()]);
        }
        let numbers = scalars(&self.trained_parameters()?, &layers);
        let copies = self.trained_copies().then(|| layers.len() - self.parts() as usize);
        let is_copy = |layer| copies.is_some_and(|first| layer >= first);
        Ok(numbers.into_iter().enumerate().map(|(layer, numbers)| numbers > 0 || is_copy(layer)).collect())
    }

    /// Returns whether the head has copies of the table of the embedding that are trained.
    fn trained_copies(&self) -> bool {
        let form = self.model.head();
        form.is_tied && self.is_trained(&form.names.of(&format!("{}.weight", form.embedding)))
    }

    /// Returns whether training changes most of the parameters of each layer: all without adapters, and otherwise an
    /// embedding or a head that is trained whole.
    pub(crate) fn whole_layers(&self) -> Vec<bool> {
        let layers = self.describe_whole(1).layers;
        let adapter = self.adapter.as_ref().map(|adapter| (adapter, self.trained_parameters()));
        let Some((adapter, Ok(mut specs))) = adapter else { return vec![true; layers.len()] };
        specs.retain(|spec| adapter.lora.saves(&spec.path));
        let copies = if self.trained_copies() { self.parts() as usize } else { 0 };
        let first = layers.len() - copies;
        let numbers = scalars(&specs, &layers).into_iter().zip(&layers).enumerate();
        numbers.map(|(index, (own, layer))| 2 * own > layer.parameters || index >= first).collect()
    }

    /// Returns the stages of a partition that have parameters that are trained.
    ///
    /// # Errors
    /// As [`CutModel::trained_layers`].
    pub fn trained_stages(&self, partition: &Partition) -> Result<TrainedStages, ModelError> {
        let layers = self.trained_layers()?;
        let stages: Vec<bool> = partition.ranges().map(|range| layers[range].contains(&true)).collect();
        Ok(TrainedStages::of(&stages))
    }

    /// Returns the model with its embedding and its head in one part each.
    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// Returns the number of parts of the head.
    pub fn parts(&self) -> u32 {
        self.cut.head.map_or(1, |head| head.parts())
    }

    /// Returns the number of parts of the embedding.
    pub fn embedding_parts(&self) -> u32 {
        self.cut.embedding.map_or(1, |embedding| embedding.parts())
    }

    /// Returns whether stages need the targets as a side input
    /// ([`PipelineConfig::targets_for_all`](pipewright::pipeline::PipelineConfig::targets_for_all)).
    pub fn needs_targets(&self) -> bool {
        self.cut.head.is_some()
    }

    /// Returns why stages of the model cannot run slices of microbatches; `None` if they can.
    pub fn refuses_slices(&self) -> Option<String> {
        self.cut.refuses_slices().or_else(|| self.model.refuses_slices())
    }

    /// Returns the number of layers, with the parts of the embedding and of the head.
    pub fn layers(&self) -> usize {
        self.cut.layers(self.model.layers() - 2)
    }

    /// Returns the layers in order; see [`ModelFamily::describe`](crate::ModelFamily::describe). With
    /// adapters, weights and products are those of training them: no gradients of frozen matrices, and no
    /// backward below the first adapter. The magnitudes of DoRA count, and the products of the adapters do
    /// not; [`LayerDesc::trained`] has their parameters.
    pub fn describe(&self, sequence: usize) -> ModelDesc {
        let whole = self.describe_whole(sequence);
        let Some(adapter) = &self.adapter else { return whole };
        // The settings of adapters were checked with the model, so their parameters are known.
        let Ok(specs) = self.trained_parameters() else { return whole };
        let (trained, tokens) = (scalars(&specs, &whole.layers), sequence as u64);
        let first = trained.iter().position(|&numbers| numbers > 0).unwrap_or(0);
        let whole_layers = self.whole_layers();
        let adapted = |(index, (layer, numbers)): (usize, (LayerDesc, u64))| {
            let is_whole = whole_layers[index];
            let mut layer = if is_whole { layer } else { frozen(layer, tokens, index >= first) };
            layer.trained = Some(numbers);
            if adapter.lora.dora {
                layer.weight += magnitude_weight(&specs, &layer, tokens);
            }
            layer
        };
        ModelDesc { layers: whole.layers.into_iter().zip(trained).enumerate().map(adapted).collect() }
    }

    /// Returns the layers as they are if all parameters are trained.
    fn describe_whole(&self, sequence: usize) -> ModelDesc {
        self.cut.describe(self.model.describe(sequence), sequence as u64)
    }

    /// Returns the parameters of the stage that holds `layers`, without their values and with the shapes of
    /// the shards of the rank `tensor`.
    ///
    /// # Errors
    /// When `layers` is not a range of the layers, when a layer cannot be split over the tensor ranks, or
    /// when there are several of them and the embedding or the head has several parts.
    pub fn outline(
        &self,
        layers: Range<usize>,
        tensor: &TensorParallel,
    ) -> Result<Vec<ParameterSpec>, ModelError> {
        let lora = self.adapter.as_ref().map(|adapter| &adapter.lora);
        outline(&*self.model, &self.cut, layers, tensor, lora, &self.quantised)
    }

    /// Builds the stage that holds `layers`, for training. The last stage computes the loss. With adapters,
    /// the parameters of the model are their base ([`Stage::with_base`]).
    ///
    /// # Errors
    /// As [`CutModel::outline`], and when the files of [`InitialParameters::Directory`] or of the adapters
    /// cannot be read or do not fit the model.
    pub fn training_stage(
        &self,
        layers: Range<usize>,
        initial: &InitialParameters,
        place: impl Into<Place>,
    ) -> Result<Stage, ModelError> {
        let (place, is_last) = (place.into(), layers.end == self.layers());
        let build = |source: &mut dyn ParameterSource| {
            let stage = self.model.build_cut_stage(&self.cut, layers.clone(), source, &place)?;
            let stage = stage.with_form(self.form);
            Ok::<_, ModelError>(match self.preference {
                Some(preference) if is_last => stage.into_preference_stage(preference),
                _ => stage.into_stage(is_last),
            })
        };
        let mut source = initial.of(&*self.model, self.streams)?;
        let Some(adapter) = &self.adapter else { return build(&mut *source) };
        let stage = build(&mut AdaptedSource::new(source, adapter, &place)?)?;
        let lora = adapter.lora.clone();
        Ok(stage.with_base(move |path| !lora.trains(path)))
    }
}

/// Returns for each layer the number of scalar parameters among `specs`.
fn scalars(specs: &[ParameterSpec], layers: &[LayerDesc]) -> Vec<u64> {
    let numbers = |layer: &LayerDesc| {
        let own = specs.iter().filter(|spec| spec.is_in(&layer.path));
        own.map(|spec| spec.shape.iter().product::<usize>() as u64).sum()
    };
    layers.iter().map(numbers).collect()
}

/// Returns the work for each token of the magnitudes among the trained parameters `specs` of a layer, for
/// rows of `tokens` tokens, in the unit of [`LayerDesc::weight`].
fn magnitude_weight(specs: &[ParameterSpec], layer: &LayerDesc, tokens: u64) -> u64 {
    let own: Vec<&ParameterSpec> = specs.iter().filter(|spec| spec.is_in(&layer.path)).collect();
    let outputs_of = |layer: &str| {
        let magnitudes = own.iter().find(|spec| layer_of_magnitudes(&spec.path) == Some(layer));
        magnitudes.map_or(0, |spec| spec.shape.iter().product::<usize>() as u64)
    };
    let weight = |spec: &&ParameterSpec| match (layer_of_first(&spec.path), spec.shape.as_slice()) {
        (Some(layer), &[inputs, rank]) => magnitudes(inputs as u64, outputs_of(layer), rank as u64, tokens),
        _ => 0,
    };
    own.iter().map(weight).sum()
}
