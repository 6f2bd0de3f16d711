//! The formats of data files, and damaged and misnamed files.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

use super::{has_error, open_files};
use crate::TokenRows;

pub(super) fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(content).expect("memory takes it");
    encoder.finish().expect("memory takes it")
}

fn zstd(content: &[u8]) -> Vec<u8> {
    compress_to_vec(content, CompressionLevel::Fastest)
}

fn open(files: &[(&str, &[u8])], vocab_size: usize) -> Result<TokenRows, String> {
    open_files(files, vocab_size, 1, |_| {})
}

/// Checks the ids of files, and what the files are said to be.
pub(super) fn check(files: &[(&str, &[u8])], ids: &[i32], sources: &[&str]) {
    let mut rows = open(files, 300).unwrap_or_else(|error| panic!("{error}"));
    let found: Vec<String> = rows.sources().iter().map(ToString::to_string).collect();
    assert_eq!(found, sources);
    assert_eq!(rows.tokens(), ids.len());
    let batch = rows.next_batch(1).expect("it is in memory");
    assert_eq!((batch.inputs.as_slice(), batch.targets.as_slice()), (&ids[..4], &ids[1..5]));
}

pub(super) fn check_refused(name: &str, content: &[u8], part: &str) {
    let error = open(&[(name, content)], 300).map(|rows| rows.sources().to_vec()).expect_err(part);
    assert!(error.starts_with(name) && error.contains(part), "{error}\nhas not: {part}");
}

pub(super) fn letters(text: &str) -> Vec<i32> {
    text.bytes().map(i32::from).collect()
}

#[test]
fn texts_in_lines_are_documents_of_one_stream() {
    let lines = b"{\"text\": \"abc\", \"id\": 1}\n\n{\"id\": 2, \"text\": \"d\\u00e9f\"}\n";
    check(&[("a.jsonl", lines)], &letters("abcd\u{e9}f"), &["1 file of JSON lines with texts"]);
    check(&[("a.json", lines)], &letters("abcd\u{e9}f"), &["1 file of JSON lines with texts"]);
    let change = |config: &mut crate::DataConfig| {
        config.documents = Some(crate::Documents { bos_id: 299, packed: false, restart_positions: false });
    };
    let mut rows = open_files(&[("a.jsonl", lines)], 300, 1, change).expect("good data");
    assert_eq!(
        (rows.tokens(), rows.next_batch(1).expect("it is in memory").inputs),
        (9, vec![299, 97, 98, 99])
    );
}

#[test]
fn a_key_may_have_another_name() {
    let change = |config: &mut crate::DataConfig| assert!(config.keys.rename("text", "content"));
    let lines: &[u8] = b"{\"content\": \"abcdef\", \"text\": 1}";
    let rows = open_files(&[("a.jsonl", lines)], 300, 1, change).expect("good data");
    assert_eq!(rows.tokens(), 6);
}

#[test]
fn every_format_may_be_compressed() {
    let text = "to be or not to be";
    let lines = format!("{{\"text\": \"{text}\"}}\n");
    check(&[("a.txt.gz", &gzip(text.as_bytes()))], &letters(text), &["1 file of text, gzip"]);
    check(&[("a.txt.zst", &zstd(text.as_bytes()))], &letters(text), &["1 file of text, zstd"]);
    let said = "1 file of JSON lines with texts, zstd";
    check(&[("a.jsonl.zst", &zstd(lines.as_bytes()))], &letters(text), &[said]);
    let rows = gzip(b"[1, 2, 3, 4, 5]\n");
    check(&[("a.jsonl.gz", &rows)], &[1, 2, 3, 4, 5], &["1 file of lines of token ids, gzip"]);
}

#[test]
fn several_members_and_frames_are_one_content() {
    let both = |pack: fn(&[u8]) -> Vec<u8>| [pack(b"to be "), pack(b"or not")].concat();
    check(&[("a.gz", &both(gzip))], &letters("to be or not"), &["1 file of text, gzip"]);
    check(&[("a.zst", &both(zstd))], &letters("to be or not"), &["1 file of text, zstd"]);
    // A frame that decoders skip: its magic number, its length, and its content.
    let skipped = [b"\x53\x2a\x4d\x18\x02\0\0\0xy".as_slice(), &both(zstd)].concat();
    check(&[("a.zst", &skipped)], &letters("to be or not"), &["1 file of text, zstd"]);
}

