//! The companion of a file of token rows: a safetensors file with a tensor for each side input, whose first
//! dimension has an entry for each row.

use std::path::{Path, PathBuf};

use pipewright_system::bounded_file::read_regular;
use safetensors::{Dtype, SafeTensorError, SafeTensors, tensor::TensorView};

use crate::bad_records::BadRecords;
use crate::error::DataError;

/// Files above this size are refused: side inputs are held in memory.
const LARGEST: u64 = 1 << 36;

/// The side inputs of all rows.
#[derive(Clone, Debug)]
pub struct SideRows {
    path: PathBuf,
    tensors: Vec<SideTensor>,
}

/// A side input of some rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SideTensor {
    /// Its name.
    pub name: String,
    /// The shape; the first dimension is the rows.
    pub shape: Vec<usize>,
    /// The numbers in row-major order.
    pub values: Vec<i32>,
}

impl SideRows {
    /// Reads a file. Numbers may be of the types I64, I32, U8 and BOOL, and must fit 32 bits.
    ///
    /// # Errors
    /// When the file cannot be read or is not a safetensors file, or when a tensor has numbers of another
    /// type or no rows.
    pub fn read(path: &Path) -> Result<Self, DataError> {
        let bytes = read_regular(path, LARGEST).map_err(|source| DataError::unreadable(path, source))?;
        let malformed =
            |source: SafeTensorError| DataError::of(path, "this is not a safetensors file").caused_by(source);
        let file = SafeTensors::deserialize(&bytes).map_err(malformed)?;
        let mut names = file.names();
        names.sort_unstable();
        let tensor = |name: &str| {
            let found = file.tensor(name).map_err(malformed)?;
            let values = numbers(&found).map_err(|problem| error_of(path, name, &problem))?;
            Ok(SideTensor { name: name.to_owned(), shape: found.shape().to_vec(), values })
        };
        let tensors = names.into_iter().map(tensor).collect::<Result<_, _>>()?;
        Ok(Self { path: path.to_owned(), tensors })
    }

    /// Returns the side inputs.
    pub fn tensors(&self) -> &[SideTensor] {
        &self.tensors
    }

    /// Returns whether there is a side input of this name.
    pub fn has(&self, tensor: &str) -> bool {
        self.tensors.iter().any(|found| found.name == tensor)
    }

    /// Returns the error of a side input.
    pub fn error(&self, tensor: &str, problem: String) -> DataError {
        error_of(&self.path, tensor, &problem)
    }

    /// Returns the error of rows that are a mixture.
    pub(crate) fn of_mixture(&self) -> DataError {
        let problem = "side inputs belong to the rows of one source, and the data is a mixture; name its data as `path`";
        DataError::of(&self.path, problem)
    }

    /// Returns the error of rows that are not all records of the data.
    pub(crate) fn of_bad_records(&self, bad: &BadRecords) -> DataError {
        let problem =
            format!("each row needs its own side inputs, and {bad}; remove such records from both files");
        DataError::of(&self.path, problem)
    }

    /// Checks that there is an entry for each of `rows`.
    pub(crate) fn check(&self, rows: usize) -> Result<(), DataError> {
        for tensor in &self.tensors {
            let found = tensor.shape.first().copied().unwrap_or(0);
            if found < rows {
                let problem = format!("has {found} rows, and the data has {rows}: it needs one for each");
                return Err(self.error(&tensor.name, problem));
            }
        }
        Ok(())
    }

    /// Takes the side inputs of the rows from `row` on out of the list.
    pub(crate) fn split_off(&mut self, row: usize) -> Self {
        let split = |tensor: &mut SideTensor| {
            let size: usize = tensor.shape[1..].iter().product();
            let mut shape = tensor.shape.clone();
            shape[0] -= row;
            tensor.shape[0] = row;
            SideTensor { name: tensor.name.clone(), shape, values: tensor.values.split_off(row * size) }
        };
        Self { path: self.path.clone(), tensors: self.tensors.iter_mut().map(split).collect() }
    }

