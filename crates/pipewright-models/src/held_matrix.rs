//! The matrices of linear layers in the form in which a source has them: parameters, or frozen matrices that are quantised or
//! stay in their files.

use std::sync::Arc;

use burn::module::Param;
use burn::tensor::Tensor;
use pipewright::memory::FrozenMatrix;
use pipewright::nn::HeldMatrix;
use pipewright::tensor::{Placement, TensorShard};
use pipewright_kernel::quantised::QuantisedMatrix;

use crate::error::ModelError;
use crate::file_layout::FileLayout;
use crate::parameter::{Builder, ParameterKind, ParameterSpec};

/// A table in the form in which the source has it.
pub(crate) enum HeldTable {
    Parameter(Param<Tensor<2>>),
    Quantised(Arc<QuantisedMatrix>),
}

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
        if let Some(matrix) = self.quantised(&spec, shard)? {
            return Ok(HeldMatrix::quantised(matrix));
        }
        let values = self.source.held_matrix(&spec, shard)?;
        Ok(self.hold(spec, values, placement).into())
    }

    /// Like [`Builder::held_matrix`], for a table with a row for each token. Layers of a stage that have the same rows of a
    /// quantised table share them.
    pub(crate) fn held_table(
        &mut self,
        layer: &str,
        shape: [usize; 2],
        placement: Placement,
    ) -> Result<HeldTable, ModelError> {
        let path = self.named(&format!("{layer}.weight"));
        let spec = ParameterSpec::new(path, shape.to_vec(), ParameterKind::Table);
        let shard = self.tensor().shard(placement);
        let known = self.tables.iter().find(|(path, of, _)| (path, of) == (&spec.path, &shard));
        if let Some((.., table)) = known {
            return Ok(HeldTable::Quantised(table.clone()));
        }
        if let Some(table) = self.quantised(&spec, shard)? {
            self.tables.push((spec.path, shard, table.clone()));
            return Ok(HeldTable::Quantised(table));
        }
        let values = self.source.held_matrix(&spec, shard)?;
        Ok(HeldTable::Parameter(self.hold(spec, values, placement)))
    }

    /// Returns the shard of a matrix or a table that the source has quantised.
    fn quantised(
        &mut self,
        spec: &ParameterSpec,
        shard: TensorShard,
    ) -> Result<Option<Arc<QuantisedMatrix>>, ModelError> {
        let Some(matrix) = self.source.quantised(spec, shard)? else { return Ok(None) };
        self.frozen.elements += matrix.rows() * matrix.columns();
        self.tensor().keep_alive();
        Ok(Some(self.tensor().share_quantised(&spec.path, matrix)))
    }
}
