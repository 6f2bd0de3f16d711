//! The bytes of a layer's tensors in the precision of a run. A model describes its layers in single precision.

use pipewright::tensor::Precision;
use pipewright_schedule::ModelDesc;

/// Returns the bytes that layer `place` keeps of one row until its backward. The first layer keeps token ids, and the
/// loss keeps the outputs of the last one in single precision: neither depends on the precision.
pub(super) fn activation_bytes(model: &ModelDesc, place: usize, precision: Precision) -> u64 {
    let layer = &model.layers[place];
    let stays = match place {
        0 => layer.activation_bytes,
        place if place + 1 == model.layers.len() => layer.output_bytes.min(layer.activation_bytes),
        _ => 0,
    };
    in_precision(layer.activation_bytes - stays, precision).saturating_add(stays)
}

/// Returns the bytes of one row that layer `place` passes on.
pub(super) fn output_bytes(model: &ModelDesc, place: usize, precision: Precision) -> u64 {
    in_precision(model.layers[place].output_bytes, precision)
}

fn in_precision(bytes: u64, precision: Precision) -> u64 {
    bytes / Precision::F32.bytes() * precision.bytes()
}

#[cfg(test)]
mod tests {
    use pipewright_schedule::LayerDesc;

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
        };
        let model = ModelDesc { layers: vec![layer(80, 400), layer(4000, 400), layer(1200, 800)] };
        let activations = |precision| [0, 1, 2].map(|place| activation_bytes(&model, place, precision));
        assert_eq!(activations(Precision::F32), [80, 4000, 1200]);
        assert_eq!(activations(Precision::Bf16), [80, 2000, 1000]);
        assert_eq!(output_bytes(&model, 1, Precision::Bf16), 200);
    }
}
