//! Rows of text and of ids, their order, and invalid input.

use std::path::Path;

use super::{has_error, open_files};
use crate::memory_budget::MemoryBudget;
use crate::{Cursor, DOCUMENTS, DataConfig, Documents, POSITIONS, TokenRows, Tokenizer};

/// Opens one file of that name and content. Returns an error as its message, without the folder.
fn open(name: &str, content: &[u8], seq_len: usize, vocab_size: usize) -> Result<TokenRows, String> {
    open_with(name, content, vocab_size, 2, |config| config.seq_len = seq_len)
}

fn open_with(
    name: &str,
    content: &[u8],
    vocab_size: usize,
    batch_rows: usize,
    change: impl FnOnce(&mut DataConfig),
) -> Result<TokenRows, String> {
    open_files(&[(name, content)], vocab_size, batch_rows, change)
}

fn check_refused(name: &str, content: &[u8], seq_len: usize, vocab_size: usize, message: &str) {
    assert_eq!(open(name, content, seq_len, vocab_size).expect_err("bad data"), message);
}

#[test]
fn text_rows_share_a_token() {
    let mut rows = open("a.txt", b"abcdefghijk", 4, 256).expect("good data");
    assert_eq!((rows.rows(), rows.tokens()), (2, 11));
    let batch = rows.next_batch(2).expect("it is in memory");
    assert_eq!(batch.inputs, b"abcdefgh".map(i32::from));
    assert_eq!(batch.targets, b"bcdefghi".map(i32::from));
}

#[test]
fn an_incomplete_row_is_left_out() {
    assert_eq!(open("a.txt", b"abcdefghi", 4, 256).map(|rows| rows.rows()), Ok(2));
    let few = "the data has 1 rows of seq_len 4, and a step's batch takes 2; \
               give more data, a shorter seq_len, or fewer or smaller microbatches";
    check_refused("a.txt", b"abcdefgh", 4, 256, few);
}

#[test]
fn rows_of_ids_come_in_order() {
    let lines: Vec<String> = (0..96).map(|row| format!("[{row}, 255, {}]", row + 100)).collect();
    let mut rows = open_with("a.jsonl", lines.join("\n").as_bytes(), 256, 8, |config| config.seq_len = 2)
        .expect("good data");
    for step in 0..12 {
        let batch = rows.next_batch(8).expect("it is in memory");
        let expected: Vec<i32> = (step * 8..step * 8 + 8).flat_map(|row| [row, 255]).collect();
        assert_eq!(batch.inputs, expected);
        let expected: Vec<i32> = (step * 8..step * 8 + 8).flat_map(|row| [255, row + 100]).collect();
        assert_eq!(batch.targets, expected);
    }
    assert_eq!(rows.cursor(), Cursor { epoch: 0, index: 96 });
    assert_eq!(rows.next_batch(1).expect("it is in memory").inputs, [0, 255], "the next epoch begins");
}

#[test]
fn a_text_in_memory_gives_the_rows_of_a_file() {
    let text = "abcdefghijklm";
    let mut of_file = open("a.txt", text.as_bytes(), 4, 256).expect("good data");
    let config = DataConfig { seq_len: 4, shuffle: false, ..DataConfig::default() };
    let mut of_text = config.open_text(text, 256, 2).expect("good data");
    assert_eq!(
        of_text.identity().expect("it is in memory").hash,
        of_file.identity().expect("it is in memory").hash
    );
    assert_eq!(
        of_text.next_batch(5).expect("it is in memory"),
        of_file.next_batch(5).expect("it is in memory")
    );
    has_error(config.open_text("abcde", 256, 2), "the data has 1 rows of seq_len 4");
    has_error(config.open_text("ab\u{e9}d", 128, 1), "the text in memory: byte 2: token id 195");
}

/// Opens a file with documents.
fn with_documents(name: &str, content: &[u8], vocab_size: usize, bos_id: u32) -> Result<TokenRows, String> {
    open_with(name, content, vocab_size, 1, |config| {
        config.documents = Some(Documents { bos_id, packed: true, restart_positions: true });
    })
}

