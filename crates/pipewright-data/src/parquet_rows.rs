//! Reads the rows of a Parquet file as records; needs the feature `parquet`. Columns without a meaning for
//! training are not read.

use std::path::Path;

use minijinja::Value;

use crate::error::DataError;

/// The rows of a file.
pub(crate) type Rows = Box<dyn Iterator<Item = Result<Value, DataError>>>;

/// Reports that this build cannot read Parquet.
#[cfg(not(feature = "parquet"))]
pub(crate) fn rows(path: &Path, _content: Vec<u8>, _names: &[&str]) -> Result<Rows, DataError> {
    Err(DataError::ParquetNotCompiledIn { path: path.to_owned() })
}

/// Returns the rows of the file `path` with this content, with the columns in `names` only.
#[cfg(feature = "parquet")]
pub(crate) fn rows(path: &Path, content: Vec<u8>, names: &[&str]) -> Result<Rows, DataError> {
    let path = path.to_owned();
    let damaged = move |source| DataError::Parquet { path: path.clone(), source: Box::new(source) };
    let rows = reading::rows(content, names).map_err(&damaged)?;
    Ok(Box::new(rows.map(move |row| row.map_err(&damaged))))
}

#[cfg(feature = "parquet")]
mod reading {
    use std::sync::Arc;

    use bytes::Bytes;
    use minijinja::Value;
    use parquet::errors::ParquetError;
    use parquet::file::reader::{FileReader, SerializedFileReader};
    use parquet::record::reader::RowIter;
    use parquet::record::{Field, Row};
    use parquet::schema::types::{GroupTypeBuilder, Type};

    pub(crate) fn rows(
        content: Vec<u8>,
        names: &[&str],
    ) -> Result<impl Iterator<Item = Result<Value, ParquetError>> + use<>, ParquetError> {
        let reader = SerializedFileReader::new(Bytes::from(content))?;
        let schema = reader.metadata().file_metadata().schema();
        let columns: Vec<Arc<Type>> =
            schema.get_fields().iter().filter(|column| names.contains(&column.name())).cloned().collect();
        // Without any known column, the error names the columns of the file.
        let projection = (!columns.is_empty())
            .then(|| GroupTypeBuilder::new(schema.name()).with_fields(columns).build())
            .transpose()?;
        let rows = RowIter::from_file_into(Box::new(reader)).project(projection)?;
        Ok(rows.map(|row| row.map(|row| of_row(&row))))
    }

    fn of_row(row: &Row) -> Value {
        Value::from_pairs(row.get_column_iter().map(|(name, field)| (name.clone(), of_field(field))))
    }

    /// Returns the value of a field. Dates, times and decimals become texts.
    fn of_field(field: &Field) -> Value {
        match field {
            Field::Null => Value::from(()),
            Field::Bool(value) => Value::from(*value),
            Field::Byte(value) => Value::from(*value),
            Field::Short(value) => Value::from(*value),
            Field::Int(value) => Value::from(*value),
            Field::Long(value) => Value::from(*value),
            Field::UByte(value) => Value::from(*value),
            Field::UShort(value) => Value::from(*value),
            Field::UInt(value) => Value::from(*value),
            Field::ULong(value) => Value::from(*value),
            Field::Float(value) => Value::from(*value),
            Field::Double(value) => Value::from(*value),
            Field::Str(value) => Value::from(value.as_str()),
            Field::Group(row) => of_row(row),
            Field::ListInternal(list) => list.elements().iter().map(of_field).collect(),
            Field::MapInternal(map) => {
                Value::from_pairs(map.entries().iter().map(|(key, value)| (of_field(key), of_field(value))))
            }
            other => Value::from(other.to_string()),
        }
    }
}
