//! The traits of a model family. The list of families is at [`ModelConfig`](crate::ModelConfig).

use std::fmt::Debug;
use std::ops::Range;

use burn::tensor::Device;
use pipewright::nn::TensorParallel;
use pipewright::train::data::{DataError, SideRows, SideTensor};
use pipewright_schedule::{LayerDesc, ModelDesc};
use pipewright_shapes::ShapeError;
use pipewright_shapes::family::{Family, SCORES};
use pipewright_shapes::model::Model;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::cost::{HiddenKept, ModelSizes};
use crate::decoder::{BlockAttentions, DecoderConfig};
use crate::embedding_form::VocabularyCut;
use crate::embedding_layer::EmbeddingLayer;
use crate::error::ModelError;
use crate::head_form::HeadForm;
use crate::hybrid::HybridConfig;
use crate::mamba::NO_SLICES;
use crate::outline::Outline;
use crate::parameter::{Builder, ParameterSource, ParameterSpec};
use crate::quantisation::{advice, method_of, without_readable};
use crate::split::{Place, SplitStage};
use crate::stage::{HeadPart, ModelStage, StageFacts, StageLayer, TablePart};
use crate::vocabulary::{HeadMatrix, HeadNorms, OutputHead, TokenTable};

/// What a family is made of. [`ModelFamily`] is written once over it.
pub(crate) trait Composition:
    Clone + Debug + Send + Sync + Serialize + DeserializeOwned + 'static
{
    /// The facts about the family.
    const FAMILY: Family;

    /// See [`ModelFamily::of_sizes`].
    fn of_sizes(sizes: DecoderConfig) -> Self;

    /// Checks the values that depend on the family after a file was read.
    ///
    /// # Errors
    /// When the family does not support a value.
    fn check(&self) -> Result<(), ShapeError> {
        Ok(())
    }

    /// Checks all values before a stage is built.
    ///
    /// # Errors
    /// When a value is out of range, or does not fit another.
    fn check_all(&self) -> Result<(), ShapeError>;

    /// See [`ModelFamily::to_json`].
    fn to_json(&self) -> Value {
        family_json(self)
    }

    /// Returns the layers of [`ModelFamily::describe`].
    fn describe(&self, sizes: &ModelSizes) -> Vec<LayerDesc>;

    /// Returns the number of layers between the embedding and the head.
    fn inner_layers(&self) -> usize;

    /// Returns the last norm and the head, which [`CutModel`](crate::CutModel) may cut along the vocabulary.
    fn head(&self) -> HeadForm;

    /// See [`ModelFamily::initial`].
    fn initial(&self, seed: u64) -> Box<dyn ParameterSource + '_>;

    /// See [`ModelFamily::labels`].
    fn labels(&self) -> &[String] {
        &[]
    }

    /// See [`ModelFamily::check_side`].
    fn check_side(&self, side: &SideRows, _sequence: usize) -> Result<(), DataError> {
        let unknown = |tensor: &SideTensor| {
            let problem =
                format!("is not an input of the model: `{}` has no side inputs", Self::FAMILY.name());
            Err(side.error(&tensor.name, problem))
        };
        side.tensors().first().map_or(Ok(()), unknown)
    }

    /// See [`ModelFamily::cuts`].
    fn cuts(&self) -> Option<Vec<usize>> {
        None
    }

    /// See [`ModelFamily::for_generation`].
    fn for_generation(&self) -> Self {
        self.clone()
    }

    /// See [`ModelFamily::longest`].
    fn longest(&self) -> Option<usize> {
        None
    }

    /// See [`ModelFamily::has_unused_window`].
    fn has_unused_window(&self) -> bool {
        false
    }

    /// See [`ModelFamily::positions`].
    fn positions(&self) -> Option<usize> {
        None
    }

    /// See [`ModelFamily::refuses_slices`].
    fn refuses_slices(&self) -> Option<String> {
        Some(NO_SLICES.to_owned())
    }

    /// See [`ModelFamily::hidden_kept`].
    fn hidden_kept(&self) -> Option<HiddenKept> {
        None
    }

    /// Returns why tensor ranks cannot have shares of the tokens between the layers of the model; `None` if they can.
    fn refuses_shares(&self) -> Option<String> {
        Some(format!("layers of the family `{}` need all tokens on every rank", Self::FAMILY.name()))
    }

    /// Returns whether files have the matrices of projections as `[inputs, outputs]`.
    fn inputs_first(&self) -> bool {
        false
    }

    /// Returns how the tokens of each block attend to each other, in a family whose attentions are causal.
    fn attentions(&self) -> BlockAttentions {
        BlockAttentions::default()
    }

    /// Returns the configuration of a hybrid, whose layers pass the token ids on.
    fn hybrid(&self) -> Option<HybridConfig> {
        None
    }

    /// Adds what the family has in the layer of the embedding, besides the table of the tokens.
    ///
    /// # Errors
    /// When the source fails.
    fn add_embeddings(
        &self,
        _layer: &mut EmbeddingLayer,
        _builder: &mut Builder<'_>,
    ) -> Result<(), ModelError> {
        Ok(())
    }

    /// Builds the layer with this index among those between the embedding and the head.
    ///
    /// # Errors
    /// When the layer cannot be split over the ranks, or the source fails.
    fn build_inner(&self, index: usize, builder: &mut Builder<'_>) -> Result<StageLayer, ModelError>;
}

/// A model of a family: its configuration, and the construction of its stages.
pub trait ModelFamily: Debug + Send + Sync {
    /// Returns the facts about the family.
    fn family(&self) -> &'static Family;

    /// Returns the configuration of a model of these sizes, with the family's usual values for everything
    /// else.
    fn of_sizes(sizes: DecoderConfig) -> Self
    where
        Self: Sized;

    /// Reads the configuration from a parsed `config.json`. Keys that do not affect the results are ignored.
    ///
    /// # Errors
    /// When a key is missing or out of range, when it has a value that the family does not support, or when
    /// it is not known and has the name of a part of a computation.
    fn from_json(json: Value) -> Result<Self, ShapeError>
    where
        Self: Sized;

    /// Returns the content of `config.json`: the keys that affect the results, and those that every such file
    /// has.
    fn to_json(&self) -> Value;

    /// Returns the shape of the model, which counts its parameters and operations.
    ///
    /// # Errors
    /// When the configuration does not describe a model.
    fn shape(&self) -> Result<Model, ShapeError> {
        Ok(pipewright_shapes::read(&file_json(self).to_string())?.model)
    }

    /// Returns the size of the vocabulary: token ids are below it.
    fn vocab_size(&self) -> usize;

    /// Returns the names of the labels, if the head has an output for each label in place of each token id; otherwise none.
    fn labels(&self) -> &[String];

    /// Returns the layers in order. Their weights are the floating point operations of a token's forward and
    /// backward at this sequence length. A stage is a range of this list.
    fn describe(&self, sequence: usize) -> ModelDesc;

    /// Returns the number of layers.
    fn layers(&self) -> usize;

    /// Checks that the model takes these side inputs, for rows of `sequence` tokens.
    ///
    /// # Errors
    /// When the family has no side input of a name, or a side input has another shape or a number outside its
    /// range. The error names the tensor and, where it can, the row.
    fn check_side(&self, side: &SideRows, sequence: usize) -> Result<(), DataError>;

    /// Returns the first layer of each stage except the first, if the model has a pattern that says it.
    fn cuts(&self) -> Option<Vec<usize>>;

    /// Returns the configuration of the parts of the model that predict the next token, without the layers that only
    /// training needs.
    fn for_generation(&self) -> Self
    where
        Self: Sized;

    /// Returns the number of positions that the model is meant for, if it says so.
    fn longest(&self) -> Option<usize>;

    /// Returns whether the configuration has a window that no layer has, because `use_sliding_window` is not
    /// true or another key leaves all layers out.
    fn has_unused_window(&self) -> bool;

    /// Returns the number of positions that the model has a vector for, if it has such vectors. Longer rows
    /// cannot be computed.
    fn positions(&self) -> Option<usize>;

    /// Returns the numbers of hidden states that every tensor rank keeps, if all others are divided among the ranks.
    fn hidden_kept(&self) -> Option<HiddenKept>;

    /// Returns why stages of the model cannot run slices of microbatches; `None` if they can
    /// ([`StageModule::refuses_slices`](pipewright::stage::StageModule::refuses_slices)).
    fn refuses_slices(&self) -> Option<String>;

    /// Returns the last norm and the head, which [`CutModel`](crate::CutModel) may cut along the vocabulary.
    fn head(&self) -> HeadForm;

    /// Returns the initial parameters, which depend on `seed` and not on the cut of the model.
    fn initial(&self, seed: u64) -> Box<dyn ParameterSource + '_>;

    /// Builds the stage that holds `layers`, with parameters from `source`: the rank's shards of them, if
    /// several ranks compute the stage together.
    ///
    /// # Errors
    /// When `layers` is empty or reaches past the last layer, when a layer cannot be split over the ranks, or
    /// when the source fails.
    fn build_stage(
        &self,
        layers: Range<usize>,
        source: &mut dyn ParameterSource,
        place: &Place,
    ) -> Result<ModelStage, ModelError> {
        self.build_cut_stage(&VocabularyCut::default(), layers, source, place)
    }

    /// Like [`ModelFamily::build_stage`], but the embedding and the head are cut into parts, each of them a layer.
    ///
    /// # Errors
    /// As [`ModelFamily::build_stage`], and when several ranks compute the parts together.
    fn build_cut_stage(
        &self,
        cut: &VocabularyCut,
        layers: Range<usize>,
        source: &mut dyn ParameterSource,
        place: &Place,
    ) -> Result<ModelStage, ModelError>;

    /// Builds the stage that holds `layers`, with initial parameters that depend on `seed` and not on the cut
    /// of the model. The shards of all ranks together are the parameters of one rank that computes the whole
    /// stage.
    ///
    /// # Errors
    /// When `layers` is empty or reaches past the last layer, or a layer cannot be split over the ranks.
    fn init_stage(
        &self,
        layers: Range<usize>,
        seed: u64,
        place: impl Into<Place>,
    ) -> Result<ModelStage, ModelError>
    where
        Self: Sized,
    {
        self.build_stage(layers, &mut *self.initial(seed), &place.into())
    }

    /// Returns the parameters of the stage that holds `layers`, without their values and with the shapes of
    /// the shards of the rank `tensor`. Nothing is allocated for them, and the rank need not be connected
    /// ([`TensorParallel::unconnected`]).
    ///
    /// # Errors
    /// When `layers` is empty or reaches past the last layer, or a layer cannot be split over the ranks.
    fn outline(
        &self,
        layers: Range<usize>,
        tensor: &TensorParallel,
    ) -> Result<Vec<ParameterSpec>, ModelError> {
        let mut outline = Outline::default();
        self.build_stage(layers, &mut outline, &Place { tensor: tensor.clone(), ..Device::flex().into() })?;
        Ok(outline.specs)
    }
}

impl<F: Composition> ModelFamily for F {
    fn family(&self) -> &'static Family {
        const { &F::FAMILY }
    }

    fn of_sizes(sizes: DecoderConfig) -> Self {
        F::of_sizes(sizes)
    }

    fn from_json(json: Value) -> Result<Self, ShapeError> {
        let json = without_readable(json);
        if let Some(method) = method_of(&json) {
            let message = format!(
                "`quantization_config` says that the weights are quantised ({method}), in a form that is not read: {}",
                advice(&method)
            );
            return Err(ShapeError::new(&["quantization_config"], message));
        }
        let family = &F::FAMILY;
        check_class(family, &json)?;
        family.keys.check(&json)?;
        let json = with_known_positions(family, without_nulls(renamed(family, json)));
        match F::deserialize(&json) {
            Ok(config) => config.check().and_then(|()| ModelFamily::shape(&config)).map(|_| config),
            Err(source) => Err(ShapeError::of_parser::<F>(&json, source)),
        }
    }

    fn to_json(&self) -> Value {
        Composition::to_json(self)
    }

    fn vocab_size(&self) -> usize {
        Composition::head(self).vocabulary
    }

    fn labels(&self) -> &[String] {
        Composition::labels(self)
    }

    fn describe(&self, sequence: usize) -> ModelDesc {
        let head @ HeadForm { width, vocabulary, is_tied, .. } = Composition::head(self);
        // A configuration that does not describe a model has no counts. `build_cut_stage` refuses it.
        let counts = self.shape().map_or_else(|_| Vec::new(), |shape| shape.layers());
        let [hidden, vocabulary, tokens] = [width, vocabulary, sequence].map(|size| size as u64);
        let (outputs, head) = (head.outputs() as u64, head.path());
        let sizes = ModelSizes { hidden, vocabulary, outputs, head, is_tied, tokens, counts };
        ModelDesc { layers: Composition::describe(self, &sizes) }
    }

    fn layers(&self) -> usize {
        self.inner_layers() + 2
    }

    fn check_side(&self, side: &SideRows, sequence: usize) -> Result<(), DataError> {
        Composition::check_side(self, side, sequence)
    }

    fn cuts(&self) -> Option<Vec<usize>> {
        Composition::cuts(self)
    }

    fn for_generation(&self) -> Self {
        Composition::for_generation(self)
    }

    fn longest(&self) -> Option<usize> {
        Composition::longest(self)
    }

    fn has_unused_window(&self) -> bool {
        Composition::has_unused_window(self)
    }

    fn positions(&self) -> Option<usize> {
        Composition::positions(self)
    }

    fn hidden_kept(&self) -> Option<HiddenKept> {
        Composition::hidden_kept(self)
    }

    fn refuses_slices(&self) -> Option<String> {
        Composition::refuses_slices(self)
    }

    fn head(&self) -> HeadForm {
        Composition::head(self)
    }

    fn initial(&self, seed: u64) -> Box<dyn ParameterSource + '_> {
        Composition::initial(self, seed)
    }

    fn build_cut_stage(
        &self,
        cut: &VocabularyCut,
        layers: Range<usize>,
        source: &mut dyn ParameterSource,
        place: &Place,
    ) -> Result<ModelStage, ModelError> {
        self.check_all()?;
        self.shape()?;
        cut.require_one_rank(place.tensor.ranks())?;
        if let Some(reason) = self.refuses_shares().filter(|_| place.tensor.shares_tokens()) {
            return Err(ModelError::new(format!(
                "`mesh.sequence_parallel` does not work with this model: {reason}; set it to false"
            )));
        }
        let (head, before) = (Composition::head(self), cut.layers_before());
        let (first_of_head, count) = (before + 1 + self.inner_layers(), cut.layers(self.inner_layers()));
        let Range { start, end } = layers;
        if start >= end || end > count {
            return Err(ModelError::new(format!(
                "layers {start}..{end} are not a stage of a model of {count} layers"
            )));
        }
        let embedding_is_cut = cut.embedding.is_some();
        let place = &Place { table_parts: cut.table_parts(), embedding_is_cut, ..place.clone() };
        let mut builder = Builder::new(source, place, head.names, self.inputs_first());
        let build = |layer: usize| {
            if layer < before {
                let (mut table, shape) =
                    (TokenTable::empty(cut.table_parts()), [head.vocabulary, head.width]);
                table.add(layer, builder.table_shard(head.embedding, shape, layer as u32)?);
                return Ok(StageLayer::TablePart(TablePart { table, index: layer }));
            }
            if layer == before {
                let table = builder.token_table(head.embedding, head.vocabulary, head.width)?;
                let mut embedding = EmbeddingLayer::new(table);
                embedding.adapter = builder.table_adapter(head.embedding, head.vocabulary, head.width)?;
                self.add_embeddings(&mut embedding, &mut builder)?;
                return Ok(StageLayer::Embedding(embedding));
            }
            if layer < first_of_head {
                return self.build_inner(layer - before - 1, &mut builder);
            }
            let Some(cut) = cut.head else {
                return OutputHead::build(&head, &mut builder).map(StageLayer::Head);
            };
            let index = (layer - first_of_head) as u32;
            let norms = (index == 0).then(|| HeadNorms::build(&head, &mut builder)).transpose()?;
            let matrix = HeadMatrix::part(&head, index, cut.parts(), &mut builder)?;
            Ok(StageLayer::HeadPart(HeadPart { norms, matrix, head: cut, index }))
        };
        let layers = (start..end).map(build).collect::<Result<_, ModelError>>()?;
        let facts = StageFacts {
            head,
            attentions: self.attentions(),
            refuses_slices: cut.refuses_slices().or_else(|| Composition::refuses_slices(self)),
            hybrid: self.hybrid(),
        };
        let split = SplitStage { tensor: place.tensor.clone(), vocabulary: head.vocabulary };
        let (built, frozen) = builder.into_built();
        Ok(ModelStage::new(layers, split, facts, &built).with_frozen(frozen))
    }
}

