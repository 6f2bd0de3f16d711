//! Matrices that bitsandbytes has quantised in four bits, as `save_pretrained` of transformers writes them.
//!
//! ```text
//! N.weight                                     the halves of bytes, of any element type and shape
//! N.weight.absmax                              the scale of each block: numbers, or bytes
//! N.weight.quant_map                           the sixteen numbers
//! N.weight.nested_absmax, .nested_quant_map    the scales and numbers of scales that are bytes
//! N.weight.quant_state.bitsandbytes__nf4       JSON: the type, the shape, the sizes of blocks
//! ```

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use pipewright_kernel::quantised::{Codebook, DoubleScales, Form, QuantisedMatrix, Scales};
use serde::Deserialize;

use super::layout::{count, file_shape};
use super::weights::{Weights, file_names_of};
use crate::error::ModelError;
use crate::parameter::{ParameterKind, ParameterSpec};
use crate::quantisation::QuantisedSizes;

/// The ends of the names of the tensors that describe a matrix.
const STATES: [&str; 2] = [".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"];
/// The longest description that is read; bitsandbytes writes less than 300 bytes.
const LONGEST_STATE: usize = 1 << 16;
/// The largest block that is read; bitsandbytes has blocks of 32 to 4096 elements.
const LARGEST_BLOCK: usize = 1 << 20;

/// The place of a quantised matrix in the files.
#[derive(Clone, Debug)]
pub(super) struct QuantisedPlace {
    /// The tensor with the elements.
    pub(super) tensor: String,
    /// The tensor that describes them.
    state: String,
}

/// The description of a matrix.
#[derive(Debug, Deserialize)]
struct State {
    quant_type: String,
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f64>,
}

impl QuantisedPlace {
    /// Returns the names of the tensors with the parts of the matrix that may exist.
    fn parts(&self) -> [String; 6] {
        let named = |name: &str| format!("{}{name}", self.tensor);
        let [absmax, map] = ["", "nested_"]
            .map(|prefix| [named(&format!(".{prefix}absmax")), named(&format!(".{prefix}quant_map"))]);
        let ([absmax, map], [nested_absmax, nested_map]) = (absmax, map);
        [self.tensor.clone(), self.state.clone(), absmax, map, nested_absmax, nested_map]
    }
}

impl Weights {
    /// Returns the place of the matrix of a linear layer that is quantised in a form that is read.
    pub(super) fn quantised_place(&self, spec: &ParameterSpec) -> Option<QuantisedPlace> {
        let is_plain = spec.kind == ParameterKind::Matrix && spec.layout.entry.is_none();
        if !is_plain || spec.layout.inputs_first {
            return None;
        }
        spec.tensors().flat_map(file_names_of).find_map(|tensor| self.quantised_at(&tensor))
    }

    /// Returns whether the files have matrices that are quantised in a form that is read.
    pub(crate) fn has_quantised(&self) -> bool {
        self.tensors().any(|name| STATES.iter().any(|end| name.ends_with(end)))
    }

    fn quantised_at(&self, tensor: &str) -> Option<QuantisedPlace> {
        let state = STATES.map(|end| format!("{tensor}{end}")).into_iter().find(|name| self.has(name))?;
        Some(QuantisedPlace { tensor: tensor.to_owned(), state })
    }

    /// Returns the names of all tensors with parts of quantised matrices, each with the tensor of its matrix.
    pub(super) fn parts_of_quantised(&self) -> BTreeMap<String, String> {
        let matrices = self.tensors().filter_map(|name| STATES.iter().find_map(|end| name.strip_suffix(end)));
        let places = matrices.filter_map(|tensor| self.quantised_at(tensor));
        let parts = |place: QuantisedPlace| place.parts().map(|part| (part, place.tensor.clone()));
        places.flat_map(parts).collect()
    }

