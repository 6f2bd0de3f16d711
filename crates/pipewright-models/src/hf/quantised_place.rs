//! Where files have matrices that are quantised in a form that is read, and how their parts are read and checked.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use pipewright_kernel::quantised::{BlockKind, Blocks, Form, QuantisedMatrix};
use safetensors::Dtype;

use super::fp8::scales_of;
use super::layout::{count, file_shape, outputs_first};
use super::weights::{Weights, file_names_of};
use super::{bitsandbytes, four_bit_groups, fp8, mxfp4};
use crate::error::ModelError;
use crate::parameter::{ParameterKind, ParameterSpec};
use crate::quantisation::{DescribedForm, QuantisedBytes, QuantisedSizes};

/// The place of a quantised matrix in the files.
#[derive(Clone, Debug)]
pub(super) struct QuantisedPlace {
    /// The tensor with the elements.
    pub(super) tensor: String,
    form: FileForm,
}

/// The form of a quantised matrix in files.
#[derive(Clone, Debug)]
enum FileForm {
    /// Four bits of bitsandbytes, which this tensor describes.
    FourBits(String),
    /// FP8 in blocks of these rows and columns, whose scales this tensor has.
    Fp8(String, [usize; 2]),
    /// Four bits in groups.
    Groups(DescribedForm),
    /// Blocks of a GGUF file.
    Blocks(BlockKind),
    /// MXFP4 of all experts.
    Mxfp4,
}

impl QuantisedPlace {
    /// Returns the names of the tensors with the elements and scales that may exist.
    fn data(&self) -> Vec<String> {
        match &self.form {
            FileForm::FourBits(_) => bitsandbytes::parts(&self.tensor),
            FileForm::Fp8(scales, _) => vec![self.tensor.clone(), scales.clone()],
            FileForm::Groups(_) => four_bit_groups::parts(&self.tensor),
            FileForm::Blocks(_) => vec![self.tensor.clone()],
            FileForm::Mxfp4 => mxfp4::parts(&self.tensor),
        }
    }

    /// Returns the names of all tensors of the matrix that may exist.
    fn parts(&self) -> Vec<String> {
        let mut parts = self.data();
        if let FileForm::FourBits(state) = &self.form {
            parts.push(state.clone());
        }
        parts
    }
}

impl Weights {
    /// Returns the place of a matrix or a table that is quantised in a form that is read.
    pub(super) fn quantised_place(&self, spec: &ParameterSpec) -> Option<QuantisedPlace> {
        let is_of_kind = matches!(spec.kind, ParameterKind::Matrix | ParameterKind::Table);
        if !is_of_kind || spec.shape.len() != 2 {
            return None;
        }
        let place = spec.tensors().flat_map(file_names_of).find_map(|tensor| self.quantised_at(&tensor))?;
        // Only four bits and GGUF have `Conv1D` of transformers as linear layers.
        let is_known = !spec.layout.inputs_first || !matches!(place.form, FileForm::Fp8(..));
        (is_known && spec.layout.entry.is_some() == matches!(place.form, FileForm::Mxfp4)).then_some(place)
    }

    /// Returns whether the files have matrices that are quantised in a form that is read.
    pub(crate) fn has_quantised(&self) -> bool {
        !self.blocks.is_empty() || self.tensors().any(|name| Self::matrix_of(name).is_some())
    }

    fn quantised_at(&self, tensor: &str) -> Option<QuantisedPlace> {
        let place = |tensor: &str, form| Some(QuantisedPlace { tensor: tensor.to_owned(), form });
        if let Some(state) = bitsandbytes::state_of(self, tensor) {
            return place(tensor, FileForm::FourBits(state));
        }
        if let Some(kind) = self.blocks.get(tensor) {
            return place(tensor, FileForm::Blocks(*kind));
        }
        match self.described()? {
            DescribedForm::Mxfp4 => mxfp4::is_at(self, tensor).then(|| place(tensor, FileForm::Mxfp4))?,
            DescribedForm::Fp8(block) => place(tensor, FileForm::Fp8(scales_of(self, tensor)?, block)),
            form => place(&four_bit_groups::codes_of(self, tensor)?, FileForm::Groups(form)),
        }
    }

    /// Returns the tensor that would have a matrix, from one of its parts that every matrix of its form has.
    fn matrix_of(part: &str) -> Option<String> {
        let named = bitsandbytes::described_by(part).or(fp8::scaled_by(part)).map(str::to_owned);
        named.or_else(|| four_bit_groups::matrix_of(part)).or_else(|| mxfp4::matrix_of(part))
    }