#[test]
fn files_of_several_formats_are_one_stream() {
    let ids = [7u16, 8].map(u16::to_le_bytes).concat();
    let files: &[(&str, &[u8])] = &[
        ("a.txt", b"ab"),
        ("b.jsonl", b"{\"text\": \"cd\"}"),
        ("c.bin", &ids),
        ("d.txt", b"e"),
        ("e.txt.gz", &gzip(b"f")),
    ];
    let sources = [
        "2 files of text",
        "1 file of JSON lines with texts",
        "1 file of token ids of 16 bits",
        "1 file of text, gzip",
    ];
    check(files, &[97, 98, 99, 100, 7, 8, 101, 102], &sources);
}

#[test]
fn rows_of_ids_may_be_in_several_files() {
    let files: &[(&str, &[u8])] = &[("a.jsonl", b"[1, 2, 3, 4, 5]"), ("b.ndjson", b"[6, 7, 8, 9, 10]\n")];
    let rows = open(files, 300).expect("good data");
    assert_eq!((rows.rows(), rows.tokens()), (2, 10));
    let mixed: &[(&str, &[u8])] = &[("a.txt", b"abcdef"), ("b.jsonl", b"[6, 7, 8, 9, 10]\n")];
    let error = open(mixed, 300).map(|rows| rows.rows()).expect_err("two kinds of data");
    assert_eq!(
        error,
        "b.jsonl: the file has lines of token ids, which are rows, and a.txt has text or ids that are cut into rows: \
         train on them in two runs"
    );
}

#[test]
fn a_file_that_ends_early_is_refused_as_a_whole() {
    let text = "to be or not to be, that is the question: ".repeat(40);
    let text: String = text
        .chars()
        .enumerate()
        .map(|(i, c)| if i % 7 == 0 { ((i * i) as u8 % 26 + 97) as char } else { c })
        .collect();
    for (name, packed) in [("a.txt.gz", gzip(text.as_bytes())), ("a.txt.zst", zstd(text.as_bytes()))] {
        for length in [packed.len() - 1, packed.len() - 5, packed.len() / 2, 12] {
            check_refused(name, &packed[..length], "damaged or ends early, so nothing of it is used");
        }
        let mut damaged = packed.clone();
        let last = damaged.len() - 2;
        damaged[last] ^= 1;
        check_refused(name, &damaged, "damaged or ends early");
        check_refused(name, &[packed, b"rest".to_vec()].concat(), "damaged or ends early");
    }
    check_refused("a.txt.gz", b"to be or not", "the name says that the file is gzip, and its content is not");
    check_refused("a.txt.zst", b"", "the name says that the file is zstd");
}

#[test]
fn records_that_cannot_be_used() {
    let check = |lines: &str, part: &str| check_refused("a.jsonl", lines.as_bytes(), part);
    check("{\"text\": \"a\"}\n{\"text\": \"b\"", "a.jsonl:2:12: not JSON: EOF while parsing an object");
    check("to be\n", "a.jsonl:1:2: not JSON: expected ident; write one record per line, such as {\"text\"");
    check(
        "{\"txt\": \"a\", \"id\": 1}",
        "a.jsonl:1: the record has the keys `txt`, `id`, and none of the keys",
    );
    check("{}", "the record has no keys");
    check("{\"text\": 3}", "a.jsonl:1: `text` is not a text but a value of the type number");
    check("{\"text\": null}", "`text` is not a text but a value of the type none");
    check(
        "{\"text\": \"a\"}\n[1, 2, 3, 4, 5]",
        "a.jsonl:2: the file has both records and arrays of token ids",
    );
    check("[1, 2, 3, 4, 5]\n{\"text\": \"a\"}", "a.jsonl:2: the file has both records and arrays");
    check("\"a\"", "a.jsonl:1: the line is a string; write a record");
    let error = open(&[("a.jsonl", "{\"text\": \"a\"}\n{\"text\": \"b\u{e9}\"}".as_bytes())], 128)
        .map(|rows| rows.rows());
    let part =
        "a.jsonl:2: token id 195 lies beyond the vocabulary of 128; raise vocab_size, or correct the data";
    assert_eq!(error.expect_err("a small vocabulary"), part);
}

#[test]
fn what_is_not_text_is_no_text() {
    let list = "this is JSON that is neither a record per line nor a list of records, and not text; write its records as one of";
    check_refused("a.json", b"{\n  \"text\": \"a\"\n}\n", list);
    check_refused("a.txt", b"{\n  \"text\": \"a\"\n}\n", list);
    check_refused("a.txt", b"[\n  1,\n 2\n]\n", list);
    check_refused(
        "a.txt",
        b"{\"text\": \"a\"}\n{\"text\": \"b\"}\n",
        "the lines are JSON, and not text; let the name end in .jsonl",
    );
    check_refused(
        "a.parquet",
        b"to be or not to be",
        "the name ends in .parquet, and the content is not a Parquet file",
    );
    check_refused("a.idx", b"MMIDIDX\0\0", "this is the index of a .bin file; name the .bin file");
    // Text that only looks like JSON at its beginning.
    for text in ["[1] See page 3.\n[2] See page 4.", "{to be}\n{or not}", "[link](a)\n"] {
        check(&[("a.md", text.as_bytes())], &letters(text), &["1 file of text"]);
    }
}

