//! Matrices of GPTQ and AWQ in four bits, of a layer `N` of `inputs` and `outputs`.
//!
//! ```text
//! N.qweight   codes in words of eight: GPTQ [inputs / 8, outputs], AWQ [inputs, outputs / 8]
//! N.qzeros    the zeros of groups, [groups, outputs / 8]; GPTQ stores them less one, unless its format is gptq_v2
//! N.scales    the scales of groups, [groups, outputs]
//! N.g_idx     GPTQ: the group of each input; only groups of neighbouring inputs are read
//! ```
//!
//! In memory each row, of one output, has its codes, zeros and scales together.

use pipewright_kernel::quantised::{Form, Grouped, QuantisedMatrix};
use safetensors::Dtype;

use super::weights::Weights;
use crate::error::ModelError;
use crate::quantisation::DescribedForm;

/// The end of the name of the tensor with the codes.
const CODES: &str = ".qweight";
/// The codes of a word.
const IN_WORD: usize = 8;
/// The place of each of eight neighbouring outputs in a word of AWQ.
const AWQ_PLACES: [usize; IN_WORD] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Returns the tensor with the codes of the matrix `tensor`, if it is in groups.
pub(super) fn codes_of(weights: &Weights, tensor: &str) -> Option<String> {
    let codes = format!("{}{CODES}", tensor.strip_suffix(".weight")?);
    weights.has(&codes).then_some(codes)
}

/// Returns the name that the matrix of these codes has if it is not quantised.
pub(super) fn matrix_of(codes: &str) -> Option<String> {
    Some(format!("{}.weight", codes.strip_suffix(CODES)?))
}

/// Returns the names of the tensors with the parts of a matrix that may exist.
pub(super) fn parts(codes: &str) -> Vec<String> {
    let layer = codes.strip_suffix(CODES).unwrap_or(codes);
    ["qweight", "qzeros", "scales", "g_idx"].iter().map(|name| format!("{layer}.{name}")).collect()
}

/// The arrangement of codes in words.
#[derive(Clone, Copy)]
struct Packing {
    group: usize,
    zeros_are_less: bool,
    is_awq: bool,
}

/// Returns the packing of a form for rows of so many columns.
fn packing(form: DescribedForm, columns: usize) -> Option<Packing> {
    match form {
        DescribedForm::Gptq { group, zeros_are_less } => {
            Some(Packing { group: group.unwrap_or(columns), zeros_are_less, is_awq: false })
        }
        DescribedForm::Awq { group } => {
            Some(Packing { group: group.unwrap_or(columns), zeros_are_less: false, is_awq: true })
        }
        DescribedForm::Fp8(_) | DescribedForm::Mxfp4 => None,
    }
}

/// Returns the bytes of a matrix in memory.
pub(super) fn bytes_in_memory(form: DescribedForm, [rows, columns]: [usize; 2]) -> u64 {
    let groups = packing(form, columns).map_or(0, |packing| columns.div_ceil(packing.group.max(1)));
    (rows * (columns.div_ceil(2) + 5 * groups)) as u64
}

impl Weights {
    /// Reads a matrix of this shape.
    pub(super) fn read_groups(
        &mut self,
        codes: &str,
        [rows, columns]: [usize; 2],
    ) -> Result<QuantisedMatrix, ModelError> {
        let Some(packing) = self.described().and_then(|form| packing(form, columns)) else {
            return Err(self.fault(codes, "`quantization_config` does not describe it".to_owned()));
        };
        let Packing { group, zeros_are_less, is_awq } = packing;
        if !rows.is_multiple_of(IN_WORD) || !columns.is_multiple_of(IN_WORD) {
            return Err(self.fault(codes, format!("the sizes [{rows}, {columns}] are not multiples of 8")));
        }
        let groups = columns.div_ceil(group);
        let layer = codes.strip_suffix(CODES).unwrap_or(codes);
        let named = |part: &str| format!("{layer}.{part}");
        let shape = if is_awq { [columns, rows / IN_WORD] } else { [columns / IN_WORD, rows] };
        let words = self.words(codes, shape)?;
        let mut zero_words = self.words(&named("qzeros"), [groups, rows / IN_WORD])?;
        if zeros_are_less {
            // Whole words, as they were written: a zero of 0 is stored as -1.
            zero_words.iter_mut().for_each(|word| *word = word.wrapping_add(0x1111_1111));
        }
        self.require_shape(&named("scales"), &[groups, rows])?;
        let scales = self.read_numbers(&named("scales"))?;
        let order = named("g_idx");
        if self.has(&order) {
            let found = self.words(&order, [columns])?;
            if found.iter().enumerate().any(|(input, index)| *index as usize != input / group) {
                let advice = "use a model that was quantised without `desc_act`";
                return Err(ModelError::at(
                    self.index(),
                    format!(
                        "tensor `{order}` has inputs in the order of their activations, which is not read: {advice}"
                    ),
                ));
            }
        }
        let half = |word: u32, place: usize| (word >> (4 * place)) as u8 & 15;
        let of_outputs = |words: &[u32], line: usize, row: usize| {
            let place = if is_awq { AWQ_PLACES[row % IN_WORD] } else { row % IN_WORD };
            half(words[line * rows / IN_WORD + row / IN_WORD], place)
        };
        let code = |row: usize, column: usize| {
            if is_awq {
                of_outputs(&words, column, row)
            } else {
                half(words[column / IN_WORD * rows + row], column % IN_WORD)
            }
        };
        let byte = |index: usize| {
            let (row, column) = (index / (columns / 2), index % (columns / 2) * 2);
            code(row, column) << 4 | code(row, column + 1)
        };
        let halves = (0..rows * columns / 2).map(byte).collect();
        let in_rows = |index: usize| (index % groups, index / groups);
        let zero = |index: usize| {
            let (group, row) = in_rows(index);
            of_outputs(&zero_words, group, row)
        };
        let scale = |index: usize| {
            let (group, row) = in_rows(index);
            scales[group * rows + row]
        };
        let (zeros, scales) =
            ((0..rows * groups).map(zero).collect(), (0..rows * groups).map(scale).collect());
        match Grouped::new([rows, columns], halves, zeros, scales, group) {
            Ok(grouped) => Ok(QuantisedMatrix::new(rows, Form::Grouped(grouped))),
            Err(source) => Err(self.fault(codes, source.to_string()).because(source)),
        }
    }

    /// Reads words of this shape.
    fn words<const D: usize>(&mut self, tensor: &str, shape: [usize; D]) -> Result<Vec<u32>, ModelError> {
        self.require_form(tensor, &[Dtype::I32, Dtype::U32], &shape)?;
        Ok(self.raw(tensor)?.as_chunks().0.iter().copied().map(u32::from_le_bytes).collect())
    }
}
