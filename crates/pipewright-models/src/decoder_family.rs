//! Families whose models have the form of [`decoder`](crate::decoder): each says only in what its blocks
//! differ.

use std::ops::Range;

use pipewright_schedule::ModelDesc;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::config_key::KeyTable;
use crate::decoder::{BlockForm, DecoderConfig, DecoderStage, stays_in_single_precision};
use crate::error::ConfigError;
use crate::family::{AbsentKey, ModelFamily};
use crate::head_form::HeadForm;
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
    /// The key of the number that normalisations add before they take a root.
    const EPSILON: &'static str = "rms_norm_eps";
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

    /// Checks the values that the family has in addition to [`DecoderConfig`].
    ///
    /// # Errors
    /// When a value is out of range.
    fn check_own(&self) -> Result<(), ConfigError> {
        Ok(())
    }
}

/// The name of [`DecoderFamily::EPSILON`] in [`DecoderConfig`].
const EPSILON: &str = "rms_norm_eps";

impl<F: DecoderFamily> ModelFamily for F {
    const MODEL_TYPE: &'static str = F::NAME;
    const ARCHITECTURE: &'static str = F::CLASS;
    const TABLE: &'static KeyTable = F::KEY_TABLE;
    const ABSENT: &'static [(&'static str, AbsentKey)] = F::ABSENT_KEYS;
    const LONGROPE_NAMES: &'static [&'static str] = F::LONGROPE_NAMES;
    const RENAMED: &'static [(&'static str, &'static str)] = &[(F::EPSILON, EPSILON)];
    const ADAPTS: bool = true;
    type Stage = DecoderStage;

    fn of_sizes(sizes: DecoderConfig) -> Self {
        sizes.into()
    }

    fn to_json(&self) -> Value {
        let mut json = self.file_json();
        let (key, activation) = F::ACTIVATION;
        json[key] = activation.into();
        json[F::EPSILON] = json[EPSILON].take();
        if let Some(keys) = json.as_object_mut().filter(|_| F::EPSILON != EPSILON) {
            keys.remove(EPSILON);
        }
        json
    }

    fn check(&self) -> Result<(), ConfigError> {
        let (key, share) = ("partial_rotary_factor", self.decoder().partial_rotary_factor);
        if share != 1.0 && !F::ROTATES_PARTS {
            return Err(ConfigError::NotSupported { key, value: share.to_string(), supported: "1" });
        }
        self.check_own()
    }

    fn vocab_size(&self) -> usize {
        self.decoder().vocab_size
    }

    fn describe(&self, sequence: usize) -> ModelDesc {
        self.decoder().describe(&self.form(), sequence)
    }

    fn head(&self) -> Option<HeadForm> {
        Some(self.decoder().head(&self.form()))
    }

    fn initializer_range(&self) -> f64 {
        self.decoder().initializer_range
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
            mixture.validate()?;
        }
        self.decoder().build_stage(&form, layers, source, place)
    }
}