#[test]
fn a_text_begins_with_the_id_of_a_document() {
    for (vocab_size, bos) in [(256, 0), (257, 256), (70_000, 69_999)] {
        let mut rows = with_documents("a.txt", b"abcdefghij", vocab_size, bos).expect("good data");
        assert_eq!((rows.rows(), rows.tokens()), (2, 11));
        let batch = rows.next_batch(1).expect("it is in memory");
        assert_eq!(batch.inputs, [bos as i32, 97, 98, 99]);
        let side: Vec<(&str, &[i32])> =
            batch.side.iter().map(|side| (side.name.as_str(), side.values.as_slice())).collect();
        assert_eq!(side, [(DOCUMENTS, &[1, 1, 1, 1][..]), (POSITIONS, &[0, 1, 2, 3])]);
    }
    let beyond = "documents begin with the token id 256, which lies beyond the vocabulary of 256; raise vocab_size, or \
                  choose another id";
    assert_eq!(with_documents("a.txt", b"abcdefghij", 256, 256).expect_err("it is beyond"), beyond);
}

#[test]
fn rows_of_ids_contain_the_beginnings() {
    let mut rows = with_documents("a.jsonl", b"[5, 7, 1, 7, 2]\n[7, 1, 2, 3, 7]", 256, 7).expect("good data");
    let batch = rows.next_batch(2).expect("it is in memory");
    assert_eq!(batch.inputs, [5, 7, 1, 7, 7, 1, 2, 3]);
    assert_eq!(batch.side[0].values, [0, 1, 1, 2, 1, 1, 1, 1]);
    assert_eq!(batch.side[1].values, [0, 0, 1, 0, 0, 1, 2, 3]);
    assert!(batch.side.iter().all(|side| side.shape == [2, 4]));
}

#[test]
fn a_share_is_held_out_from_the_end() {
    let rows = open("a.txt", b"abcdefghijklmnopqrst", 4, 256).expect("good data");
    let (mut training, mut held) = rows.hold_out(0.45).expect("it divides");
    assert_eq!((training.tokens(), training.rows(), held.tokens(), held.rows()), (11, 2, 9, 2));
    assert_eq!(training.next_batch(2).expect("it is in memory").targets, b"bcdefghi".map(i32::from));
    assert_eq!(held.next_batch(2).expect("it is in memory").inputs, b"lmnopqrs".map(i32::from));
    let shorter = open("a.txt", b"abcdefghijk", 4, 256).expect("good data");
    assert_eq!(
        training.identity().expect("it is in memory"),
        shorter.identity().expect("it is in memory"),
        "it is as if the text were shorter"
    );

    let lines: Vec<String> = (0..10).map(|row| format!("[{row}, 1]")).collect();
    let change = |config: &mut DataConfig| (config.seq_len, config.shuffle) = (1, true);
    let rows = open_with("a.jsonl", lines.join("\n").as_bytes(), 256, 2, change).expect("good data");
    let (mut training, mut held) = rows.hold_out(0.3).expect("it divides");
    assert_eq!(firsts(&mut held, 3), [7, 8, 9], "it is not shuffled");
    let mut trained = firsts(&mut training, 7);
    trained.sort_unstable();
    assert_eq!(trained, [0, 1, 2, 3, 4, 5, 6]);
}

#[test]
fn what_was_dealt_out_is_counted() {
    let mut rows = open("a.txt", b"abcdefghijklm", 4, 256).expect("good data");
    assert_eq!((rows.tokens_seen(), rows.epochs_seen()), (0, 0.0));
    rows.next_batch(3).expect("it is in memory");
    assert_eq!((rows.tokens_seen(), rows.epochs_seen()), (12, 1.0));
    rows.next_batch(4).expect("it is in memory");
    assert_eq!(rows.tokens_seen(), 28);
    assert!((rows.epochs_seen() - 7.0 / 3.0).abs() < 1e-12);
}

#[test]
fn the_entropy_of_the_frequencies() {
    let entropy = |text: &[u8]| {
        open("a.txt", text, 2, 256).expect("good data").frequency_entropy().expect("it is in memory")
    };
    assert_eq!(entropy(b"aaaaaaaa"), 0.0);
    assert!((entropy(b"abababab") - 2f64.ln()).abs() < 1e-12);
    assert!((entropy(b"aabcaabc") - 1.5 * 2f64.ln()).abs() < 1e-12);
}

