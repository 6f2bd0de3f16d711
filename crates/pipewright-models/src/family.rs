//! The trait of a model family. The list of families is at [`ModelConfig`](crate::ModelConfig).

use std::ops::Range;

use burn::tensor::Device;
use pipewright::nn::TensorParallel;
use pipewright::train::data::{DataError, SideRows, SideTensor};
use pipewright_schedule::ModelDesc;
use pipewright_shapes::ShapeError;
pub use pipewright_shapes::family::AbsentKey;
use pipewright_shapes::key_table::KeyTable;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::decoder::DecoderConfig;
use crate::error::ConfigError;
use crate::generation_stage::GenerationStage;
use crate::head_form::HeadForm;
use crate::init::SeededInit;
use crate::parameter::{Outline, ParameterSource, ParameterSpec};
use crate::quantisation::{advice, method_of};
use crate::split::Place;
use crate::training_module::TrainingModule;

/// A model family: its configuration, and the construction of its stages. The configuration serialises as the
/// keys of `config.json` that affect the results.
pub trait ModelFamily: Clone + Send + Sync + Sized + Serialize + DeserializeOwned {
    /// The name of the family: `model_type` in `config.json`.
    const MODEL_TYPE: &'static str;
    /// The entry of `architectures` in `config.json`.
    const ARCHITECTURE: &'static str;
    /// The meaning of each key of `config.json` for the family.
    const TABLE: &'static KeyTable;
    /// The values of keys that a file leaves out, where they differ from the values that the configuration
    /// type fills in.
    const ABSENT: &'static [(&'static str, AbsentKey)] = &[];
    /// Older names of keys, each with the name that it stands for. If a file has both, the older one counts,
    /// as in transformers.
    const RENAMED: &'static [(&'static str, &'static str)] = &[];
    /// Whether the linear layers of the blocks can have adapters.
    const ADAPTS: bool = false;
    /// Types of positions that mean `longrope` in files of this family.
    const LONGROPE_NAMES: &'static [&'static str] = &[];
    /// The module of a stage.
    type Stage: TrainingModule + GenerationStage;

    /// Returns the configuration of a model of these sizes, with the family's usual values for everything
    /// else.
    fn of_sizes(sizes: DecoderConfig) -> Self;

    /// Reads the configuration from a parsed `config.json`. Keys that do not affect the results are ignored.
    ///
    /// # Errors
    /// When a key is missing or out of range, when it has a value that the family does not support, or when
    /// it is not known and has the name of a part of a computation.
    fn from_json(json: Value) -> Result<Self, ConfigError> {
        if let Some(method) = method_of(&json) {
            let message = format!(
                "`quantization_config` says that the weights are quantised ({method}), and training needs them whole: {}",
                advice(&method)
            );
            return Err(ShapeError::new(&["quantization_config"], message).into());
        }
        check_class::<Self>(&json)?;
        Self::TABLE.check(&json)?;
        let json = with_longrope::<Self>(without_nulls(renamed::<Self>(json)));
        match Self::deserialize(&json) {
            Ok(config) => config.check().map(|()| config),
            Err(source) => Err(ShapeError::of_parser::<Self>(&json, source).into()),
        }
    }

    /// Checks the values that depend on the family.
    ///
    /// # Errors
    /// When the family does not support a value.
    fn check(&self) -> Result<(), ConfigError> {
        Ok(())
    }

    /// Returns the content of `config.json`.
    fn to_json(&self) -> Value {
        self.file_json()
    }

    /// Returns the keys of the configuration, and the keys that every `config.json` has.
    fn file_json(&self) -> Value {
        let mut json = json!(self);
        json["model_type"] = Self::MODEL_TYPE.into();
        json["architectures"] = json!([Self::ARCHITECTURE]);
        json["dtype"] = "float32".into();
        json
    }

    /// Returns the size of the vocabulary: token ids are below it.
    fn vocab_size(&self) -> usize;

    /// Returns the layers in order. Their weights are the floating point operations of a token's forward and
    /// backward at this sequence length. A stage is a range of this list.
    fn describe(&self, sequence: usize) -> ModelDesc;

    /// Returns the number of layers.
    fn layers(&self) -> usize {
        // The sequence length affects only costs.
        self.describe(1).layers.len()
    }

    /// Checks that the model takes these side inputs, for rows of `sequence` tokens.
    ///
    /// # Errors
    /// When the family has no side input of a name, or a side input has another shape or a number outside its
    /// range. The error names the tensor and, where it can, the row.
    fn check_side(&self, side: &SideRows, _sequence: usize) -> Result<(), DataError> {
        let unknown = |tensor: &SideTensor| {
            let problem = format!("is not an input of the model: `{}` has no side inputs", Self::MODEL_TYPE);
            Err(side.error(&tensor.name, problem))
        };
        side.tensors().first().map_or(Ok(()), unknown)
    }

    /// Returns the first layer of each stage except the first, if the model has a pattern that says it.
    fn cuts(&self) -> Option<Vec<usize>> {
        None
    }

    /// Returns the configuration of the parts of the model that predict the next token.
    fn for_generation(&self) -> Self {
        self.clone()
    }

    /// Returns the number of positions that the model is meant for, if it says so.
    fn longest(&self) -> Option<usize> {
        None
    }

    /// Returns whether the configuration has a window that no layer has, because `use_sliding_window` is not
    /// true or another key leaves all layers out.
    fn has_unused_window(&self) -> bool {
        false
    }

    /// Returns the number of positions that the model has a vector for, if it has such vectors. Longer rows
    /// cannot be computed.
    fn positions(&self) -> Option<usize> {
        None
    }

    /// Returns the last norm and the head, which [`CutModel`](crate::CutModel) may cut along the vocabulary.
    fn head(&self) -> HeadForm;

    /// Returns the standard deviation of initial parameters.
    fn initializer_range(&self) -> f64;

    /// Returns the initial parameters, which depend on `seed` and not on the cut of the model.
    fn initial(&self, seed: u64) -> impl ParameterSource<Error = ConfigError> {
        SeededInit { seed, deviation: self.initializer_range() }
    }

    /// Returns whether a parameter at a path keeps single precision in a run of half precision; see
    /// [`StageModule::stays_in_single_precision`](pipewright::stage::StageModule::stays_in_single_precision).
    fn stays_in_single_precision(parameter: &str) -> bool;

    /// Builds the stage that holds `layers`, with parameters from `source`: the rank's shards of them, if
    /// several ranks compute the stage together.
    ///
    /// # Errors
    /// When `layers` is empty or reaches past the last layer, when a layer cannot be split over the ranks, or
    /// when the source fails.
    fn build_stage<S: ParameterSource>(
        &self,
        layers: Range<usize>,
        source: &mut S,
        place: &Place,
    ) -> Result<Self::Stage, S::Error>;

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
    ) -> Result<Self::Stage, ConfigError> {
        self.build_stage(layers, &mut self.initial(seed), &place.into())
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
    ) -> Result<Vec<ParameterSpec>, ConfigError> {
        let mut outline = Outline::default();
        self.build_stage(layers, &mut outline, &Place { tensor: tensor.clone(), ..Device::flex().into() })?;
        Ok(outline.specs)
    }
}

