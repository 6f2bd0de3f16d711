//! Where the parameters of a model come from.

use std::ops::Range;
use std::path::{Path, PathBuf};

use burn::tensor::Device;
use pipewright::checkpoint::Checkpoint;
use pipewright::nn::TensorParallel;

use crate::adapter::AdaptedSource;
use crate::embedding_form::VocabularyCut;
use crate::error::ModelError;
use crate::family::ModelFamily;
use crate::hf::{self, Stored};
use crate::lora::LoraConfig;
use crate::merged::MergedSource;
use crate::outline::Outline;
use crate::parameter::{ParameterSource, ParameterSpec};
use crate::quantisation::QuantisedSizes;
use crate::split::Place;

/// The source of the parameters with which training starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InitialParameters {
    /// Random parameters that depend on a seed.
    Seed(u64),
    /// The parameters in a Hugging Face directory.
    Directory {
        /// The directory.
        path: PathBuf,
        /// The seed of a head of labels that the directory does not have.
        seed: u64,
    },
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

impl InitialParameters {
    /// Returns the parameters of a model. If it `streams`, matrices of a directory are read when their stage computes.
    pub(crate) fn of<'a>(
        &self,
        config: &'a dyn ModelFamily,
        streams: bool,
    ) -> Result<Box<dyn ParameterSource + 'a>, ModelError> {
        match self {
            Self::Seed(seed) => Ok(config.initial(*seed)),
            Self::Directory { path, seed } => {
                let weights = hf::open_weights(path, config)?.keeping_quantised();
                let weights = if streams { weights.streaming()? } else { weights };
                Ok(Box::new(weights.drawing_labels(*seed, config)?))
            }
        }
    }
}

impl<'a> ModelSource<'a> {
    /// Returns the parameters of a model for generation at a place. Adapters of a base that is quantised or stays in its files,
    /// or of a table that a head shares, are not merged into it. A device other than the processor gets decoded parameters.
    pub(crate) fn for_generation(
        self,
        config: &dyn ModelFamily,
        place: &'a Place,
    ) -> Result<Box<dyn ParameterSource + 'a>, ModelError> {
        if !config.labels().is_empty() {
            return Err(ModelError::new(
                "the model has a head of labels, which scores texts and does not continue them: name a model without it",
            ));
        }
        if place.streams {
            return self.streamed(config, place);
        }
        let is_processor = place.device == Device::flex();
        match self {
            Self::Directory(directory) if !is_processor => Ok(Box::new(hf::open_weights(directory, config)?)),
            Self::Adapted(AdaptedCheckpoint { checkpoint, lora, base }) => {
                let specs = config.outline(0..config.layers(), &TensorParallel::default())?;
                let base = hf::open_weights(base, config)?;
                let base = if is_processor { base.keeping_quantised() } else { base };
                let is_of_tied = adapts_tied_table(config, lora);
                if !stays_apart(is_of_tied, base.has_quantised(), is_processor) {
                    return self.of(config);
                }
                if !lora.adapts_latents(specs.iter().map(|spec| &*spec.path)) {
                    return Ok(Box::new(AdaptedSource::of_checkpoint(
                        Box::new(base),
                        lora,
                        checkpoint,
                        place,
                    )));
                }
                if is_of_tied {
                    return Err(ModelError::new(
                        "the embedding and latents have adapters, and the head multiplies by the table of the embedding \
                         (`tie_word_embeddings`): adapters of latents are merged into their matrices for generation, and that of the \
                         embedding cannot be; export the adapters, and generate with PEFT",
                    ));
                }
                self.of(config)
            }
            other => other.of(config),
        }
    }

    fn streamed(
        self,
        config: &dyn ModelFamily,
        place: &'a Place,
    ) -> Result<Box<dyn ParameterSource + 'a>, ModelError> {
        let open = |dir: &Path| hf::open_weights(dir, config)?.keeping_quantised().streaming();
        let refused = |what: &str| {
            ModelError::new(format!(
                "{what}, so the model cannot stay in its files: generate without `--stream`"
            ))
        };
        match self {
            Self::Directory(directory) => Ok(Box::new(open(directory)?)),
            Self::Checkpoint(_) => Err(refused("a checkpoint has the whole model in another form")),
            Self::Adapted(AdaptedCheckpoint { checkpoint, lora, base }) => {
                let specs = config.outline(0..config.layers(), &TensorParallel::default())?;
                if lora.adapts_latents(specs.iter().map(|spec| &*spec.path)) {
                    return Err(refused("adapters of latents are merged into their matrices"));
                }
                let base = Box::new(open(base)?);
                Ok(Box::new(AdaptedSource::of_checkpoint(base, lora, checkpoint, place)))
            }
        }
    }

    /// Returns the parameters of a model.
    pub(crate) fn of(self, config: &dyn ModelFamily) -> Result<Box<dyn ParameterSource + 'a>, ModelError> {
        Ok(match self {
            Self::Directory(directory) => Box::new(hf::open_weights(directory, config)?.keeping_quantised()),
            Self::Checkpoint(checkpoint) => Box::new(Stored(checkpoint)),
            Self::Adapted(AdaptedCheckpoint { checkpoint, lora, base }) => {
                if adapts_tied_table(config, lora) {
                    return Err(ModelError::new(
                        "the embedding has an adapter, and the head multiplies by the table without it (`tie_word_embeddings`), so \
                         the adapters cannot be merged into the model: export the adapters alone, without --merge",
                    ));
                }
                let base = Box::new(hf::open_weights(base, config)?);
                let (whole, place) = (0..config.layers(), TensorParallel::default());
                let specs = outline(
                    config,
                    &VocabularyCut::default(),
                    whole,
                    &place,
                    Some(lora),
                    &QuantisedSizes::default(),
                )?;
                Box::new(MergedSource::new(base, Box::new(Stored(checkpoint)), lora, &specs))
            }
        })
    }
}

/// Returns whether the table of the embedding has an adapter, and the head multiplies by the table without it.
fn adapts_tied_table(config: &dyn ModelFamily, lora: &LoraConfig) -> bool {
    let form = config.head();
    form.is_tied && lora.adapts(&form.names.of(form.embedding))
}

/// Returns whether adapters are not merged into their base for generation: if they adapt a table that the head shares, and on the
/// processor if the base is quantised.
fn stays_apart(is_of_tied: bool, is_quantised: bool, is_processor: bool) -> bool {
    is_of_tied || (is_quantised && is_processor)
}

/// Returns the parameters of the stage that holds `layers` of a model with parts and adapters; see
/// [`ModelFamily::outline`].
pub(crate) fn outline(
    config: &dyn ModelFamily,
    cut: &VocabularyCut,
    layers: Range<usize>,
    tensor: &TensorParallel,
    lora: Option<&LoraConfig>,
    quantised: &QuantisedSizes,
) -> Result<Vec<ParameterSpec>, ModelError> {
    let mut outline = Outline::with(lora, quantised);
    let place = Place { tensor: tensor.clone(), ..Device::flex().into() };
    config.build_cut_stage(cut, layers, &mut outline, &place)?;
    Ok(outline.specs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_adapter_of_a_tied_table_is_merged_on_no_device() {
        assert_eq!([false, true].map(|is_processor| stays_apart(true, false, is_processor)), [true; 2]);
        assert_eq!([false, true].map(|is_processor| stays_apart(false, true, is_processor)), [false, true]);
    }
}
