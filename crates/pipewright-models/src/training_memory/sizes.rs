//! The bytes of the tensors of layers and stages in the precision of a run. A model describes its layers in
//! single precision.

use pipewright::tensor::Precision;
use pipewright_schedule::costs::StageSizes;
use pipewright_schedule::recompute::LayerParts;
use pipewright_schedule::{EMBEDDING_PART, LayerDesc, ModelDesc};

use crate::cut_model::CutModel;
use crate::training_memory::adapters::{OneOperation, add_adapters, remove_inputs};
use crate::training_memory::compute_devices::ComputeDevices;

/// Returns the layers of a model for rows of `tokens` tokens. Their activations are the tensors that `devices`
/// keep in the precision of a run, also of adapters.
pub fn layers_in(
    model: &CutModel,
    tokens: usize,
    precision: Precision,
    devices: ComputeDevices,
) -> ModelDesc {
    let mut layers = base_layers_in(model, tokens, precision, devices);
    // The settings of adapters were checked with the model, so their layers are known.
    if let (Some(adapter), Ok(specs)) = (model.adapter(), model.trained_parameters()) {
        let one = OneOperation::new(&adapter.lora, devices, 1);
        add_adapters(&mut layers.layers, &adapter.lora, specs.iter(), tokens, precision, one);
        if let (ComputeDevices::Processor, Ok(base)) = (devices, model.model().parameters()) {
            let (base, adapted) = (base.iter().filter(|spec| !model.is_trained(&spec.path)), specs.iter());
            remove_inputs(&mut layers.layers, &adapter.lora, base, adapted, tokens, (precision, one));
        }
    }
    layers
}

/// Like [`layers_in`], without what adapters keep.
pub(super) fn base_layers_in(
    model: &CutModel,
    tokens: usize,
    precision: Precision,
    devices: ComputeDevices,
) -> ModelDesc {
    let mut described = model.describe(tokens);
    for layer in &mut described.layers {
        layer.activation_bytes = devices.kept_bytes(layer);
        layer.device_activation_bytes = None;
    }
    let mut layers = in_precision(&described, precision);
    if let (true, Ok(shape)) = (devices != ComputeDevices::Others, model.model().shape())
        && shape.vectors.norm_parameters > 1
    {
        // A layer normalisation keeps the centred and the scaled elements in single precision.
        let norm = 2 * shape.hidden * tokens as u64 * (Precision::F32.bytes() - precision.bytes());
        let blocks = layers.blocks();
        for layer in &mut layers.layers[blocks] {
            let norms = 2 * shape.vectors.norms_per_part * norm;
            layer.activation_bytes = layer.activation_bytes.saturating_add(norms);
        }
    }
    layers
}

/// Returns the sizes of the activations of a stage with these layers, for a microbatch of `rows` rows.
///
/// `I` keeps the inputs and the output gradients of the matrix products for `W`. Together they are about as
/// large as the activations.
pub(super) fn stage_sizes(layers: &[LayerDesc], rows: u32) -> StageSizes {
    let activation = kept_bytes(layers).saturating_mul(u64::from(rows));
    let keys_values = keys_values_bytes(layers).saturating_mul(u64::from(rows));
    StageSizes { activation, stash: activation, keys_values, ..StageSizes::default() }
}

/// Returns a layer that computes these parts again and does not keep them, and the bytes of the parts in its backward.
pub(super) fn without_parts(layer: &LayerDesc, parts: LayerParts) -> (LayerDesc, u64) {
    let bytes = parts.iter().map(|part| part.bytes_of(layer)).fold(0, u64::saturating_add);
    let bytes = bytes.min(layer.activation_bytes);
    (LayerDesc { activation_bytes: layer.activation_bytes - bytes, ..layer.clone() }, bytes)
}

/// Returns the bytes of the keys and values of these layers, for a row.
pub(super) fn keys_values_bytes(layers: &[LayerDesc]) -> u64 {
    layers.iter().map(|layer| layer.keys_values_bytes).fold(0, u64::saturating_add)
}

/// Returns the bytes that the forward of a stage with these layers keeps for its backward, for a row.
pub(super) fn kept_bytes(layers: &[LayerDesc]) -> u64 {
    let all = layers.iter().map(|layer| layer.activation_bytes).fold(0, u64::saturating_add);
    let shared = layers.windows(2).map(|pair| pair[1].shared_bytes(&pair[0]));
    shared.fold(all, u64::saturating_sub)
}

/// Returns the description of a model whose stages compute in `precision`. The token ids that the first layer
/// and the parts of the embedding keep do not depend on it.
fn in_precision(model: &ModelDesc, precision: Precision) -> ModelDesc {
    let scaled = |bytes: u64| bytes / Precision::F32.bytes() * precision.bytes();
    let layer = |(index, layer): (usize, &LayerDesc)| {
        let kept = layer.activation_bytes;
        LayerDesc {
            activation_bytes: if index == 0 || layer.kind == EMBEDDING_PART { kept } else { scaled(kept) },
            output_bytes: scaled(layer.output_bytes),
            keys_values_bytes: scaled(layer.keys_values_bytes),
            norms_bytes: scaled(layer.norms_bytes),
            feed_forward_bytes: scaled(layer.feed_forward_bytes),
            ..layer.clone()
        }
    };
    ModelDesc { layers: model.layers.iter().enumerate().map(layer).collect() }
}

#[cfg(test)]
mod tests {
    use pipewright_schedule::profile::HEAD_PART;

