//! The class `Frame`: a table of columns, which Arrow reads without a copy.

use std::fmt::Write;
use std::sync::Arc;

use arrow_array::builder::StringBuilder;
use arrow_array::cast::AsArray;
use arrow_array::ffi_stream::FFI_ArrowArrayStream;
use arrow_array::types::{Float64Type, UInt32Type, UInt64Type};
use arrow_array::{
    Array, ArrayRef, BooleanArray, Float64Array, RecordBatch, RecordBatchIterator, StringArray, UInt32Array,
    UInt64Array,
};
use arrow_schema::DataType;
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCapsule, PyDict, PyIterator, PyList};

use crate::errors::{internal, type_error};

/// A table of named columns, such as the events of a timeline.
///
/// `frame["start"]` is one column as a list, and `dict(frame)` has all of them. Libraries that know Arrow read the table
/// without a copy: `pyarrow.table(frame)`, `polars.DataFrame(frame)`. `to_pandas()` needs pandas alone.
///
/// Example:
///     >>> import pipewright_pp as pw
///     >>> events = pw.schedule("gpipe", ranks=1, microbatches=1).simulate().events
///     >>> events["action"], events.rows
///     (['0F0', '0B0'], 2)
#[pyclass(frozen, mapping, module = "pipewright_pp", name = "Frame")]
#[derive(Debug)]
pub(crate) struct PyFrame(RecordBatch);

/// The columns of a frame, in their order.
#[derive(Debug, Default)]
pub(crate) struct Columns(Vec<(&'static str, ArrayRef, bool)>);

impl Columns {
    /// Adds whole numbers.
    pub(crate) fn numbers(self, name: &'static str, values: impl IntoIterator<Item = u32>) -> Self {
        self.with(name, UInt32Array::from_iter_values(values), false)
    }

    /// Adds whole numbers that a row may lack.
    pub(crate) fn some_numbers(
        self,
        name: &'static str,
        values: impl IntoIterator<Item = Option<u32>>,
    ) -> Self {
        self.with(name, UInt32Array::from_iter(values), true)
    }

    /// Adds counts.
    pub(crate) fn counts(self, name: &'static str, values: impl IntoIterator<Item = u64>) -> Self {
        self.with(name, UInt64Array::from_iter_values(values), false)
    }

    /// Adds counts that a row may lack.
    pub(crate) fn some_counts(
        self,
        name: &'static str,
        values: impl IntoIterator<Item = Option<u64>>,
    ) -> Self {
        self.with(name, UInt64Array::from_iter(values), true)
    }

    /// Adds real numbers.
    pub(crate) fn reals(self, name: &'static str, values: impl IntoIterator<Item = f64>) -> Self {
        self.with(name, Float64Array::from_iter_values(values), false)
    }

    /// Adds real numbers that a row may lack.
    pub(crate) fn some_reals(
        self,
        name: &'static str,
        values: impl IntoIterator<Item = Option<f64>>,
    ) -> Self {
        self.with(name, Float64Array::from_iter(values), true)
    }

    /// Adds truth values.
    pub(crate) fn flags(self, name: &'static str, values: impl IntoIterator<Item = bool>) -> Self {
        let values: Vec<bool> = values.into_iter().collect();
        self.with(name, BooleanArray::from(values), false)
    }

    /// Adds texts that exist already.
    pub(crate) fn words<'a>(
        self,
        name: &'static str,
        values: impl IntoIterator<Item = Option<&'a str>>,
    ) -> Self {
        self.with(name, StringArray::from_iter(values), true)
    }

    /// Adds the texts of values, none of which is kept as a text of its own.
    pub(crate) fn texts<T: std::fmt::Display>(
        self,
        name: &'static str,
        values: impl IntoIterator<Item = Option<T>>,
    ) -> Self {
        let mut texts = StringBuilder::new();
        for value in values {
            match value {
                Some(value) => {
                    write!(texts, "{value}").expect("a column takes all text");
                    texts.append_value("");
                }
                None => texts.append_null(),
            }
        }
        self.with(name, texts.finish(), true)
    }

    fn with(mut self, name: &'static str, values: impl Array + 'static, nullable: bool) -> Self {
        self.0.push((name, Arc::new(values), nullable));
        self
    }

    /// Makes the frame.
    pub(crate) fn frame(self, py: Python<'_>) -> PyResult<PyFrame> {
        let batch = RecordBatch::try_from_iter_with_nullable(self.0);
        batch.map(PyFrame).map_err(|error| internal(py, &error.to_string()))
    }
}

impl PyFrame {
    fn names(&self) -> Vec<&str> {
        self.0.schema_ref().fields().iter().map(|field| field.name().as_str()).collect()
    }

    fn column(&self, name: &str) -> PyResult<&ArrayRef> {
        self.0.column_by_name(name).ok_or_else(|| {
            PyKeyError::new_err(format!(
                "there is no column `{name}`; the columns are {}",
                self.names().join(", ")
            ))
        })
    }
}

/// Returns a column as a list, with `None` where a row has no value.
fn list<'py>(py: Python<'py>, column: &ArrayRef) -> PyResult<Bound<'py, PyList>> {
    match column.data_type() {
        DataType::UInt32 => PyList::new(py, column.as_primitive::<UInt32Type>().iter().collect::<Vec<_>>()),
        DataType::UInt64 => PyList::new(py, column.as_primitive::<UInt64Type>().iter().collect::<Vec<_>>()),
        DataType::Float64 => PyList::new(py, column.as_primitive::<Float64Type>().iter().collect::<Vec<_>>()),
        DataType::Boolean => PyList::new(py, column.as_boolean().iter().collect::<Vec<_>>()),
        _ => PyList::new(py, column.as_string::<i32>().iter().collect::<Vec<_>>()),
    }
}

