//! Builds a stage of a decoder-only model from a source of parameters.

use std::ops::Range;

use burn::tensor::Tensor;
use pipewright_shapes::decoder::DecoderConfig;

use super::attentions::BlockAttentions;
use super::block::DecoderBlock;
use super::form::BlockForm;
use super::stage::{DecoderModel, DecoderStage, EMBEDDING, NORM, POSITION_TABLE};
use crate::error::ConfigError;
use crate::head_form::{FurtherPredictions, HeadForm};
use crate::parameter::{Builder, ParameterSource};
use crate::split::{Place, SplitStage};
use crate::stage_layers::{Layer, stage_layers};
use crate::training_module::{Loss, TrainingModule, loss_of_logits};
use crate::vocabulary::OutputHead;

/// Builds the stage that holds `layers`; see
/// [`ModelFamily::build_stage`](crate::ModelFamily::build_stage).
pub(crate) fn build_stage<S: ParameterSource>(
    config: &DecoderConfig,
    form: &BlockForm<'_>,
    layers: Range<usize>,
    source: &mut S,
    place: &Place,
) -> Result<DecoderStage, S::Error> {
    config.validate().map_err(ConfigError::from)?;
    let mut builder = Builder::new(source, place).with_names(form.names).with_inputs_first(form.inputs_first);
    let mut stage = DecoderStage::empty(config, form);
    for layer in stage_layers(layers, config.num_hidden_layers)? {
        match layer {
            Layer::Embedding => {
                let table = builder.token_table(EMBEDDING, config.vocab_size, config.hidden_size)?;
                stage.model.embed_tokens = Some(table);
                let positions = form
                    .position_table
                    .map(|positions| builder.embedding(POSITION_TABLE, positions, config.hidden_size));
                stage.model.embed_positions = positions.transpose()?;
            }
            Layer::Block(index) => {
                let path = format!("model.layers.{index}");
                let block = DecoderBlock::build(config, form, index, &path, &mut builder)?;
                stage.model.layers[index] = Some(block);
            }
            Layer::Head => stage.head = Some(OutputHead::build(&head(config, form), &mut builder)?),
        }
    }
    stage.split = builder.into_split(config.vocab_size);
    Ok(stage)
}

/// Returns the last norm and the head; see [`ModelFamily::head`](crate::ModelFamily::head).
pub(crate) fn head(config: &DecoderConfig, form: &BlockForm<'_>) -> HeadForm {
    HeadForm {
        norm: NORM,
        names: form.names,
        embedding: EMBEDDING,
        form: form.norm(config),
        width: config.hidden_size,
        vocabulary: config.vocab_size,
        is_tied: config.tie_word_embeddings,
        factor: form.factors.logits,
        cap: form.logit_cap,
        further: FurtherPredictions::default(),
    }
}

impl DecoderStage {
    fn empty(config: &DecoderConfig, form: &BlockForm<'_>) -> Self {
        let layers = vec![None; config.num_hidden_layers];
        Self {
            model: DecoderModel { embed_tokens: None, embed_positions: None, layers },
            head: None,
            attentions: BlockAttentions::new(config, form),
            embedding_factor: form.factors.embedding,
            names: form.names,
            split: SplitStage::default(),
        }
    }
}

impl TrainingModule for DecoderStage {
    fn loss(&self) -> Loss<Tensor<3>> {
        loss_of_logits(&self.split)
    }
}
