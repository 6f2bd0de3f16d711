//! Families whose models have the form of [`decoder`](crate::decoder): each says only in what its blocks
//! differ.

use std::ops::Range;

use pipewright_schedule::ModelDesc;
use pipewright_shapes::ShapeError;
use pipewright_shapes::family::AbsentKey;
use pipewright_shapes::key_table::KeyTable;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::decoder::{self, BlockForm, DecoderConfig, DecoderStage, LayerWindows, stays_in_single_precision};
use crate::error::ConfigError;
use crate::family::ModelFamily;
use crate::head_form::HeadForm;
use crate::init::InitByPath;
use crate::parameter::ParameterSource;
use crate::split::Place;

/// A family of decoder-only models. [`From`] returns the family's model of some sizes, with its usual values
/// for everything else.
pub(crate) trait DecoderFamily:
    From<DecoderConfig> + Clone + Send + Sync + Serialize + DeserializeOwned
{
    /// The name of the family: `model_type` in `config.json`.
    const NAME: &'static str;
    /// The entry of `architectures` in `config.json`.
    const CLASS: &'static str;
    /// The meaning of each key of `config.json` for the family.
    const KEY_TABLE: &'static KeyTable;
    /// The key that names the activation in files, and its only value.
    const ACTIVATION: (&'static str, &'static str) = ("hidden_act", "silu");
    /// The keys with other names in files than in [`DecoderConfig`], each with the name there.
    const KEY_NAMES: &'static [(&'static str, &'static str)] = &[];
    /// Whether a part of a head's elements may be rotated.
    const ROTATES_PARTS: bool = false;
    /// Types of positions that mean `longrope` in files of this family.
    const LONGROPE_NAMES: &'static [&'static str] = &[];
    /// The values of keys that a file leaves out.
    const ABSENT_KEYS: &'static [(&'static str, AbsentKey)] = &[];

    /// Returns the sizes and constants.
    fn decoder(&self) -> &DecoderConfig;

    /// Returns the form of the model.
    fn form(&self) -> BlockForm<'_>;

    /// Returns the windows of the model by the keys of Qwen2, in a family that has these keys.
    fn windows(&self) -> Option<&LayerWindows> {
        None
    }

    /// Returns the standard deviation of a parameter's initial values, by its path.
    fn deviation_of(&self, _parameter: &str) -> f64 {
        self.decoder().initializer_range
    }

    /// Checks the values that the family has in addition to [`DecoderConfig`].
    ///
    /// # Errors
    /// When a value is out of range.
    fn check_own(&self) -> Result<(), ShapeError> {
        Ok(())
    }
}

impl<F: DecoderFamily> ModelFamily for F {
    const MODEL_TYPE: &'static str = F::NAME;
    const ARCHITECTURE: &'static str = F::CLASS;
    const TABLE: &'static KeyTable = F::KEY_TABLE;
    const ABSENT: &'static [(&'static str, AbsentKey)] = F::ABSENT_KEYS;
    const LONGROPE_NAMES: &'static [&'static str] = F::LONGROPE_NAMES;
    const RENAMED: &'static [(&'static str, &'static str)] = F::KEY_NAMES;
    const ADAPTS: bool = true;
    type Stage = DecoderStage;

    fn of_sizes(sizes: DecoderConfig) -> Self {
        sizes.into()
    }

    fn to_json(&self) -> Value {
        let mut json = self.file_json();
        let (key, activation) = F::ACTIVATION;
        json[key] = activation.into();
        if let Some(keys) = json.as_object_mut() {
            for (in_files, name) in F::KEY_NAMES {
                if let Some(value) = keys.remove(*name) {
                    keys.insert((*in_files).to_owned(), value);
                }
            }
        }
        json
    }

    fn check(&self) -> Result<(), ConfigError> {
        let (key, share) = ("partial_rotary_factor", self.decoder().partial_rotary_factor);
        if share != 1.0 && !F::ROTATES_PARTS {
            return Err(ShapeError::not_supported(key, &share.to_string(), "1").into());
        }
        Ok(self.check_own()?)
    }

    fn vocab_size(&self) -> usize {
        self.decoder().vocab_size
    }

    fn describe(&self, sequence: usize) -> ModelDesc {
        decoder::describe(self.decoder(), &self.form(), sequence)
    }

    fn head(&self) -> HeadForm {
        decoder::head(self.decoder(), &self.form())
    }

    fn initializer_range(&self) -> f64 {
        self.decoder().initializer_range
    }

    fn initial(&self, seed: u64) -> impl ParameterSource<Error = ConfigError> {
        InitByPath { seed, deviation: |path: &str| self.deviation_of(path) }
    }

    fn longest(&self) -> Option<usize> {
        self.decoder().max_position_embeddings
    }

    fn has_unused_window(&self) -> bool {
        let has_window = self.windows().is_some_and(|windows| windows.sliding_window.is_some());
        has_window && self.form().layers.iter().all(|layer| layer.window.is_none())
    }

    fn positions(&self) -> Option<usize> {
        self.form().position_table
    }

    fn stays_in_single_precision(parameter: &str) -> bool {
        stays_in_single_precision(parameter)
    }

    fn build_stage<S: ParameterSource>(
        &self,
        layers: Range<usize>,
        source: &mut S,
        place: &Place,
    ) -> Result<DecoderStage, S::Error> {
        self.check()?;
        let form = self.form();
        if let Some(mixture) = form.mixture {
            mixture.validate().map_err(ConfigError::from)?;
        }
        decoder::build_stage(self.decoder(), &form, layers, source, place)
    }
}
