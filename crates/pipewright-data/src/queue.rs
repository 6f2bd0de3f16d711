//! Texts and records that wait to be encoded together.

use std::path::{Path, PathBuf};

use minijinja::Value;

use crate::chat::template::size_of;
use crate::config::DataConfig;
use crate::container::data_file::Packing;
use crate::encoding::record_content;
use crate::error::{DataError, DataPlace};
use crate::formats::format::Format;
use crate::formats::lines;
use crate::settings::record::RecordKind;

/// A file that is read.
pub(crate) struct SourceFile {
    pub(crate) path: PathBuf,
    pub(crate) packing: Packing,
    /// The format, which the first record decides.
    pub(crate) format: Option<Format>,
}

/// A text or a record as it was read.
pub(crate) enum Unparsed {
    /// The text of a whole file.
    Text(String),
    /// A line of a `.jsonl` file or a record of a JSON list, with its place.
    Json(DataPlace, Vec<u8>),
    /// A row of a Parquet file, with its number.
    Row(u64, Value),
}

/// The content of a file or of a record.
pub(crate) enum Parsed {
    Text(String),
    /// The ids of a line.
    Ids(DataPlace, Vec<u64>),
    Record(DataPlace, Value, RecordKind),
}

impl Unparsed {
    /// Returns the number of bytes of the text, as far as it is known.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Text(text) => text.len() as u64,
            Self::Json(_, json) => json.len() as u64,
            Self::Row(_, record) => size_of(std::iter::once(record)),
        }
    }

    /// Parses JSON, and recognises the kind of a record.
    pub(crate) fn parse(self, path: &Path, config: &DataConfig) -> Result<Parsed, DataError> {
        let (place, record) = match self {
            Self::Text(text) => return Ok(Parsed::Text(text)),
            Self::Row(row, record) => (DataPlace::Row(row), record),
            Self::Json(place, json) if lines::is_array(&json) => {
                return Ok(Parsed::Ids(place, lines::ids(path, place, &json)?));
            }
            Self::Json(place, json) => (place, lines::record(path, place, &json)?),
        };
        let kind = record_content::kind_of(&record, config).map_err(|error| error.of_record(path, place))?;
        Ok(Parsed::Record(place, record, kind))
    }
}

impl Parsed {
    /// Returns the format of a file with this content.
    pub(crate) fn format(&self) -> Format {
        match *self {
            Self::Text(_) => Format::Text,
            Self::Ids(..) => Format::IdLines,
            Self::Record(DataPlace::Row(_), _, kind) => Format::Parquet(kind),
            Self::Record(DataPlace::Column(..), _, kind) => Format::List(kind),
            Self::Record(_, _, kind) => Format::Lines(kind),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_texts_of_a_row_count() {
        let row: Value =
            serde_json::from_str(r#"{"messages": [{"role": "user", "content": "to be"}], "id": 3}"#)
                .expect("JSON");
        // Four keys, two texts and the number.
        assert_eq!(Unparsed::Row(1, row).bytes(), 8 + 4 + 7 + 2 + 4 + 5 + 7 * 8);
    }
}