    use super::*;
    use crate::ModelConfig;
    use crate::decoder::{DecoderConfig, MixtureConfig};
    use crate::hybrid::{HybridConfig, Pattern};
    use crate::nemotron_h::{BlockKind as NemotronHBlock, NemotronHConfig};
    use crate::qwen3_moe::Qwen3MoeConfig;

    fn layer(activation_bytes: u64, output_bytes: u64) -> LayerDesc {
        LayerDesc {
            path: String::new(),
            kind: String::new(),
            parameters: 0,
            weight: 1,
            activation_bytes,
            output_bytes,
            keys_values_bytes: output_bytes,
            norms_bytes: 0,
            feed_forward_bytes: 0,
            products: 0,
            mixing: 0,
            copied: 0,
            device_activation_bytes: None,
            trained: None,
        }
    }

    #[test]
    fn parts_of_a_head_share_what_one_sends_to_the_next() {
        let part = |activation_bytes| LayerDesc { kind: HEAD_PART.into(), ..layer(activation_bytes, 5) };
        let layers = [layer(40, 5), part(14), part(9), part(9)];
        assert_eq!(stage_sizes(&layers, 3).activation, 3 * (40 + 14 + 4 + 4));
        assert_eq!(kept_bytes(&layers[1..2]), 14);
        assert_eq!(kept_bytes(&[layer(7, 5), layer(7, 5)]), 14);
    }

    #[test]
    fn layers_count_with_what_their_devices_keep() {
        use ComputeDevices::{Mixed, Others, Processor};
        let kept = |on_devices| {
            let layer = LayerDesc { device_activation_bytes: on_devices, ..layer(40, 5) };
            [Processor, Others, Mixed].map(|devices| devices.kept_bytes(&layer))
        };
        assert_eq!(kept(None), [40, 40, 40]);
        assert_eq!(kept(Some(90)), [40, 90, 90]);
        assert_eq!(kept(Some(30)), [40, 30, 40]);
    }

    /// Returns for each layer of a model how many more numbers devices keep of each token.
    fn more_on_devices(model: &ModelConfig) -> Vec<Option<i64>> {
        let more = |layer: &LayerDesc| {
            let bytes = layer.device_activation_bytes? as i64 - layer.activation_bytes as i64;
            Some(bytes / (8 * 4))
        };
        model.describe(8).layers.iter().map(more).collect()
    }

    #[test]
    fn mixtures_keep_the_rows_of_their_experts_on_devices() {
        let mixture = MixtureConfig { num_experts: 4, num_experts_per_tok: 3, ..MixtureConfig::of_width(96) };
        let sizes = DecoderConfig { hidden_size: 64, num_hidden_layers: 2, ..DecoderConfig::new(256, 4) };
        let model = ModelConfig::Qwen3Moe(Qwen3MoeConfig { mixture, ..sizes.clone().into() });
        let rows = Some(2 * 3 * 64);
        assert_eq!(more_on_devices(&model), [None, rows, rows, None]);
        assert_eq!(more_on_devices(&ModelConfig::Llama(sizes.into())), [None; 4]);
    }

    #[test]
    fn mamba_blocks_do_not_keep_their_scan_on_devices() {
        let json = include_str!("../../tests/data/nemotron-h-tiny/config.json");
        let config: NemotronHConfig = serde_json::from_str(json).expect("a configuration");
        let expected_of = |kind: &NemotronHBlock| match kind {
            // Heads of 16 numbers, 4 of them, in 2 groups.
            NemotronHBlock::Mamba => Some(-(4 * 16 + 2)),
            NemotronHBlock::Experts => Some(2 * 2 * 64),
            _ => None,
        };
        let blocks = config.blocks.iter().map(expected_of);
        let expected: Vec<_> = [None].into_iter().chain(blocks).chain([None]).collect();
        assert_eq!(more_on_devices(&ModelConfig::NemotronH(config)), expected);
    }

    #[test]
    fn blocks_of_a_hybrid_keep_their_own_numbers_on_devices() {
        let config = HybridConfig {
            num_attention_heads: 4,
            mamba_num_heads: 4,
            mamba_head_dim: 8,
            ssm_state_size: 8,
            n_groups: 2,
            intermediate_size: 40,
            num_experts: 4,
            num_experts_per_tok: 2,
            moe_intermediate_size: 24,
            mod_layers: vec![4],
            mod_capacity_factor: 0.5,
            ..HybridConfig::new(64, 32, Pattern::new("AMEDM").expect("a pattern"))
        };
        let scan = -(4 * 8 + 2);
        let expected = [None, None, Some(scan), Some(2 * 2 * 32), None, Some(scan / 2), None];
        assert_eq!(more_on_devices(&ModelConfig::Hybrid(config)), expected);
    }

    #[test]
    fn half_precision_halves_all_but_ids() {
        let model = ModelDesc { layers: vec![layer(80, 400), layer(4000, 400), layer(1200, 800)] };
        let sizes = |precision| {
            let layers = in_precision(&model, precision).layers;
            assert!(layers.iter().all(|layer| layer.keys_values_bytes == layer.output_bytes), "{layers:?}");
            layers.iter().map(|layer| (layer.activation_bytes, layer.output_bytes)).collect::<Vec<_>>()
        };
        assert_eq!(sizes(Precision::F32), [(80, 400), (4000, 400), (1200, 800)]);
        assert_eq!(sizes(Precision::Bf16), [(80, 200), (2000, 200), (600, 400)]);
    }
}
