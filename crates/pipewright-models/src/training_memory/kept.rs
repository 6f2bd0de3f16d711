//! The bytes of the activations that the stages of a run keep, with adapters too.

use std::collections::HashSet;
use std::ops::Range;

use pipewright::tensor::Precision;
use pipewright_schedule::costs::{RecomputeSizes, StageSizes};
use pipewright_schedule::profile::HEAD;
use pipewright_schedule::{LayerDesc, ModelDesc, Partition, Recompute, Slices, StageIndex};
use pipewright_shapes::model::{Mamba2, Mixer};

use crate::cut_model::CutModel;
use crate::parameter::ParameterSpec;
use crate::projection::input_of;
use crate::router::is_of_router;
use crate::training_memory::adapters::{
    OneOperation, adapter_stash, add_adapters, remove_below, remove_inputs,
};
use crate::training_memory::arrived_rows::{ExpertLoad, add_arrived_rows, chosen_experts, row_bytes};
use crate::training_memory::compute_devices::ComputeDevices;
use crate::training_memory::expert_adapters::{add_expert_adapters, expert_adapter_stash};
use crate::training_memory::sizes::{
    base_layers_in, kept_bytes, keys_values_bytes, stage_sizes, without_parts,
};
use crate::training_memory::tensor_share::TensorShare;

/// The parts of a run on which the bytes of its activations depend.
#[derive(Clone, Copy, Debug)]
pub struct KeptActivations<'a> {
    /// The model.
    pub model: &'a CutModel,
    /// The layers of each stage.
    pub partition: &'a Partition,
    /// The tokens of a row.
    pub tokens: usize,
    /// The rows of a microbatch.
    pub rows: u32,
    /// The slices of a microbatch.
    pub slices: Slices,
    /// The precision in which the stages compute.
    pub precision: Precision,
    /// The part of their forwards that the stages compute again.
    pub recompute: &'a Recompute,
    /// The devices on which the stages compute.
    pub devices: ComputeDevices,
    /// The number of replicas that hold the experts of each mixture together; 1 if each holds all.
    pub expert_ranks: u32,
    /// The tokens that choose the experts of a replica, if several hold them together.
    pub expert_load: ExpertLoad,
    /// The ranks that compute each stage together.
    pub tensor: TensorShare,
}

