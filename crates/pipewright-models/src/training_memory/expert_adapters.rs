//! The bytes that a model keeps for the adapters of experts that a router chooses ([`pipewright::nn::ExpertAdapter`]).

use pipewright_schedule::LayerDesc;

use crate::lora::is_of_adapter;
use crate::parameter::{ParameterSpec, is_in};

/// The bytes of a number in an adapter.
const FLOAT: u64 = 4;

/// The shapes of the adapters of an expert. The first number of a shape is the rows of a matrix.
#[derive(Clone, Copy, Debug, Default)]
struct Shapes {
    /// The first matrix of gate and up, and the second one of each.
    enter: Option<[[u64; 2]; 2]>,
    /// The first matrices of gate and up: one of both, or one of each.
    firsts: u64,
    /// Both matrices of down.
    leave: Option<[[u64; 2]; 2]>,
}

impl Shapes {
    /// Returns the shapes of the experts of a layer among the parameters `specs`; `None` without adapters.
    fn of<'a>(specs: impl Iterator<Item = &'a ParameterSpec> + Clone, layer: &str) -> Option<Self> {
        let found = |ending: &str| {
            specs.clone().find_map(|spec| {
                let stack = spec.layout.stack.as_ref().filter(|stack| stack.tensor.ends_with(ending))?;
                (is_of_adapter(&spec.path) && is_in(&spec.path, layer)).then_some((stack.is_usual, spec))
            })
        };
        let shape = |ending: &str| {
            let &[rows, columns] = found(ending)?.1.shape.as_slice() else { return None };
            Some([rows as u64, columns as u64])
        };
        let both = |name: &str| Some([shape(&format!("{name}.lora_A"))?, shape(&format!("{name}.lora_B"))?]);
        let firsts = if found(".gate_up_proj.lora_A").is_some_and(|(is_usual, _)| !is_usual) { 2 } else { 1 };
        let shapes = Self { enter: both(".gate_up_proj"), firsts, leave: both(".down_proj") };
        (shapes.enter.is_some() || shapes.leave.is_some()).then_some(shapes)
    }

    /// Returns the numbers that the adapters keep of a row: the results of their first matrices.
    fn low(self) -> u64 {
        let of = |matrices: Option<[[u64; 2]; 2]>| matrices.map_or(0, |[[_, rank], _]| rank);
        self.firsts * of(self.enter) + of(self.leave)
    }

    /// Returns the numbers of a row that `I` keeps for `W`: the inputs and the output gradients of the matrices. Gate and up
    /// have the same input.
    fn stash(self) -> u64 {
        let enter =
            self.enter.map_or(0, |[[width, rank], [_, inner]]| width + 2 * self.firsts * rank + 2 * inner);
        enter + self.leave.map_or(0, |[[inner, rank], [_, width]]| inner + 2 * rank + width)
    }
}

/// Returns whether the experts of a layer among the parameters `specs` have adapters on gate and up, and on down.
pub(super) fn adapted_parts<'a>(
    specs: impl Iterator<Item = &'a ParameterSpec> + Clone,
    layer: &str,
) -> [bool; 2] {
    Shapes::of(specs, layer).map_or([false; 2], |shapes| [shapes.enter.is_some(), shapes.leave.is_some()])
}

/// Adds to `layers`, which have the sizes for rows of `tokens` tokens, what the adapters of experts among the parameters
/// `specs` keep, if a token has `chosen` experts.
pub(super) fn add_expert_adapters<'a>(
    layers: &mut [LayerDesc],
    specs: impl Iterator<Item = &'a ParameterSpec> + Clone,
    chosen: u64,
    tokens: usize,
) {
    for layer in layers {
        let Some(shapes) = Shapes::of(specs.clone(), &layer.path) else { continue };
        let bytes = (FLOAT * shapes.low()).saturating_mul(chosen).saturating_mul(tokens as u64);
        layer.activation_bytes = layer.activation_bytes.saturating_add(bytes);
    }
}

