//! The model as a list of layers with sizes and costs, for partition and simulation.

use pipewright_schedule::{LayerDesc, ModelDesc};

use super::LlamaConfig;

/// What reading and writing one element in an element-wise pass costs, in floating point operations of a matrix product:
/// on a CPU core, products run at a few hundred operations in the time that memory moves ten floats.
const ELEMENT: u64 = 32;

pub(super) fn describe(config: &LlamaConfig, sequence: usize) -> ModelDesc {
    let hidden = config.hidden_size as u64;
    let table = config.vocab_size as u64 * hidden;

    let embedding = LayerDesc {
        path: "model.embed_tokens".to_owned(),
        kind: "embedding".to_owned(),
        parameters: table,
        // A row is copied forward, and added to a row backward.
        weight: 4 * ELEMENT * hidden,
    };
    let block = |index| LayerDesc {
        path: format!("model.layers.{index}"),
        kind: "decoder".to_owned(),
        parameters: block_parameters(config),
        weight: block_weight(config, sequence as u64),
    };
    let head = LayerDesc {
        path: "lm_head".to_owned(),
        kind: "head".to_owned(),
        parameters: hidden + table,
        weight: 6 * table + ELEMENT * (NORM_PASSES * hidden + LOSS_PASSES * config.vocab_size as u64),
    };

    let mut layers = vec![embedding];
    layers.extend((0..config.num_hidden_layers).map(block));
    layers.push(head);
    ModelDesc { layers }
}

/// Element-wise passes of a normalisation, of the loss, and of a gated activation, forward and backward.
const NORM_PASSES: u64 = 16;
const LOSS_PASSES: u64 = 12;
const GATE_PASSES: u64 = 12;

fn block_parameters(config: &LlamaConfig) -> u64 {
    matrix_parameters(config) + 2 * config.hidden_size as u64
}

fn matrix_parameters(config: &LlamaConfig) -> u64 {
    let (hidden, head_dim) = (config.hidden_size as u64, config.head_dim() as u64);
    let queries = config.num_attention_heads as u64 * head_dim;
    let keys = config.num_key_value_heads as u64 * head_dim;
    2 * hidden * (queries + keys) + 3 * hidden * config.intermediate_size as u64
}

/// Operations of a token, forward and backward: each parameter takes part in three multiply-adds, and so does each pair
/// of a query and one of the `sequence / 2` keys that it sees on average, once for the scores and once for the values.
fn block_weight(config: &LlamaConfig, sequence: u64) -> u64 {
    let queries = (config.num_attention_heads * config.head_dim()) as u64;
    let products = 6 * matrix_parameters(config) + 6 * sequence * queries;
    let element_wise =
        2 * NORM_PASSES * config.hidden_size as u64 + GATE_PASSES * config.intermediate_size as u64;
    products + ELEMENT * element_wise
}