#[test]
fn only_targets_that_count_are_in_the_entropy_of_the_frequencies() {
    let lines = b"{\"prompt\": \"xyz\", \"completion\": \"ab\"}\n{\"prompt\": \"\", \"completion\": \"zab\"}";
    let rows = open("a.jsonl", lines, 4, 256).expect("good data");
    // Nothing predicts the `z` that begins the second record.
    let entropy = rows.frequency_entropy().expect("it is in memory");
    assert!((entropy - 2f64.ln()).abs() < 1e-12, "{entropy}");
}

/// Returns the first id of each of the next rows.
fn firsts(rows: &mut TokenRows, count: usize) -> Vec<i32> {
    let batch = rows.next_batch(count).expect("it is in memory");
    batch.inputs.chunks(batch.seq_len).map(|row| row[0]).collect()
}

fn shuffled(seed: u64) -> TokenRows {
    let lines: Vec<String> = (0..20).map(|row| format!("[{row}, 1]")).collect();
    let change = |config: &mut DataConfig| (config.seq_len, config.shuffle, config.seed) = (1, true, seed);
    open_with("a.jsonl", lines.join("\n").as_bytes(), 256, 8, change).expect("good data")
}

#[test]
fn a_cursor_resumes() {
    let mut rows = shuffled(1);
    firsts(&mut rows, 33);
    let cursor = rows.cursor();
    assert_eq!(cursor, Cursor { epoch: 1, index: 13 });
    let mut resumed = shuffled(1);
    resumed.seek(cursor).expect("the same data");
    assert_eq!(firsts(&mut resumed, 30), firsts(&mut rows, 30));
    let error = resumed.seek(Cursor { epoch: 0, index: 21 }).expect_err("there are 20 rows");
    let message =
        "row 21 of an epoch is asked for, and the data has 20; resume with the data of the first run";
    assert_eq!(error.to_string(), message);
}

/// Opens one sparse file of that name and size with this much memory for data. Returns the error.
fn open_within(budget: u64, name: &str, size: u64) -> String {
    open_documents_within(budget, name, size, None).expect_err("too much data")
}

/// Opens the data with documents, like [`open_within`].
fn open_documents_within(
    budget: u64,
    name: &str,
    size: u64,
    documents: Option<Documents>,
) -> Result<(), String> {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let path = folder.path().join(name);
    std::fs::write(&path, "a".repeat(size.min(2 << 20) as usize)).expect("a file");
    let file = std::fs::File::options().write(true).open(&path);
    file.and_then(|file| file.set_len(size)).expect("a file");
    let path = path.to_str().expect("UTF-8").to_owned();
    let config =
        DataConfig { path: vec![path], seq_len: 4, shuffle: false, documents, ..DataConfig::default() };
    let opened = config.open_within(MemoryBudget::of(budget), 256, 1).map(drop);
    opened.map_err(|error| error.to_string().replace(&format!("{}/", folder.path().display()), ""))
}

#[test]
fn the_text_of_a_document_counts_beside_its_ids() {
    let documents = Some(Documents { bos_id: 1, packed: false, restart_positions: false });
    let opened = |size| open_documents_within(1 << 20, "a.txt", size, documents);
    assert_eq!(opened(500 << 10), Ok(()));
    has_error(opened(600 << 10), "a.txt: reading this file takes 1.1 MiB, and 1 MiB of the memory");
    assert_eq!(open_documents_within(1 << 20, "a.txt", 600 << 10, None), Ok(()), "the bytes are the ids");
}

#[test]
fn more_data_than_memory_is_refused_before_it_is_read() {
    let words =
        "(half of what this machine has available); give less data, or use a machine with more memory";
    assert_eq!(
        open_within(1 << 20, "a.txt", 100 << 30),
        format!("a.txt: reading this file takes 100 GiB, and 1 MiB of the memory for data are left {words}")
    );
    assert_eq!(
        open_within(1 << 20, "a.jsonl", 100 << 30),
        "a.jsonl:1: the line has more than 1 MiB, too long for a row of seq_len 4; write one array per line"
    );
    let budget = MemoryBudget::of_machine().left();
    assert!(budget > 1 << 20, "a machine that runs tests has more memory than {budget} bytes");
}

