//! Parquet files as data.

use std::sync::Arc;

use parquet::basic::{Compression, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, DataType, Int32Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;

use super::formats::{check, check_refused, gzip, letters};
use super::{has_error, open_files};
use crate::{ChatTemplate, IGNORED_TARGET};

/// Returns a file with this schema, whose groups of rows `fill` writes.
fn written(
    schema: &str,
    compression: Compression,
    fill: impl FnOnce(&mut SerializedFileWriter<&mut Vec<u8>>),
) -> Vec<u8> {
    let schema = Arc::new(parse_message_type(schema).expect("a schema"));
    let properties = WriterProperties::builder().set_compression(compression).build();
    let mut bytes = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut bytes, schema, Arc::new(properties)).expect("a writer");
    fill(&mut writer);
    writer.close().expect("it is written");
    bytes
}

/// Writes the next column of a group.
fn add<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, &mut Vec<u8>>,
    values: &[T::T],
    [definitions, repetitions]: [Option<&[i16]>; 2],
) {
    let mut column = group.next_column().expect("it is written").expect("a column");
    column.typed::<T>().write_batch(values, definitions, repetitions).expect("it is written");
    column.close().expect("it is written");
}

/// Returns a file with the columns `text` and `number`.
fn file(texts: &[&str], compression: Compression) -> Vec<u8> {
    let schema = "message schema { REQUIRED INT32 number; OPTIONAL BYTE_ARRAY text (UTF8); }";
    written(schema, compression, |writer| {
        // A group of rows for each half.
        for texts in texts.chunks(texts.len().div_ceil(2)) {
            let mut group = writer.next_row_group().expect("a group");
            let numbers: Vec<i32> = (0..texts.len() as i32).collect();
            add::<Int32Type>(&mut group, &numbers, [None; 2]);
            let values: Vec<ByteArray> =
                texts.iter().filter(|text| **text != "null").map(|text| ByteArray::from(*text)).collect();
            let levels: Vec<i16> = texts.iter().map(|text| i16::from(*text != "null")).collect();
            add::<ByteArrayType>(&mut group, &values, [Some(&levels), None]);
            group.close().expect("it is written");
        }
    })
}

#[test]
fn texts_of_rows_are_documents() {
    let codecs = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(Default::default()),
        Compression::ZSTD(ZstdLevel::default()),
    ];
    for codec in codecs {
        let file = file(&["to ", "be ", "or not"], codec);
        check(&[("a.parquet", &file)], &letters("to be or not"), &["1 file of Parquet with texts"]);
    }
    let packed = gzip(&file(&["to be", " or"], Compression::SNAPPY));
    check(&[("a.parquet.gz", &packed)], &letters("to be or"), &["1 file of Parquet with texts, gzip"]);
}

#[test]
fn damaged_files_and_rows_without_a_text() {
    let whole = file(&["to ", "be ", "or not"], Compression::SNAPPY);
    for length in [whole.len() - 1, whole.len() / 2, 4] {
        check_refused(
            "a.parquet",
            &whole[..length],
            "the Parquet file cannot be read to its end, so nothing of it is used",
        );
    }
    let row = "a.parquet: row 2: `text` is not a text but a value of the type none";
    check_refused("a.parquet", &file(&["a", "null"], Compression::SNAPPY), row);
}

#[test]
fn a_row_has_the_form_whose_columns_are_not_null() {
    let columns = ["prompt", "completion", "text"].map(|name| format!("OPTIONAL BYTE_ARRAY {name} (UTF8);"));
    let schema = format!("message schema {{ {} }}", columns.concat());
    let file = written(&schema, Compression::SNAPPY, |writer| {
        let mut group = writer.next_row_group().expect("a group");
        for value in [None, None, Some("to be")] {
            let values: Vec<ByteArray> = value.into_iter().map(ByteArray::from).collect();
            add::<ByteArrayType>(&mut group, &values, [Some(&[i16::from(value.is_some())]), None]);
        }
        group.close().expect("it is written");
    });
    check(&[("a.parquet", &file)], &letters("to be"), &["1 file of Parquet with texts"]);
}

/// Returns a file with one column `text` of this type, with a value for each row.
fn column<T: DataType>(kind: &str, values: &[T::T]) -> Vec<u8> {
    let schema = format!("message schema {{ REQUIRED {kind}; }}");
    written(&schema, Compression::UNCOMPRESSED, |writer| {
        let mut group = writer.next_row_group().expect("a group");
        add::<T>(&mut group, values, [None; 2]);
        group.close().expect("it is written");
    })
}

