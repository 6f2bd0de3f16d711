//! The files of a Hugging Face directory, and the layout of parameters in them. The weight of a linear layer
//! is `[inputs, outputs]` in Burn and `[outputs, inputs]` in most files. Some families differ
//! ([`FileLayout`](crate::file_layout::FileLayout)).

use std::borrow::Cow;
use std::ops::Range;

use crate::file_layout::FileLayout;
use crate::parameter::{ParameterKind, ParameterSpec};

/// The file with the configuration.
pub(super) const CONFIG: &str = "config.json";
/// The file with the weights, if it is only one.
pub(super) const SINGLE: &str = "model.safetensors";
/// The file that says which of several files has which tensor.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// Returns the shape in a file of the tensor that has the parameter.
pub(super) fn file_shape(spec: &ParameterSpec) -> Vec<usize> {
    let shape = own_shape(spec);
    match (&spec.layout.stack, &*shape) {
        (Some(stack), &[outputs, inputs]) if stack.is_usual => stack.tensor_shape([outputs, inputs]),
        _ => shape,
    }
}

/// Returns the shape of the parameter in a file, of which a tensor may have several.
fn own_shape(spec: &ParameterSpec) -> Vec<usize> {
    let mut shape = spec.shape.clone();
    if is_transposed(spec) {
        shape.reverse();
    }
    match &spec.layout.entry {
        Some(entry) => entry.tensor_shape(&shape),
        None => shape,
    }
}

/// Returns the number of elements of a tensor, or the largest number if there are more.
pub(super) fn count(shape: &[usize]) -> usize {
    shape.iter().fold(1, |count, &size| count.saturating_mul(size))
}

/// A place of a parameter in a file: neighbouring elements of a tensor.
#[derive(Debug)]
pub(super) struct FilePlace<N> {
    /// The name of the tensor.
    pub(super) tensor: N,
    /// The shape of the tensor.
    pub(super) shape: Vec<usize>,
    /// The elements that are read for the parameter.
    pub(super) elements: Range<usize>,
}

/// Returns the places where files may have the parameter: the usual one first.
pub(super) fn places(spec: &ParameterSpec) -> Vec<FilePlace<&str>> {
    let layout = &spec.layout;
    let shape = own_shape(spec);
    let all = count(&shape);
    let elements = layout.entry.as_ref().map_or(0..all, |entry| {
        let length = all / entry.count.max(1);
        entry.index * length..(entry.index + 1) * length
    });
    let usual = |tensor| FilePlace { tensor, shape: shape.clone(), elements: elements.clone() };
    let names = || [Some(spec.tensor()), layout.other_name.as_deref()].into_iter().flatten();
    let (Some(stack), &[outputs, inputs]) = (&layout.stack, &*shape) else {
        return names().map(usual).collect();
    };
    let first = stack.index().saturating_mul(all);
    let stacked = |tensor| {
        let shape = stack.tensor_shape([outputs, inputs]);
        FilePlace { tensor, shape, elements: first..first.saturating_add(all) }
    };
    if stack.is_usual {
        return names().map(stacked).collect();
    }
    names().map(usual).chain([stacked(&stack.tensor)]).collect()
}

/// Returns the description of a parameter in files that have all matrices as `[outputs, inputs]`: in GGUF, and for
/// quantised matrices, where `Conv1D` becomes a linear layer.
pub(super) fn outputs_first(spec: &ParameterSpec) -> ParameterSpec {
    let layout = FileLayout { inputs_first: false, ..spec.layout.clone() };
    ParameterSpec { layout, ..spec.clone() }
}

/// Returns whether a matrix has its dimensions in a file in the other order.
fn is_transposed(spec: &ParameterSpec) -> bool {
    let layout = &spec.layout;
    spec.kind == ParameterKind::Matrix && !layout.inputs_first && layout.entry.is_none()
}

/// Returns whether parts of the parameter along a dimension are whole rows in a file, in the same order.
pub(super) fn is_of_rows(spec: &ParameterSpec, dimension: usize) -> bool {
    let in_file = if is_transposed(spec) { spec.shape.len() - 1 - dimension } else { dimension };
    in_file == 0 && spec.layout.parts.is_none() && spec.layout.entry.is_none()
}

/// Converts a parameter's elements from Burn's order to the file's, or to that of the entry of the tensor.
pub(super) fn to_file(spec: &ParameterSpec, values: &[f32]) -> Vec<f32> {
    let mut values = Cow::from(values);
    if let Some(parts) = &spec.layout.parts {
        let places = parts.places();
        let mut moved = vec![0.0; values.len()];
        for (from, to) in values.chunks_exact(places.len()).zip(moved.chunks_exact_mut(places.len())) {
            from.iter().zip(&places).for_each(|(value, &place)| to[place] = *value);
        }
        values = moved.into();
    }
    match spec.shape.as_slice() {
        &[inputs, outputs] if is_transposed(spec) => transposed(&values, inputs, outputs),
        _ => values.into_owned(),
    }
}

