//! The adapters of the experts that a router chooses, as PEFT has them for `target_parameters`: two matrices for all
//! experts of a block.
//!
//! The rows of `lora_A [experts * rank, inputs]` are those of one expert after the other. The columns of `lora_B
//! [outputs, rank * experts]` are one column of each expert, then the next column of each. Gate and up are the outputs of one
//! matrix, `gate_up_proj`. If `down_proj` has an adapter too, that of `gate_up_proj` is in a `base_layer`.
//!
//! The experts of models of transformers 4 are layers, whose adapters are read and written as those of other layers.

use crate::file_layout::StackedMatrix;
use crate::lora::{GATE_UP, is_of_adapter, module_of};
use crate::parameter::ParameterSpec;

/// The beginning of the names of tensors.
pub(super) const PREFIX: &str = "base_model.model.";
/// The name of the module with an adapter inside a module with another one.
const INNER: &str = ".base_layer";

/// A matrix of an expert's adapter, in the tensor of all experts.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertPart<'a> {
    stack: &'a StackedMatrix,
    /// The shape of the matrix here, `[inputs, rank]` or `[rank, outputs]`.
    shape: [usize; 2],
}

impl<'a> ExpertPart<'a> {
    /// Returns the place of a parameter; `None` if it is not of an adapter that all experts of a block have in one matrix.
    pub(super) fn of(spec: &'a ParameterSpec) -> Option<Self> {
        let stack = spec.layout.stack.as_ref();
        let stack = stack.filter(|stack| stack.is_usual && is_of_adapter(&spec.path))?;
        Some(Self { stack, shape: spec.shape.as_slice().try_into().ok()? })
    }

    /// Returns the matrices of all experts of the block that have the adapter, such as
    /// `model.layers.0.mlp.experts.down_proj`.
    pub(super) fn target(&self) -> &'a str {
        self.split().0
    }

    /// Returns the module of the experts of the block, such as `model.layers.0.mlp.experts`.
    pub(super) fn module(&self) -> &'a str {
        module_of(self.target())
    }

    fn split(&self) -> (&'a str, &'a str) {
        self.stack.tensor.rsplit_once('.').unwrap_or_default()
    }

    fn is_first(&self) -> bool {
        self.split().1 == "lora_A"
    }

    /// Returns the names that the tensor may have: the name inside another adapter and the usual one, or the usual one
    /// alone.
    pub(super) fn tensors(&self) -> Vec<String> {
        let (target, part) = self.split();
        let (module, name) = target.rsplit_once('.').unwrap_or_default();
        let inner = (name == GATE_UP).then_some(INNER);
        inner.into_iter().chain([""]).map(|inner| format!("{PREFIX}{module}{inner}.{part}.weight")).collect()
    }

    /// Returns the shape of the tensor.
    pub(super) fn tensor_shape(&self) -> Vec<usize> {
        let ([rows, columns], experts) = (self.shape, self.stack.experts);
        if self.is_first() {
            vec![experts * columns, rows]
        } else {
            vec![self.stack.matrices * columns, rows * experts]
        }
    }

    /// Returns the indices in the tensor of the matrix's elements, in the order that they have here.
    pub(super) fn indices(&self) -> impl Iterator<Item = usize> {
        let ([rows, columns], &StackedMatrix { expert, experts, matrix, .. }) = (self.shape, self.stack);
        let is_first = self.is_first();
        (0..rows * columns).map(move |index| {
            let (row, column) = (index / columns, index % columns);
            if is_first {
                (expert * columns + column) * rows + row
            } else {
                (matrix * columns + column) * rows * experts + row * experts + expert
            }
        })
    }
}

/// Returns the path of the module of experts to which a layer of PEFT belongs, and whether it is inside another adapter.
pub(super) fn module_of_experts(layer: &str) -> Option<(&str, bool)> {
    let (module, is_inner) = match layer.strip_suffix(INNER) {
        Some(module) => (module, true),
        None => (layer, false),
    };
    module.ends_with(".experts").then_some((module, is_inner))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file_layout::FileLayout;
    use crate::parameter::ParameterKind;

    /// Checks the place of a matrix of the expert 1 of 3.
    fn check(
        tensor: &str,
        shape: [usize; 2],
        [matrix, matrices]: [usize; 2],
        expected: (&[usize], &[usize]),
    ) {
        let tensor = format!("m.experts.{tensor}");
        let stack = StackedMatrix { tensor, expert: 1, experts: 3, matrix, matrices, is_usual: true };
        let layout = FileLayout { stack: Some(stack), ..FileLayout::default() };
        let path = "m.experts.1.x.lora_A.weight".to_owned();
        let spec =
            ParameterSpec { layout, ..ParameterSpec::new(path, shape.to_vec(), ParameterKind::Matrix) };
        let part = ExpertPart::of(&spec).expect("it is of an adapter");
        let indices: Vec<usize> = part.indices().collect();
        assert_eq!((&*part.tensor_shape(), &*indices), expected);
    }

    #[test]
    fn matrices_of_all_experts_have_the_order_of_peft() {
        check("down_proj.lora_A", [4, 2], [0, 1], (&[6, 4], &[8, 12, 9, 13, 10, 14, 11, 15]));
        check("gate_up_proj.lora_B", [2, 2], [1, 2], (&[4, 6], &[13, 19, 16, 22]));
    }

    #[test]
    fn the_adapter_of_gates_is_inside_the_other_one() {
        assert_eq!(module_of_experts("m.experts.base_layer"), Some(("m.experts", true)));
        assert_eq!(module_of_experts("m.experts"), Some(("m.experts", false)));
        assert_eq!(module_of_experts("m.shared_experts"), None);
    }
}
