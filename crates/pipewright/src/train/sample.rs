//! Texts that the model continues in the middle of its training.

use burn::tensor::{Device, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use crate::pipeline::{Pipeline, PipelineError};
use crate::tensor::{Values, unpack};

/// A prompt with the text by which the model continues it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// The prompt.
    pub prompt: String,
    /// The text after it.
    pub text: String,
}

/// Returns the most likely tokens after each prompt: at most `tokens`, and at most until the prompt with them
/// has as many tokens as a row. A batch has `shape`, rows and tokens of a row.
///
/// Each token is an evaluation of a batch in which the texts stand at the beginning of rows. A token does not
/// see what comes after it, so the rest of a row does not matter.
pub(super) fn continue_texts(
    pipeline: &mut Pipeline,
    prompts: &[Vec<u32>],
    shape: [usize; 2],
    tokens: usize,
) -> Result<Vec<Vec<u32>>, PipelineError> {
    let mut texts = prompts.to_vec();
    for group in texts.chunks_mut(shape[0]) {
        for _ in 0..tokens {
            if group.iter().all(|text| text.len() >= shape[1]) {
                break;
            }
            let outputs = pipeline.eval(batch(group, shape), None::<Tensor<2, Int>>)?.outputs;
            append(group, outputs, shape[1]);
        }
    }
    let generated = texts.into_iter().zip(prompts);
    Ok(generated.map(|(mut text, prompt)| text.split_off(prompt.len())).collect())
}

/// Returns the texts as rows of a batch. Rows without a text, and the ends of rows, have the token 0.
fn batch(texts: &[Vec<u32>], shape @ [rows, length]: [usize; 2]) -> Tensor<2, Int> {
    let mut ids = vec![0i32; rows * length];
    for (row, text) in ids.chunks_exact_mut(length).zip(texts) {
        row.iter_mut().zip(text).for_each(|(id, &token)| *id = token as i32);
    }
    Tensor::from_data(TensorData::new(ids, shape), &Device::flex())
}

/// Appends to each text the token with the largest of the logits after it; of several equal ones the first.
/// The first output of each microbatch are the logits.
fn append(texts: &mut [Vec<u32>], outputs: Vec<Values>, length: usize) {
    let mut texts = texts.iter_mut();
    for output in outputs {
        let Ok(logits) = unpack::<Tensor<3>>(output.into_iter().take(1).collect()) else { continue };
        let [rows, _, vocabulary] = logits.dims();
        for (row, text) in (0..rows).zip(texts.by_ref()) {
            if text.len() < length {
                let last = logits.clone().slice([row..row + 1, text.len() - 1..text.len(), 0..vocabulary]);
                let last: Vec<f32> = last.into_data().iter().collect();
                let best = (0..vocabulary).rev().max_by(|&a, &b| last[a].total_cmp(&last[b]));
                text.extend(best.map(|token| token as u32));
            }
        }
    }
}