    /// Returns the side inputs of these rows.
    pub(crate) fn of_rows(&self, rows: &[usize]) -> Vec<SideTensor> {
        let of = |tensor: &SideTensor| {
            let mut shape = tensor.shape.clone();
            shape[0] = rows.len();
            let size: usize = shape[1..].iter().product();
            let values = rows.iter().flat_map(|row| tensor.values[row * size..][..size].to_vec()).collect();
            SideTensor { name: tensor.name.clone(), shape, values }
        };
        self.tensors.iter().map(of).collect()
    }
}

fn error_of(path: &Path, tensor: &str, problem: &str) -> DataError {
    DataError::of(path, format!("tensor `{tensor}` {problem}"))
}

fn numbers(tensor: &TensorView<'_>) -> Result<Vec<i32>, String> {
    if tensor.shape().is_empty() {
        return Err("is a single number; its first dimension must be the rows".to_owned());
    }
    let data = tensor.data();
    let narrow = |number: i64| {
        i32::try_from(number).map_err(|_| format!("has the number {number}, which does not fit 32 bits"))
    };
    match tensor.dtype() {
        Dtype::I64 => data.as_chunks().0.iter().map(|bytes| narrow(i64::from_le_bytes(*bytes))).collect(),
        Dtype::I32 => Ok(data.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect()),
        Dtype::U8 | Dtype::BOOL => Ok(data.iter().map(|byte| i32::from(*byte)).collect()),
        other => Err(format!("has the type {other:?}; convert it to I64, I32, U8 or BOOL")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(name: &str, dtype: Dtype, shape: Vec<usize>, bytes: &[u8]) -> Result<SideRows, DataError> {
        let folder = tempfile::TempDir::new().expect("a temporary folder");
        let path = folder.path().join("side.safetensors");
        let view = TensorView::new(dtype, shape, bytes).expect("a tensor");
        safetensors::serialize_to_file([(name, view)], None, &path).expect("it is written");
        SideRows::read(&path)
    }

    #[test]
    fn rows_are_found_by_their_index() {
        let numbers: Vec<u8> = (0..6i64).flat_map(i64::to_le_bytes).collect();
        let side = written("doc_ids", Dtype::I64, vec![3, 2], &numbers).expect("it is read");
        let rows = side.of_rows(&[2, 0]);
        let expected = SideTensor { name: "doc_ids".to_owned(), shape: vec![2, 2], values: vec![4, 5, 0, 1] };
        assert_eq!(rows, [expected]);
    }

    #[test]
    fn the_last_rows_are_split_off() {
        let numbers: Vec<u8> = (0..6i64).flat_map(i64::to_le_bytes).collect();
        let mut side = written("doc_ids", Dtype::I64, vec![3, 2], &numbers).expect("it is read");
        let last = side.split_off(2);
        assert_eq!(
            (side.tensors()[0].shape.as_slice(), &side.of_rows(&[1])[0].values),
            (&[2, 2][..], &vec![2, 3])
        );
        assert_eq!(
            (last.tensors()[0].shape.as_slice(), &last.of_rows(&[0])[0].values),
            (&[1, 2][..], &vec![4, 5])
        );
    }

    #[test]
    fn errors_name_file_tensor_and_shape() {
        let side = written("a", Dtype::U8, vec![3, 2], &[0; 6]).expect("it is read");
        let error = side.check(4).expect_err("it has three rows").to_string();
        assert!(
            error.ends_with("tensor `a` has 3 rows, and the data has 4: it needs one for each"),
            "{error}"
        );
        side.check(3).expect("it has as many");
        let refused = |dtype, shape, bytes: &[u8]| {
            written("b", dtype, shape, bytes).map(drop).map_err(|error| error.to_string())
        };
        let error = refused(Dtype::F32, vec![1], &[0; 4]).expect_err("floats are not ids");
        assert!(
            error.ends_with("tensor `b` has the type F32; convert it to I64, I32, U8 or BOOL"),
            "{error}"
        );
        let error = refused(Dtype::I64, vec![1], &i64::MAX.to_le_bytes()).expect_err("it is too large");
        assert!(error.ends_with("has the number 9223372036854775807, which does not fit 32 bits"), "{error}");
    }
}