    /// Reads a quantised matrix.
    pub(super) fn read_quantised(
        &mut self,
        spec: &ParameterSpec,
        place: &QuantisedPlace,
    ) -> Result<QuantisedMatrix, ModelError> {
        let QuantisedPlace { tensor, state } = place;
        let shape = file_shape(spec);
        let &[rows, columns] = &*shape else {
            return Err(self.fault(tensor, format!("a matrix of the shape {shape:?} is not quantised")));
        };
        let state = self.state(state)?;
        if state.shape != shape {
            let fault = format!("its shape is {:?}, and the configuration asks for {shape:?}", state.shape);
            return Err(self.fault(tensor, fault));
        }
        let named = |part: &str| format!("{tensor}.{part}");
        let table = self.numbers::<16>(&named("quant_map"))?;
        let scales = match state.nested_blocksize {
            None => Scales::Single(self.read_numbers(&named("absmax"))?),
            Some(block) => {
                let map = self.numbers::<256>(&named("nested_quant_map"))?;
                let scales = self.read_numbers(&named("nested_absmax"))?;
                let offset = state.nested_offset.unwrap_or_default() as f32;
                let codes = self.raw(&named("absmax"))?;
                Scales::Double(DoubleScales { codes, map: Box::new(map), scales, block, offset, first: 0 })
            }
        };
        let codes = self.raw(tensor)?;
        let codebook = Codebook::new([rows, columns], codes, table, scales, state.blocksize);
        match codebook {
            Ok(codebook) => Ok(QuantisedMatrix::new(rows, Form::Codebook(codebook))),
            Err(source) => Err(self.fault(tensor, source.to_string()).because(source)),
        }
    }

    /// Checks the length of a quantised matrix, and returns its number of bytes in memory. It reads headers only.
    pub(super) fn check_quantised(
        &mut self,
        spec: &ParameterSpec,
        place: &QuantisedPlace,
    ) -> Result<u64, ModelError> {
        let needed = count(&file_shape(spec)).div_ceil(2);
        if self.length(&place.tensor)? != needed {
            return Err(self.fault(&place.tensor, format!("its elements need {needed} bytes")));
        }
        let parts = place.parts().into_iter().filter(|part| *part != place.state && self.has(part));
        let parts: Vec<String> = parts.collect();
        parts.iter().try_fold(0, |bytes, part| Ok(bytes + self.length(part)? as u64))
    }

    /// Returns the ranges of bytes, by file, that have a quantised matrix.
    pub(super) fn ranges_of_quantised(
        &mut self,
        place: &QuantisedPlace,
    ) -> Result<Vec<(String, Range<u64>)>, ModelError> {
        let parts: Vec<String> = place.parts().into_iter().filter(|part| self.has(part)).collect();
        let range = |part: String| {
            let file = self.file_of(&part)?;
            let range = self.file(file.clone())?.place_of(&part)?;
            Ok((file, range))
        };
        parts.into_iter().map(range).collect()
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

    /// Reads a list of numbers of single or half precision.
    fn read_numbers(&mut self, tensor: &str) -> Result<Vec<f32>, ModelError> {
        let file = self.existing(tensor)?;
        let file = self.file(file)?;
        let shape = file.shape_of(tensor).unwrap_or_default().to_vec();
        file.read(tensor, &shape)
    }

    /// Reads the bytes of a tensor.
    pub(super) fn raw(&mut self, tensor: &str) -> Result<Vec<u8>, ModelError> {
        let file = self.existing(tensor)?;
        self.file(file)?.read_bytes(tensor)
    }

    fn length(&mut self, tensor: &str) -> Result<usize, ModelError> {
        let file = self.existing(tensor)?;
        let length = self.file(file)?.bytes_of(tensor);
        length.ok_or_else(|| self.fault(tensor, "it is missing".to_owned()))
    }

    /// Returns the file with a tensor.
    fn existing(&self, tensor: &str) -> Result<String, ModelError> {
        if self.has(tensor) {
            self.file_of(tensor)
        } else {
            Err(self.fault(tensor, "it is missing".to_owned()))
        }
    }

    fn fault(&self, tensor: &str, fault: String) -> ModelError {
        let advice = "copy or download the files again";
        ModelError::at(
            self.index(),
            format!("tensor `{tensor}` is not a part of a quantised matrix: {fault}; {advice}"),
        )
    }
}

/// Returns the bytes of the matrices among the parameters `specs` that the files in `dir` have quantised in a form that
/// stages of frozen parameters hold. It reads headers only.
///
/// # Errors
/// When a file is missing, cut short or not a safetensors file, or has another number of elements.
pub fn quantised_sizes(dir: &Path, specs: &[ParameterSpec]) -> Result<QuantisedSizes, ModelError> {
    let mut weights = Weights::open(dir)?;
    let mut sizes = Vec::new();
    for spec in specs {
        if let Some(place) = weights.quantised_place(spec) {
            sizes.push((spec.path.clone(), weights.check_quantised(spec, &place)?));
        }
    }
    Ok(sizes.into_iter().collect())
}