/// Returns a file's keys under the names that the family reads.
fn renamed<F: ModelFamily>(mut json: Value) -> Value {
    if let Some(keys) = json.as_object_mut() {
        for (older, name) in F::RENAMED {
            if let Some(value) = keys.remove(*older).filter(|value| !value.is_null()) {
                keys.insert((*name).to_owned(), value);
            }
        }
    }
    json
}

/// Replaces the family's own names of the type `longrope`.
fn with_longrope<F: ModelFamily>(mut json: Value) -> Value {
    for table in ["rope_parameters", "rope_scaling"] {
        let entries = json.get_mut(table).and_then(Value::as_object_mut);
        for (_, name) in
            entries.into_iter().flatten().filter(|(key, _)| *key == "rope_type" || *key == "type")
        {
            if name.as_str().is_some_and(|name| F::LONGROPE_NAMES.contains(&name)) {
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
fn check_class<F: ModelFamily>(json: &Value) -> Result<(), ConfigError> {
    let family = |class: &str| {
        let stem = class.split("For").next().unwrap_or(class);
        stem.strip_suffix("Model").unwrap_or(stem).to_lowercase()
    };
    let classes = json.get("architectures").and_then(Value::as_array).into_iter().flatten();
    let other = classes.filter_map(Value::as_str).find(|class| family(class) != family(F::ARCHITECTURE));
    other.map_or(Ok(()), |class| {
        Err(ShapeError::not_supported("architectures", class, F::ARCHITECTURE).into())
    })
}
