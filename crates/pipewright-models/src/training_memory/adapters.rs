//! The bytes that the forward of a model keeps for its adapters.

use std::collections::{HashMap, HashSet};

use pipewright::tensor::Precision;
use pipewright_schedule::LayerDesc;
use pipewright_shapes::matrix::Division;
use pipewright_shapes::training::AdaptedLayer;

use crate::lora::LoraConfig;
use crate::parameter::{ParameterSpec, is_in};
use crate::projection::{adapted_layers, input_of};
use crate::training_memory::compute_devices::ComputeDevices;

/// The bytes of a number in an adapter, which computes in single precision.
const FLOAT: u64 = 4;

/// Which layers and their adapters are one operation, which reads the input of the layer in the precision of the run
/// ([`adapted_product`](pipewright::nn::adapted_product)).
#[derive(Clone, Copy, Debug)]
pub(super) struct OneOperation {
    has_operation: bool,
    ranks: u32,
}

impl OneOperation {
    /// Returns the operations of adapters with these settings, if so many ranks compute each layer together.
    pub(super) fn new(lora: &LoraConfig, devices: ComputeDevices, ranks: u32) -> Self {
        let has_operation = devices == ComputeDevices::Processor && !lora.dora && lora.dropout == 0.0;
        Self { has_operation, ranks }
    }

    /// Returns whether a layer is one operation with its adapter. If several ranks have a part of its inputs each, it is not.
    fn includes(self, layer: &AdaptedLayer) -> bool {
        self.has_operation && (self.ranks == 1 || layer.division != Division::Rows)
    }
}

/// Adds to `layers`, which have the sizes for rows of `tokens` tokens in `precision`, what the adapters among
/// the parameters `specs` keep in single precision ([`AdapterSizes::kept`](pipewright_shapes::training::AdapterSizes::kept)).
/// An adapter that is one operation with its layer needs no copy of its input.
pub(super) fn add_adapters<'a>(
    layers: &mut [LayerDesc],
    lora: &LoraConfig,
    specs: impl Iterator<Item = &'a ParameterSpec>,
    tokens: usize,
    precision: Precision,
    one: OneOperation,
) {
    let sizes = lora.sizes();
    let adapted = adapted_layers(lora, specs);
    let kept = |layer: &AdaptedLayer| {
        let widths = [layer.input as f64, layer.output as f64];
        let is_copied = precision != Precision::F32 && !one.includes(layer);
        sizes.kept(widths, is_copied && !layer.shares_input).ceil() as u64
    };
    for layer in layers {
        let own = adapted.iter().filter(|(path, _)| is_in(path, &layer.path));
        let numbers = own.map(|(_, adapted)| kept(adapted)).fold(0, u64::saturating_add);
        let bytes = numbers.saturating_mul(FLOAT).saturating_mul(tokens as u64);
        layer.activation_bytes = layer.activation_bytes.saturating_add(bytes);
    }
}

/// Removes from `layers`, which compute on the processor and have the sizes for rows of `tokens` tokens in `precision`, the
/// inputs of frozen products that nothing keeps: the products have no weight gradients, and the adapters on them, if any, have
/// a copy of their own. They are results of norms, and the product of a gate with what it multiplies. Projections that
/// usual decoders do not have count with their inputs. `frozen` are the frozen parameters; the layers are a rank's part of
/// them if several compute a layer together.
pub(super) fn remove_inputs<'a>(
    layers: &mut [LayerDesc],
    lora: &LoraConfig,
    frozen: impl Iterator<Item = &'a ParameterSpec>,
    adapted: impl Iterator<Item = &'a ParameterSpec>,
    tokens: usize,
    (precision, one): (Precision, OneOperation),
) {
    let is_whole = precision == Precision::F32 && lora.dropout == 0.0;
    let adapted = adapted_layers(lora, adapted).into_iter();
    let adapted = adapted.filter(|(_, layer)| is_whole || one.includes(layer));
    let kept: HashSet<String> = adapted.map(|(path, _)| input_of(&path)).collect();
    let frozen: HashMap<&str, &ParameterSpec> = frozen.map(|spec| (&*spec.path, spec)).collect();
    for layer in layers {
        let of = |name: &str| frozen.get(&*format!("{}.{name}.weight", layer.path)).copied();
        // The bytes of the input of these products.
        let unkept = |names: &[&str]| {
            let of_names: Option<Vec<_>> = names.iter().map(|name| of(name)).collect();
            let width = of_names.and_then(|specs| Some(*specs[0].shape.first()? as u64));
            let width = width.filter(|_| !kept.contains(&format!("{}.{}", layer.path, names[0])));
            width.unwrap_or(0).saturating_mul(tokens as u64).saturating_mul(precision.bytes())
        };
        let has = |norm: &str| of(norm).is_some();
        let before_heads = has("input_layernorm");
        let before_inner =
            has("pre_feedforward_layernorm") || before_heads && has("post_attention_layernorm");
        let of_heads = unkept(&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]);
        let of_inner = unkept(&["mlp.gate_proj", "mlp.up_proj"]);
        let norms = [(before_heads, of_heads), (before_inner, of_inner)];
        let norms = norms.into_iter().filter(|(has, _)| *has).fold(0, |sum: u64, (_, bytes)| sum + bytes);
        let inner = if of("mlp.gate_proj").is_some() { unkept(&["mlp.down_proj"]) } else { 0 };
        layer.activation_bytes = layer.activation_bytes.saturating_sub(norms + inner);
        layer.norms_bytes = layer.norms_bytes.saturating_sub(norms);
        layer.feed_forward_bytes = layer.feed_forward_bytes.saturating_sub(inner);
    }
}