#[test]
fn long_lines_of_json_are_recognised() {
    let record = format!("{{\"text\": \"{}\"}}", "a".repeat(100_000));
    let list = "this is a JSON list of records, and not text; let the name end in .json";
    let tokens = |name, text: String| open(&[(name, text.as_bytes())], 300).map(|rows| rows.tokens());
    assert_eq!(tokens("a.json", format!("[{record},{record}]")), Ok(200_000));
    assert_eq!(tokens("a.jsonl", format!("[ {record},\n{record}]")), Ok(200_000));
    check_refused("a.txt", format!("[{record},{record}]").as_bytes(), list);
    let lines = "the lines are JSON, and not text; let the name end in .jsonl";
    check_refused("a.txt", format!("{record}\n{record}\n{{\"text\": 1,\n").as_bytes(), lines);
    let rows = open(&[("a.json", format!("{record}\n{record}\n").as_bytes())], 300);
    assert_eq!(rows.map(|rows| rows.tokens()), Ok(200_000));
}

#[test]
fn the_format_is_recognised_whatever_the_compressed_pieces_are() {
    let pieces = [b"{\"text\":".as_slice(), b" \"a\"}\n{\"text\": \"b\"}\n"];
    let members = pieces.map(gzip).concat();
    check_refused("a.txt.gz", &members, "the lines are JSON, and not text");
    let frames = pieces.map(zstd).concat();
    check_refused("a.txt.zst", &frames, "the lines are JSON, and not text");
    let ids = [1u32, 2, 299, 4, 0, 6].map(|id| gzip(&id.to_le_bytes())).concat();
    check_refused("a.bin.gz", &ids, "looks like token ids of 32 bits");
}

#[test]
fn the_first_error_in_the_order_of_the_files_counts() {
    let bad: &[u8] = b"{\"text\": \"a\"}\n{\"text\": 1}\n{\"text\": \"b\"}";
    let error = open(&[("a.jsonl", bad), ("b.txt", b"\xff\xfe")], 300).map(|rows| rows.tokens());
    has_error(error, "a.jsonl:2: `text` is not a text");
}

#[test]
fn ids_of_16_bits() {
    let ids: Vec<u8> = [1u16, 2, 299, 4, 0].into_iter().flat_map(u16::to_le_bytes).collect();
    check(&[("a.bin", &ids)], &[1, 2, 299, 4, 0], &["1 file of token ids of 16 bits"]);
    check(&[("a.bin.gz", &gzip(&ids))], &[1, 2, 299, 4, 0], &["1 file of token ids of 16 bits, gzip"]);
    check_refused("a.bin", &ids[..9], "the file ends inside a token id of 2 bytes");
    let beyond = [ids, 300u16.to_le_bytes().to_vec()].concat();
    check_refused("a.bin", &beyond, "a.bin: token 5: token id 300 lies beyond the vocabulary of 300");
    check_refused("a.bin", "to be or not to be, ".repeat(9).as_bytes(), "the file is text, not token ids");
    check_refused("a.bin", b"PK\x03\x04\x14\0\0\0", "a zip archive");
}

#[test]
fn ids_with_the_header_of_llm_c() {
    let file = |magic: u32, version: u32, count: u32, ids: &[u8]| {
        let mut header = vec![0; 1024];
        for (at, number) in [magic, version, count].into_iter().enumerate() {
            header[4 * at..4 * at + 4].copy_from_slice(&number.to_le_bytes());
        }
        [header, ids.to_vec()].concat()
    };
    let short: Vec<u8> = [1u16, 2, 299, 4, 0].into_iter().flat_map(u16::to_le_bytes).collect();
    let long: Vec<u8> = [1u32, 2, 299, 4, 0].into_iter().flat_map(u32::to_le_bytes).collect();
    let said = ["1 file of token ids with llm.c's header"];
    check(&[("a.bin", &file(20_240_520, 1, 5, &short))], &[1, 2, 299, 4, 0], &said);
    check(&[("a.bin", &file(20_240_801, 7, 5, &long))], &[1, 2, 299, 4, 0], &said);
    let fewer = file(20_240_520, 1, 6, &short);
    check_refused("a.bin", &fewer, "the header says 6 token ids, and the file has 5");
}