/// Returns a column as pandas takes it: an array of NumPy, or an array of pandas if numbers are missing.
fn pandas_column<'py>(py: Python<'py>, column: &ArrayRef) -> PyResult<Bound<'py, PyAny>> {
    let numpy = py.import("numpy")?;
    let array = |bytes: &[u8], kind: &str| {
        numpy.call_method1("frombuffer", (PyBytes::new(py, bytes), numpy.getattr(kind)?))
    };
    let flags = |flags: Vec<u8>| array(&flags, "bool_");
    let (numbers, name) = match column.data_type() {
        DataType::UInt32 => {
            (array(column.as_primitive::<UInt32Type>().values().inner(), "uint32")?, "UInt32")
        }
        DataType::UInt64 => {
            (array(column.as_primitive::<UInt64Type>().values().inner(), "uint64")?, "UInt64")
        }
        DataType::Float64 => {
            (array(column.as_primitive::<Float64Type>().values().inner(), "float64")?, "Float64")
        }
        DataType::Boolean => {
            return flags(column.as_boolean().iter().map(|flag| u8::from(flag == Some(true))).collect());
        }
        _ => return Ok(list(py, column)?.into_any()),
    };
    if column.null_count() == 0 {
        return Ok(numbers);
    }
    let missing = flags((0..column.len()).map(|row| u8::from(column.is_null(row))).collect())?;
    let class = if name == "Float64" { "FloatingArray" } else { "IntegerArray" };
    py.import("pandas")?
        .getattr("arrays")?
        .getattr(class)?
        .call1((numbers.call_method0("copy")?, missing.call_method0("copy")?))
}

/// Returns a column of texts as pandas takes it from pyarrow, or an error if a library or its version lacks this.
fn arrow_texts<'py>(frame: &Bound<'py, PyFrame>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    let py = frame.py();
    let column = py.import("pyarrow")?.call_method1("table", (frame,))?.call_method1("column", (name,))?;
    let pandas = py.import("pandas")?;
    let keywords = PyDict::new(py);
    keywords.set_item("na_value", f64::NAN)?;
    let text = pandas.getattr("StringDtype")?.call(("pyarrow",), Some(&keywords))?;
    pandas.call_method1("array", (column, text))
}

#[pymethods]
impl PyFrame {
    /// The number of rows.
    #[getter]
    fn rows(&self) -> usize {
        self.0.num_rows()
    }

    /// Returns the names of the columns.
    fn keys(&self) -> Vec<&str> {
        self.names()
    }

    /// Returns the columns as lists.
    fn values<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyList>>> {
        self.0.columns().iter().map(|column| list(py, column)).collect()
    }

    /// Returns the names of the columns with the columns as lists.
    fn items<'py>(&self, py: Python<'py>) -> PyResult<Vec<(&str, Bound<'py, PyList>)>> {
        Ok(self.names().into_iter().zip(self.values(py)?).collect())
    }

    /// Returns a `pandas.DataFrame` of the table. With pyarrow, texts stay in the memory of the frame.
    ///
    /// Raises:
    ///     ImportError: If pandas is not installed.
    pub(crate) fn to_pandas<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let (py, frame) = (slf.py(), slf.get());
        let columns = PyDict::new(py);
        for (name, column) in frame.names().into_iter().zip(frame.0.columns()) {
            let shared =
                if *column.data_type() == DataType::Utf8 { arrow_texts(slf, name).ok() } else { None };
            columns.set_item(name, shared.map_or_else(|| pandas_column(py, column), Ok)?)?;
        }
        py.import("pandas")?.call_method1("DataFrame", (columns,))
    }

    /// Returns the table as a stream of Arrow, which reads its memory without a copy.
    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_stream__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        // The protocol lets a table keep its own types.
        let _own_types = requested_schema;
        let reader = RecordBatchIterator::new([Ok(self.0.clone())], self.0.schema());
        PyCapsule::new_with_value(py, FFI_ArrowArrayStream::new(Box::new(reader)), c"arrow_array_stream")
    }

    /// Raises `TypeError`: the columns have different types. Without it, `pandas.DataFrame(frame)` would make a table of the
    /// names.
    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__(&self, dtype: Option<Py<PyAny>>, copy: Option<bool>) -> PyResult<Py<PyAny>> {
        let _any = (dtype, copy);
        Err(type_error("a frame is no array; use to_pandas(), or take one column, such as frame[\"start\"]"))
    }

    fn __len__(&self) -> usize {
        self.0.num_columns()
    }

    fn __contains__(&self, name: &str) -> bool {
        self.0.column_by_name(name).is_some()
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        PyList::new(py, self.names())?.try_iter()
    }

    fn __getitem__<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyList>> {
        list(py, self.column(name)?)
    }

    fn __repr__(&self) -> String {
        format!("<Frame of {} rows: {}>", self.0.num_rows(), self.names().join(", "))
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }
}
