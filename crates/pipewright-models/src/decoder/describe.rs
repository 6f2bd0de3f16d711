//! The description of a model as a list of layers with sizes and costs, for partition, simulation and the estimate of
//! memory.
//!
//! The table of a tied head counts as parameters of the embedding only, so that the sum over the layers is the number
//! of parameters of the model.

use pipewright_schedule::{LayerDesc, ModelDesc};

use super::config::DecoderConfig;
use super::form::BlockForm;
use super::mixture::MixtureConfig;
use crate::cost::{BIAS_PASSES, ELEMENT, FLOAT, GATE_PASSES, LOSS_PASSES, NORM_PASSES, TOKEN_ID};

impl DecoderConfig {
    /// Returns the layers in order; see [`ModelFamily::describe`](crate::ModelFamily::describe).
    pub(crate) fn describe(&self, form: &BlockForm<'_>, sequence: usize) -> ModelDesc {
        let hidden = self.hidden_size as u64;
        let table = self.vocab_size as u64 * hidden;
        let tokens = sequence as u64;

        let embedding = LayerDesc {
            path: "model.embed_tokens".to_owned(),
            kind: "embedding".to_owned(),
            parameters: table,
            // The forward copies a row, and the backward adds to a row.
            weight: 4 * ELEMENT * hidden,
            activation_bytes: tokens * TOKEN_ID,
            output_bytes: tokens * FLOAT * hidden,
            keys_values_bytes: 0,
        };
        let keys_values = 2 * (self.num_key_value_heads * self.head_dim()) as u64;
        let block = |index| {
            let mixture = form.mixture_of(index);
            let parts = [attention(self, form, tokens), feed_forward(self, form, mixture, tokens)];
            let sum = |of: fn(&Part) -> u64| parts.iter().map(of).sum::<u64>();
            let norms = 2 * norm(hidden);
            LayerDesc {
                path: format!("model.layers.{index}"),
                kind: if mixture.is_some() { "mixture" } else { "decoder" }.to_owned(),
                parameters: sum(|part| part.parameters) + 2 * hidden,
                weight: sum(|part| part.operations) + ELEMENT * 2 * NORM_PASSES * hidden,
                activation_bytes: tokens * FLOAT * (sum(|part| part.activations) + norms),
                output_bytes: tokens * FLOAT * hidden,
                keys_values_bytes: tokens * FLOAT * keys_values,
            }
        };
        let head = LayerDesc {
            path: "lm_head".to_owned(),
            kind: "head".to_owned(),
            parameters: hidden + if self.tie_word_embeddings { 0 } else { table },
            weight: 6 * table + ELEMENT * (NORM_PASSES * hidden + LOSS_PASSES * self.vocab_size as u64),
            // The input and the output of the norm, and the logits with a normaliser, which the loss keeps.
            activation_bytes: tokens * FLOAT * (norm(hidden) + self.vocab_size as u64 + 1),
            output_bytes: tokens * FLOAT * self.vocab_size as u64,
            keys_values_bytes: 0,
        };

        let mut layers = vec![embedding];
        layers.extend((0..self.num_hidden_layers).map(block));
        layers.push(head);
        ModelDesc { layers }
    }
}

/// Element-wise passes of an expert's rows: they are gathered and summed in both directions, and weighted.
const ROW_PASSES: u64 = 10;
/// Element-wise passes of an expert's matrices in a microbatch: the products read them in both directions and add to
/// their gradients. A dense layer has so many rows for each matrix that this does not matter.
const MATRIX_PASSES: u64 = 4;

/// The costs of a part of a block.
struct Part {
    parameters: u64,
    /// Operations of a token, forward and backward. Each parameter that a token meets takes part in three
    /// multiply-adds.
    operations: u64,
    /// Numbers that are kept per token until the backward. An operation keeps its inputs, and tensors that several
    /// operations keep are stored once. The input of a block's part is counted with its norm.
    activations: u64,
}

/// Returns the costs of the attention. Each pair of a query channel and one of the `tokens / 2` keys that a token sees
/// on average takes part in three multiply-adds, once for the scores and once for the values.
fn attention(config: &DecoderConfig, form: &BlockForm<'_>, tokens: u64) -> Part {
    let (hidden, head_dim) = (config.hidden_size as u64, config.head_dim() as u64);
    let (heads, kv_heads) = (config.num_attention_heads as u64, config.num_key_value_heads as u64);
    let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
    let matrices = 2 * hidden * (queries + keys);
    let inputs = if form.bias.inputs { queries + 2 * keys } else { 0 };
    let biases = inputs + if form.bias.output { hidden } else { 0 };
    // Queries, keys, values and the attention's output with a normaliser for each head.
    let kept = 2 * queries + 2 * keys + heads;
    // A normalisation of heads also keeps its input, with a scale for each head.
    let (factors, normalised, scales) = match form.normalises_heads {
        true => (2 * head_dim, queries + keys, heads + kv_heads),
        false => (0, 0, 0),
    };
    Part {
        parameters: matrices + biases + factors,
        operations: 6 * matrices
            + 6 * tokens * queries
            + ELEMENT * (BIAS_PASSES * biases + NORM_PASSES * normalised),
        activations: kept + normalised + scales,
    }
}

fn feed_forward(
    config: &DecoderConfig,
    form: &BlockForm<'_>,
    mixture: Option<&MixtureConfig>,
    tokens: u64,
) -> Part {
    match mixture {
        Some(mixture) => experts(config, mixture, tokens),
        None => dense(config, form),
    }
}

fn dense(config: &DecoderConfig, form: &BlockForm<'_>) -> Part {
    let (hidden, inner) = (config.hidden_size as u64, config.intermediate_size as u64);
    let matrices = 3 * hidden * inner;
    let biases = if form.mlp_bias { 2 * inner + hidden } else { 0 };
    Part {
        parameters: matrices + biases,
        operations: 6 * matrices + ELEMENT * (GATE_PASSES * inner + BIAS_PASSES * biases),
        // Gate, up and their product.
        activations: 3 * inner,
    }
}

/// Returns the costs of a mixture. A token meets the router and the experts that it chose; the matrices of all experts
/// that any token chose are moved once for the whole microbatch.
fn experts(config: &DecoderConfig, mixture: &MixtureConfig, tokens: u64) -> Part {
    let (hidden, inner) = (config.hidden_size as u64, mixture.moe_intermediate_size as u64);
    let (experts, chosen) = (mixture.num_experts as u64, mixture.num_experts_per_tok as u64);
    let (router, expert) = (hidden * experts, 3 * hidden * inner);
    let met = experts.min(tokens.saturating_mul(chosen));
    let moved = MATRIX_PASSES * met * expert / tokens.max(1);
    let element_wise = GATE_PASSES * chosen * inner + ROW_PASSES * chosen * hidden + LOSS_PASSES * experts;
    Part {
        parameters: router + experts * expert,
        operations: 6 * (router + chosen * expert) + ELEMENT * (element_wise + moved),
        // The probabilities; gate, up and their product of each chosen expert; its weight, and its number twice.
        activations: experts + chosen * (3 * inner + 1 + 2 * NUMBER),
    }
}

/// The size of an expert's number, in floats.
const NUMBER: u64 = 2;

/// Returns the numbers that a norm of this width keeps per row: input, output and scale.
fn norm(width: u64) -> u64 {
    2 * width + 1
}