/// Returns the keys of a configuration, and the keys that every `config.json` has.
pub(crate) fn family_json<F: Composition>(config: &F) -> Value {
    let mut json = json!(config);
    json["model_type"] = F::FAMILY.name().into();
    let class = F::FAMILY.scoring_class().filter(|_| !config.labels().is_empty());
    json["architectures"] = json!([class.as_deref().unwrap_or(F::FAMILY.class)]);
    json["dtype"] = "float32".into();
    json
}

/// Returns the content of a model's `config.json`, with the width of a head where readers of files assume another
/// one.
pub(crate) fn file_json<F: ModelFamily + ?Sized>(config: &F) -> Value {
    let mut json = config.to_json();
    let assumes_width = config.family().absent.iter().any(|(key, _)| *key == "head_dim");
    let sizes = (json["hidden_size"].as_u64(), json["num_attention_heads"].as_u64());
    if let (true, None, (Some(width), Some(heads))) = (assumes_width, json.get("head_dim"), sizes) {
        json["head_dim"] = (width / heads.max(1)).into();
    }
    json
}

/// Returns a file's keys under the names that the family reads.
fn renamed(family: &Family, mut json: Value) -> Value {
    if let Some(keys) = json.as_object_mut() {
        for (older, name) in family.renamed {
            if let Some(value) = keys.remove(*older).filter(|value| !value.is_null()) {
                keys.insert((*name).to_owned(), value);
            }
        }
    }
    json
}

