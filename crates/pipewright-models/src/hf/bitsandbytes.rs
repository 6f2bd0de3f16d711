//! Matrices that bitsandbytes has quantised in four bits, as `save_pretrained` of transformers writes them.
//!
//! ```text
//! N.weight                                     the halves of bytes, of any element type and shape
//! N.weight.absmax                              the scale of each block: numbers, or bytes
//! N.weight.quant_map                           the sixteen numbers
//! N.weight.nested_absmax, .nested_quant_map    the scales and numbers of scales that are bytes
//! N.weight.quant_state.bitsandbytes__nf4       JSON: the type, the shape, the sizes of blocks
//! ```

use std::ops::Range;

use pipewright_kernel::quantised::{Codebook, DoubleScales, Form, QuantisedMatrix, Scales};
use serde::Deserialize;

use super::layout::count;
use super::weights::Weights;
use crate::error::ModelError;
use crate::parameter::ParameterSpec;
use crate::quantisation::QuantisedBytes;

/// The ends of the names of the tensors that describe a matrix.
const STATES: [&str; 2] = [".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"];
/// The longest description that is read; bitsandbytes writes less than 300 bytes.
const LONGEST_STATE: usize = 1 << 16;
/// The largest block that is read; bitsandbytes has blocks of 32 to 4096 elements.
const LARGEST_BLOCK: usize = 1 << 20;

/// The description of a matrix.
#[derive(Debug, Deserialize)]
struct State {
    quant_type: String,
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f64>,
}

/// Returns the tensor that describes a matrix, if it is quantised by bitsandbytes.
pub(super) fn state_of(weights: &Weights, tensor: &str) -> Option<String> {
    STATES.map(|end| format!("{tensor}{end}")).into_iter().find(|name| weights.has(name))
}

/// Returns the tensor that a description belongs to.
pub(super) fn described_by(state: &str) -> Option<&str> {
    STATES.iter().find_map(|end| state.strip_suffix(end))
}

/// Returns the names of the tensors with the parts of a matrix that may exist, except its description.
pub(super) fn parts(tensor: &str) -> Vec<String> {
    let names = ["", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"];
    names.iter().map(|name| format!("{tensor}{name}")).collect()
}

impl Weights {
    /// Returns the elements of a block of a matrix that `state` describes.
    pub(super) fn block_of(&mut self, state: &str) -> Result<usize, ModelError> {
        self.state(state).map(|state| state.blocksize)
    }

    /// Reads rows of a matrix of this shape, which `state` describes: all of them, or rows of whole blocks.
    pub(super) fn read_four_bits(
        &mut self,
        tensor: &str,
        state: &str,
        [rows, columns]: [usize; 2],
        own: Range<usize>,
    ) -> Result<QuantisedMatrix, ModelError> {
        let shape = [rows, columns];
        let state = self.state(state)?;
        if state.shape != shape {
            let fault = format!("its shape is {:?}, and the configuration asks for {shape:?}", state.shape);
            return Err(self.fault(tensor, fault));
        }
        let named = |part: &str| format!("{tensor}.{part}");
        let table = self.numbers::<16>(&named("quant_map"))?;
        let is_whole = own == (0..rows);
        let elements = own.start * columns..own.end * columns;
        let blocks = elements.start / state.blocksize..elements.end / state.blocksize;
        let scales = match state.nested_blocksize {
            None if is_whole => Scales::Single(self.read_numbers(&named("absmax"))?),
            None => Scales::Single(self.read_some_numbers(&named("absmax"), blocks)?),
            Some(block) => {
                let map = self.numbers::<256>(&named("nested_quant_map"))?;
                let mut scales = self.read_numbers(&named("nested_absmax"))?;
                let Some(offset) = state.nested_offset else {
                    return Err(self.fault(tensor, "its description has no `nested_offset`".to_owned()));
                };
                let offset = offset as f32;
                let codes = if is_whole {
                    self.raw(&named("absmax"))?
                } else {
                    let nested = blocks.start / block..blocks.end.div_ceil(block).min(scales.len());
                    scales = scales.get(nested).unwrap_or_default().to_vec();
                    self.raw_part(&named("absmax"), blocks.clone())?
                };
                let first = blocks.start % block;
                Scales::Double(DoubleScales { codes, map: Box::new(map), scales, block, offset, first })
            }
        };
        let codes = if is_whole {
            self.raw(tensor)?
        } else {
            self.raw_part(tensor, elements.start / 2..elements.end / 2)?
        };
        let codebook = Codebook::new([own.len(), columns], codes, table, scales, state.blocksize);
        match codebook {
            Ok(codebook) => Ok(QuantisedMatrix::new(own.len(), Form::Codebook(codebook))),
            Err(source) => Err(self.fault(tensor, source.to_string()).because(source)),
        }
    }

    /// Returns the bytes in memory of a matrix whose elements have `codes` bytes. It reads headers only.
    pub(super) fn bytes_of_four_bits(
        &mut self,
        tensor: &str,
        spec: &ParameterSpec,
        codes: usize,
    ) -> Result<QuantisedBytes, ModelError> {
        /// The bytes of a number.
        const NUMBER: u64 = 4;
        let nested = format!("{tensor}.nested_absmax");
        let (_, shape, _) = self.describe(&format!("{tensor}.absmax"))?;
        let blocks = count(&shape);
        let numbers = NUMBER * blocks as u64;
        if !self.has(&nested) || spec.layout.parts.is_some() {
            // Rows of joined projections are read one by one, with scales that are numbers.
            let block = (2 * codes).div_ceil(blocks.max(1));
            let unit = if spec.shape[0].is_multiple_of(block.max(1)) { block } else { 0 };
            return Ok(QuantisedBytes {
                divided: codes as u64,
                scales: numbers,
                unit,
                ..QuantisedBytes::default()
            });
        }
        let scales = blocks as u64 + NUMBER * count(&self.describe(&nested)?.1) as u64;
        Ok(QuantisedBytes { divided: codes as u64, scales, fixed: NUMBER * 256, ..QuantisedBytes::default() })
    }

    /// Reads the description of a matrix.
    fn state(&mut self, tensor: &str) -> Result<State, ModelError> {
        if self.length(tensor)? > LONGEST_STATE {
            return Err(self.fault(tensor, "it is too long for the description of a matrix".to_owned()));
        }
        let text = self.raw(tensor)?;
        let state: State = serde_json::from_slice(&text).map_err(|source| {
            self.fault(tensor, "it is not the description of a matrix".to_owned()).because(source)
        })?;
        let is_known = matches!(&*state.quant_type, "nf4" | "fp4")
            && (1..=LARGEST_BLOCK).contains(&state.blocksize)
            && state.nested_blocksize.is_none_or(|block| (1..=LARGEST_BLOCK).contains(&block));
        if !is_known {
            let (kind, block) = (&state.quant_type, state.blocksize);
            let fault = format!("it describes `{kind}` in blocks of {block}; nf4 and fp4 are read");
            return Err(self.fault(tensor, fault));
        }
        Ok(state)
    }

    /// Reads a list of `N` numbers.
    fn numbers<const N: usize>(&mut self, tensor: &str) -> Result<[f32; N], ModelError> {
        let numbers = self.read_numbers(tensor)?;
        let found = numbers.len();
        numbers
            .try_into()
            .map_err(|_| self.fault(tensor, format!("it has {found} numbers, and {N} are needed")))
    }
}