#[test]
#[cfg(target_os = "linux")]
fn files_without_an_end_are_refused() {
    for path in ["/dev/zero", "/dev/null"] {
        let path = vec![path.to_owned()];
        let config = DataConfig { path, seq_len: 4, shuffle: false, ..DataConfig::default() };
        has_error(config.open(256, 1), "copy its content to a regular file and name that");
    }
}

#[test]
fn bad_text() {
    check_refused("a.txt", b"", 4, 256, "a.txt: the data is empty; name files that hold text");
    let not_text = "a.txt: byte 3 is not valid UTF-8; convert the file, or leave it out with a pattern such as \
                    \"!**/a.txt\"";
    check_refused("a.txt", b"abc\xffdefghijkl", 4, 256, not_text);
    let beyond =
        "a.txt: byte 2: token id 99 lies beyond the vocabulary of 99; raise vocab_size, or correct the data";
    check_refused("a.txt", b"abcabcabcabc", 4, 99, beyond);
    assert!(open("a.txt", b"abcabcabcabc", 4, 100).is_ok());
}

#[test]
fn bad_rows() {
    let line = "a.jsonl:3:5: not an array of token ids: expected value; write lines such as [12, 7, 255]";
    check_refused("a.jsonl", b"[1, 2]\n\n[1, x]\n", 1, 256, line);
    let negative = "a.jsonl:1:3: not an array of token ids: invalid value: integer `-1`, expected u64; \
                    write lines such as [12, 7, 255]";
    check_refused("a.jsonl", b"[-1, 2]\n", 1, 256, negative);
    let length = "a.jsonl:2: the row holds 3 ids, and seq_len 1 takes 2; correct the row or seq_len";
    check_refused("a.jsonl", b"[1, 2]\n[1, 2, 3]", 1, 256, length);
    let beyond =
        "a.jsonl:2: token id 256 lies beyond the vocabulary of 256; raise vocab_size, or correct the data";
    check_refused("a.jsonl", b"[1, 2]\n[256, 2]", 1, 256, beyond);
    check_refused("a.jsonl", b"\n \n", 1, 256, "a.jsonl: the data is empty; name files that hold text");
}

#[cfg(not(feature = "tokenizers"))]
#[test]
fn tokenizer_files_need_a_feature() {
    let tokenizer = Tokenizer::File(Path::new("t.json").to_owned());
    let result = open_with("a.txt", b"abc", 256, 1, |config| config.tokenizer = tokenizer);
    let message = "t.json: tokenizer files are not compiled in; use the tokenizer \"bytes\", or build with the feature \
                   `tokenizers` (`cargo build --release --features tokenizers`)";
    assert_eq!(result.expect_err("the feature is off"), message);
}

#[cfg(feature = "tokenizers")]
#[test]
fn a_tokenizer_file_gives_the_ids() {
    let tokenizer = r#"{"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": [], "model":
        {"type": "WordLevel", "vocab": {"to": 0, "be": 1, "or": 2, "not": 300, "?": 4}, "unk_token": "?"}}"#;
    let read = |tokenizer: &str, vocab_size| {
        open_with("a.txt", b"to be or not to be", vocab_size, 1, |config| {
            let path = config.path[0].replace("a.txt", "t.json");
            std::fs::write(&path, tokenizer).expect("a file");
            (config.tokenizer, config.seq_len) = (Tokenizer::File(Path::new(&path).to_owned()), 5);
        })
    };
    let batch = read(tokenizer, 301).expect("good data").next_batch(1).expect("it is in memory");
    assert_eq!((batch.inputs, batch.targets), (vec![0, 1, 2, 300, 0], vec![1, 2, 300, 0, 1]));
    let beyond = "a.txt: token 3: token id 300 lies beyond the vocabulary of 300; raise vocab_size, or correct the data";
    assert_eq!(read(tokenizer, 300).expect_err("a small vocabulary"), beyond);
    has_error(
        read("{}", 300),
        "t.json: not a tokenizer.json of Hugging Face (the other choice is \"bytes\")",
    );
}