/// Removes from `layers` what the layers below the one at index `first` keep, the first trained one: nothing of them is on the
/// tape. With slices they keep keys and values for later slices. `off_tape` returns the bytes that the first trained layer, with an
/// input of these bytes, does not keep.
pub(super) fn remove_below(
    layers: &mut [LayerDesc],
    first: usize,
    is_sliced: bool,
    off_tape: impl Fn(&LayerDesc, u64) -> u64,
) {
    let (below, others) = layers.split_at_mut(first.min(layers.len()));
    for layer in &mut *below {
        layer.activation_bytes = if is_sliced { layer.keys_values_bytes } else { 0 };
        (layer.norms_bytes, layer.feed_forward_bytes) = (0, 0);
    }
    if let (Some(below), Some(first)) = (below.last(), others.first_mut()) {
        first.activation_bytes = first.activation_bytes.saturating_sub(off_tape(first, below.output_bytes));
    }
}

/// Returns the bytes that `I` keeps for the `W` of the adapters among the parameters `specs`, for rows of
/// `tokens` tokens ([`AdapterSizes::stash`](pipewright_shapes::training::AdapterSizes::stash)). If an adapter is
/// one operation with its layer, the input and the output gradient of the layer have the precision of the run.
/// The frozen base needs nothing in `W`.
pub(super) fn adapter_stash<'a>(
    lora: &LoraConfig,
    specs: impl Iterator<Item = &'a ParameterSpec>,
    tokens: usize,
    precision: Precision,
    one: OneOperation,
) -> u64 {
    // The bytes of a token.
    let kept = |(_, layer): &(String, AdaptedLayer)| {
        let widths = [layer.input as f64, layer.output as f64];
        let of_layer = if one.includes(layer) { precision.bytes() } else { FLOAT };
        let [layer, adapter] = lora.sizes().stash(widths, layer.shares_input).map(|numbers| numbers as u64);
        of_layer.saturating_mul(layer).saturating_add(FLOAT.saturating_mul(adapter))
    };
    let bytes = adapted_layers(lora, specs).iter().map(kept).fold(0, u64::saturating_add);
    bytes.saturating_mul(tokens as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parameter::ParameterKind;
    use crate::training_memory::compute_devices::ComputeDevices::{Mixed, Others, Processor};

    fn layer(index: usize, activation_bytes: u64, keys_values_bytes: u64) -> LayerDesc {
        LayerDesc {
            path: format!("model.layers.{index}"),
            kind: String::new(),
            parameters: 0,
            weight: 1,
            activation_bytes,
            output_bytes: 0,
            keys_values_bytes,
            norms_bytes: 0,
            feed_forward_bytes: 0,
            products: 0,
            mixing: 0,
            copied: 0,
            device_activation_bytes: None,
            trained: None,
        }
    }

    /// Returns the bytes of a token that adapters of rank 3 on layers of these inputs add to the blocks 1 and
    /// 10.
    fn added(
        projections: &[(&str, usize)],
        dropout: f64,
        precision: Precision,
        devices: ComputeDevices,
    ) -> [u64; 2] {
        let lora = LoraConfig { rank: 3, dropout, ..LoraConfig::default() };
        let matrices = |&(layer, inputs): &(&str, usize)| {
            [("lora_A", [inputs, 3]), ("lora_B", [3, 1])].map(|(matrix, shape)| {
                let path = format!("model.layers.{layer}.{matrix}.weight");
                ParameterSpec::new(path, shape.to_vec(), ParameterKind::Matrix)
            })
        };
        let specs: Vec<ParameterSpec> = projections.iter().flat_map(matrices).collect();
        let mut layers = [1, 10].map(|index| layer(index, 0, 0));
        let one = OneOperation::new(&lora, devices, 1);
        add_adapters(&mut layers, &lora, specs.iter(), 1, precision, one);
        layers.map(|layer| layer.activation_bytes)
    }

    #[test]
    fn adapters_of_one_input_share_its_copy_in_single_precision() {
        let block = [("1.self_attn.q_proj", 8), ("1.self_attn.v_proj", 8), ("1.mlp.up_proj", 8)];
        for devices in [Others, Mixed] {
            assert_eq!(added(&block, 0.0, Precision::F32, devices), [4 * 9, 0]);
            assert_eq!(added(&block, 0.0, Precision::Bf16, devices), [4 * (9 + 2 * 8), 0]);
            let down = added(&[("10.mlp.down_proj", 20)], 0.0, Precision::Bf16, devices);
            assert_eq!(down, [0, 4 * (3 + 20)]);
        }
    }

    #[test]
    fn adapters_that_are_one_operation_with_their_layers_keep_no_copy_of_inputs() {
        let block = [("1.self_attn.q_proj", 8), ("1.self_attn.v_proj", 8), ("1.mlp.up_proj", 8)];
        for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
            assert_eq!(added(&block, 0.0, precision, Processor), [4 * 9, 0]);
        }
    }

    #[test]
    fn magnitudes_keep_the_outputs_that_they_multiply() {
        let kept = |dropout, precision| {
            let lora = LoraConfig { rank: 3, dropout, dora: true, ..LoraConfig::default() };
            let spec = |name: &str, shape: &[usize]| {
                let path = format!("model.layers.1.self_attn.q_proj.{name}");
                ParameterSpec::new(path, shape.to_vec(), ParameterKind::Matrix)
            };
            let specs = [
                spec("lora_A.weight", &[7, 3]),
                spec("lora_B.weight", &[3, 5]),
                spec("lora_magnitude_vector", &[5]),
            ];
            let mut layers = [layer(1, 0, 0)];
            let one = OneOperation::new(&lora, Processor, 1);
            add_adapters(&mut layers, &lora, specs.iter(), 1, precision, one);
            layers[0].activation_bytes
        };
        assert_eq!(kept(0.0, Precision::F32), 4 * (3 + 5));
        assert_eq!(kept(0.0, Precision::Bf16), 4 * (3 + 5 + 7));
        assert_eq!(kept(0.1, Precision::F32), 4 * (3 + 5 + 2 * 7));
        assert_eq!(kept(0.1, Precision::Bf16), 4 * (3 + 5 + 2 * 7 + 4));
    }

    #[test]
    fn layers_below_the_first_trained_one_keep_nothing() {
        let kept = |is_sliced, has_norm| {
            let layer = |index| LayerDesc {
                norms_bytes: 2,
                feed_forward_bytes: 3,
                output_bytes: 1,
                ..layer(index, 10, 4)
            };
            let mut layers: Vec<LayerDesc> = (0..3).map(layer).collect();
            remove_below(&mut layers, 1, is_sliced, |_, input| if has_norm { input } else { 0 });
            assert_eq!((layers[0].norms_bytes, layers[0].feed_forward_bytes), (0, 0));
            layers.iter().map(|layer| layer.activation_bytes).collect::<Vec<_>>()
        };
        assert_eq!(kept(false, false), [0, 10, 10]);
        assert_eq!(kept(true, false), [4, 10, 10]);
        assert_eq!(kept(false, true), [0, 9, 10]);
    }

    #[test]
    fn inputs_of_frozen_products_are_kept_for_adapters_alone() {
        let spec = |name: &str, shape: &[usize], kind| {
            ParameterSpec::new(format!("model.layers.1.{name}.weight"), shape.to_vec(), kind)
        };
        let norms = ["input_layernorm", "post_attention_layernorm"];
        let norms = norms.map(|name| spec(name, &[8], ParameterKind::Scale));
        let matrix = |name: &str, inputs, outputs| spec(name, &[inputs, outputs], ParameterKind::Matrix);
        let heads = ["q_proj", "k_proj", "v_proj"].map(|name| matrix(&format!("self_attn.{name}"), 8, 8));
        let inner = ["gate_proj", "up_proj"].map(|name| matrix(&format!("mlp.{name}"), 8, 20));
        let frozen = [&norms[..], &heads, &inner, &[matrix("mlp.down_proj", 20, 8)]].concat();
        let removed_on = |ranks, adapted: &[&str], frozen: &[ParameterSpec], lora: &LoraConfig, precision| {
            let specs =
                adapted.iter().map(|name| matrix(&format!("{name}.lora_A"), 8, 3)).collect::<Vec<_>>();
            let mut layers = [LayerDesc { norms_bytes: 500, feed_forward_bytes: 500, ..layer(1, 1000, 0) }];
            let one = OneOperation::new(lora, Processor, ranks);
            remove_inputs(&mut layers, lora, frozen.iter(), specs.iter(), 1, (precision, one));
            let [layer] = layers;
            [1000 - layer.activation_bytes, 500 - layer.norms_bytes, 500 - layer.feed_forward_bytes]
        };
        let removed = |adapted: &[&str], frozen: &[ParameterSpec], lora: &LoraConfig, precision| {
            removed_on(1, adapted, frozen, lora, precision)
        };
        let (whole, plain) = (Precision::F32, LoraConfig::default());
        // The adapter of the values keeps the input of the queries too.
        assert_eq!(removed(&["self_attn.v_proj"], &frozen, &plain, whole), [4 * (8 + 20), 4 * 8, 4 * 20]);
        assert_eq!(removed(&["mlp.up_proj", "mlp.down_proj"], &frozen, &plain, whole), [4 * 8, 4 * 8, 0]);
        let all = ["self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj"];
        assert_eq!(removed(&all, &frozen, &plain, Precision::Bf16), [0; 3]);
        // Each of several ranks has a copy in single precision of its part of the inputs.
        assert_eq!(removed_on(2, &all, &frozen, &plain, Precision::Bf16), [2 * 20, 0, 2 * 20]);
        assert_eq!(removed_on(2, &all, &frozen, &plain, whole), [0; 3]);
        // These have copies of their inputs in half precision.
        let magnitudes = LoraConfig { dora: true, ..plain.clone() };
        assert_eq!(removed(&all, &frozen, &magnitudes, Precision::Bf16), [2 * 36, 2 * 16, 2 * 20]);
        assert_eq!(removed(&all, &frozen, &magnitudes, whole), [0; 3]);
        let dropped = LoraConfig { dropout: 0.1, ..plain.clone() };
        assert_eq!(removed(&all, &frozen, &dropped, whole), [4 * 36, 4 * 16, 4 * 20]);
        // A layer that is trained whole, or that is of another kind, keeps its input.
        assert_eq!(removed(&[], &frozen[1..], &plain, whole), [4 * 20, 0, 4 * 20]);
    }

    #[test]
    fn weight_gradients_need_inputs_and_output_gradients() {
        let matrix = |path: &str, shape: [usize; 2]| {
            let path = format!("model.layers.1.{path}.weight");
            ParameterSpec::new(path, shape.to_vec(), ParameterKind::Matrix)
        };
        let specs = [
            matrix("self_attn.q_proj", [8, 8]),
            matrix("self_attn.q_proj.lora_A", [8, 3]),
            matrix("self_attn.q_proj.lora_B", [3, 8]),
            matrix("self_attn.v_proj.lora_A", [8, 3]),
            matrix("self_attn.v_proj.lora_B", [3, 4]),
        ];
        let stash = |dropout, precision, devices| {
            let lora = LoraConfig { rank: 3, dropout, ..LoraConfig::default() };
            adapter_stash(&lora, specs.iter(), 5, precision, OneOperation::new(&lora, devices, 1))
        };
        for precision in [Precision::F32, Precision::Bf16] {
            assert_eq!(stash(0.0, precision, Others), 4 * 5 * (8 + 3 + 3 + 8 + 3 + 3 + 4));
            for devices in [Processor, Others] {
                let expected = 4 * 5 * (2 * 8 + 3 + 3 + 8 + 3 + 3 + 4);
                assert_eq!(stash(0.1, precision, devices), expected);
            }
        }
        assert_eq!(stash(0.0, Precision::F32, Processor), stash(0.0, Precision::F32, Others));
        let expected = 5 * (2 * (8 + 8 + 4) + 4 * (3 + 3 + 3 + 3));
        assert_eq!(stash(0.0, Precision::Bf16, Processor), expected);
    }

    #[test]
    fn with_dropout_each_adapter_keeps_its_input_and_a_mask() {
        let block = [("1.self_attn.q_proj", 8), ("1.self_attn.v_proj", 8)];
        for precision in [Precision::F32, Precision::Bf16] {
            assert_eq!(added(&block, 0.1, precision, Processor), [4 * 2 * (3 + 2 * 8), 0]);
        }
    }
}
