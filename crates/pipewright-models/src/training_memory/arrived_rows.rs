//! The bytes of the rows that arrive from other replicas, if replicas hold the experts together.

use pipewright::tensor::Precision;
use pipewright_schedule::LayerDesc;

use crate::model_config::ModelConfig;
use crate::parameter::ParameterSpec;

/// Returns the number of experts that the router of a model chooses for each token; 0 without experts.
pub(super) fn chosen_experts(model: &ModelConfig) -> u64 {
    model.to_json().get("num_experts_per_tok").and_then(serde_json::Value::as_u64).unwrap_or(0)
}

/// Adds to `layers`, which have the sizes for rows of `tokens` tokens in `precision`, the inputs that the
/// experts among the parameters `specs` keep for their backward: a row for each of the `chosen` experts of a
/// token. A replica that holds all experts keeps the inputs of the layer alone. This is the mean over the
/// replicas of a group: a replica keeps as many rows as tokens choose its experts.
pub(super) fn add_arrived_rows<'a>(
    layers: &mut [LayerDesc],
    chosen: u64,
    specs: impl Iterator<Item = &'a ParameterSpec>,
    tokens: usize,
    precision: Precision,
) {
    // The first matrix of an expert has the rows of tokens as its inputs.
    let matrices: Vec<&ParameterSpec> = specs.filter(|spec| spec.is_of_routed_expert()).collect();
    for layer in layers {
        let Some(matrix) = matrices.iter().find(|spec| spec.is_in(&layer.path)) else { continue };
        let width = matrix.shape.first().copied().unwrap_or_default() as u64;
        let numbers = chosen.saturating_mul(width).saturating_mul(tokens as u64);
        let bytes = numbers.saturating_mul(precision.bytes());
        layer.activation_bytes = layer.activation_bytes.saturating_add(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::DecoderConfig;

    #[test]
    fn each_chosen_expert_keeps_a_row_of_its_own() {
        let keys = [("mlp_only_layers".to_owned(), serde_json::json!([0]))].into_iter().collect();
        let model = ModelConfig::of_sizes("qwen3_moe", DecoderConfig::new(256, 4), keys);
        let model = model.expect("sizes of a model");
        assert_eq!(chosen_experts(&model), 2);
        let (before, specs) = (model.describe(10).layers, model.parameters().expect("it has parameters"));
        for precision in [Precision::F32, Precision::Bf16] {
            let mut layers = before.clone();
            add_arrived_rows(&mut layers, 2, specs.iter(), 10, precision);
            let added = layers
                .iter()
                .zip(&before)
                .map(|(now, before)| now.activation_bytes - before.activation_bytes);
            assert_eq!(added.collect::<Vec<_>>(), [0, 0, 2 * 64 * 10 * precision.bytes(), 0]);
        }
    }
}
