//! The bytes that the backward of a stage holds besides the activations.
//!
//! A backward goes through the operations from the last one to the first. Between them are gradients. Some operations make copies
//! in single precision, gather the rows of experts, or pack an operand. The most bytes of a head, of a dense layer, of a mixture
//! and of a Mamba-2 mixer are counted as the operations of [`pipewright::nn`] on the processor hold them, and of other layers the
//! gradients of their input and output. A thread keeps its memory for packed operands up to a limit.
//!
//! The gradients of weights are computed after the gradients of the stage's inputs. Until then, the backward holds the tensors
//! that they need, and no other activations of these layers.

use std::ops::Range;

use pipewright::tensor::Precision;
use pipewright_kernel::KEPT_BYTES;
use pipewright_kernel::scan::CHUNK;
use pipewright_schedule::LayerDesc;
use pipewright_schedule::profile::{EMBEDDING, EMBEDDING_PART, HEAD, HEAD_PART, PREDICTION};
use pipewright_shapes::model::Mamba2;

use crate::lora::is_of_adapter;
use crate::parameter::{ParameterSpec, is_in};
use crate::training_memory::compute_devices::ComputeDevices;
use crate::training_memory::expert_adapters::adapted_parts;
use crate::training_memory::kept::KeptActivations;
use crate::training_memory::sizes::base_layers_in;

/// The bytes of a number in single precision.
const FLOAT: u64 = 4;

/// The widths of all rows of a mixture's experts on a rank, in numbers for each of its tokens.
#[derive(Clone, Copy, Debug)]
struct ExpertRows {
    /// The hidden state of the token.
    hidden: u64,
    /// The inputs of the experts.
    outer: u64,
    /// The results of the gates of these experts.
    inner: u64,
    has_bias: bool,
    /// Whether gate and up, and down, have adapters.
    adapted: [bool; 2],
    /// Whether the tape needs the gradient of the mixture's input.
    has_input_gradient: bool,
}

impl ExpertRows {
    /// Returns the widths of the layer at a path with these parameters, if it is a mixture whose input needs a gradient. Each token
    /// of the rank has `rows` rows.
    fn of(specs: &[&ParameterSpec], layer: &str, hidden: u64, rows: u64) -> Option<Self> {
        let of_experts =
            || specs.iter().filter(|spec| spec.is_of_routed_expert() && !is_of_adapter(&spec.path));
        let is_matrix = |spec: &&&ParameterSpec| spec.shape.len() == 2;
        let matrix = of_experts().find(is_matrix)?;
        let numbers = matrix.shape.iter().fold(1, |product: u64, &size| product.saturating_mul(size as u64));
        Some(Self {
            hidden,
            outer: rows.saturating_mul(hidden),
            inner: rows.saturating_mul(numbers / hidden.max(1)),
            has_bias: of_experts().any(|spec| spec.shape.len() == 1),
            adapted: adapted_parts(specs.iter().copied(), layer),
            has_input_gradient: true,
        })
    }

    /// Returns the most bytes of a token besides the gradient of the result, if a number has `number` bytes.
    fn bytes(self, number: u64) -> u64 {
        let Self { has_bias, adapted: [enters, leaves], has_input_gradient, .. } = self;
        let numbers = [number, self.hidden, self.outer, self.inner, FLOAT];
        let [number, hidden, outer, inner, float] = numbers.map(u128::from);
        let if_so = |is_so: bool, bytes: u128| if is_so { bytes } else { 0 };
        // The gradient of the activation, in single precision, with the rows of biases or a copy of the gathered gradients.
        let down = float * inner + if_so(has_bias, float * outer) + if_so(leaves, (number + float) * outer);
        let activation = float * inner + 2 * number * inner;
        // The activations of gate and up are freed, and their gradients are as large.
        let rows = if_so(has_input_gradient, float * outer) + if_so(enters, float * (2 * inner + outer));
        // The hidden states in single precision, from which rows are gathered.
        let gathered = rows + if_so(enters && number < float, float * hidden);
        let scaled = rows + if_so(leaves, (number + float) * outer);
        let inputs =
            rows + if_so(leaves, float * (outer + inner)) + if_so(has_input_gradient, float * hidden);
        let inputs = inputs.max(gathered).max(scaled);
        // The gathered gradients of the result.
        let most = number * outer + down.max(activation).max(inputs);
        u64::try_from(most).unwrap_or(u64::MAX)
    }
}