/// A tokenizer that puts `<s>` (id 1) before a text.
#[cfg(feature = "tokenizers")]
const BEGINNING: &str = r#"{"version": "1.0", "pre_tokenizer": {"type": "Whitespace"},
    "added_tokens": [{"id": 1, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": true}],
    "post_processor": {"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
    "model": {"type": "WordLevel", "vocab": {"?": 0, "<s>": 1, "to": 2, "be": 3}, "unk_token": "?"}}"#;

#[cfg(feature = "tokenizers")]
#[test]
fn a_tokenizer_adds_its_special_tokens_to_each_document_once() {
    let read = |bos: Option<u32>| {
        let read = open_with("a.txt", b"to be", 8, 1, |config| {
            let tokenizer = config.path[0].replace("a.txt", "t.json");
            std::fs::write(&tokenizer, BEGINNING).expect("a file");
            let second = config.path[0].replace("a.txt", "b.txt");
            std::fs::write(&second, "be to").expect("a file");
            config.path.push(second);
            config.documents =
                bos.map(|bos_id| Documents { bos_id, packed: false, restart_positions: false });
            (config.tokenizer, config.seq_len) = (Tokenizer::File(Path::new(&tokenizer).to_owned()), 5);
        });
        let batch = read.expect("good data").next_batch(1).expect("it is in memory");
        batch.inputs.into_iter().chain(batch.targets.last().copied()).collect::<Vec<i32>>()
    };
    assert_eq!(read(None), [1, 2, 3, 1, 3, 2]);
    assert_eq!(read(Some(1)), [1, 2, 3, 1, 3, 2], "the token is not doubled");
    assert_eq!(read(Some(0)), [0, 1, 2, 3, 0, 1]);
}

#[cfg(feature = "tokenizers")]
#[test]
fn a_tokenizer_that_cuts_and_fills_texts_gives_all_of_their_tokens() {
    let cutting = BEGINNING.replacen(
        '{',
        r#"{"truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
            "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
                "pad_type_id": 0, "pad_token": "?"},"#,
        1,
    );
    let rows = open_with("a.txt", b"to be to be", 8, 1, |config| {
        let path = config.path[0].replace("a.txt", "t.json");
        std::fs::write(&path, cutting).expect("a file");
        config.tokenizer = Tokenizer::File(Path::new(&path).to_owned());
    });
    assert_eq!(rows.map(|rows| rows.tokens()), Ok(5));
}

#[test]
fn a_byte_order_mark_begins_a_file_of_ids() {
    let mut rows = open("a.jsonl", b"\xef\xbb\xbf[1, 2, 3]\n[4, 5, 6]\n", 2, 256).expect("good data");
    assert_eq!(rows.next_batch(2).expect("it is in memory").inputs, [1, 2, 4, 5]);
    assert!(open("a.jsonl", b"\xef\xbb\xbf\n[1, 2, 3]\n[4, 5, 6]", 2, 256).is_ok());
}

#[test]
fn what_is_not_text_is_refused_with_what_it_is() {
    let check = |name: &str, content: &[u8], part: &str| {
        let error = open(name, content, 4, 256).expect_err(part);
        assert!(error.starts_with(&format!("{name}: ")) && error.contains(part), "{error}");
    };
    check("a.txt", b"\x1f\x8b\x08\0rest", "a gzip archive, not text: let its name end in `.gz`");
    check("a.jsonl", b"\x1f\x8b\x08\0rest", "a gzip archive");
    check("a.txt", b"PAR1\x15\0\x15", "a Parquet file, not text: let its name end in `.parquet`");
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n";
    check("a.txt", pointer, "this is a Git LFS pointer");
    check("a.jsonl", pointer, "this is a Git LFS pointer");
    let mut rows = open("a.txt", "ж 世界🦀".as_bytes(), 2, 256).expect("text in any language");
    assert_eq!(rows.next_batch(2).expect("it is in memory").inputs[..2], [0xd0, 0xb6]);
}
