//! A frozen matrix of a layer, which products decode in panels.

use crate::memory::FrozenMatrix;

/// A frozen matrix whose bytes are decoded in panels. Its rows are the outputs.
#[derive(Clone, Debug)]
pub(super) struct HeldFrozen {
    pub(super) matrix: FrozenMatrix,
}