/// A layer as far as its backward depends on it.
#[derive(Clone, Copy)]
struct BackwardLayer<'a> {
    specs: &'a [&'a ParameterSpec],
    experts: Option<ExpertRows>,
    scan: Option<Mamba2>,
    /// Whether a hyperbolic tangent limits the logits.
    caps_logits: bool,
    /// The memory that the thread keeps for operands.
    kept_operand: u64,
}

/// Returns the sizes of the matrix of a layer whose path ends so.
fn matrix_of(specs: &[&ParameterSpec], name: &str) -> Option<[u64; 2]> {
    let ending = format!(".{name}.weight");
    let &[rows, columns] = specs.iter().find(|spec| spec.path.ends_with(&ending))?.shape.as_slice() else {
        return None;
    };
    Some([rows as u64, columns as u64])
}

/// Returns whether a dense feed-forward layer has a matrix into its inner width and no gate.
fn is_ungated(specs: &[&ParameterSpec], part: &str) -> bool {
    let has = |name: &str| matrix_of(specs, &format!("{part}.{name}")).is_some();
    has("up_proj") && !has("gate_proj")
}

/// Returns the inner width of a dense feed-forward layer whose activation is not SwiGLU, and whether it has a gate.
fn inner_width(specs: &[&ParameterSpec], width: u64) -> Option<(u64, bool)> {
    let gate = matrix_of(specs, "mlp.gate_proj");
    let [rows, inner] = gate.or_else(|| matrix_of(specs, "mlp.c_fc"))?;
    (rows == width).then_some((inner, gate.is_some()))
}

/// How many bytes more than before it a backward holds, and the most of them so far.
#[derive(Default)]
struct BackwardPeak {
    now: i128,
    most: i128,
}

impl BackwardPeak {
    /// Adds a layer whose backward holds these bytes. `stays` of them are left after it.
    fn add(&mut self, held: i128, stays: i128) {
        self.most = self.most.max(self.now + held);
        self.now += stays;
        self.most = self.most.max(self.now);
    }
}

