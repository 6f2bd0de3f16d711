//! A frozen table of embeddings whose elements are quantised. A look-up decodes only the rows that it reads.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use pipewright_kernel::quantised::QuantisedMatrix;

use super::embedding::{Embedding, check_ids};
use super::operation::indices;
use super::parallel::TensorParallel;

/// A quantised table with a row for each id. It is not a parameter of its module.
#[derive(Module, Debug)]
pub struct QuantisedTable {
    #[module(skip)]
    matrix: Arc<QuantisedMatrix>,
    /// The element type of the rows.
    #[module(skip)]
    precision: DType,
    /// A tensor without elements, whose device is the device of the rows.
    place: Tensor<1>,
}

impl QuantisedTable {
    /// Returns the table, whose rows are rounded to `precision`.
    pub fn new(matrix: Arc<QuantisedMatrix>, precision: DType, device: &Device) -> Self {
        Self { matrix, precision, place: Tensor::zeros([0], device) }
    }

    /// Returns what [`Embedding::forward_split`] returns for the decoded table.
    ///
    /// # Panics
    /// As [`Embedding::forward_split`].
    pub fn forward_split(
        &self,
        ids: Tensor<2, Int>,
        ids_in_all: usize,
        tensor: &TensorParallel,
    ) -> Tensor<3> {
        let rows = self.forward_part(ids, ids_in_all, tensor.range(ids_in_all));
        if tensor.ranks() == 1 { rows } else { Embedding::leave(rows, tensor) }
    }

    /// Returns what [`Embedding::forward_part`] returns for the decoded table.
    ///
    /// # Panics
    /// As [`Embedding::forward_part`].
    pub fn forward_part(&self, ids: Tensor<2, Int>, ids_in_all: usize, range: Range<usize>) -> Tensor<3> {
        let (table, ids, count) = self.read(ids, ids_in_all, range);
        table.forward_part(ids, count + 1, 0..count)
    }

    /// Returns what [`Embedding::forward_part_onto`] returns for the decoded table.
    ///
    /// # Panics
    /// As [`Embedding::forward_part`].
    pub fn forward_part_onto(
        &self,
        earlier: Tensor<3>,
        ids: Tensor<2, Int>,
        ids_in_all: usize,
        range: Range<usize>,
    ) -> Tensor<3> {
        let (table, ids, count) = self.read(ids, ids_in_all, range);
        table.forward_part_onto(earlier, ids, count + 1, 0..count)
    }

    /// Returns a table of the rows that the ids in `range` read, the index of the row of each id, and the number of rows.
    /// The index of an id outside `range` is this number.
    fn read(
        &self,
        ids: Tensor<2, Int>,
        ids_in_all: usize,
        range: Range<usize>,
    ) -> (Embedding, Tensor<2, Int>, usize) {
        let (shape, device) = (ids.dims(), ids.device());
        let ids = indices(ids.flatten(0, 1));
        check_ids(&ids, ids_in_all);
        let mut rows: BTreeMap<usize, usize> =
            ids.iter().filter(|id| range.contains(id)).map(|id| (*id, 0)).collect();
        rows.values_mut().enumerate().for_each(|(index, row)| *row = index);
        let (count, width) = (rows.len(), self.matrix.columns());
        let mut elements = vec![0.0; count * width];
        for (id, out) in rows.keys().zip(elements.chunks_exact_mut(width.max(1))) {
            self.matrix.decode_row(id - range.start, 0..width, out);
        }
        let places = ids.iter().map(|id| rows.get(id).copied().unwrap_or(count) as i64).collect();
        let places = Tensor::from_data(TensorData::new::<i64, _>(places, shape), &device);
        let options = (&self.place.device(), self.precision);
        let table = Tensor::<2>::from_data(TensorData::new(elements, [count, width]), options);
        (Embedding { weight: Param::initialized(ParamId::new(), table) }, places, count)
    }
}

#[cfg(test)]
mod tests {
    use pipewright_kernel::quantised::{Form, Fp8};

    use super::*;

    /// Checks rows of a table of ten ids against the decoded table, with the last ids in a part of their own.
    #[test]
    fn rows_have_the_bits_of_the_decoded_table() {
        let codes = (0..60).map(|index| (index * 37 % 120) as u8).collect();
        let scales = (0..15).map(|index| 0.3 + index as f32 / 7.0).collect();
        let matrix = Fp8::new([10, 6], codes, scales, [2, 2]).expect("a matrix");
        let matrix = QuantisedMatrix::new(10, Form::Fp8(matrix));
        let device = Device::flex();
        let ids = Tensor::<2, Int>::from_data([[3, 9, 0], [9, 7, 3]], &device);
        for precision in [DType::F32, DType::BF16] {
            let decoded = TensorData::new(matrix.decoded(), [10, 6]);
            let decoded = Tensor::<2>::from_data(decoded, (&device, precision));
            let expected = Embedding { weight: Param::from_tensor(decoded) }.forward(ids.clone()).into_data();
            let part = |rows| Arc::new(matrix.part(rows, 0..6).expect("rows"));
            let table = |rows| QuantisedTable::new(part(rows), precision, &device);
            let whole = table(0..10).forward_split(ids.clone(), 10, &TensorParallel::default());
            assert_eq!(whole.into_data(), expected);
            let first = table(0..7).forward_part(ids.clone(), 10, 0..7);
            let both = table(7..10).forward_part_onto(first, ids.clone(), 10, 7..10);
            assert_eq!(both.into_data(), expected);
            let none = table(4..6).forward_part(ids.clone(), 10, 4..6);
            assert_eq!(none.into_data().iter::<f32>().collect::<Vec<_>>(), [0.0; 36]);
        }
    }

    #[test]
    #[should_panic = "an id lies outside the vocabulary of 4: got 4"]
    fn ids_outside_the_vocabulary_are_refused() {
        let matrix = Fp8::new([4, 2], vec![0; 8], vec![1.0], [4, 2]).expect("a matrix");
        let table = QuantisedTable::new(
            Arc::new(QuantisedMatrix::new(4, Form::Fp8(matrix))),
            DType::F32,
            &Device::flex(),
        );
        table.forward_part(Tensor::from_data([[1, 4]], &Device::flex()), 4, 0..4);
    }
}
