//! The description of a model as a list of layers with sizes and costs, for partition, simulation and the estimate of
//! memory.
//!
//! The table of a tied head counts as parameters of the embedding only, so that the sum over the layers is the number
//! of parameters of the model.

use pipewright_schedule::{LayerDesc, ModelDesc};

use super::block::AttentionBias;
use super::config::DecoderConfig;
use crate::cost::{BIAS_PASSES, ELEMENT, FLOAT, GATE_PASSES, LOSS_PASSES, NORM_PASSES, TOKEN_ID};

impl DecoderConfig {
    /// Returns the layers in order; see [`ModelFamily::describe`](crate::ModelFamily::describe).
    pub(crate) fn describe(&self, bias: AttentionBias, sequence: usize) -> ModelDesc {
        let hidden = self.hidden_size as u64;
        let table = self.vocab_size as u64 * hidden;

        let embedding = LayerDesc {
            path: "model.embed_tokens".to_owned(),
            kind: "embedding".to_owned(),
            parameters: table,
            // The forward copies a row, and the backward adds to a row.
            weight: 4 * ELEMENT * hidden,
            activation_bytes: sequence as u64 * TOKEN_ID,
        };
        let block = |index| LayerDesc {
            path: format!("model.layers.{index}"),
            kind: "decoder".to_owned(),
            parameters: block_parameters(self, bias),
            weight: block_weight(self, bias, sequence as u64),
            activation_bytes: sequence as u64 * FLOAT * block_activations(self),
        };
        let head = LayerDesc {
            path: "lm_head".to_owned(),
            kind: "head".to_owned(),
            parameters: hidden + if self.tie_word_embeddings { 0 } else { table },
            weight: 6 * table + ELEMENT * (NORM_PASSES * hidden + LOSS_PASSES * self.vocab_size as u64),
            activation_bytes: sequence as u64 * FLOAT * head_activations(self),
        };

        let mut layers = vec![embedding];
        layers.extend((0..self.num_hidden_layers).map(block));
        layers.push(head);
        ModelDesc { layers }
    }
}

fn block_parameters(config: &DecoderConfig, bias: AttentionBias) -> u64 {
    matrix_parameters(config) + bias_parameters(config, bias) + 2 * config.hidden_size as u64
}

fn matrix_parameters(config: &DecoderConfig) -> u64 {
    let hidden = config.hidden_size as u64;
    let (queries, keys) = head_widths(config);
    2 * hidden * (queries + keys) + 3 * hidden * config.intermediate_size as u64
}

fn bias_parameters(config: &DecoderConfig, bias: AttentionBias) -> u64 {
    let (queries, keys) = head_widths(config);
    let inputs = if bias.inputs { queries + 2 * keys } else { 0 };
    let output = if bias.output { config.hidden_size as u64 } else { 0 };
    inputs + output
}

/// Returns the channels of all query heads, and of all key heads.
fn head_widths(config: &DecoderConfig) -> (u64, u64) {
    let head_dim = config.head_dim() as u64;
    (config.num_attention_heads as u64 * head_dim, config.num_key_value_heads as u64 * head_dim)
}

/// Returns the operations of a token, forward and backward. Each parameter takes part in three multiply-adds. So does
/// each pair of a query channel and one of the `sequence / 2` keys that a token sees on average, once for the scores
/// and once for the values.
fn block_weight(config: &DecoderConfig, bias: AttentionBias, sequence: u64) -> u64 {
    let (queries, _) = head_widths(config);
    let products = 6 * matrix_parameters(config) + 6 * sequence * queries;
    let element_wise = 2 * NORM_PASSES * config.hidden_size as u64
        + GATE_PASSES * config.intermediate_size as u64
        + BIAS_PASSES * bias_parameters(config, bias);
    products + ELEMENT * element_wise
}

/// Returns the numbers that a block keeps per token until its backward. An operation keeps its inputs, and tensors that
/// several operations keep are stored once. In order: the input and the output of both norms with the scale of the row;
/// queries, keys, values and the attention's output with a normaliser for each head; gate, up and their product.
fn block_activations(config: &DecoderConfig) -> u64 {
    let (queries, keys) = head_widths(config);
    let norms = 2 * norm_activations(config.hidden_size as u64);
    let attention = 2 * queries + 2 * keys + config.num_attention_heads as u64;
    norms + attention + 3 * config.intermediate_size as u64
}

/// As [`block_activations`]: the input and the output of the norm, and the logits with a normaliser, which the loss
/// keeps.
fn head_activations(config: &DecoderConfig) -> u64 {
    norm_activations(config.hidden_size as u64) + config.vocab_size as u64 + 1
}

/// Returns the numbers that a norm of this width keeps per row: input, output and scale.
fn norm_activations(width: u64) -> u64 {
    2 * width + 1
}
