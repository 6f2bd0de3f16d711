//! The experts of gpt-oss in MXFP4: all experts of a layer in one tensor, with the rows of gate and up in turn.
//!
//! ```text
//! N_blocks    halves of bytes, the lower one first: [experts, outputs, inputs / 32, 16]
//! N_scales    the exponents of the scales: [experts, outputs, inputs / 32]
//! ```
//!
//! The names and the order are as in transformers 5.24 (`integrations/mxfp4.py`).

use pipewright_kernel::quantised::{Codebook, Form, QuantisedMatrix, Scales};
use safetensors::Dtype;

use super::weights::Weights;
use crate::error::ModelError;
use crate::file_layout::TensorEntry;
use crate::parameter::ParameterSpec;
use crate::quantisation::QuantisedBytes;

/// The ends of the names of the tensors with the codes and with the scales.
const ENDS: [&str; 2] = ["_blocks", "_scales"];
/// The elements of a block.
const BLOCK: usize = 32;
/// The numbers of E2M1.
const NUMBERS: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Returns whether the matrices of the experts in `tensor` are quantised.
pub(super) fn is_at(weights: &Weights, tensor: &str) -> bool {
    weights.has(&format!("{tensor}{}", ENDS[0]))
}

/// Returns the tensor with the matrices that these codes belong to.
pub(super) fn matrix_of(codes: &str) -> Option<String> {
    codes.strip_suffix(ENDS[0]).map(str::to_owned)
}

/// Returns the names of the tensors with the codes and with the scales.
pub(super) fn parts(tensor: &str) -> Vec<String> {
    ENDS.iter().map(|end| format!("{tensor}{end}")).collect()
}

impl Weights {
    /// Reads the matrix of an expert.
    pub(super) fn read_mxfp4(
        &mut self,
        tensor: &str,
        spec: &ParameterSpec,
    ) -> Result<QuantisedMatrix, ModelError> {
        self.check_mxfp4(tensor, spec)?;
        let (&[columns, rows], Some(entry)) = (&*spec.shape, &spec.layout.entry) else {
            return Err(self.fault(tensor, "it is not the matrix of an expert".to_owned()));
        };
        let TensorEntry { index, first, step, .. } = *entry;
        let mut chosen = |part: String, width: usize| -> Result<Vec<u8>, ModelError> {
            let (file, length) = (self.file_of(&part)?, rows * step * width);
            let all = self.file(file)?.read_bytes_of(&part, index * length..(index + 1) * length)?;
            Ok(all.chunks_exact(width).skip(first).step_by(step).flatten().copied().collect())
        };
        let [blocks, scales] = ENDS.map(|end| format!("{tensor}{end}"));
        let mut codes = chosen(blocks, columns / 2)?;
        codes.iter_mut().for_each(|byte| *byte = byte.rotate_left(4));
        let scales = Scales::Exponents(chosen(scales, columns / BLOCK)?);
        match Codebook::new([rows, columns], codes, NUMBERS, scales, BLOCK) {
            Ok(codebook) => Ok(QuantisedMatrix::new(rows, Form::Codebook(codebook))),
            Err(source) => Err(self.fault(tensor, source.to_string()).because(source)),
        }
    }

    /// Checks the tensors with the matrix of an expert, and returns its bytes in memory. It reads headers only.
    pub(super) fn check_mxfp4(
        &mut self,
        tensor: &str,
        spec: &ParameterSpec,
    ) -> Result<QuantisedBytes, ModelError> {
        let (&[columns, rows], Some(entry)) = (&*spec.shape, &spec.layout.entry) else {
            return Err(self.fault(tensor, "it is not the matrix of an expert".to_owned()));
        };
        if columns == 0 || !columns.is_multiple_of(BLOCK) {
            return Err(self.fault(tensor, format!("{columns} inputs are not a multiple of {BLOCK}")));
        }
        let shape = [entry.count, rows * entry.step, columns / BLOCK, BLOCK / 2];
        let [blocks, scales] = ENDS.map(|end| format!("{tensor}{end}"));
        self.require_form(&blocks, &[Dtype::U8], &shape)?;
        self.require_form(&scales, &[Dtype::U8], &shape[..3])?;
        let (codes, scales) = (rows * columns / 2, rows * columns / BLOCK);
        Ok(QuantisedBytes {
            divided: codes as u64,
            scales: scales as u64,
            unit: BLOCK,
            ..QuantisedBytes::default()
        })
    }
}
