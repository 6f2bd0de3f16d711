//! The bytes of the adapters of experts that a router chooses, besides those of the model itself. Each chosen expert is a
//! sequence of layers with adapters ([`pipewright::nn::ExpertAdapter`]).

use pipewright::tensor::Precision;
use pipewright_schedule::LayerDesc;
use pipewright_shapes::kept::expert_rows;

use crate::lora::is_of_adapter;
use crate::parameter::{ParameterSpec, is_in};

/// The bytes of a number in an adapter.
const FLOAT: u64 = 4;

/// The shapes of the adapters of an expert, of which the first number is the rows of a matrix.
#[derive(Clone, Copy, Debug, Default)]
struct Shapes {
    /// The first matrix of gate and up, and the second one of each.
    enter: Option<[[u64; 2]; 2]>,
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
        let shapes = Self { enter: both(".gate_up_proj"), leave: both(".down_proj") };
        (shapes.enter.is_some() || shapes.leave.is_some()).then_some(shapes)
    }

    /// Returns the width of a token's row.
    fn width(self) -> u64 {
        self.enter.map_or_else(|| self.leave.map_or(0, |[_, [_, width]]| width), |[[width, _], _]| width)
    }

    /// Returns the numbers in single precision that the adapters keep of a row: the results of their first matrices.
    fn low(self) -> u64 {
        let of = |matrices: Option<[[u64; 2]; 2]>| matrices.map_or(0, |[[_, rank], _]| rank);
        2 * of(self.enter) + of(self.leave)
    }

    /// Returns the numbers of a row that `I` keeps for `W` in the precision of the run: the inputs and the output gradients
    /// of the layers.
    fn of_layers(self) -> u64 {
        let enter = self.enter.map_or(0, |[[width, _], [_, inner]]| width + 2 * inner);
        enter + self.leave.map_or(0, |[[inner, _], [_, width]]| inner + width)
    }
}

/// Adds to `layers`, which have the sizes for rows of `tokens` tokens in `precision`, what the adapters of experts among
/// the parameters `specs` keep, if a token has `chosen` experts.
pub(super) fn add_expert_adapters<'a>(
    layers: &mut [LayerDesc],
    specs: impl Iterator<Item = &'a ParameterSpec> + Clone,
    chosen: u64,
    tokens: usize,
    precision: Precision,
) {
    for layer in layers {
        let Some(shapes) = Shapes::of(specs.clone(), &layer.path) else { continue };
        let rows = expert_rows(chosen, shapes.width()) * precision.bytes();
        let bytes = rows.saturating_add(chosen.saturating_mul(FLOAT * shapes.low()));
        layer.activation_bytes = layer.activation_bytes.saturating_add(bytes.saturating_mul(tokens as u64));
    }
}

/// Returns the bytes that `I` keeps for the `W` of the adapters of experts of these layers, for rows of `tokens` tokens.
pub(super) fn expert_adapter_stash<'a>(
    layers: &[LayerDesc],
    specs: impl Iterator<Item = &'a ParameterSpec> + Clone,
    chosen: u64,
    tokens: usize,
    precision: Precision,
) -> u64 {
    let of_row = |shapes: Shapes| precision.bytes() * shapes.of_layers() + 2 * FLOAT * shapes.low();
    let rows = layers.iter().filter_map(|layer| Shapes::of(specs.clone(), &layer.path)).map(of_row);
    rows.fold(0, u64::saturating_add).saturating_mul(chosen).saturating_mul(tokens as u64)
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
            let stack = StackedMatrix { tensor, expert: 0, experts: 2, matrix: 0, matrices: 1 };
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
        add_expert_adapters(&mut layers, specs.iter(), 2, 7, Precision::Bf16);
        let rows = expert_rows(2, 8);
        let kept = layers.clone().map(|layer| layer.activation_bytes);
        assert_eq!(kept, [0, 7 * (2 * rows + 2 * 4 * 3 * 3)]);
        let stash = expert_adapter_stash(&layers, specs.iter(), 2, 7, Precision::Bf16);
        assert_eq!(stash, 7 * 2 * (2 * (8 + 2 * 5 + 5 + 8) + 2 * 4 * 3 * 3));
    }
}