    /// Returns the names of all tensors with parts of quantised matrices, each with the tensor of its matrix.
    pub(super) fn parts_of_quantised(&self) -> BTreeMap<String, String> {
        let matrices = self.tensors().filter_map(Self::matrix_of).chain(self.blocks.keys().cloned());
        let places = matrices.filter_map(|tensor| self.quantised_at(&tensor));
        let parts =
            |place: QuantisedPlace| place.parts().into_iter().map(move |part| (part, place.tensor.clone()));
        places.flat_map(parts).collect()
    }

    /// Reads a quantised matrix.
    pub(super) fn read_quantised(
        &mut self,
        spec: &ParameterSpec,
        place: &QuantisedPlace,
    ) -> Result<QuantisedMatrix, ModelError> {
        let QuantisedPlace { tensor, form } = place;
        let mut shape = spec.shape.clone();
        if spec.kind == ParameterKind::Matrix {
            shape.reverse();
        }
        let &[rows, columns] = &*shape else {
            return Err(self.fault(tensor, format!("a matrix of the shape {shape:?} is not quantised")));
        };
        match form {
            FileForm::FourBits(state) => self.read_four_bits(tensor, state, [rows, columns], 0..rows),
            FileForm::Fp8(scales, block) => self.read_fp8(tensor, scales, [rows, columns], *block),
            FileForm::Groups(_) => self.read_groups(tensor, [rows, columns]),
            FileForm::Blocks(kind) => self.read_blocks(tensor, [rows, columns], *kind),
            FileForm::Mxfp4 => self.read_mxfp4(tensor, spec),
        }
    }

