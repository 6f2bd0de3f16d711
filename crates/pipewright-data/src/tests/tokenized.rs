//! Files of token ids that are made once: a run has the same rows as one that reads the files directly.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::{ChatTemplate, DataConfig, Documents, LongRecords, TokenBatch, TokenRows, Tokenized, TrainOn};

const TEXTS: &[(&str, &str)] = &[
    ("a.txt", "to be or not to be, that is the question"),
    ("b.jsonl", "{\"text\": \"whether\"}\n{\"text\": \"'tis nobler\"}"),
];
const CHATS: &[(&str, &str)] = &[(
    "a.jsonl",
    r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
{"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]}
{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me"}]}
"#,
)];

/// Returns a folder with these files, and settings that read them.
fn folder(files: &[(&str, &str)], change: impl FnOnce(&mut DataConfig)) -> (TempDir, DataConfig) {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let mut path = Vec::new();
    for (name, content) in files {
        let file = folder.path().join(name);
        std::fs::write(&file, content).expect("a file");
        path.push(file.to_str().expect("UTF-8").to_owned());
    }
    let chat_template = Some(ChatTemplate::Named("phi3".to_owned()));
    let mut config = DataConfig { path, seq_len: 8, seed: 3, chat_template, ..DataConfig::default() };
    change(&mut config);
    (folder, config)
}

fn tokenize(config: &DataConfig, folder: &Path) -> Result<(Tokenized, PathBuf), String> {
    let output = folder.join("data.pwtok");
    let result = config.tokenize(&output, &mut |_| {});
    let left = std::fs::read_dir(folder).expect("a folder").filter_map(Result::ok);
    assert!(left.into_iter().all(|file| !file.file_name().to_string_lossy().ends_with(".tmp")));
    result.map(|tokenized| (tokenized, output)).map_err(|error| error.to_string())
}

/// Returns settings that read a file of token ids.
fn reading(config: &DataConfig, file: &Path) -> DataConfig {
    DataConfig { path: vec![file.to_str().expect("UTF-8").to_owned()], ..config.clone() }
}

fn batches(rows: &mut TokenRows) -> Vec<TokenBatch> {
    let count = 2 * rows.rows();
    (0..count).map(|_| rows.next_batch(1).expect("it can be read")).collect()
}

/// Compares the rows of files with those of the file that is made of them.
fn check(files: &[(&str, &str)], change: impl FnOnce(&mut DataConfig)) {
    let (folder, config) = folder(files, change);
    let (tokenized, file) = tokenize(&config, folder.path()).expect("it is tokenized");
    let mut expected = config.open(256, 1).expect("good data");
    let mut found = reading(&config, &file).open(256, 1).expect("good data");
    assert_eq!(found.tokens(), expected.tokens());
    assert_eq!(found.long_records(), expected.long_records());
    let facts = |rows: &TokenRows| {
        let targets = rows.counted_targets().expect("it can be read");
        (targets, rows.frequency_entropy().expect("it can be read"))
    };
    assert_eq!(facts(&found), facts(&expected));
    assert_eq!(batches(&mut found), batches(&mut expected));
    if config.long_records == LongRecords::Refuse {
        assert_eq!((tokenized.tokens, tokenized.width), (expected.tokens() as u64, 1));
        assert_eq!(found.identity().expect("it can be read"), expected.identity().expect("it can be read"));
    }
    let parts = |rows: TokenRows| rows.hold_out(0.4).expect("it divides");
    let (expected, found) = (parts(expected), parts(found));
    for (mut expected, mut found) in [(expected.0, found.0), (expected.1, found.1)] {
        assert_eq!(facts(&found), facts(&expected));
        assert_eq!(batches(&mut found), batches(&mut expected));
    }
}

#[test]
fn a_stream_has_the_same_rows() {
    check(TEXTS, |_| {});
    check(TEXTS, |config| {
        config.documents = Some(Documents { bos_id: 0, packed: true, restart_positions: true });
    });
}

#[test]
fn chats_have_the_same_rows() {
    check(CHATS, |config| config.seq_len = 60);
    check(CHATS, |config| (config.seq_len, config.packs_examples) = (90, true));
    check(CHATS, |config| (config.seq_len, config.train_on) = (60, Some(TrainOn::All)));
    check(CHATS, |config| (config.seq_len, config.long_records) = (40, LongRecords::Skip));
    check(CHATS, |config| (config.seq_len, config.long_records) = (40, LongRecords::Cut));
}

/// Checks the error of opening a file of token ids with other settings or another content.
fn check_refused(
    files: &[(&str, &str)],
    damage: impl FnOnce(&mut Vec<u8>),
    change: impl FnOnce(&mut DataConfig),
    part: &str,
) {
    let (folder, mut config) = folder(files, |config| config.seq_len = 60);
    let (_, file) = tokenize(&config, folder.path()).expect("it is tokenized");
    let mut bytes = std::fs::read(&file).expect("the file");
    damage(&mut bytes);
    std::fs::write(&file, bytes).expect("the file");
    change(&mut config);
    let error = reading(&config, &file).open(256, 0).map(|rows| rows.rows());
    let error = error.expect_err("it is refused").to_string();
    assert!(error.contains(part), "{error}\nhas not: {part}");
}

#[test]
fn another_setting_is_refused() {
    let refused = |change: fn(&mut DataConfig), part: &str| check_refused(CHATS, |_| {}, change, part);
    refused(
        |config| config.chat_template = Some(ChatTemplate::Named("chatml".to_owned())),
        "data.pwtok: the file was made with another `chat_template` (",
    );
    refused(
        |config| config.train_on = Some(TrainOn::All),
        "the file was made with another `train_on` (the default) than [data] has (all)",
    );
    refused(
        |config| config.documents = Some(Documents { bos_id: 7, packed: false, restart_positions: false }),
        "the file was made with another `bos_id` (none) than [data] has (7); write the same one, or tokenize",
    );
    refused(
        |config| config.seq_len = 30,
        "data.pwtok: record 1 has 46 tokens, and a row of seq_len 30 takes 31; raise seq_len, or write `long_records",
    );
    refused(
        |config| (config.seq_len, config.long_records) = (4, LongRecords::Cut),
        "after the cut to the 5 tokens of a row of seq_len 4, nothing of record 1 counts",
    );
}

#[test]
fn a_damaged_file_is_refused() {
    let refused = |damage: fn(&mut Vec<u8>), part: &str| check_refused(CHATS, damage, |_| {}, part);
    refused(|bytes| bytes.truncate(bytes.len() - 1), "bytes, and its header says ");
    refused(|bytes| bytes.push(0), "bytes, and its header says ");
    refused(|bytes| bytes.truncate(100), "data.pwtok: the header is damaged: it ends early");
    refused(|bytes| bytes[30] ^= 1, "data.pwtok: the header is damaged: its checksum differs");
    refused(|bytes| bytes[8] = 9, "data.pwtok: its version is 9, and this program reads version 2");
    refused(|bytes| bytes[1] = 0, "the name ends in .pwtok");
    refused(
        |bytes| {
            let end = bytes.len();
            bytes[end - 4] ^= 1;
        },
        "the lengths of its records contradict its header",
    );
    refused(
        |bytes| {
            // Three sizes end the file, and their sum stays the same.
            let sizes = bytes.len() - 12;
            bytes[sizes] += 2;
            bytes[sizes + 4] -= 2;
        },
        "the lengths of its records contradict its header",
    );
}

/// Opens a file in which the byte `byte` of the token ids is `id`, for a model with 128 ids.
fn open_damaged(
    files: &[(&str, &str)],
    byte: usize,
    id: u8,
    change: impl FnOnce(&mut DataConfig),
) -> (TempDir, TokenRows) {
    let (folder, config) = folder(files, change);
    let (_, file) = tokenize(&config, folder.path()).expect("it is tokenized");
    let mut bytes = std::fs::read(&file).expect("the file");
    assert_ne!(bytes[4096 + byte], id);
    bytes[4096 + byte] = id;
    std::fs::write(&file, bytes).expect("the file");
    let rows = reading(&config, &file).open(128, 1).expect("the header and the sizes are whole");
    (folder, rows)
}

#[test]
fn a_damaged_id_above_the_vocabulary_is_an_error_of_the_batch() {
    let check = |files: &[(&str, &str)], byte: usize, part: &str| {
        let (_folder, mut rows) = open_damaged(files, byte, 200, |config| config.seq_len = 50);
        let mut parts = rows.clone();
        let error = (0..rows.rows()).find_map(|_| rows.next_batch(1).err()).expect("an id is damaged");
        assert!(error.to_string().contains(part), "{error}\nhas not: {part}");
        let error = (0..rows.rows()).find_map(|_| parts.next_row_parts().err()).expect("an id is damaged");
        assert!(error.to_string().contains(part), "{error}\nhas not: {part}");
    };
    let whole = "data.pwtok: the file is damaged: token 33 has the id 200, and the largest in its header is 119; copy the";
    check(TEXTS, 33, whole);
    // The first record has 46 ids and 6 bytes of bits.
    check(CHATS, 46 + 6 + 2, "data.pwtok: the file is damaged: token 48 has the id 200, and the largest in");
}

#[test]
fn a_damaged_id_in_the_vocabulary_is_an_error_of_each_pass_over_the_data() {
    let check = |rows: &TokenRows, has_hash: bool| {
        let part = "data.pwtok: the file is damaged: the hash of its token ids is not the one in its header; copy the";
        let passes = [
            rows.frequency_entropy().err(),
            rows.ignores_targets().then(|| rows.counted_targets().err()).flatten(),
            has_hash.then(|| rows.identity().err()).flatten(),
        ];
        let expected = 1 + usize::from(rows.ignores_targets()) + usize::from(has_hash);
        assert_eq!(passes.iter().flatten().count(), expected);
        passes.iter().flatten().for_each(|error| assert!(error.to_string().contains(part), "{error}"));
    };
    let (_folder, rows) = open_damaged(TEXTS, 33, b'a', |_| {});
    let (first, second) = rows.hold_out(0.4).expect("it divides");
    // The damaged id is in one part only.
    check(&first, true);
    check(&second, true);
    let (_folder, rows) = open_damaged(CHATS, 1, b'a', |config| config.seq_len = 60);
    let (first, second) = rows.hold_out(0.4).expect("it divides");
    check(&first, false);
    check(&second, false);
    let skip = |config: &mut DataConfig| (config.seq_len, config.long_records) = (40, LongRecords::Skip);
    check(&open_damaged(CHATS, 1, b'a', skip).1, false);
}

#[test]
fn a_file_that_becomes_shorter_is_an_error_of_the_batch() {
    for files in [TEXTS, CHATS] {
        let (folder, config) = folder(files, |config| config.seq_len = 45);
        let (_, file) = tokenize(&config, folder.path()).expect("it is tokenized");
        let mut rows = reading(&config, &file).open(256, 1).expect("good data");
        let expected = batches(&mut rows.clone());
        let whole = std::fs::read(&file).expect("the file");
        rows.next_batch(1).expect("it can be read");
        let cursor = rows.cursor();
        let shortened = std::fs::OpenOptions::new().write(true).open(&file).expect("the file");
        shortened.set_len(4100).expect("it becomes shorter");
        let error = rows.next_batch(1).expect_err("the row is gone").to_string();
        assert!(error.ends_with("data.pwtok: cannot be read"), "{error}");
        rows.next_row_parts().expect_err("the row is gone");
        assert_eq!(rows.cursor(), cursor);
        // Writing keeps the file that is open.
        std::fs::write(&file, whole).expect("the file");
        assert_eq!(rows.next_batch(1).expect("it can be read"), expected[1]);
    }
}

#[test]
fn ids_beyond_the_vocabulary_are_found() {
    let check = |files: &[(&str, &str)], vocab_size: usize, part: &str| {
        let (folder, config) = folder(files, |config| config.seq_len = 60);
        let (_, file) = tokenize(&config, folder.path()).expect("it is tokenized");
        let error = reading(&config, &file).open(vocab_size, 0).map(|rows| rows.rows());
        let error = error.expect_err("it is refused").to_string();
        assert!(error.contains(part), "{error}\nhas not: {part}");
    };
    check(TEXTS, 117, "data.pwtok: token 33: token id 117 lies beyond the vocabulary of 117");
    check(CHATS, 124, "token 1: token id 124 lies beyond the vocabulary of 124");
}

#[test]
fn files_that_cannot_be_tokenized() {
    let refused = |files: &[(&str, &str)], part: &str| {
        let (folder, config) = folder(files, |_| {});
        let error = tokenize(&config, folder.path()).expect_err("it is refused");
        assert!(error.contains(part), "{error}\nhas not: {part}");
        assert!(!folder.path().join("data.pwtok").exists());
    };
    refused(&[("a.jsonl", "[1, 2, 3]")], "a.jsonl: its lines are token ids, which need no tokenizer");
    refused(&[("a.txt", "")], "a.txt: the data is empty");
    refused(&[("a.jsonl", "{\"text\": \"a\"}\n{\"text\": 1}")], "a.jsonl:2: `text` is not a text");
    let (folder, mut config) = folder(TEXTS, |_| {});
    let (_, file) = tokenize(&config, folder.path()).expect("it is tokenized");
    config.path.push(file.to_str().expect("UTF-8").to_owned());
    let error = config.open(256, 1).map(|rows| rows.rows()).expect_err("it is refused").to_string();
    assert!(
        error.contains("data.pwtok: a file of `pipewright tokenize` is the only file of its data"),
        "{error}"
    );
}

#[test]
fn long_data_is_tokenized_in_parts() {
    // More than the queue holds at a time, in lines, and the last text alone is more too.
    let line = format!("{{\"text\": \"{}\"}}\n", "to be or not to be ".repeat(50));
    let lines = line.repeat(1500);
    let text = "that is the question ".repeat(60_000);
    check(&[("a.jsonl", &lines), ("b.txt", &text)], |config| config.seq_len = 1000);
}

#[test]
fn the_progress_reaches_the_end() {
    let (folder, config) = folder(TEXTS, |_| {});
    let mut last = None;
    let tokenized = config
        .tokenize(&folder.path().join("a.pwtok"), &mut |progress| last = Some(progress))
        .expect("it works");
    let last = last.expect("there is progress");
    assert_eq!((last.read, last.tokens), (last.bytes, tokenized.tokens));
}

/// Tokenizes with `settings`, while the file `name` of the folder gets another content, and then opens the
/// result with its first content.
#[cfg(feature = "tokenizers")]
fn check_change_during_work(
    files: &[(&str, &str)],
    (name, content): (&str, &str),
    settings: impl FnOnce(&mut DataConfig, PathBuf),
) {
    let (folder, mut config) = folder(files, |config| config.seq_len = 8);
    let (output, changed) = (folder.path().join("data.pwtok"), folder.path().join(name));
    std::fs::write(&changed, content).expect("a file");
    settings(&mut config, changed.clone());
    let write = |content: &str| std::fs::write(&changed, content).expect("a file");
    let other = content.replace("to", "two");
    assert_ne!(other, content);
    config.tokenize(&output, &mut |_| write(&other)).expect("it is tokenized");
    config.long_records = LongRecords::Cut;
    let open =
        || reading(&config, &output).open(256, 0).map(|rows| rows.rows()).map_err(|error| error.to_string());
    assert!(open().expect_err("it is another file").contains("the file was made with another `"));
    write(content);
    open().expect("these are the settings");
}

#[test]
#[cfg(feature = "tokenizers")]
fn the_fingerprints_of_the_files_that_were_used_are_written() {
    const WORDS: &str = r#"{"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {"?": 0, "to": 1, "be": 2}, "unk_token": "?"}}"#;
    check_change_during_work(TEXTS, ("tokenizer.json", WORDS), |config, path| {
        config.tokenizer = crate::Tokenizer::File(path);
    });
    const TEMPLATE: &str = "to {% for message in messages %}{{ message.content }}{% endfor %}";
    check_change_during_work(CHATS, ("template.jinja", TEMPLATE), |config, path| {
        config.chat_template = Some(ChatTemplate::File(path));
        config.train_on = Some(TrainOn::All);
    });
}
