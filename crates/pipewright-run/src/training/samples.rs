//! The prompts that a run continues with each evaluation (`run.sample_prompts`).

use std::sync::Arc;

use pipewright::pipeline::PipelineError;
use pipewright::train::data::{DataError, TokenCodec};
use pipewright::train::{Sample, Trainer};
use pipewright_schedule::error_text::with_causes as sentence;

use crate::error::RunError;
use crate::run_data::data_config;
use crate::run_model::RunModel;
use crate::settings::Settings;
use crate::settings::pipeline::TransportChoice;
use crate::training::origin;

/// Prompts as tokens.
#[derive(Clone, Debug)]
pub struct SamplePrompts {
    codec: Arc<TokenCodec>,
    texts: Vec<String>,
    prompts: Vec<Vec<u32>>,
    /// The number of tokens after a prompt, at most.
    tokens: usize,
    /// The tokens that end a text.
    ends: Vec<u32>,
}

impl SamplePrompts {
    /// Returns the prompts of a run; `None` if it has none.
    pub fn open(settings: &Settings, model: &dyn RunModel) -> Result<Option<Self>, RunError> {
        let (run, data, vocab_size) = (&settings.run, &settings.data, model.vocab_size());
        let texts = run.sample_prompts.clone();
        if texts.is_empty() {
            return Ok(None);
        }
        let refused = |reason: String| RunError::input(format!("`run.sample_prompts`: {reason}"));
        if model.has_labels() {
            return Err(refused(
                "a model with a head of labels does not continue texts: remove the key".to_owned(),
            ));
        }
        let advice = "remove the key, and ask a checkpoint with `pipewright generate`";
        if settings.pipeline.transport == TransportChoice::Mpi {
            return Err(refused(format!("the tokens are not sent between processes: {advice}")));
        }
        if settings.pipeline.head_parts > 1 {
            return Err(refused(format!("a head in parts has no logits (`pipeline.head_parts`): {advice}")));
        }
        let codec = TokenCodec::open(&data_config(settings).tokenizer).map_err(RunError::input)?;
        let encode = |text: &String| {
            let encoded = encode_prompt(&codec, vocab_size, data.bos_id, text);
            let tokens = encoded.map_err(|error| refused(format!("{text:?}: {}", sentence(&error))))?;
            let (count, longest) = (tokens.len(), data.seq_len as usize);
            if count == 0 || count >= longest {
                return Err(refused(format!(
                    "{text:?} has {count} tokens: give from 1 to {}, fewer than a row (`data.seq_len`)",
                    longest.saturating_sub(1)
                )));
            }
            Ok(tokens)
        };
        let prompts = texts.iter().map(encode).collect::<Result<_, _>>()?;
        let (codec, ends) = (Arc::new(codec), origin::end_tokens(settings)?);
        Ok(Some(Self { codec, texts, prompts, tokens: run.sample_tokens as usize, ends }))
    }

    /// Continues the prompts with the most likely tokens.
    pub fn sample(&self, trainer: &mut Trainer) -> Result<Vec<Sample>, PipelineError> {
        let tokens = trainer.sample(&self.prompts, self.tokens, &self.ends)?;
        let samples =
            self.texts.iter().zip(tokens).map(|(prompt, tokens)| {
                Ok(Sample { prompt: prompt.clone(), text: self.codec.decode(&tokens)? })
            });
        samples.collect()
    }
}

/// Returns the tokens of a prompt, begun as the documents of the training begin.
pub fn encode_prompt(
    codec: &TokenCodec,
    vocab_size: usize,
    bos_id: Option<u32>,
    text: &str,
) -> Result<Vec<u32>, DataError> {
    // Models are trained with the special tokens of their tokenizers, such as the token that begins a
    // document.
    let encoded = codec.encode(text, vocab_size, true)?;
    let bos = bos_id.filter(|bos| encoded.first() != Some(bos));
    Ok(bos.into_iter().chain(encoded).collect())
}