    /// Checks the length of a quantised matrix, and returns its bytes in memory. It reads headers only.
    pub(super) fn check_quantised(
        &mut self,
        spec: &ParameterSpec,
        place: &QuantisedPlace,
    ) -> Result<QuantisedBytes, ModelError> {
        let spec = &outputs_first(spec);
        let elements = count(&file_shape(spec));
        let needed = match &place.form {
            FileForm::FourBits(_) | FileForm::Groups(_) => elements.div_ceil(2),
            FileForm::Fp8(..) => elements,
            FileForm::Blocks(kind) => {
                self.require_shape(&place.tensor, &file_shape(spec))?;
                elements / kind.elements() * kind.bytes()
            }
            FileForm::Mxfp4 => return self.check_mxfp4(&place.tensor, spec),
        };
        if self.length(&place.tensor)? != needed {
            return Err(self.fault(&place.tensor, format!("its elements need {needed} bytes")));
        }
        if let (FileForm::Groups(form), &[rows, columns]) = (&place.form, &*file_shape(spec)) {
            let divided = four_bit_groups::bytes_in_memory(*form, [rows, columns]);
            return Ok(QuantisedBytes { divided, ..QuantisedBytes::default() });
        }
        if let FileForm::FourBits(_) = &place.form {
            return self.bytes_of_four_bits(&place.tensor, spec, needed);
        }
        let block = if let FileForm::Blocks(kind) = &place.form { kind.elements() } else { 0 };
        let parts: Vec<String> = place.data().into_iter().filter(|part| self.has(part)).collect();
        let mut divided = 0;
        for part in parts {
            divided += self.length(&part)? as u64;
        }
        Ok(QuantisedBytes { divided, block, ..QuantisedBytes::default() })
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

    /// Reads a matrix of this shape in blocks of a GGUF file.
    fn read_blocks(
        &mut self,
        tensor: &str,
        [rows, columns]: [usize; 2],
        kind: BlockKind,
    ) -> Result<QuantisedMatrix, ModelError> {
        self.require_shape(tensor, &[rows, columns])?;
        let name = self.file_of(tensor)?;
        let file = self.file(name)?;
        let (bytes, order) = (file.read_bytes(tensor)?, file.rows_of(tensor).map(<[usize]>::to_vec));
        let fault = |fault: String| self.fault(tensor, fault);
        let blocks = Blocks::new(kind, [rows, columns], bytes).map_err(|error| fault(error.to_string()))?;
        let matrix = QuantisedMatrix::new(rows, Form::Blocks(blocks));
        match order {
            Some(order) => matrix.gathered(&order).map_err(|error| fault(error.to_string())),
            None => Ok(matrix),
        }
    }

    /// Returns whether [`Weights::read_rows`] can read some rows of a matrix.
    pub(super) fn has_rows(
        &mut self,
        spec: &ParameterSpec,
        place: &QuantisedPlace,
    ) -> Result<bool, ModelError> {
        match &place.form {
            FileForm::Blocks(_) => {
                let file = self.file_of(&place.tensor)?;
                Ok(self.file(file)?.rows_of(&place.tensor).is_none())
            }
            FileForm::FourBits(state) => {
                let (columns, block) = (spec.shape[0], self.block_of(state)?);
                Ok(columns.is_multiple_of(block) && columns.is_multiple_of(2))
            }
            FileForm::Fp8(..) | FileForm::Groups(_) | FileForm::Mxfp4 => Ok(false),
        }
    }

    /// Reads some rows of a matrix whose rows can be read alone ([`Weights::has_rows`]).
    pub(super) fn read_rows(
        &mut self,
        spec: &ParameterSpec,
        place: &QuantisedPlace,
        rows: Range<usize>,
    ) -> Result<QuantisedMatrix, ModelError> {
        let (tensor, columns, count) = (&*place.tensor, spec.shape[0], rows.len());
        match &place.form {
            FileForm::FourBits(state) => self.read_four_bits(tensor, state, [spec.shape[1], columns], rows),
            FileForm::Blocks(kind) => {
                let width = columns / kind.elements() * kind.bytes();
                let bytes = self.raw_part(tensor, rows.start * width..rows.end * width)?;
                let blocks = Blocks::new(*kind, [count, columns], bytes);
                let blocks = blocks.map_err(|error| self.fault(tensor, error.to_string()))?;
                Ok(QuantisedMatrix::new(count, Form::Blocks(blocks)))
            }
            _ => Err(self.fault(tensor, "its rows cannot be read alone".to_owned())),
        }
    }

    /// Reads a list of numbers of single or half precision.
    pub(super) fn read_numbers(&mut self, tensor: &str) -> Result<Vec<f32>, ModelError> {
        let file = self.existing(tensor)?;
        let file = self.file(file)?;
        let shape = file.shape_of(tensor).unwrap_or_default().to_vec();
        file.read(tensor, &shape)
    }

    /// Reads some neighbouring numbers of such a list.
    pub(super) fn read_some_numbers(
        &mut self,
        tensor: &str,
        part: Range<usize>,
    ) -> Result<Vec<f32>, ModelError> {
        let file = self.existing(tensor)?;
        let file = self.file(file)?;
        let shape = file.shape_of(tensor).unwrap_or_default().to_vec();
        if part.end > count(&shape) {
            let found = count(&shape);
            return Err(self.fault(tensor, format!("it has {found} numbers, and {} are needed", part.end)));
        }
        file.read_elements(tensor, &shape, part)
    }

    /// Reads the bytes of a tensor.
    pub(super) fn raw(&mut self, tensor: &str) -> Result<Vec<u8>, ModelError> {
        let file = self.existing(tensor)?;
        self.file(file)?.read_bytes(tensor)
    }

    /// Reads some neighbouring bytes of a tensor.
    pub(super) fn raw_part(&mut self, tensor: &str, part: Range<usize>) -> Result<Vec<u8>, ModelError> {
        let length = self.length(tensor)?;
        if part.end > length {
            return Err(self.fault(tensor, format!("it has {length} bytes, and {} are needed", part.end)));
        }
        let file = self.existing(tensor)?;
        self.file(file)?.read_bytes_of(tensor, part)
    }

    /// Requires a shape of a tensor.
    pub(super) fn require_shape(&mut self, tensor: &str, shape: &[usize]) -> Result<(), ModelError> {
        let file = self.existing(tensor)?;
        let found = self.file(file)?.shape_of(tensor).unwrap_or_default().to_vec();
        if found == shape {
            return Ok(());
        }
        Err(self.fault(tensor, format!("its shape is {found:?}, and {shape:?} is needed")))
    }

    /// Requires one of some element types, and a shape, of a tensor.
    pub(super) fn require_form(
        &mut self,
        tensor: &str,
        kinds: &[Dtype],
        shape: &[usize],
    ) -> Result<(), ModelError> {
        self.require_shape(tensor, shape)?;
        let (found, ..) = self.describe(tensor)?;
        if kinds.contains(&found) {
            return Ok(());
        }
        Err(self.fault(tensor, format!("its elements are {found:?}, and {:?} is needed", kinds[0])))
    }

    pub(super) fn length(&mut self, tensor: &str) -> Result<usize, ModelError> {
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

    pub(super) fn fault(&self, tensor: &str, fault: String) -> ModelError {
        let advice = "copy or download the files again, or use the model from which it was made";
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
