//! The bytes of the adapters of experts that a router chooses ([`pipewright::nn::ExpertAdapter`]), besides those of the model
//! itself.

use pipewright_schedule::LayerDesc;

use crate::lora::is_of_adapter;
use crate::parameter::{ParameterSpec, is_in};

/// The bytes of a number in an adapter.
const FLOAT: u64 = 4;

/// The shapes of the adapters of an expert, of which the first number is the rows of a matrix.
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
        let shape = |ending: &str| {
            let is_meant = |spec: &&ParameterSpec| {
                let stack = spec.layout.stack.as_ref().filter(|_| is_of_adapter(&spec.path));
                stack.is_some_and(|stack| stack.tensor.ends_with(ending)) && is_in(&spec.path, layer)
            };
            let spec = specs.clone().find(is_meant)?;
            let &[rows, columns] = spec.shape.as_slice() else { return None };
            Some([rows as u64, columns as u64])
        };
        let both = |name: &str| Some([shape(&format!("{name}.lora_A"))?, shape(&format!("{name}.lora_B"))?]);
        let own = both(".up_proj");
        let (enter, firsts) = if own.is_some() { (own, 2) } else { (both(".gate_up_proj"), 1) };
        let shapes = Self { enter, firsts, leave: both(".down_proj") };
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
    use super::*;
    use crate::file_layout::{FileLayout, StackedMatrix};
    use crate::parameter::ParameterKind;

    #[test]
    fn each_chosen_expert_keeps_its_rows() {
        let spec = |path: &str, tensor: &str, shape: [usize; 2]| {
            let tensor = format!("m.layers.1.mlp.experts.{tensor}");
            let stack =
                StackedMatrix { tensor, expert: 0, experts: 2, matrix: 0, matrices: 1, is_usual: false };
            let layout = FileLayout { stack: Some(stack), ..FileLayout::default() };
            let path = format!("m.layers.1.mlp.experts.0.{path}.weight");
            ParameterSpec { layout, ..ParameterSpec::new(path, shape.to_vec(), ParameterKind::Matrix) }
        };
        let specs = [
            spec("gate_up_proj.lora_A", "gate_up_proj.lora_A", [8, 3]),
            spec("gate_proj.lora_B", "gate_up_proj.lora_B", [3, 5]),
            spec("up_proj.lora_B", "gate_up_proj.lora_B", [3, 5]),
            spec("down_proj.lora_A", "down_proj.lora_A", [5, 3]),
            spec("down_proj.lora_B", "down_proj.lora_B", [3, 8]),
        ];
        let layer = |index: usize| LayerDesc { path: format!("m.layers.{index}"), ..LayerDesc::default() };
        let mut layers = [layer(0), layer(1)];
        add_expert_adapters(&mut layers, specs.iter(), 2, 7);
        let kept = layers.clone().map(|layer| layer.activation_bytes);
        assert_eq!(kept, [0, 7 * 2 * 4 * (3 + 3)]);
        let stash = expert_adapter_stash(&layers, specs.iter(), 2, 7);
        assert_eq!(stash, 7 * 2 * 4 * (8 + 2 * 3 + 2 * 5 + 5 + 2 * 3 + 8));
    }
}