impl KeptActivations<'_> {
    /// Returns for each stage, which has these parameters, the most bytes that the backward of a microbatch holds besides the
    /// activations, with the parts of layers that it computes again; and the same if it computes whole layers again one by one,
    /// besides the activations of one layer.
    pub(super) fn backward_bytes(&self, stages: &[Vec<ParameterSpec>]) -> Vec<[u64; 2]> {
        let base = base_layers_in(self.model, self.tokens, self.precision, self.devices);
        let hidden = |layers: &[LayerDesc]| layers.first().map_or(0, |layer| layer.output_bytes);
        let width = hidden(&base.layers) / self.precision.bytes() / (self.tokens as u64).max(1);
        let base = self.tensor.of(base, self.model, self.tokens, self.precision.bytes()).layers;
        let layers = self.layers(stages);
        let (kept, parts) = self.without_parts(&layers);
        let first = self.first_trained(&layers, stages);
        let (whole_layers, scans) = (self.model.whole_layers(), self.scans(&layers));
        let expert_rows = self.expert_rows();
        let caps_logits = self.model.model().shape().is_ok_and(|shape| shape.caps_logits);
        let bytes = |of_row: u64| i128::from(of_row) * i128::from(self.rows);
        let of_stage = |(specs, range): (&Vec<ParameterSpec>, Range<usize>)| {
            let (mut whole, mut by_layer) = (BackwardPeak::default(), BackwardPeak::default());
            let mut largest = 0;
            let range = || range.clone().filter(move |index| *index >= first);
            let specs_of = |index: usize| {
                let path = &*base[index].path;
                specs.iter().filter(move |spec| is_in(&spec.path, path))
            };
            let operands =
                range().map(|index| self.operand(&base[index], &specs_of(index).collect::<Vec<_>>()));
            // A thread keeps the memory for operands that are not larger than this.
            let kept_operand = operands.filter(|bytes| *bytes <= KEPT_BYTES as u64).max().unwrap_or(0);
            for index in range().rev() {
                let own = || specs_of(index);
                let own_specs: Vec<_> = own().collect();
                let is_tape_end =
                    index == first && self.mixer_off_tape(&layers.layers[index], stages).is_some();
                let experts = ExpertRows::of(&own_specs, &base[index].path, width, expert_rows)
                    .map(|rows| ExpertRows { has_input_gradient: !is_tape_end, ..rows });
                let layer = BackwardLayer {
                    specs: &own_specs,
                    experts,
                    scan: scans[index],
                    caps_logits,
                    kept_operand,
                };
                let held = self.of_layer(&base[index], hidden(&base), width, layer);
                let activations = bytes(kept.layers[index].activation_bytes);
                let input = index.checked_sub(1).map_or(0, |below| bytes(base[below].output_bytes));
                let how = (&*whole_layers, &*scans, expert_rows);
                let needed = i128::from(self.stash(&layers, how, index..index + 1, own()));
                // Parts that are computed again stay as long as gradients of weights need them.
                whole.add(i128::from(held) + bytes(parts[index]), needed - activations);
                by_layer.add(activations + i128::from(held), needed - input);
                largest = largest.max(activations);
            }
            [whole.most, by_layer.most - largest].map(|bytes| u64::try_from(bytes).unwrap_or(0))
        };
        stages.iter().zip(self.partition.ranges()).map(of_stage).collect()
    }

    /// Returns the most bytes that the backward of a layer holds for a microbatch. The hidden states of a row have `hidden` bytes
    /// and the width `width`.
    fn of_layer(&self, layer: &LayerDesc, hidden: u64, width: u64, parts: BackwardLayer<'_>) -> u64 {
        let BackwardLayer { specs, experts, scan, caps_logits, kept_operand } = parts;
        let (number, tokens, rows) = (self.precision.bytes(), self.tokens as u64, u64::from(self.rows));
        let of_rows = |bytes: u64| bytes.saturating_mul(rows);
        let is_half = self.precision != Precision::F32;
        let inner = layer.feed_forward_bytes;
        let held = match &*layer.kind {
            EMBEDDING | EMBEDDING_PART => return 0,
            HEAD | HEAD_PART | PREDICTION => {
                let own = self.own_ids();
                let singles = own.saturating_mul(tokens).saturating_mul(FLOAT);
                // The gradient of bounded logits, with copies in single precision.
                let bounded =
                    if caps_logits { singles.saturating_mul(if is_half { 3 } else { 1 }) } else { 0 };
                let operand = self.packed(own).max(kept_operand);
                let in_backward = of_rows(hidden.saturating_add(bounded)).saturating_add(operand);
                // The forward of the loss of a part of the vocabulary holds logits in single precision: differences and their
                // exponentials, and a copy.
                let in_loss = of_rows(singles.saturating_mul(if is_half { 3 } else { 2 }));
                return if self.tensor.ranks > 1 { in_backward.max(in_loss) } else { in_backward };
            }
            _ => match experts {
                Some(experts) => {
                    experts.bytes(number).saturating_mul(tokens).saturating_add(layer.output_bytes)
                }
                None if inner > 0 => {
                    let lora = self.model.adapter().map(|adapter| &adapter.lora);
                    let has_copies = lora.is_some_and(|lora| lora.dora && lora.dropout == 0.0);
                    let prefix = format!("{}.mlp", layer.path);
                    let is_adapted =
                        specs.iter().any(|spec| is_of_adapter(&spec.path) && is_in(&spec.path, &prefix));
                    let gradients = if has_copies && is_adapted && is_half {
                        // With magnitudes, gate and up have copies in single precision, when the activations of SwiGLU are freed.
                        (2 * FLOAT).saturating_mul(inner / number)
                    } else if matrix_of(specs, "mlp.gate_up_proj").is_some() {
                        // The gradients of gate and up are filled up to the width of both, and added. One of the activations is
                        // freed before.
                        inner.saturating_mul(6)
                    } else if ["mlp", "mixer"].iter().any(|part| is_ungated(specs, part)) {
                        inner.saturating_mul(2)
                    } else {
                        inner.saturating_mul(3)
                    };
                    gradients.saturating_add(layer.output_bytes)
                }
                None => match inner_width(specs, width) {
                    // The gradient of GELU, in half precision with copies in single precision.
                    Some((inner, is_gated)) => {
                        let others = number * if is_gated { 2 } else { 1 };
                        let of_gelu = if is_half { 3 * FLOAT } else { number };
                        let gradients = inner.saturating_mul(others + of_gelu).saturating_mul(tokens);
                        gradients.saturating_add(layer.output_bytes)
                    }
                    None => layer.output_bytes.saturating_mul(2),
                },
            },
        };
        // The gradients of queries, keys and values are filled up to the width of all, and added. The tensors of a norm are
        // freed before.
        let joined = ["self_attn.qkv_proj", "attn.c_attn"].iter().find_map(|name| matrix_of(specs, name));
        let joined = joined.map_or(0, |[_, width]| 4 * width.saturating_mul(tokens).saturating_mul(number));
        let joined = joined.saturating_sub(layer.output_bytes);
        // The gradients of the projected channels, of the gate's input and of the convolved channels, which are computed again,
        // instead of the result of the scan.
        let of_scan = scan.map_or(0, |scan| {
            let convolved = scan.inner() + 2 * scan.groups * scan.state;
            let numbers = number * (scan.projected() - scan.inner()) + FLOAT * (scan.inner() + 2 * convolved);
            numbers.saturating_mul(tokens).saturating_add(layer.output_bytes)
        });
        // The states between the chunks of one row.
        let states = scan.map_or(0, |scan| {
            let chunks = tokens.div_ceil(CHUNK as u64);
            FLOAT * scan.state * (scan.inner() / scan.groups.max(1)) * chunks
        });
        of_rows(held.max(joined)).max(of_rows(of_scan).saturating_add(states)).saturating_add(kept_operand)
    }

    /// Returns the number of ids of the head, or of a part of it, on a rank.
    pub(super) fn own_ids(&self) -> u64 {
        let ids = (self.model.model().head().outputs() as u64).div_ceil(u64::from(self.model.parts().max(1)));
        ids.div_ceil(u64::from(self.tensor.ranks.max(1)))
    }

    /// Returns the bytes of the largest operand of a layer with these parameters.
    fn operand(&self, layer: &LayerDesc, specs: &[&ParameterSpec]) -> u64 {
        match &*layer.kind {
            EMBEDDING | EMBEDDING_PART => 0,
            HEAD | HEAD_PART | PREDICTION => self.packed(self.own_ids()),
            _ => {
                let own =
                    specs.iter().filter(|spec| !spec.is_of_routed_expert() && !is_of_adapter(&spec.path));
                let widths = own.filter(|spec| spec.shape.len() == 2).flat_map(|spec| &spec.shape);
                self.packed(widths.copied().max().unwrap_or(0) as u64)
            }
        }
    }

    /// Returns the bytes of the left operand of a product, as wide as this, for a microbatch: a product in half precision packs it
    /// whole.
    fn packed(&self, width: u64) -> u64 {
        let bytes = match self.precision {
            _ if self.devices == ComputeDevices::Others => 0,
            Precision::F32 => 0,
            Precision::Bf16 => Precision::Bf16.bytes(),
            // The copy has single precision.
            Precision::F16 => Precision::F32.bytes(),
        };
        let rows = (self.tokens as u64).saturating_mul(u64::from(self.rows));
        bytes.saturating_mul(width).saturating_mul(rows)
    }
}

