//! The matrices of linear layers in the form in which a source has them: parameters, or frozen matrices that are quantised or
//! stay in their files.

use pipewright::memory::FrozenMatrix;
use pipewright::nn::HeldMatrix;
use pipewright::tensor::Placement;

use crate::error::ModelError;
use crate::file_layout::FileLayout;
use crate::parameter::{Builder, ParameterKind, ParameterSpec};

impl Builder<'_> {
    /// Builds the matrix of the linear layer at the path `layer` in the form in which the source has it. `shape` is
    /// the shape of the whole matrix, `[inputs, outputs]`.
    pub(crate) fn held_matrix(
        &mut self,
        layer: &str,
        shape: [usize; 2],
        layout: FileLayout,
        placement: Placement,
    ) -> Result<HeldMatrix, ModelError> {
        let path = self.named(&format!("{layer}.weight"));
        let spec =
            ParameterSpec { layout, ..ParameterSpec::new(path, shape.to_vec(), ParameterKind::Matrix) };
        let shard = self.tensor().shard(placement);
        if let Some(matrix) = self.source.streamed(&spec, shard)? {
            let matrix = self.tensor().share_streamed(matrix);
            self.frozen.streamed.push(matrix.clone());
            let held = HeldMatrix::from(FrozenMatrix::Streamed(matrix));
            self.frozen.elements += held.quantised_elements();
            return Ok(held);
        }
        if let Some(matrix) = self.source.quantised(&spec, shard)? {
            self.frozen.elements += matrix.rows() * matrix.columns();
            self.tensor().keep_alive();
            return Ok(HeldMatrix::quantised(self.tensor().share_quantised(&spec.path, matrix)));
        }
        let values = self.source.held_matrix(&spec, shard)?;
        Ok(self.hold(spec, values, placement).into())
    }
}
