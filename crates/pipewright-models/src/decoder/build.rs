//! Builds a stage of a decoder-only model from a source of parameters.

use std::ops::Range;

use burn::tensor::Tensor;

use super::attentions::BlockAttentions;
use super::block::DecoderBlock;
use super::config::DecoderConfig;
use super::form::BlockForm;
use super::stage::{DecoderModel, DecoderStage, EMBEDDING, NORM, POSITION_TABLE};
use crate::head_form::{FurtherPredictions, HeadForm};
use crate::parameter::{Builder, ParameterSource};
use crate::split::{Place, SplitStage};
use crate::stage_layers::{Layer, stage_layers};
use crate::training_module::{Loss, TrainingModule, loss_of_logits};
use crate::vocabulary::OutputHead;

impl DecoderConfig {
    /// Builds the stage that holds `layers`; see
    /// [`ModelFamily::build_stage`](crate::ModelFamily::build_stage).
    pub(crate) fn build_stage<S: ParameterSource>(
        &self,
        form: &BlockForm<'_>,
        layers: Range<usize>,
        source: &mut S,
        place: &Place,
    ) -> Result<DecoderStage, S::Error> {
        self.validate()?;
        let mut builder =
            Builder::new(source, place).with_names(form.names).with_inputs_first(form.inputs_first);
        let mut stage = DecoderStage::empty(self, form);
        for layer in stage_layers(layers, self.num_hidden_layers)? {
            match layer {
                Layer::Embedding => {
                    let table = builder.token_table(EMBEDDING, self.vocab_size, self.hidden_size)?;
                    stage.model.embed_tokens = Some(table);
                    let positions = form
                        .position_table
                        .map(|positions| builder.embedding(POSITION_TABLE, positions, self.hidden_size));
                    stage.model.embed_positions = positions.transpose()?;
                }
                Layer::Block(index) => {
                    let path = format!("model.layers.{index}");
                    let block = DecoderBlock::build(self, form, index, &path, &mut builder)?;
                    stage.model.layers[index] = Some(block);
                }
                Layer::Head => stage.head = Some(OutputHead::build(&self.head(form), &mut builder)?),
            }
        }
        stage.split = builder.into_split(self.vocab_size);
        Ok(stage)
    }

    /// Returns the last norm and the head; see [`ModelFamily::head`](crate::ModelFamily::head).
    pub(crate) fn head(&self, form: &BlockForm<'_>) -> HeadForm {
        HeadForm {
            norm: NORM,
            names: form.names,
            embedding: EMBEDDING,
            form: self.norm(form),
            width: self.hidden_size,
            vocabulary: self.vocab_size,
            is_tied: self.tie_word_embeddings,
            factor: form.factors.logits,
            cap: form.logit_cap,
            further: FurtherPredictions::default(),
        }
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