#[cfg(test)]
mod tests {
    use pipewright::nn::TensorParallel;
    use pipewright_schedule::partition::{Method, partition};
    use pipewright_schedule::{Recompute, Slices};

    use super::*;
    use crate::adapter::{Adapter, AdapterStart};
    use crate::cut_model::CutModel;
    use crate::decoder::DecoderConfig;
    use crate::lora::LoraConfig;
    use crate::model_config::ModelConfig;
    use crate::training_memory::arrived_rows::ExpertLoad;
    use crate::training_memory::tensor_share::TensorShare;

    const TOKENS: u64 = 8;
    const HIDDEN: u64 = 64;
    const INNER: u64 = 96;
    const IDS: u64 = 256;

    /// Calls `check` with two stages of a model, which have a block each, with these adapters.
    fn with_stages<R>(
        family: &str,
        precision: Precision,
        lora: Option<LoraConfig>,
        check: impl FnOnce(&KeptActivations<'_>, &[Vec<ParameterSpec>]) -> R,
    ) -> R {
        let sizes = DecoderConfig {
            hidden_size: HIDDEN as usize,
            intermediate_size: INNER as usize,
            num_hidden_layers: 2,
            ..DecoderConfig::new(IDS as usize, 4)
        };
        let model = ModelConfig::of_sizes(family, sizes, serde_json::Map::new()).expect("a model");
        let mut model = CutModel::from(model);
        if let Some(lora) = lora {
            model = model.with_adapter(Adapter { lora, start: AdapterStart::Seed(0) }).expect("adapters");
        }
        let partition = partition(&[1; 4], 2, &Method::Even).expect("two stages");
        let specs = |range| model.outline(range, &TensorParallel::default()).expect("known");
        let stages: Vec<_> = partition.ranges().map(specs).collect();
        let kept = KeptActivations {
            model: &model,
            partition: &partition,
            tokens: TOKENS as usize,
            rows: 2,
            slices: Slices::ONE,
            precision,
            recompute: &Recompute::None,
            devices: ComputeDevices::Processor,
            expert_ranks: 1,
            expert_load: ExpertLoad::Mean,
            tensor: TensorShare::ALONE,
        };
        check(&kept, &stages)
    }

    /// Returns the bytes of a token in the backwards of two stages.
    fn of_token(precision: Precision, lora: Option<LoraConfig>) -> [u64; 2] {
        let bytes = |kept: &KeptActivations<'_>, stages: &[Vec<ParameterSpec>]| kept.backward_bytes(stages);
        let bytes = with_stages("llama", precision, lora, bytes);
        [0, 1].map(|stage: usize| bytes[stage][0] / (2 * TOKENS))
    }

    #[test]
    fn a_backward_holds_the_gradients_of_a_feed_forward_layer() {
        // The gradients of the result, the product, the gate and the other projection.
        let dense = |number: u64| number * (HIDDEN + 3 * INNER);
        assert_eq!(of_token(Precision::F32, None), [dense(4); 2]);
        // The packed input of the last product, and the memory for the gradients of the logits, which is kept.
        assert_eq!(of_token(Precision::Bf16, None), [dense(2) + 2 * INNER, dense(2) + 2 * IDS]);
    }

    #[test]
    fn a_frozen_head_frees_its_logits_before_other_layers_have_gradients() {
        let lora = LoraConfig { rank: 1, ..LoraConfig::default() };
        assert_eq!(of_token(Precision::F32, Some(lora.clone()))[1], 4 * HIDDEN);
        // The packed gradients of the logits.
        assert_eq!(of_token(Precision::Bf16, Some(lora))[1], 2 * HIDDEN + 2 * IDS);
    }

    #[test]
    fn a_frozen_head_keeps_no_input() {
        let kept = |lora| {
            let last = |kept: &KeptActivations<'_>, stages: &[Vec<ParameterSpec>]| {
                kept.layers(stages).layers.last().expect("a head").activation_bytes
            };
            with_stages("llama", Precision::F32, lora, last) / TOKENS
        };
        // The input and the scale of the norm, its result, and logits with a normaliser.
        assert_eq!(kept(None), 4 * (HIDDEN + 1 + HIDDEN + IDS + 1));
        assert_eq!(kept(Some(LoraConfig::default())), 4 * (HIDDEN + 1 + IDS + 1));
    }