/// Converts a parameter's elements from the file's order to Burn's.
pub(super) fn from_file(spec: &ParameterSpec, values: Vec<f32>) -> Vec<f32> {
    let values = match spec.shape.as_slice() {
        &[inputs, outputs] if is_transposed(spec) => transposed(&values, outputs, inputs),
        _ => values,
    };
    let Some(parts) = &spec.layout.parts else { return values };
    let places = parts.places();
    let rows = values.chunks_exact(places.len());
    rows.flat_map(|row| places.iter().map(|&place| row[place])).collect()
}

/// Transposes `[rows, columns]` to `[columns, rows]`, in squares that stay in the cache.
fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    const SIDE: usize = 32;
    let mut result = vec![0.0; values.len()];
    for top in (0..rows).step_by(SIDE) {
        for left in (0..columns).step_by(SIDE) {
            for row in top..(top + SIDE).min(rows) {
                for column in left..(left + SIDE).min(columns) {
                    result[column * rows + row] = values[row * columns + column];
                }
            }
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file_layout::{OutputParts, StackedMatrix};

    fn check(rows: usize, columns: usize) {
        let values: Vec<f32> = (0..rows * columns).map(|i| i as f32).collect();
        let result = transposed(&values, rows, columns);
        for row in 0..rows {
            for column in 0..columns {
                assert_eq!(result[column * rows + row], values[row * columns + column]);
            }
        }
    }

    #[test]
    fn parts_of_outputs_are_whole_in_files() {
        let parts = Some(OutputParts { groups: 2, widths: [1, 1, 0] });
        let layout = FileLayout { parts, ..FileLayout::default() };
        let spec = |shape: &[usize], kind| ParameterSpec {
            layout: layout.clone(),
            ..ParameterSpec::new(String::new(), shape.to_vec(), kind)
        };
        let matrix = spec(&[2, 4], ParameterKind::Matrix);
        let values = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
        let in_file = to_file(&matrix, &values);
        assert_eq!(in_file, [0.0, 4.0, 2.0, 6.0, 1.0, 5.0, 3.0, 7.0]);
        assert_eq!(from_file(&matrix, in_file), values);
        assert_eq!((file_shape(&matrix), is_of_rows(&matrix, 1)), (vec![4, 2], false));
        let plain = ParameterSpec { layout: FileLayout { inputs_first: true, ..layout.clone() }, ..matrix };
        assert_eq!(to_file(&plain, &values), [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
        assert_eq!(file_shape(&plain), [2, 4]);
        let bias = spec(&[4], ParameterKind::Bias);
        assert_eq!(from_file(&bias, to_file(&bias, &values[..4])), values[..4]);
    }

    #[test]
    fn a_matrix_is_also_looked_for_among_those_of_all_experts() {
        let tensor = "mlp.experts.gate_up_proj".to_owned();
        let stack = StackedMatrix { tensor, expert: 2, experts: 4, matrix: 1, matrices: 2, is_usual: false };
        let layout = FileLayout { stack: Some(stack), ..FileLayout::default() };
        let path = "mlp.experts.2.up_proj.weight".to_owned();
        let matrix = ParameterSpec { layout, ..ParameterSpec::new(path, vec![3, 5], ParameterKind::Matrix) };
        let found = places(&matrix);
        let place = |index: usize| (found[index].tensor, &*found[index].shape, found[index].elements.clone());
        assert_eq!(found.len(), 2);
        assert_eq!(place(0), ("mlp.experts.2.up_proj.weight", &[5, 3][..], 0..15));
        let stacked = ("mlp.experts.gate_up_proj", &[4, 10, 3][..], 75..90);
        assert_eq!(place(1), stacked);
        assert_eq!(file_shape(&matrix), [5, 3]);
        // In some families, files have no tensors of the matrices.
        let mut usual = matrix.clone();
        usual.layout.stack.iter_mut().for_each(|stack| stack.is_usual = true);
        let found = places(&usual);
        assert_eq!((found.len(), file_shape(&usual)), (1, vec![4, 10, 3]));
        assert_eq!((found[0].tensor, &*found[0].shape, found[0].elements.clone()), stacked);
    }

    #[test]
    fn transposes_shapes_of_any_remainder() {
        check(1, 1);
        check(1, 70);
        check(64, 32);
        check(33, 97);
    }
}