#[test]
fn a_column_without_annotation_is_text_if_its_bytes_are_utf_8() {
    let texts = ["to ", "b\u{e9} or not"].map(ByteArray::from);
    let file = column::<ByteArrayType>("BYTE_ARRAY text", &texts);
    check(&[("a.parquet", &file)], &letters("to b\u{e9} or not"), &["1 file of Parquet with texts"]);
    let file =
        column::<ByteArrayType>("BYTE_ARRAY text", &["a".into(), ByteArray::from(b"\xff\xfe".to_vec())]);
    let bytes = "a.parquet: row 2: `text` is not a text but a value of the type bytes that are not UTF-8";
    check_refused("a.parquet", &file, bytes);
}

#[test]
fn dates_and_decimal_numbers_are_no_texts() {
    for kind in ["INT32 text (DATE)", "INT32 text (TIME_MILLIS)", "INT32 text (DECIMAL(9, 2))"] {
        let file = column::<Int32Type>(kind, &[20_000, 20_001]);
        let part = "a.parquet: row 1: `text` is not a text but a value of the type date, time or decimal";
        check_refused("a.parquet", &file, part);
    }
}

/// Returns the file with a compression of the column `name` that is not read. Its values stay as they are.
fn with_other_codec(mut file: Vec<u8>, name: &str) -> Vec<u8> {
    // The name of the column, and the fields of the compression (0: none) and of the number of values.
    let metadata = [name.as_bytes(), b"\x15\x00\x16"].concat();
    let place = file.windows(metadata.len()).position(|bytes| bytes == metadata).expect("the metadata");
    file[place + name.len() + 1] = 10;
    file
}

#[test]
fn an_unknown_compression_is_named_if_the_column_is_read() {
    let file = || file(&["to be or not"], Compression::UNCOMPRESSED);
    let part =
        "a.parquet: its columns are compressed with LZ4; write the file with snappy, gzip, zstd or without";
    check_refused("a.parquet", &with_other_codec(file(), "text"), part);
    let other = with_other_codec(file(), "number");
    check(&[("a.parquet", &other)], &letters("to be or not"), &["1 file of Parquet with texts"]);
    // No column has a known name, and all are read.
    let unknown = column::<ByteArrayType>("BYTE_ARRAY body (UTF8)", &["to be or not".into()]);
    check_refused("a.parquet", &with_other_codec(unknown, "body"), part);
}

#[test]
fn the_content_of_a_compressed_file_is_part_of_the_memory_for_data() {
    let texts: Vec<String> = (0..2000).map(|number| format!("{number:05}")).collect();
    let file = file(&texts.iter().map(String::as_str).collect::<Vec<_>>(), Compression::UNCOMPRESSED);
    let packed = gzip(&file);
    let folder = tempfile::tempdir().expect("a scratch folder");
    let open = |name: &str, content: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).expect("a file");
        let path = vec![path.to_str().expect("UTF-8").to_owned()];
        let config = crate::DataConfig { path, seq_len: 4, ..crate::DataConfig::default() };
        // The ids have 10,000 bytes.
        let budget = crate::memory_budget::MemoryBudget::of(file.len() as u64 + 5000);
        config.open_within(budget, 256, 1).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(open("a.parquet", &file), Ok(()), "it is read in parts");
    has_error(open("a.parquet.gz", &packed), "reading this file takes");
}

/// Returns a file with a chat of a question and an answer in each of two rows.
fn chats() -> Vec<u8> {
    let schema =
        "message schema { OPTIONAL group messages (LIST) { REPEATED group list { OPTIONAL group element {
        OPTIONAL BYTE_ARRAY content (UTF8); OPTIONAL BYTE_ARRAY role (UTF8); } } } }";
    written(schema, Compression::UNCOMPRESSED, |writer| {
        let mut group = writer.next_row_group().expect("a group");
        for values in [["A", "B", "C", "D"], ["user", "assistant", "user", "assistant"]] {
            // All values exist, and every second one begins a list.
            let levels = [Some(&[4; 4][..]), Some(&[0, 1, 0, 1])];
            add::<ByteArrayType>(&mut group, &values.map(ByteArray::from), levels);
        }
        group.close().expect("it is written");
    })
}

#[test]
fn chats_of_rows_are_lists_of_messages() {
    let file = chats();
    let mut rows = open_files(&[("a.parquet", &file)], 256, 1, |config| {
        config.seq_len = 63;
        config.chat_template = Some(ChatTemplate::Named("phi3".to_owned()));
    })
    .expect("good data");
    assert_eq!((rows.rows(), rows.sources()[0].to_string().as_str()), (2, "1 file of Parquet with chats"));
    let batch = rows.next_batch(2).expect("it is in memory");
    let targets = |text: &str| text.bytes().map(i32::from).collect::<Vec<_>>();
    let counted: Vec<i32> = batch.targets.into_iter().filter(|id| *id != IGNORED_TARGET).collect();
    assert_eq!(counted, targets("B<|end|>D<|end|>"));
}
