//! The bytes of the rows that arrive from other replicas, if replicas hold the experts together.

use pipewright::tensor::Precision;
use pipewright_schedule::LayerDesc;

use crate::lora::is_of_adapter;
use crate::model_config::ModelConfig;
use crate::parameter::ParameterSpec;

/// The tokens that choose the experts of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertLoad {
    /// All experts are chosen equally often.
    Mean,
    /// The tokens of all replicas that hold the experts together choose experts of one of them.
    OneReplica {
        /// The number of these replicas.
        replicas: u32,
    },
}

impl ExpertLoad {
    /// Returns the number of replicas whose tokens choose the experts of one of them.
    pub(super) fn replicas(self) -> u64 {
        match self {
            Self::Mean => 1,
            Self::OneReplica { replicas } => u64::from(replicas),
        }
    }
}

/// Returns the number of experts that the router of a model chooses for each token; 0 without experts.
pub(super) fn chosen_experts(model: &ModelConfig) -> u64 {
    model.to_json().get("num_experts_per_tok").and_then(serde_json::Value::as_u64).unwrap_or(0)
}

/// Returns the bytes of the rows of `tokens` tokens that go to experts, in `precision`: one row for each of the
/// `chosen` experts of a token. `matrix` is the first matrix of one of the experts.
pub(super) fn row_bytes(matrix: &ParameterSpec, chosen: u64, tokens: u64, precision: Precision) -> u64 {
    // The first matrix of an expert has the rows of tokens as its inputs.
    let width = matrix.shape.first().copied().unwrap_or_default() as u64;
    chosen.saturating_mul(width).saturating_mul(tokens).saturating_mul(precision.bytes())
}

/// Adds to `layers`, which have the sizes for rows of `tokens` tokens in `precision`, the inputs that the
/// experts among the parameters `specs` keep for their backward: a row for each of the `chosen` experts of a
/// token. A replica that holds all experts keeps the inputs of the layer alone. This is the mean over the
/// replicas of a group: a replica keeps as many rows as tokens choose its experts. If the tokens of all
/// replicas choose experts of one of them ([`ExpertLoad::OneReplica`]), that replica also keeps the inputs
/// and the outputs of each matrix, and of a gated expert their product, for the tokens of the others.
pub(super) fn add_arrived_rows<'a>(
    layers: &mut [LayerDesc],
    chosen: u64,
    specs: impl Iterator<Item = &'a ParameterSpec>,
    tokens: usize,
    precision: Precision,
    load: ExpertLoad,
) {
    let is_own = |spec: &&ParameterSpec| spec.is_of_routed_expert() && !is_of_adapter(&spec.path);
    let matrices: Vec<&ParameterSpec> = specs.filter(is_own).collect();
    for layer in layers {
        let Some(matrix) = matrices.iter().find(|spec| spec.is_in(&layer.path)) else { continue };
        let rows = row_bytes(matrix, chosen, tokens as u64, precision);
        let kept = chosen.saturating_mul(kept_numbers(&matrices, matrix)).saturating_mul(tokens as u64);
        let more = kept.saturating_mul(load.replicas().saturating_sub(1)).saturating_mul(precision.bytes());
        let bytes = rows.saturating_mul(load.replicas()).saturating_add(more);
        layer.activation_bytes = layer.activation_bytes.saturating_add(bytes);
    }
}

/// Returns the numbers that an expert, one of whose matrices is `first`, keeps of a row besides its input:
/// the outputs of all matrices but the last one, and what the last one multiplies.
fn kept_numbers(matrices: &[&ParameterSpec], first: &ParameterSpec) -> u64 {
    let expert = |spec: &ParameterSpec| {
        let mut names = spec.path.rsplitn(3, '.');
        names.nth(2).map(str::to_owned)
    };
    let own = matrices.iter().filter(|spec| expert(spec) == expert(first)).count() as u64;
    own.saturating_mul(first.shape.get(1).copied().unwrap_or_default() as u64)
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
            add_arrived_rows(&mut layers, 2, specs.iter(), 10, precision, ExpertLoad::Mean);
            let added = layers
                .iter()
                .zip(&before)
                .map(|(now, before)| now.activation_bytes - before.activation_bytes);
            assert_eq!(added.collect::<Vec<_>>(), [0, 0, 2 * 64 * 10 * precision.bytes(), 0]);
        }
    }

    #[test]
    fn a_replica_whose_experts_all_tokens_choose_keeps_their_rows() {
        let keys = [("mlp_only_layers".to_owned(), serde_json::json!([0]))].into_iter().collect();
        let model = ModelConfig::of_sizes("qwen3_moe", DecoderConfig::new(256, 4), keys);
        let model = model.expect("sizes of a model");
        let (before, specs) = (model.describe(10).layers, model.parameters().expect("it has parameters"));
        let gate = specs.iter().find(|spec| spec.is_of_routed_expert()).expect("experts");
        let inner = gate.shape[1] as u64;
        for replicas in [1, 4] {
            let mut layers = before.clone();
            let load = ExpertLoad::OneReplica { replicas };
            add_arrived_rows(&mut layers, 2, specs.iter(), 10, Precision::F32, load);
            let added = layers[2].activation_bytes - before[2].activation_bytes;
            // Two rows for each of ten tokens: their inputs, and gate, up and product of the other replicas'.
            let replicas = u64::from(replicas);
            assert_eq!(added, 2 * 10 * 4 * (64 * replicas + 3 * inner * (replicas - 1)));
        }
    }
}
