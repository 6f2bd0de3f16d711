//! Texts that the model continues in the middle of its training.

use burn::tensor::{Device, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use crate::pipeline::{Mistake, Pipeline, PipelineError};
use crate::tensor::{Values, unpack};

/// A prompt with the text by which the model continues it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// The prompt.
    pub prompt: String,
    /// The text after it.
    pub text: String,
}

/// When texts end.
#[derive(Clone, Copy)]
pub(super) struct Limits<'a> {
    /// The most tokens after a prompt.
    pub tokens: usize,
    /// The tokens that end a text. They do not belong to it.
    pub ends: &'a [u32],
}

/// A text that grows.
struct Text {
    tokens: Vec<u32>,
    is_ended: bool,
}

/// Returns the most likely tokens after each prompt, until the text ends or the prompt with them has as many
/// tokens as a row. A batch has `shape`, rows and tokens of a row.
///
/// Each token is an evaluation of a batch in which the texts begin the rows. A token does not
/// see what comes after it, so the rest of a row does not matter.
pub(super) fn continue_texts(
    pipeline: &mut Pipeline,
    prompts: &[Vec<u32>],
    shape: [usize; 2],
    limits: Limits<'_>,
) -> Result<Vec<Vec<u32>>, PipelineError> {
    let text = |prompt: &Vec<u32>| Text { tokens: prompt.clone(), is_ended: prompt.len() >= shape[1] };
    let mut texts: Vec<Text> = prompts.iter().map(text).collect();
    for group in texts.chunks_mut(shape[0]) {
        for _ in 0..limits.tokens {
            if group.iter().all(|text| text.is_ended) {
                break;
            }
            let summary = pipeline.eval(batch(group, shape), None::<Tensor<2, Int>>)?;
            if summary.interrupted {
                return Err(PipelineError::Interrupted);
            }
            append(group, summary.outputs, shape[1], limits.ends)?;
        }
    }
    let generated = texts.into_iter().zip(prompts);
    Ok(generated.map(|(mut text, prompt)| text.tokens.split_off(prompt.len())).collect())
}

/// Returns the texts as rows of a batch. Rows without a text, and the ends of rows, have the token 0.
fn batch(texts: &[Text], shape @ [rows, length]: [usize; 2]) -> Tensor<2, Int> {
    let mut ids = vec![0i32; rows * length];
    for (row, text) in ids.chunks_exact_mut(length).zip(texts) {
        row.iter_mut().zip(&text.tokens).for_each(|(id, &token)| *id = token as i32);
    }
    Tensor::from_data(TensorData::new(ids, shape), &Device::flex())
}

/// Appends to each text the token with the largest of the logits after it, unless it ends the text; of
/// several equal ones the first. The first output of each microbatch are the logits.
fn append(
    texts: &mut [Text],
    outputs: Vec<Values>,
    length: usize,
    ends: &[u32],
) -> Result<(), PipelineError> {
    let mut texts = texts.iter_mut();
    for output in outputs {
        let logits: Tensor<3> = unpack(output.into_iter().take(1).collect())
            .map_err(|reason| {
                let sentence = format!(
                    "texts cannot be continued, because the model does not return logits of [rows, tokens, vocabulary]: \
                     {reason}"
                );
                PipelineError::Batch(Mistake::caused(sentence, reason))
            })?;
        let [rows, _, vocabulary] = logits.dims();
        for (row, text) in (0..rows).zip(texts.by_ref()).filter(|(_, text)| !text.is_ended) {
            let at = text.tokens.len() - 1;
            let last = logits.clone().slice([row..row + 1, at..at + 1, 0..vocabulary]);
            let last: Vec<f32> = last.into_data().iter().collect();
            let best = (0..vocabulary).rev().max_by(|&a, &b| last[a].total_cmp(&last[b]));
            match best.map(|token| token as u32).filter(|token| !ends.contains(token)) {
                Some(token) => text.tokens.push(token),
                None => text.is_ended = true,
            }
            text.is_ended |= text.tokens.len() >= length;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::pack;

    fn texts() -> Vec<Text> {
        [1, 2].map(|token| Text { tokens: vec![token], is_ended: false }).into()
    }

    /// Returns the logits of one row, after whose first token `token` is the most likely of three.
    fn row(token: usize) -> Values {
        let mut logits = [0.0f32; 12];
        logits[token] = 1.0;
        pack(Tensor::<3>::from_data(TensorData::new(logits.to_vec(), [1, 4, 3]), &Device::flex()))
    }

    #[test]
    fn a_text_ends_before_its_end_token() {
        let mut texts = texts();
        append(&mut texts, vec![row(2), row(0)], 4, &[0]).expect("logits");
        let found: Vec<_> = texts.iter().map(|text| (&text.tokens[..], text.is_ended)).collect();
        assert_eq!(found, [(&[1, 2][..], false), (&[2][..], true)]);
    }

    #[test]
    fn outputs_that_are_not_logits_are_refused() {
        let flat = Tensor::<2>::zeros([1, 3], &Device::flex());
        let outcome = append(&mut texts(), vec![pack(flat), row(2)], 4, &[]);
        let error = outcome.expect_err("there are no logits").to_string();
        assert!(error.starts_with("texts cannot be continued"), "{error}");
    }
}
