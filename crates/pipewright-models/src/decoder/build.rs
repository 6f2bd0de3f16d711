//! Builds a stage of a decoder-only model from a source of parameters.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Device;
use pipewright::nn::{Embedding, TensorParallel, TiedHead};
use pipewright::stage::Stage;

use super::block::DecoderBlock;
use super::config::DecoderConfig;
use super::form::BlockForm;
use super::stage::{AttentionCache, DecoderModel, DecoderStage, EMBEDDING, NORM};
use crate::error::ConfigError;
use crate::head_form::HeadForm;
use crate::parameter::{Builder, ParameterSource};
use crate::split::SplitStage;
use crate::stage_layers::{Layer, stage_layers};
use crate::training_module::{TrainingModule, stage_of_logits};

impl DecoderConfig {
    /// Builds the stage that holds `layers`; see
    /// [`ModelFamily::build_split_stage`](crate::ModelFamily::build_split_stage).
    pub(crate) fn build_split_stage<S>(
        &self,
        form: &BlockForm<'_>,
        layers: Range<usize>,
        source: &mut S,
        (device, tensor): (&Device, &TensorParallel),
    ) -> Result<DecoderStage, S::Error>
    where
        S: ParameterSource,
        S::Error: From<ConfigError>,
    {
        self.validate()?;
        let mut builder = Builder::new(source, device, tensor);
        let mut stage = DecoderStage::empty(self);
        for layer in stage_layers(layers, self.num_hidden_layers)? {
            match layer {
                Layer::Embedding => {
                    let weight = builder.token_table(EMBEDDING, self.vocab_size, self.hidden_size)?;
                    stage.model.embed_tokens = Some(Embedding { weight });
                }
                Layer::Block(index) => {
                    let path = format!("model.layers.{index}");
                    let block = DecoderBlock::build(self, form, index, &path, &mut builder)?;
                    stage.model.layers[index] = Some(block);
                }
                Layer::Head => stage.add_head(self, &mut builder)?,
            }
        }
        let placements = Arc::new(builder.into_placements());
        stage.split = SplitStage { tensor: tensor.clone(), vocabulary: self.vocab_size, placements };
        Ok(stage)
    }
}

impl DecoderConfig {
    /// Returns the last norm and the head; see [`ModelFamily::head`](crate::ModelFamily::head).
    pub(crate) fn head(&self) -> HeadForm {
        HeadForm {
            norm: NORM,
            epsilon: self.rms_norm_eps,
            width: self.hidden_size,
            vocabulary: self.vocab_size,
            is_tied: self.tie_word_embeddings,
        }
    }
}

impl DecoderStage {
    fn empty(config: &DecoderConfig) -> Self {
        let layers = vec![None; config.num_hidden_layers];
        Self {
            model: DecoderModel { embed_tokens: None, layers, norm: None },
            lm_head: None,
            tied_head: None,
            attention: AttentionCache::new(config),
            split: SplitStage::default(),
        }
    }

    fn add_head<S>(&mut self, config: &DecoderConfig, builder: &mut Builder<'_, S>) -> Result<(), S::Error>
    where
        S: ParameterSource,
        S::Error: From<ConfigError>,
    {
        let (vocabulary, hidden) = (config.vocab_size, config.hidden_size);
        self.model.norm = Some(builder.norm(NORM, hidden, config.rms_norm_eps)?);
        match config.tie_word_embeddings {
            true => {
                let weight = builder.token_table(EMBEDDING, vocabulary, hidden)?;
                self.tied_head = Some(TiedHead { weight });
            }
            false => self.lm_head = Some(builder.head(vocabulary, hidden)?),
        }
        Ok(())
    }
}

impl TrainingModule for DecoderStage {
    fn into_stage(self, is_last: bool) -> Stage {
        let split = self.split.clone();
        stage_of_logits(self, is_last, split)
    }
}