    #[test]
    fn magnitudes_have_gradients_in_single_precision() {
        let lora = LoraConfig { rank: 1, dora: true, ..LoraConfig::default() };
        let found = of_token(Precision::Bf16, Some(lora))[0];
        assert_eq!(found, 2 * HIDDEN + 2 * 4 * INNER + 2 * INNER);
    }

    #[test]
    fn a_replica_whose_experts_all_tokens_choose_has_all_rows() {
        let gathered = |kept: &KeptActivations<'_>, stages: &[Vec<ParameterSpec>]| {
            let gate = stages[0].iter().find(|spec| spec.is_of_routed_expert()).expect("experts");
            let [outer, inner] = [2 * HIDDEN, 2 * gate.shape[1] as u64];
            let loads = [ExpertLoad::Mean, ExpertLoad::OneReplica { replicas: 4 }];
            for (expert_load, replicas) in loads.into_iter().zip([1, 4]) {
                let kept = KeptActivations { expert_ranks: 4, expert_load, ..*kept };
                let rows = 4 * outer + (3 * 4 * inner).max(4 * outer + 4 * HIDDEN / replicas);
                let found = kept.backward_bytes(stages)[0][0] / (2 * TOKENS);
                assert_eq!(found, 4 * HIDDEN + replicas * rows);
            }
        };
        with_stages("qwen3_moe", Precision::F32, None, gathered);
    }

    #[test]
    fn mixtures_have_rows_of_gradients() {
        let rows = |has_bias, adapted| ExpertRows {
            hidden: 5,
            outer: 10,
            inner: 6,
            has_bias,
            adapted,
            has_input_gradient: true,
        };
        let plain = rows(false, [false; 2]);
        assert_eq!(plain.bytes(2), 2 * 10 + 4 * 10 + 4 * 5);
        assert_eq!(ExpertRows { inner: 20, ..plain }.bytes(2), 2 * 10 + 4 * 20 + 2 * 2 * 20);
        assert_eq!(rows(true, [false; 2]).bytes(2), 2 * 10 + 4 * 6 + 4 * 10);
        // The copies for the gradients of weights, and the gradient of the input before it is added up and after.
        let enters = 4 * (2 * 6 + 10);
        let adapted = rows(false, [true; 2]);
        assert_eq!(adapted.bytes(2), 2 * 10 + enters + 4 * (10 + 6) + 4 * 10 + 4 * 5);
        let is_first = ExpertRows { has_input_gradient: false, ..adapted };
        assert_eq!(is_first.bytes(2), 2 * 10 + enters + 4 * (10 + 6));
        // The hidden states in single precision, from which the rows are gathered.
        let only_enters = ExpertRows { adapted: [true, false], ..is_first };
        assert_eq!(only_enters.bytes(2), 2 * 10 + enters + 4 * 5);
        assert_eq!(only_enters.bytes(4), 4 * 10 + enters);
    }
}
