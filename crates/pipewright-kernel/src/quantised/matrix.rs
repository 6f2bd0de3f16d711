//! A quantised matrix of any form, or one of floats that is held as its file has it.

use std::ops::Range;

use super::blocks::Blocks;
use super::codebook::Codebook;
use super::decoded::Decoded;
use super::error::CutError;
use super::fp8::Fp8;
use super::grouped::Grouped;
use super::plain::Plain;

/// A matrix of quantised elements. Its rows are the outputs of a linear layer, as in files.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantisedMatrix {
    rows: usize,
    form: Form,
}

/// The form of a matrix's elements.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// Four bits that choose one of sixteen numbers.
    Codebook(Codebook),
    /// Eight bits with a sign, an exponent and a mantissa.
    Fp8(Fp8),
    /// Four bits with a zero and a scale for each group.
    Grouped(Grouped),
    /// Floats that are not quantised.
    Plain(Plain),
    /// Blocks with their codes and scales together.
    Blocks(Blocks),
}

impl QuantisedMatrix {
    /// Returns a matrix of `rows` rows with these elements.
    pub fn new(rows: usize, form: Form) -> Self {
        Self { rows, form }
    }

    pub(super) fn form(&self) -> &Form {
        &self.form
    }

    /// Returns the number of rows: the outputs of the layer.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of columns: the inputs of the layer.
    pub fn columns(&self) -> usize {
        match &self.form {
            Form::Codebook(codebook) => codebook.columns(),
            Form::Fp8(fp8) => fp8.columns(),
            Form::Grouped(grouped) => grouped.columns(),
            Form::Plain(plain) => plain.columns(),
            Form::Blocks(blocks) => blocks.columns(),
        }
    }

    /// Returns the bytes that the elements need.
    pub fn bytes(&self) -> usize {
        match &self.form {
            Form::Codebook(codebook) => codebook.bytes(),
            Form::Fp8(fp8) => fp8.bytes(),
            Form::Grouped(grouped) => grouped.bytes(),
            Form::Plain(plain) => plain.storage().len(),
            Form::Blocks(blocks) => blocks.bytes(),
        }
    }

    /// Returns the addresses of the lists with the elements and their scales.
    pub fn addresses(&self) -> Vec<usize> {
        match &self.form {
            Form::Codebook(codebook) => codebook.addresses(),
            Form::Fp8(fp8) => fp8.addresses(),
            Form::Grouped(grouped) => grouped.addresses(),
            Form::Plain(plain) => vec![plain.storage().as_ptr().addr()],
            Form::Blocks(blocks) => vec![blocks.storage().as_ptr().addr()],
        }
    }

    /// Returns the rows and columns of a part.
    ///
    /// # Errors
    /// When the border goes through a block of a form whose blocks cannot be cut.
    pub fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Result<Self, CutError> {
        let count = rows.len();
        let form = match &self.form {
            Form::Codebook(codebook) => Form::Codebook(codebook.part(rows, columns)),
            Form::Fp8(fp8) => Form::Fp8(fp8.part(rows, columns)),
            Form::Grouped(grouped) => Form::Grouped(grouped.part(rows, columns)),
            Form::Plain(plain) => Form::Plain(plain.part(rows, columns)),
            Form::Blocks(blocks) => Form::Blocks(blocks.part(rows, columns)),
        };
        Ok(Self { rows: count, form })
    }

    /// Returns the rows with these indices, in this order.
    ///
    /// # Errors
    /// When blocks have elements of several rows.
    pub fn gathered(&self, rows: &[usize]) -> Result<Self, CutError> {
        let form = match &self.form {
            Form::Codebook(codebook) => Form::Codebook(codebook.gathered(rows)?),
            Form::Fp8(fp8) => Form::Fp8(fp8.gathered(rows)),
            Form::Grouped(grouped) => Form::Grouped(grouped.gathered(rows)),
            Form::Plain(plain) => Form::Plain(plain.gathered(rows)),
            Form::Blocks(blocks) => Form::Blocks(blocks.gathered(rows)),
        };
        Ok(Self { rows: rows.len(), form })
    }

    /// Returns all elements, row by row.
    pub fn decoded(&self) -> Vec<f32> {
        let columns = self.columns();
        let mut elements = vec![0.0; self.rows * columns];
        for (row, out) in elements.chunks_exact_mut(columns.max(1)).enumerate() {
            self.decode(row, 0..columns, out);
        }
        elements
    }

    /// Writes the elements `columns` of a row.
    pub fn decode_row(&self, row: usize, columns: Range<usize>, out: &mut [f32]) {
        self.decode(row, columns, out);
    }

    /// Writes the elements `columns` of neighbouring rows.
    pub(super) fn decode_rows<T: Decoded>(&self, rows: Range<usize>, columns: Range<usize>, out: &mut [T]) {
        assert!(rows.end <= self.rows && columns.end <= self.columns(), "the matrix has the elements");
        assert_eq!(out.len(), rows.len() * columns.len(), "there is room for the elements");
        #[cfg(target_arch = "x86_64")]
        if let Form::Codebook(codebook) = &self.form
            && codebook.decode_parts(rows.clone(), columns.clone(), out)
        {
            return;
        }
        for (row, out) in rows.zip(out.chunks_exact_mut(columns.len().max(1))) {
            self.decode(row, columns.clone(), out);
        }
    }

    pub(crate) fn decode<T: Decoded>(&self, row: usize, columns: Range<usize>, out: &mut [T]) {
        assert!(row < self.rows, "the matrix has the row");
        match &self.form {
            Form::Codebook(codebook) => codebook.decode(row, columns, out),
            Form::Fp8(fp8) => fp8.decode(row, columns, out),
            Form::Grouped(grouped) => grouped.decode(row, columns, out),
            Form::Plain(plain) => plain.decode(row, columns, out),
            Form::Blocks(blocks) => blocks.decode(row, columns, out),
        }
    }
}
