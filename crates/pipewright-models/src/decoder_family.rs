//! Families whose models have the form of [`decoder`](crate::decoder): each says only in what its blocks
//! differ.

use std::ops::Range;

use pipewright_schedule::ModelDesc;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::config_key::KeyTable;
use crate::decoder::{BlockForm, DecoderConfig, DecoderStage};
use crate::family::ModelFamily;
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
    /// The values of keys that a file leaves out.
    const ABSENT_KEYS: &'static [(&'static str, u32)] = &[];

    /// Returns the sizes and constants.
    fn decoder(&self) -> &DecoderConfig;

    /// Returns the form of the blocks.
    fn form(&self) -> BlockForm<'_>;
}

impl<F: DecoderFamily> ModelFamily for F {
    const MODEL_TYPE: &'static str = F::NAME;
    const ARCHITECTURE: &'static str = F::CLASS;
    const TABLE: &'static KeyTable = F::KEY_TABLE;
    const ABSENT: &'static [(&'static str, u32)] = F::ABSENT_KEYS;
    const ADAPTS: bool = true;
    type Stage = DecoderStage;

    fn of_sizes(sizes: DecoderConfig) -> Self {
        sizes.into()
    }

    fn vocab_size(&self) -> usize {
        self.decoder().vocab_size
    }

    fn describe(&self, sequence: usize) -> ModelDesc {
        self.decoder().describe(&self.form(), sequence)
    }

    fn head(&self) -> Option<HeadForm> {
        Some(self.decoder().head())
    }

    fn initializer_range(&self) -> f64 {
        self.decoder().initializer_range
    }

    fn build_stage<S: ParameterSource>(
        &self,
        layers: Range<usize>,
        source: &mut S,
        place: &Place,
    ) -> Result<DecoderStage, S::Error> {
        let form = self.form();
        if let Some(mixture) = form.mixture {
            mixture.validate()?;
        }
        self.decoder().build_stage(&form, layers, source, place)
    }
}