/// Returns the bytes that `I` keeps for the `W` of the adapters of experts of these layers, for rows of `tokens` tokens.
pub(super) fn expert_adapter_stash<'a>(
    layers: &[LayerDesc],
    specs: impl Iterator<Item = &'a ParameterSpec> + Clone,
    chosen: u64,
    tokens: usize,
) -> u64 {
    let shapes = layers.iter().filter_map(|layer| Shapes::of(specs.clone(), &layer.path));
    let numbers = shapes.map(Shapes::stash).fold(0, u64::saturating_add);
    numbers.saturating_mul(FLOAT).saturating_mul(chosen).saturating_mul(tokens as u64)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::file_layout::{FileLayout, StackedMatrix};
    use crate::lora::{LoraConfig, LoraTargets};
    use crate::model_config::ModelConfig;
    use crate::parameter::ParameterKind;

    /// Returns the description of a matrix of an adapter of an expert in layer 1, in the tensor of all experts or as its own.
    fn spec(path: &str, tensor: &str, shape: [usize; 2], is_usual: bool) -> ParameterSpec {
        let tensor = format!("m.layers.1.mlp.experts.{tensor}");
        let stack = StackedMatrix { tensor, expert: 0, experts: 2, matrix: 0, matrices: 1, is_usual };
        let layout = FileLayout { stack: Some(stack), ..FileLayout::default() };
        let path = format!("m.layers.1.mlp.experts.0.{path}.weight");
        ParameterSpec { layout, ..ParameterSpec::new(path, shape.to_vec(), ParameterKind::Matrix) }
    }

    /// Checks what layers 0 and 1 keep for 2 experts of each of 7 tokens.
    fn check(specs: &[ParameterSpec], kept: u64, stash: u64) {
        let layer = |index: usize| LayerDesc { path: format!("m.layers.{index}"), ..LayerDesc::default() };
        let mut layers = [layer(0), layer(1)];
        add_expert_adapters(&mut layers, specs.iter(), 2, 7);
        let of_tokens = 7 * 2 * 4;
        assert_eq!(layers.clone().map(|layer| layer.activation_bytes), [0, of_tokens * kept]);
        assert_eq!(expert_adapter_stash(&layers, specs.iter(), 2, 7), of_tokens * stash);
    }

    #[test]
    fn each_chosen_expert_keeps_its_rows() {
        let others = |is_usual| {
            [
                spec("gate_proj.lora_B", "gate_up_proj.lora_B", [3, 5], is_usual),
                spec("up_proj.lora_B", "gate_up_proj.lora_B", [3, 5], is_usual),
                spec("down_proj.lora_A", "down_proj.lora_A", [5, 3], is_usual),
                spec("down_proj.lora_B", "down_proj.lora_B", [3, 8], is_usual),
            ]
        };
        let first = |path: &str, is_usual| spec(path, "gate_up_proj.lora_A", [8, 3], is_usual);
        let of_all = [&[first("gate_up_proj.lora_A", true)], &others(true)[..]].concat();
        check(&of_all, 3 + 3, 8 + 2 * 3 + 2 * 5 + 5 + 2 * 3 + 8);
        let firsts = ["gate_proj.lora_A", "up_proj.lora_A"].map(|path| first(path, false));
        let own = [&firsts[..], &others(false)].concat();
        check(&own, 3 + 3 + 3, 8 + 2 * 2 * 3 + 2 * 5 + 5 + 2 * 3 + 8);
    }

    /// The files of Mixtral have other names for the layers of an expert.
    #[test]
    fn own_layers_of_other_names_are_counted() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/mixtral-tiny");
        let targets = LoraTargets::named(["experts.gate_up_proj", "experts.down_proj"]);
        let lora = LoraConfig { rank: 3, own_experts: true, targets, ..LoraConfig::default() };
        let model = ModelConfig::read(&folder).expect("a model");
        let specs = model.adapter_parameters(&lora).expect("it can have these adapters");
        assert!(specs.iter().any(|spec| spec.path.ends_with(".experts.0.w3.lora_A.weight")));
        let shapes = Shapes::of(specs.iter(), "model.layers.1").expect("it has adapters");
        assert_eq!(shapes.low(), 3 + 3 + 3);
    }
}
