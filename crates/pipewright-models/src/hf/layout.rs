//! The files of a Hugging Face directory, and the layout of parameters in them. It differs from the layout
//! here only for the weight of a linear layer, which is `[inputs, outputs]` in Burn and `[outputs, inputs]`
//! in a file.

use crate::parameter::{ParameterKind, ParameterSpec};

/// The file with the configuration.
pub(super) const CONFIG: &str = "config.json";
/// The file with the weights, if it is only one.
pub(super) const SINGLE: &str = "model.safetensors";
/// The file that says which of several files has which tensor.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// Returns the parameter's shape in a file.
pub(super) fn file_shape(spec: &ParameterSpec) -> Vec<usize> {
    match spec.kind {
        ParameterKind::Matrix => spec.shape.iter().rev().copied().collect(),
        ParameterKind::Table | ParameterKind::Scale | ParameterKind::Bias => spec.shape.clone(),
    }
}

/// Returns the dimension in a file that a dimension of the parameter is.
pub(super) fn file_dimension(spec: &ParameterSpec, dimension: usize) -> usize {
    match spec.kind {
        ParameterKind::Matrix => spec.shape.len() - 1 - dimension,
        ParameterKind::Table | ParameterKind::Scale | ParameterKind::Bias => dimension,
    }
}

/// Converts a parameter's elements from Burn's order to the file's.
pub(super) fn to_file(spec: &ParameterSpec, values: &[f32]) -> Vec<f32> {
    match (spec.kind, spec.shape.as_slice()) {
        (ParameterKind::Matrix, &[inputs, outputs]) => transposed(values, inputs, outputs),
        _ => values.to_vec(),
    }
}

/// Converts a parameter's elements from the file's order to Burn's.
pub(super) fn from_file(spec: &ParameterSpec, values: Vec<f32>) -> Vec<f32> {
    match (spec.kind, spec.shape.as_slice()) {
        (ParameterKind::Matrix, &[inputs, outputs]) => transposed(&values, outputs, inputs),
        _ => values,
    }
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
    fn transposes_shapes_of_any_remainder() {
        check(1, 1);
        check(1, 70);
        check(64, 32);
        check(33, 97);
    }
}