impl KeptActivations<'_> {
    /// Returns the layers of the model with what the forwards of stages with these parameters keep for a row.
    pub(super) fn layers(&self, stages: &[Vec<ParameterSpec>]) -> ModelDesc {
        let layers = base_layers_in(self.model, self.tokens, self.precision, self.devices);
        let mut layers = self.tensor.of(layers, self.model, self.tokens, self.precision.bytes());
        if self.expert_ranks > 1 {
            let chosen = chosen_experts(self.model.model());
            let specs = stages.iter().flatten();
            add_arrived_rows(
                &mut layers.layers,
                chosen,
                specs,
                self.tokens,
                self.precision,
                self.expert_load,
            );
        }
        // A router computes in single precision.
        let routers = stages.iter().flatten().filter(|spec| {
            self.precision != Precision::F32 && self.model.is_trained(&spec.path) && is_of_router(&spec.path)
        });
        for router in routers.filter(|spec| spec.shape.len() == 2) {
            let input = (router.shape[0] as u64).saturating_mul(self.tokens as u64);
            let input = input.saturating_mul(Precision::F32.bytes());
            let of_router = layers.layers.iter_mut().filter(|layer| router.is_in(&layer.path));
            of_router.for_each(|layer| layer.activation_bytes = layer.activation_bytes.saturating_add(input));
        }
        if let Some(adapter) = self.model.adapter() {
            let (lora, specs) = (&adapter.lora, stages.iter().flatten());
            let one = OneOperation::new(lora, self.devices, self.tensor.ranks);
            add_adapters(&mut layers.layers, lora, specs, self.tokens, self.precision, one);
            add_expert_adapters(&mut layers.layers, stages.iter().flatten(), self.expert_rows(), self.tokens);
            let (trained, frozen): (Vec<&ParameterSpec>, Vec<&ParameterSpec>) =
                stages.iter().flatten().partition(|spec| self.model.is_trained(&spec.path));
            // Ranks that share tokens have further tensors in their place.
            if self.devices == ComputeDevices::Processor && !self.tensor.shares_tokens {
                let (frozen, adapted) = (frozen.iter().copied(), trained.iter().copied());
                let how = (self.precision, one);
                remove_inputs(&mut layers.layers, lora, frozen, adapted, self.tokens, how);
                let blocks = &layers.layers[layers.blocks()];
                let is_of_block = |spec: &&ParameterSpec| blocks.iter().any(|layer| spec.is_in(&layer.path));
                // Nothing keeps the input of a frozen head either.
                if trained.iter().all(is_of_block)
                    && let [.., before, head] = layers.layers.as_mut_slice()
                    && head.kind == HEAD
                {
                    head.activation_bytes = head.activation_bytes.saturating_sub(before.output_bytes);
                }
            }
            let first = self.first_trained(&layers, stages);
            let is_sliced = !self.slices.is_one();
            let off_tape = |layer: &LayerDesc, input: u64| {
                let norm = format!("{}.input_layernorm.weight", layer.path);
                let has_norm = frozen.iter().any(|spec| spec.path == norm);
                match self.mixer_off_tape(layer, stages) {
                    _ if !has_norm => 0,
                    // Nothing keeps the input of the second norm either.
                    Some(mixer) => input.saturating_mul(2).saturating_add(mixer),
                    None => input,
                }
            };
            remove_below(&mut layers.layers, first, is_sliced, off_tape);
        }
        layers
    }

    /// Returns the bytes of a row that the attention of the first trained layer does not keep if it is not on the tape, because
    /// nothing before the layer's feed-forward part is trained: queries, keys and values before and after their norms, and its
    /// results. `None` if it is on the tape, and for mixers other than the usual attention.
    pub(super) fn mixer_off_tape(&self, layer: &LayerDesc, stages: &[Vec<ParameterSpec>]) -> Option<u64> {
        let specs = || stages.iter().flatten().filter(|spec| spec.is_in(&layer.path));
        let before = ["self_attn", "input_layernorm", "post_attention_layernorm"]
            .map(|name| format!("{}.{name}", layer.path));
        if specs().any(|spec| self.model.is_trained(&spec.path) && before.iter().any(|part| spec.is_in(part)))
        {
            return None;
        }
        let shape = |name: &str| {
            let path = format!("{}.{name}.weight", before[0]);
            specs().find(|spec| spec.path == path).map(|spec| spec.shape.as_slice())
        };
        let width = |name: &str, index: usize| Some(*shape(name)?.get(index)? as u64);
        let (queries, keys, values) = (width("o_proj", 0)?, width("k_proj", 1)?, width("v_proj", 1)?);
        let normalised = if shape("q_norm").is_some() { queries + keys } else { 0 };
        // Later slices attend to the keys and values.
        let kept = if self.slices.is_one() { keys + values } else { 0 };
        let numbers = 2 * queries + normalised + kept;
        Some(numbers.saturating_mul(self.tokens as u64).saturating_mul(self.precision.bytes()))
    }

    /// Returns the rows of the experts of a replica for each of its tokens.
    pub(super) fn expert_rows(&self) -> u64 {
        chosen_experts(self.model.model()).saturating_mul(self.expert_load.replicas())
    }

    /// Returns the index of the first of these layers with trained parameters. Nothing below it is on the tape.
    pub(super) fn first_trained(&self, layers: &ModelDesc, stages: &[Vec<ParameterSpec>]) -> usize {
        if self.model.adapter().is_none() {
            return 0;
        }
        let trained: Vec<_> =
            stages.iter().flatten().filter(|spec| self.model.is_trained(&spec.path)).collect();
        let is_trained = |layer: &LayerDesc| trained.iter().any(|spec| spec.is_in(&layer.path));
        layers.layers.iter().position(is_trained).unwrap_or(layers.layers.len())
    }

    /// Returns the sizes of the stages, which have these parameters, for a microbatch.
    pub fn sizes(&self, stages: &[Vec<ParameterSpec>]) -> Vec<StageSizes> {
        let layers = self.layers(stages);
        let (kept, parts) = self.without_parts(&layers);
        let (whole, scans) = (self.model.whole_layers(), self.scans(&layers));
        let expert_rows = self.expert_rows();
        let size = |(specs, stage): (&Vec<ParameterSpec>, u32)| {
            let stage = StageIndex::new(stage);
            let range = self.partition.range(stage);
            let sizes = stage_sizes(&kept.layers[range.clone()], self.rows);
            let stash = self.stash(&layers, (&whole, &scans, expert_rows), range.clone(), specs.iter());
            let parts = parts[range].iter().fold(0u64, |sum, &bytes| sum.saturating_add(bytes));
            let parts = parts.saturating_mul(u64::from(self.rows));
            let recompute = Some(self.recompute_sizes(&kept, stage));
            let offload = self.input_bytes(&kept, stage).saturating_mul(u64::from(self.rows));
            StageSizes { recompute, stash, parts, offload, ..sizes }
        };
        stages.iter().zip(0..).map(size).collect()
    }

    /// Returns the Mamba-2 mixer of each of these layers, if it has one.
    pub(super) fn scans(&self, layers: &ModelDesc) -> Vec<Option<Mamba2>> {
        let mut scans = vec![None; layers.layers.len()];
        let blocks = self.model.model().shape().map_or_else(|_| Vec::new(), |shape| shape.blocks);
        for (scan, block) in scans[layers.blocks()].iter_mut().zip(blocks) {
            *scan = if let Mixer::Mamba2(mixer) = block.mixer { Some(mixer) } else { None };
        }
        scans
    }

    /// Returns the bytes of a microbatch that `I` keeps for `W`: the inputs of all products, also inputs that it has computed again,
    /// and their output gradients. `layers` are the result of [`KeptActivations::layers`], `whole` of [`CutModel::whole_layers`],
    /// `scans` of [`KeptActivations::scans`] and `expert_rows` of [`KeptActivations::expert_rows`], and `specs` are the parameters of a
    /// range of the layers.
    pub(super) fn stash<'s>(
        &self,
        layers: &ModelDesc,
        (whole, scans, expert_rows): (&[bool], &[Option<Mamba2>], u64),
        range: Range<usize>,
        specs: impl Iterator<Item = &'s ParameterSpec> + Clone,
    ) -> u64 {
        let own = &layers.layers[range.clone()];
        // `W` of a trained mixer needs two gradients instead of the result of the scan: of the projected channels, and of the
        // convolved ones in single precision.
        let of_scan = |(scan, is_whole): (&Option<Mamba2>, &bool)| {
            let scan = scan.filter(|_| *is_whole)?;
            let gradients = self.precision.bytes() * (scan.projected() - scan.inner());
            let convolved = Precision::F32.bytes() * (scan.inner() + 2 * scan.groups * scan.state);
            Some(
                (gradients + convolved)
                    .saturating_mul(self.tokens as u64)
                    .saturating_mul(u64::from(self.rows)),
            )
        };
        let of_scans = scans[range.clone()].iter().zip(&whole[range.clone()]).filter_map(of_scan);
        let of_scans = of_scans.fold(0, u64::saturating_add);
        let Some(adapter) = self.model.adapter() else {
            // The gradients of the results of experts are gathered rows.
            let matrix = |layer: &LayerDesc| {
                specs.clone().find(|spec| {
                    spec.is_in(&layer.path) && spec.is_of_routed_expert() && spec.shape.len() == 2
                })
            };
            let gathered = |spec| row_bytes(spec, expert_rows, self.tokens as u64, self.precision);
            let rows = own.iter().filter_map(matrix).map(gathered).fold(0, u64::saturating_add);
            let rows = rows.saturating_mul(u64::from(self.rows));
            let less =
                own.iter().map(|layer| self.not_needed(layer, specs.clone())).fold(0, u64::saturating_add);
            let less = less.saturating_mul(u64::from(self.rows));
            let stash = stage_sizes(own, self.rows).stash.saturating_sub(less);
            return stash.saturating_add(rows).saturating_add(of_scans);
        };
        let one = OneOperation::new(&adapter.lora, self.devices, self.tensor.ranks);
        let stash = adapter_stash(&adapter.lora, specs.clone(), self.tokens, self.precision, one);
        let stash = stash.saturating_add(expert_adapter_stash(own, specs, expert_rows, self.tokens));
        let trained = own.iter().zip(&whole[range]).filter(|(_, is_whole)| **is_whole);
        let trained: Vec<_> = trained.map(|(layer, _)| layer.clone()).collect();
        let of_whole = stage_sizes(&trained, self.rows).stash;
        stash.saturating_mul(u64::from(self.rows)).saturating_add(of_whole).saturating_add(of_scans)
    }

    /// Returns the bytes of a row by which a trained layer with these parameters needs less for `W` than for `I`. A layer with an
    /// attention and without experts needs the inputs of its products and the gradients of their results.
    fn not_needed<'s>(
        &self,
        layer: &LayerDesc,
        specs: impl Iterator<Item = &'s ParameterSpec> + Clone,
    ) -> u64 {
        if layer.kind == HEAD {
            // The logits before a hyperbolic tangent limits them.
            let caps_logits = self.model.model().shape().is_ok_and(|shape| shape.caps_logits);
            let logits =
                self.own_ids().saturating_mul(self.tokens as u64).saturating_mul(self.precision.bytes());
            return if caps_logits { logits } else { 0 };
        }
        let matrices = specs.filter(|spec| spec.is_in(&layer.path) && spec.shape.len() == 2);
        let is_attention = matrices
            .clone()
            .any(|spec| [".self_attn.", ".attn."].iter().any(|part| spec.path.contains(part)));
        if !is_attention || matrices.clone().any(ParameterSpec::is_of_routed_expert) {
            return 0;
        }
        let mut inputs = HashSet::new();
        let numbers = matrices.map(|spec| {
            let projection = spec.path.strip_suffix(".weight").unwrap_or(&spec.path);
            let input = if inputs.insert(input_of(projection)) { spec.shape[0] } else { 0 };
            (input + spec.shape[1]) as u64
        });
        let needed = numbers.sum::<u64>().saturating_mul(self.tokens as u64);
        layer.activation_bytes.saturating_sub(needed.saturating_mul(self.precision.bytes()))
    }

    /// Returns the layers with what they keep if their stages compute parts of them again, and for each layer
    /// the bytes of these parts.
    pub(super) fn without_parts(&self, layers: &ModelDesc) -> (ModelDesc, Vec<u64>) {
        let stages = (0..self.partition.stages()).map(StageIndex::new);
        let parts_of = |stage| self.partition.range(stage).map(move |_| self.recompute.parts_of(stage));
        let layers = layers.layers.iter().zip(stages.flat_map(parts_of));
        let (layers, parts) = layers.map(|(layer, parts)| without_parts(layer, parts)).unzip();
        (ModelDesc { layers }, parts)
    }

    /// Returns the bytes of the inputs that a stage keeps if it is recomputed, for a row. The first layer's
    /// inputs are token ids, which its activations include.
    fn input_bytes(&self, layers: &ModelDesc, stage: StageIndex) -> u64 {
        let range = self.partition.range(stage);
        let first = range.start;
        let with_inputs = if self.recompute.is_by_block() { range } else { first..first + 1 };
        let before = with_inputs.filter_map(|layer| layer.checked_sub(1));
        before.map(|before| layers.layers[before].output_bytes).fold(0, u64::saturating_add)
    }

    /// Returns the bytes of a microbatch that a stage keeps if it is recomputed, as far as the stage does so,
    /// and the bytes that its backward then holds in addition.
    fn recompute_sizes(&self, layers: &ModelDesc, stage: StageIndex) -> RecomputeSizes {
        let range = self.partition.range(stage);
        let (own, inputs) = (&layers.layers[range], self.input_bytes(layers, stage));
        let (kept, recomputed) = if self.recompute.is_by_block() {
            (inputs, own.iter().map(|layer| layer.activation_bytes).max().unwrap_or(0))
        } else {
            let again = self.recompute.of(stage).map_or(own.len(), |choice| choice.layers_of(own.len()));
            let others = kept_bytes(&own[again..]);
            // A slice that is computed again keeps the keys and values of all layers. The keys and values of
            // the other layers are part of their activations.
            let keys_values = if self.slices.is_one() { 0 } else { keys_values_bytes(&own[again..]) };
            let kept = inputs.saturating_add(others).saturating_sub(keys_values);
            (kept, kept_bytes(own).saturating_sub(others))
        };
        let rows = u64::from(self.rows);
        RecomputeSizes { kept: kept.saturating_mul(rows), recomputed: recomputed.saturating_mul(rows) }
    }
}
