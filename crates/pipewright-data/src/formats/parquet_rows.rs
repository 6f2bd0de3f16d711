//! Reads the rows of a Parquet file as records; needs the feature `parquet`. If a column has a known name,
//! the columns with other names are not read.

use minijinja::Value;

use crate::container::data_file::DataFile;
use crate::error::DataError;
use crate::memory_budget::MemoryBudget;

/// The rows of a file.
pub(crate) type Rows = Box<dyn Iterator<Item = Result<Value, DataError>>>;

/// Reports that this build cannot read Parquet.
#[cfg(not(feature = "parquet"))]
pub(crate) fn rows(
    file: &mut DataFile,
    _names: &[&str],
    _budget: &mut MemoryBudget,
) -> Result<(Rows, u64), DataError> {
    let feature = crate::feature::Feature::Parquet;
    Err(DataError::of(file.path(), format!("{feature} is not compiled in; {}", feature.advice())))
}

/// Returns the rows of a file, with the columns in `names` only, and the bytes that they hold of the budget:
/// the content of a compressed file is in memory as a whole.
#[cfg(feature = "parquet")]
pub(crate) fn rows(
    file: &mut DataFile,
    names: &[&str],
    budget: &mut MemoryBudget,
) -> Result<(Rows, u64), DataError> {
    let path = file.path().to_owned();
    if file.packing() == crate::container::data_file::Packing::Plain {
        let file = pipewright_system::bounded_file::open_regular(&path)
            .map_err(|source| DataError::unreadable(&path, source))?;
        return Ok((reading::rows(path, file, names)?, 0));
    }
    let mut content = Vec::new();
    file.append(&mut content, budget)?;
    let held = content.len() as u64;
    budget.take(&path, held)?;
    Ok((reading::rows(path, bytes::Bytes::from(content), names)?, held))
}

#[cfg(feature = "parquet")]
mod reading {
    use std::fmt;
    use std::path::PathBuf;
    use std::sync::Arc;

    use minijinja::Value;
    use minijinja::value::{Object, ObjectRepr};
    use parquet::basic::Compression;
    use parquet::errors::ParquetError;
    use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData, RowGroupMetaData};
    use parquet::file::reader::{ChunkReader, FileReader, SerializedFileReader};
    use parquet::record::reader::RowIter;
    use parquet::record::{Field, Row};
    use parquet::schema::types::{GroupTypeBuilder, Type};

    use crate::error::DataError;
    use crate::formats::parquet_rows::Rows;

    /// Returns the rows of the file `path` with this content, with the columns in `names` only.
    pub(super) fn rows(
        path: PathBuf,
        content: impl ChunkReader + 'static,
        names: &[&str],
    ) -> Result<Rows, DataError> {
        let file = path.clone();
        let damaged = move |source: ParquetError| {
            let problem = "the Parquet file cannot be read to its end, so nothing of it is used; copy or download it again";
            DataError::of(&file, problem).caused_by(source)
        };
        let reader = SerializedFileReader::new(content).map_err(&damaged)?;
        let projection = projection(reader.metadata(), names).map_err(&damaged)?;
        if let Some(codec) = other_codec(reader.metadata(), projection.as_ref()) {
            let problem = format!(
                "its columns are compressed with {codec}; write the file with snappy, gzip, zstd or without compression"
            );
            return Err(DataError::of(&path, problem));
        }
        let rows = RowIter::from_file_into(Box::new(reader)).project(projection).map_err(&damaged)?;
        Ok(Box::new(rows.map(move |row| row.map(|row| of_row(&row)).map_err(&damaged))))
    }

    /// Returns the name of a compression that this build does not read, if a column that is read has one.
    fn other_codec(metadata: &ParquetMetaData, projection: Option<&Type>) -> Option<String> {
        let is_projected = |column: &&ColumnChunkMetaData| {
            let root = &column.column_path().parts()[0];
            projection
                .is_none_or(|projection| projection.get_fields().iter().any(|field| field.name() == root))
        };
        let columns = metadata.row_groups().iter().flat_map(RowGroupMetaData::columns).filter(is_projected);
        let is_read = |codec: &Compression| {
            matches!(
                codec,
                Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::GZIP(_) | Compression::ZSTD(_)
            )
        };
        columns
            .map(ColumnChunkMetaData::compression)
            .find(|codec| !is_read(codec))
            .map(|codec| codec.to_string())
    }

    /// Returns the schema with the columns in `names` only. Without any of them, the error of a row names the
    /// columns of the file, so all are read.
    fn projection(metadata: &ParquetMetaData, names: &[&str]) -> Result<Option<Type>, ParquetError> {
        let schema = metadata.file_metadata().schema();
        let columns: Vec<Arc<Type>> =
            schema.get_fields().iter().filter(|column| names.contains(&column.name())).cloned().collect();
        (!columns.is_empty())
            .then(|| GroupTypeBuilder::new(schema.name()).with_fields(columns).build())
            .transpose()
    }

    fn of_row(row: &Row) -> Value {
        Value::from_pairs(row.get_column_iter().map(|(name, field)| (name.clone(), of_field(field))))
    }

    /// Returns the value of a field. Bytes are a text if they are UTF-8, because many writers do not annotate
    /// the columns of their texts.
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
            Field::Float16(value) => Value::from(f32::from(*value)),
            Field::Float(value) => Value::from(*value),
            Field::Double(value) => Value::from(*value),
            Field::Str(value) => Value::from(value.as_str()),
            Field::Bytes(value) => std::str::from_utf8(value.data())
                .map_or_else(|_| Value::from_bytes(value.data().to_vec()), Value::from),
            Field::Group(row) => of_row(row),
            Field::ListInternal(list) => list.elements().iter().map(of_field).collect(),
            Field::MapInternal(map) => {
                Value::from_pairs(map.entries().iter().map(|(key, value)| (of_field(key), of_field(value))))
            }
            Field::Decimal(_)
            | Field::Date(_)
            | Field::TimeMillis(_)
            | Field::TimeMicros(_)
            | Field::TimestampMillis(_)
            | Field::TimestampMicros(_) => Value::from_object(NotText(field.to_string())),
        }
    }

    /// A date, a time or a decimal number. A template writes it, and it is not a text for training.
    #[derive(Debug)]
    struct NotText(String);

    impl Object for NotText {
        fn repr(self: &Arc<Self>) -> ObjectRepr {
            ObjectRepr::Plain
        }

        fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(&self.0)
        }
    }
}
