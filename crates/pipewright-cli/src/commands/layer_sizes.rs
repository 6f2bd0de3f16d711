//! The bytes of a layer's tensors in the precision of a run, and of a stage's. A model describes its layers in single
//! precision.

use pipewright::tensor::Precision;
use pipewright_models::CutModel;
use pipewright_schedule::costs::StageSizes;
use pipewright_schedule::{LayerDesc, ModelDesc};

use crate::config::Settings;

/// Returns the layers of a run's model, with their sizes in the precision of the run.
pub(super) fn layers_of(settings: &Settings, model: &CutModel) -> ModelDesc {
    in_precision(&model.describe(settings.data.seq_len as usize), settings.run.precision)
}

/// Returns the sizes of the activations of a stage with these layers, for a microbatch of `rows` rows.
///
/// `I` keeps the inputs and the output gradients of the matrix products for `W`. Together they are about as large as the
/// activations.
pub(super) fn stage_sizes(layers: &[LayerDesc], rows: u32) -> StageSizes {
    let bytes = |of: fn(&LayerDesc) -> u64| {
        layers.iter().map(of).fold(0, u64::saturating_add).saturating_mul(u64::from(rows))
    };
    let activation = bytes(|layer| layer.activation_bytes);
    let keys_values = bytes(|layer| layer.keys_values_bytes);
    StageSizes { activation, stash: activation, keys_values, ..StageSizes::default() }
}

/// Returns the description of a model whose stages compute in `precision`. The first layer keeps token ids, and the loss
/// keeps the outputs of the last one in single precision: neither depends on the precision.
fn in_precision(model: &ModelDesc, precision: Precision) -> ModelDesc {
    let scaled = |bytes: u64| bytes / Precision::F32.bytes() * precision.bytes();
    let layer = |(place, layer): (usize, &LayerDesc)| {
        let stays = match place {
            0 => layer.activation_bytes,
            place if place + 1 == model.layers.len() => layer.output_bytes.min(layer.activation_bytes),
            _ => 0,
        };
        LayerDesc {
            activation_bytes: scaled(layer.activation_bytes - stays).saturating_add(stays),
            output_bytes: scaled(layer.output_bytes),
            keys_values_bytes: scaled(layer.keys_values_bytes),
            ..layer.clone()
        }
    };
    ModelDesc { layers: model.layers.iter().enumerate().map(layer).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_precision_halves_all_but_ids_and_logits() {
        let layer = |activation_bytes, output_bytes| LayerDesc {
            path: String::new(),
            kind: String::new(),
            parameters: 0,
            weight: 1,
            activation_bytes,
            output_bytes,
            keys_values_bytes: output_bytes,
        };
        let model = ModelDesc { layers: vec![layer(80, 400), layer(4000, 400), layer(1200, 800)] };
        let sizes = |precision| {
            let layers = in_precision(&model, precision).layers;
            assert!(layers.iter().all(|layer| layer.keys_values_bytes == layer.output_bytes), "{layers:?}");
            layers.iter().map(|layer| (layer.activation_bytes, layer.output_bytes)).collect::<Vec<_>>()
        };
        assert_eq!(sizes(Precision::F32), [(80, 400), (4000, 400), (1200, 800)]);
        assert_eq!(sizes(Precision::Bf16), [(80, 200), (2000, 200), (1000, 400)]);
    }
}