/// Removes keys without an effect from the tables of positions, and replaces the family's own names of the type
/// `longrope`.
fn with_known_positions(family: &Family, mut json: Value) -> Value {
    for table in ["rope_parameters", "rope_scaling"] {
        let Some(entries) = json.get_mut(table).and_then(Value::as_object_mut) else { continue };
        entries.retain(|key, _| !family.ignored_positions.contains(&key.as_str()));
        for (_, name) in entries.iter_mut().filter(|(key, _)| *key == "rope_type" || *key == "type") {
            if name.as_str().is_some_and(|name| family.longrope_names.contains(&name)) {
                *name = "longrope".into();
            }
        }
    }
    json
}

/// Removes the keys that are `null`, which count as absent.
fn without_nulls(mut json: Value) -> Value {
    if let Some(keys) = json.as_object_mut() {
        keys.retain(|_, value| !value.is_null());
    }
    json
}

/// Refuses a file whose `architectures` name a class of another family.
fn check_class(family: &Family, json: &Value) -> Result<(), ShapeError> {
    let stem_of = |class: &str| {
        let stem = class.split("For").next().unwrap_or(class);
        let stem = stem.strip_suffix("Model").unwrap_or(stem);
        stem.strip_suffix("LMHead").unwrap_or(stem).to_lowercase()
    };
    let scoring = family.scoring_class();
    let classes = json.get("architectures").and_then(Value::as_array).into_iter().flatten();
    let mut classes =
        classes.filter(|class| class.as_str().is_none_or(|class| Some(class) != scoring.as_deref()));
    if let Some(class) = classes.clone().filter_map(Value::as_str).find(|class| class.ends_with(SCORES)) {
        let supported = scoring.as_deref().unwrap_or(family.class);
        return Err(ShapeError::not_supported("architectures", class, supported));
    }
    let other =
        classes.by_ref().filter_map(Value::as_str).find(|class| stem_of(class) != stem_of(family.class));
    other.map_or(Ok(()), |class| Err(ShapeError::not_supported("architectures", class, family.class)))
}
