//! Matrices of FP8 in blocks, as DeepSeek and Qwen publish them.
//!
//! ```text
//! N.weight              the elements, F8_E4M3, [rows, columns]
//! N.weight_scale_inv    the scale of each block of rows and columns
//! config.json           quantization_config.weight_block_size: the rows and columns of a block
//! ```
//!
//! The weights are `element * scale`. The published code also rounds the inputs of layers to FP8, which is not done
//! here.

use pipewright_kernel::quantised::{Form, Fp8, QuantisedMatrix};
use safetensors::Dtype;

use super::weights::Weights;
use crate::error::ModelError;

/// The end of the name of the tensor with the scales of a matrix.
const SCALES: &str = "_scale_inv";

/// Returns the tensor with the scales of a matrix, if it is quantised as FP8.
pub(super) fn scales_of(weights: &Weights, tensor: &str) -> Option<String> {
    let scales = format!("{tensor}{SCALES}");
    (weights.has(tensor) && weights.has(&scales)).then_some(scales)
}

/// Returns the tensor that scales belong to.
pub(super) fn scaled_by(scales: &str) -> Option<&str> {
    scales.strip_suffix(SCALES)
}

impl Weights {
    /// Reads a matrix of this shape.
    pub(super) fn read_fp8(
        &mut self,
        tensor: &str,
        scales: &str,
        [rows, columns]: [usize; 2],
        block: [usize; 2],
    ) -> Result<QuantisedMatrix, ModelError> {
        self.require_form(tensor, &[Dtype::F8_E4M3], &[rows, columns])?;
        self.require_shape(scales, &[rows.div_ceil(block[0].max(1)), columns.div_ceil(block[1].max(1))])?;
        let scales = self.read_numbers(scales)?;
        match Fp8::new([rows, columns], self.raw(tensor)?, scales, block) {
            Ok(fp8) => Ok(QuantisedMatrix::new(rows, Form::Fp8(fp8))),
            Err(source) => Err(self.fault(tensor, source.to_string()).because(source)),
        }
    }
}