#[test]
fn a_header_of_llm_c_that_is_not_known_is_refused() {
    let header = |version: u32, length: usize| {
        let mut bytes = [20_240_520, version, 2].map(u32::to_le_bytes).concat();
        bytes.resize(length, 1);
        bytes
    };
    let part =
        "a.bin: not a file of token ids of llm.c: its version is 2, and only 1 is known for its magic number";
    check_refused("a.bin", &header(2, 1028), part);
    check_refused("a.bin", &header(1, 100), "it has 100 bytes, and a header has 1024; write it again");
    check_refused("a.bin", &header(1, 12), "it has 12 bytes, and a header has 1024");
}

#[test]
fn wide_ids_without_a_header_are_refused() {
    let ids = [1u32, 2, 299, 4, 0, 6];
    let part = "a.bin: the file looks like token ids of 32 bits without a header";
    check_refused("a.bin", &ids.map(u32::to_le_bytes).concat(), part);
    check_refused("a.bin", &ids.map(|id| u64::from(id).to_le_bytes()).concat(), part);
    let open = |ids: &[u8], vocab_size| open(&[("a.bin", ids)], vocab_size).map(|rows| rows.tokens());
    let large = [70_000u32, 2, 65_536, 4, 131_000, 6].map(u32::to_le_bytes).concat();
    assert!(open(&large, 131_072).expect_err("they are wide").contains(part));
    assert_eq!(open(&large, 65_536), Ok(12), "1 is not an upper half in such a vocabulary");
    // Every second id is 0 here too, and the others are all the same.
    assert_eq!(open(&[5u16, 0, 5, 0, 5, 0, 5, 0, 5].map(u16::to_le_bytes).concat(), 300), Ok(9));
}

/// Returns an index of Megatron for sequences of these lengths and first bytes.
fn index(code: u8, sequences: &[(i64, i32)]) -> Vec<u8> {
    let mut bytes = b"MMIDIDX\0\0".to_vec();
    bytes.extend(1u64.to_le_bytes());
    bytes.push(code);
    bytes.extend((sequences.len() as u64).to_le_bytes());
    bytes.extend((sequences.len() as u64 + 1).to_le_bytes());
    sequences.iter().for_each(|(_, length)| bytes.extend(length.to_le_bytes()));
    sequences.iter().for_each(|(start, _)| bytes.extend(start.to_le_bytes()));
    (0..=sequences.len() as i64).for_each(|document| bytes.extend(document.to_le_bytes()));
    bytes
}

/// Checks files of Megatron. The second file is only found through the first one's name.
fn open_megatron(bin: &[u8], index: &[u8]) -> Result<TokenRows, String> {
    let files: &[(&str, &[u8])] = &[("a.bin", bin), ("a.idx", index)];
    open_files(files, 300, 1, |config| config.path.truncate(1))
}

#[test]
fn sequences_of_megatron_come_in_the_order_of_the_index() {
    let wide: Vec<u8> = [1i32, 2, 299, 4, 5, 6].into_iter().flat_map(i32::to_le_bytes).collect();
    let mut rows = open_megatron(&wide, &index(4, &[(8, 4), (0, 2)])).expect("good data");
    assert_eq!(rows.sources()[0].to_string(), "1 file of Megatron's token ids");
    let batch = rows.next_batch(1).expect("it is in memory");
    assert_eq!((rows.tokens(), batch.inputs, batch.targets[3]), (6, vec![299, 4, 5, 6], 1));
    let refused = |bin: &[u8], index: &[u8], part: &str| {
        has_error(open_megatron(bin, index), part);
    };
    let sound = index(4, &[(0, 6)]);
    refused(&wide[..20], &sound, "a.bin: the file ends before sequence 1 of a.idx");
    refused(&wide, &sound[..40], "a.idx: not an index of Megatron's token ids: it ends early");
    refused(&wide, b"MMIDIDX", "it does not begin with MMIDIDX");
    refused(&wide, &index(7, &[(0, 6)]), "the type 7 of its ids is not a type of whole numbers");
    refused(&wide, &index(4, &[(0, -1)]), "a sequence has a negative length");
    refused(&wide, &index(4, &[(-4, 1)]), "a sequence begins at a negative byte");
    refused(&wide, &index(4, &[(i64::MAX, 1)]), "the file ends before sequence 1");
    let negative = [-1i32, 2].map(i32::to_le_bytes).concat();
    refused(&negative, &index(4, &[(0, 2)]), "a.bin: token 0: token id 18446744073709551615 lies beyond");
}

#[cfg(not(feature = "parquet"))]
#[test]
fn parquet_needs_a_feature() {
    check_refused(
        "a.parquet",
        b"PAR1rest",
        "build with the feature `parquet` (`cargo build --release --features parquet`)",
    );
}
