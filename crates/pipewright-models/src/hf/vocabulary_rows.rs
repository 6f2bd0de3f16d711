//! The parameters that have a row for each token id, and the rows of ids that the files of a model do not have.

use super::weight_type::WeightType;
use crate::lora::{HEAD, is_table, module_of};
use crate::parameter::{ParameterKind, ParameterSpec};

/// Returns whether a parameter has a row for each token id: the table of the embedding, and the head.
pub(super) fn is_of_vocabulary(spec: &ParameterSpec) -> bool {
    let module = module_of(&spec.path);
    module == HEAD || (spec.kind == ParameterKind::Table && is_table(module))
}

/// Returns the elements of the rows of a parameter in a file of this type, followed by their mean until there are `rows`.
pub(super) fn with_means(mut elements: Vec<f32>, own: usize, rows: usize, kind: WeightType) -> Vec<f32> {
    let mean = kind.rounded(mean_row(&elements, own));
    (own..rows).for_each(|_| elements.extend(&mean));
    elements
}

/// Returns the mean of rows that follow each other.
pub(super) fn mean_row(elements: &[f32], rows: usize) -> Vec<f32> {
    let width = elements.len() / rows.max(1);
    let mut sums = vec![0.0; width];
    for row in elements.chunks_exact(width.max(1)) {
        sums.iter_mut().zip(row).for_each(|(sum, element)| *sum += f64::from(*element));
    }
    sums.into_iter().map(|sum| (sum / rows as f64) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_row_is_the_mean_of_all() {
        assert_eq!(mean_row(&[1.0, 2.0, 3.0, 6.0], 2), [2.0, 4.0]);
    }
}
