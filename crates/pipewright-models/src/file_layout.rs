//! How files of a Hugging Face directory store a parameter, where that differs from a tensor of its own with
//! matrices as `[outputs, inputs]`.

/// How files store a parameter. The default is a tensor of its own, in which a matrix is `[outputs, inputs]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileLayout {
    /// Whether a matrix is `[inputs, outputs]` in files, as in the `Conv1D` of transformers.
    pub inputs_first: bool,
    /// The parts of which the outputs of a matrix consist, if files store one part after the other.
    pub parts: Option<OutputParts>,
    /// The larger tensor of which the parameter is an entry.
    pub entry: Option<TensorEntry>,
    /// Another name that the tensor may have.
    pub other_name: Option<String>,
    /// The larger tensor that may have the matrix instead of a tensor of its own.
    pub stack: Option<StackedMatrix>,
}

/// The outputs of a linear layer that are several parts, such as queries, keys and values. Files have one
/// whole part after the other. In memory and in checkpoints, the outputs are in groups, each with its share
/// of every part. So neighbouring groups have neighbouring outputs, and the ranks that compute a layer
/// together can hold some groups each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputParts {
    /// The number of groups.
    pub groups: usize,
    /// The outputs of a group that belong to each part. A width is 0 if there are only two parts.
    pub widths: [usize; 3],
}

impl OutputParts {
    /// Returns the outputs of a group.
    pub(crate) fn group(&self) -> usize {
        self.widths.iter().sum()
    }

    /// Returns the number of outputs.
    pub(crate) fn outputs(&self) -> usize {
        self.groups * self.group()
    }

    /// Returns the place in a file of each output, in the order that they have here.
    pub(crate) fn places(&self) -> Vec<usize> {
        let mut places = Vec::with_capacity(self.outputs());
        for group in 0..self.groups {
            let mut start = 0;
            for width in self.widths {
                let first = start * self.groups + group * width;
                places.extend(first..first + width);
                start += width;
            }
        }
        places
    }
}

/// An entry of a tensor in a file. The tensor has the entries along its first dimension, and each entry has
/// the parameter's elements in every `step`th column from `first` on. A matrix is `[inputs, outputs]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// The name of the tensor.
    pub tensor: String,
    /// The index of the entry.
    pub index: usize,
    /// The number of entries.
    pub count: usize,
    /// The first column.
    pub first: usize,
    /// The distance of neighbouring columns.
    pub step: usize,
}

/// A matrix in a tensor that has the matrices of all experts of a layer. transformers computes with such
/// tensors, and writes them if `save_pretrained` has `save_original_format=False`. The tensor is
/// `[experts, matrices * outputs, inputs]`: the matrices of an expert follow each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackedMatrix {
    /// The name of the tensor.
    pub tensor: String,
    /// The index of the expert.
    pub expert: usize,
    /// The number of experts.
    pub experts: usize,
    /// The index of the matrix among those of the expert.
    pub matrix: usize,
    /// The number of matrices of an expert in the tensor.
    pub matrices: usize,
    /// Whether files of the family have this tensor only, and no tensors of the matrices.
    pub is_usual: bool,
}

impl StackedMatrix {
    /// Returns the shape of the tensor with matrices of `[outputs, inputs]`.
    pub(crate) fn tensor_shape(&self, [outputs, inputs]: [usize; 2]) -> Vec<usize> {
        vec![self.experts, self.matrices.saturating_mul(outputs), inputs]
    }

    /// Returns the index of the matrix among all matrices of the tensor.
    pub(crate) fn index(&self) -> usize {
        self.expert * self.matrices + self.matrix
    }
}

impl TensorEntry {
    /// Returns the shape of the tensor with entries of this shape.
    pub(crate) fn tensor_shape(&self, shape: &[usize]) -> Vec<usize> {
        let mut whole = vec![self.count];
        whole.extend(shape);
        if let Some(columns) = whole.last_mut() {
            *columns *= self.step;
        }
        whole
    }

    /// Returns the parameter's elements, from the elements of the entry.
    pub(crate) fn columns_of(&self, entry: Vec<f32>) -> Vec<f32> {
        if self.step == 1 { entry } else { entry.into_iter().skip(self.first).step_by(self.step).collect() }
    }
}

impl FileLayout {
    /// Returns the name that the tensor with the matrices of all experts has in transformers, which adapters name.
    pub(crate) fn stack_of_experts(&self) -> Option<&str> {
        let stack = self.stack.as_ref()?;
        if stack.is_usual { self.other_name.as_deref() } else { Some(&stack.tensor) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_a_share_of_every_part() {
        // A file has the queries 0 to 7, the keys 8 to 11 and the values 12 to 15 of two groups.
        let parts = OutputParts { groups: 2, widths: [4, 2, 2] };
        assert_eq!(parts.places(), [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]);
        let pairs = OutputParts { groups: 3, widths: [1, 1, 0] };
        assert_eq!(pairs.places(), [0, 3, 1, 4, 2, 5]);
    }

    #[test]
    fn entries_are_columns_of_a_part_of_a_tensor() {
        let entry = TensorEntry { tensor: String::new(), index: 2, count: 5, first: 1, step: 2 };
        assert_eq!(entry.tensor_shape(&[3, 4]), [5, 3, 8]);
        assert_eq!(entry.tensor_shape(&[4]), [5, 8]);
        assert_eq!(entry.columns_of(vec![0.0, 1.0, 2.0, 3.0]), [1.0, 3.0]);
    }
}
