//! The description of a parameter of a stage, and a count without copies.

use std::collections::HashSet;

use crate::file_layout::FileLayout;

/// The description of a parameter of a stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterSpec {
    /// The global path.
    pub path: String,
    /// The shape as Burn stores it; a matrix is `[inputs, outputs]`.
    pub shape: Vec<usize>,
    /// The use of the parameter.
    pub kind: ParameterKind,
    /// How files store it.
    pub layout: FileLayout,
    /// The first row or column of the parameter that a shard has; 0 for a whole parameter.
    pub first: usize,
    /// The bytes of a quantised matrix in the memory of a stage; `None` for other parameters.
    pub quantised_bytes: Option<u64>,
    /// The bytes that are read from files whenever the stage needs the matrix, which then is in memory only while the stage
    /// computes; `None` if it stays in memory.
    pub read_bytes: Option<u64>,
}

impl ParameterSpec {
    /// Returns the description of a parameter that files store in the usual way.
    pub fn new(path: String, shape: Vec<usize>, kind: ParameterKind) -> Self {
        let layout = FileLayout::default();
        Self { path, shape, kind, layout, first: 0, quantised_bytes: None, read_bytes: None }
    }

    /// Returns the name of the tensor in files that has the parameter, unless it has another place.
    pub(crate) fn tensor(&self) -> &str {
        let FileLayout { entry, stack, .. } = &self.layout;
        let stack = stack.as_ref().filter(|stack| stack.is_usual).map(|stack| &stack.tensor);
        entry.as_ref().map(|entry| &entry.tensor).or(stack).unwrap_or(&self.path)
    }

    /// Returns the names that the tensor with the parameter may have in files.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &str> {
        let FileLayout { other_name, stack, .. } = &self.layout;
        let stack = stack.as_ref().map(|stack| &*stack.tensor);
        [Some(self.tensor()), other_name.as_deref(), stack].into_iter().flatten()
    }

    /// Returns the bytes of the whole matrix if it is read for a part of it, in which case both are in memory until the part is
    /// made.
    pub(crate) fn read_whole(&self) -> Option<u64> {
        self.read_bytes.filter(|read| *read > self.quantised_bytes.unwrap_or(0))
    }

    /// Returns whether the parameter belongs to an expert that a router chooses.
    pub fn is_of_routed_expert(&self) -> bool {
        let mut names = self.path.split('.').skip_while(|name| *name != "experts").skip(1);
        names.next().is_some_and(|name| name.parse::<usize>().is_ok())
    }

    /// Returns whether the parameter belongs to the layer at a path.
    pub(crate) fn is_in(&self, layer: &str) -> bool {
        is_in(&self.path, layer)
    }
}

/// Returns whether a path is below the path of a layer.
pub(crate) fn is_in(path: &str, layer: &str) -> bool {
    path.strip_prefix(layer).is_some_and(|rest| rest.starts_with('.'))
}

/// The use of a parameter, which decides its initial values and its layout in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParameterKind {
    /// The weight of a linear layer: `[inputs, outputs]` here, `[outputs, inputs]` in most files
    /// ([`FileLayout`]). Initially normal.
    Matrix,
    /// One row for each token id, the same in a file. Initially normal.
    Table,
    /// Elementwise factors. Initially one.
    Scale,
    /// Elementwise summands of a linear layer. Initially zero.
    Bias,
}

/// The parameters that a rank holds, in a count of them. A shared parameter is one parameter for all stages of a
/// rank that have copies of it.
#[derive(Debug, Clone, Default)]
pub struct FirstCopies(HashSet<(String, usize)>);

impl FirstCopies {
    /// Returns the parameters in `specs` without copies of parameters that were passed to this function before.
    pub fn of(&mut self, specs: &[ParameterSpec]) -> Vec<ParameterSpec> {
        let is_first = |spec: &&ParameterSpec| self.0.insert((spec.path.clone(), spec.first));
        specs.iter().filter(is_first).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_that_is_read_for_a_part_is_in_memory_whole() {
        let read_whole = |quantised_bytes, read_bytes| {
            let spec = ParameterSpec::new(String::new(), vec![3, 5], ParameterKind::Matrix);
            ParameterSpec { quantised_bytes, read_bytes, ..spec }.read_whole()
        };
        assert_eq!([read_whole(Some(900), None), read_whole(Some(800), Some(800))], [None; 2]);
        assert_eq!([read_whole(Some(10), Some(20)), read_whole(None, Some(30))], [Some(20), Some(30)]);
    }
}
