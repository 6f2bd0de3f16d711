//! Files of token ids that are made once: a run has the same rows as one that reads the files directly.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::has_error;
use crate::{ChatTemplate, DataConfig, Documents, LongRecords, TokenBatch, TokenRows, Tokenized, TrainOn};

pub(super) const TEXTS: &[(&str, &str)] = &[
    ("a.txt", "to be or not to be, that is the question"),
    ("b.jsonl", "{\"text\": \"whether\"}\n{\"text\": \"'tis nobler\"}"),
];
pub(super) const CHATS: &[(&str, &str)] = &[(
    "a.jsonl",
    r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
{"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]}
{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me"}]}
"#,
)];

/// Returns a folder with these files, and settings that read them.
pub(super) fn folder(files: &[(&str, &str)], change: impl FnOnce(&mut DataConfig)) -> (TempDir, DataConfig) {
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

fn require_nothing_unfinished(folder: &Path) {
    let left = std::fs::read_dir(folder).expect("a folder").filter_map(Result::ok);
    assert!(left.into_iter().all(|file| !file.file_name().to_string_lossy().ends_with(".tmp")));
}

pub(super) fn tokenize(config: &DataConfig, folder: &Path) -> Result<(Tokenized, PathBuf), String> {
    let output = folder.join("data.pwtok");
    let result = config.tokenize(&output, &mut |_| ControlFlow::Continue(()));
    require_nothing_unfinished(folder);
    result.map(|tokenized| (tokenized, output)).map_err(|error| error.to_string())
}

/// Returns settings that read a file of token ids.
pub(super) fn reading(config: &DataConfig, file: &Path) -> DataConfig {
    DataConfig { path: vec![file.to_str().expect("UTF-8").to_owned()], ..config.clone() }
}

pub(super) fn batches(rows: &mut TokenRows) -> Vec<TokenBatch> {
    let count = 2 * rows.rows();
    (0..count).map(|_| rows.next_batch(1).expect("it can be read")).collect()
}

/// Compares the rows of files with those of the file that is made of them.
fn check(files: &[(&str, &str)], change: impl FnOnce(&mut DataConfig)) {
    check_for_models_of(&[256], files, change);
}

/// The same for models with these numbers of ids.
fn check_for_models_of(vocab_sizes: &[usize], files: &[(&str, &str)], change: impl FnOnce(&mut DataConfig)) {
    let (folder, config) = folder(files, change);
    let (tokenized, file) = tokenize(&config, folder.path()).expect("it is tokenized");
    let width = if config.documents.is_some_and(|documents| documents.bos_id > 255) { 2 } else { 1 };
    for &vocab_size in vocab_sizes {
        let expected = config.open(vocab_size, 1).expect("good data");
        let found = reading(&config, &file).open(vocab_size, 1).expect("good data");
        if config.long_records == LongRecords::Refuse {
            assert_eq!((tokenized.tokens, tokenized.width), (expected.tokens() as u64, width));
        }
        compare(expected, found);
    }
}

/// Compares the properties, the batches and the parts of two sources.
fn compare(mut expected: TokenRows, mut found: TokenRows) {
    assert_eq!(found.tokens(), expected.tokens());
    assert_eq!(found.long_records(), expected.long_records());
    let facts = |rows: &TokenRows| {
        let targets = rows.counted_targets().expect("it can be read");
        (targets, rows.frequency_entropy().expect("it can be read"))
    };
    assert_eq!(facts(&found), facts(&expected));
    assert_eq!(batches(&mut found), batches(&mut expected));
    assert_eq!(found.identity().expect("it can be read"), expected.identity().expect("it can be read"));
    let parts = |rows: TokenRows| rows.hold_out(0.4).expect("it divides");
    let (expected, found) = (parts(expected), parts(found));
    for (mut expected, mut found) in [(expected.0, found.0), (expected.1, found.1)] {
        assert_eq!(facts(&found), facts(&expected));
        assert_eq!(found.identity().expect("it can be read"), expected.identity().expect("it can be read"));
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
pub(super) fn check_refused(
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
    has_error(error, part);
}

#[test]
fn a_model_may_have_another_width_of_ids() {
    let models = &[256, 257, 70_000];
    check_for_models_of(models, TEXTS, |_| {});
    check_for_models_of(models, CHATS, |config| config.seq_len = 60);
    // The id that begins documents is not one of the tokenizer.
    let documents = Some(Documents { bos_id: 300, packed: false, restart_positions: false });
    check_for_models_of(&[301, 70_000], TEXTS, |config| config.documents = documents);
    check_for_models_of(&[301, 70_000], CHATS, |config| (config.seq_len, config.documents) = (60, documents));
}

#[test]
fn another_setting_is_refused() {
    let refused = |change: fn(&mut DataConfig), part: &str| check_refused(CHATS, |_| {}, change, part);
    refused(
        |config| config.chat_template = Some(ChatTemplate::Named("chatml".to_owned())),
        "data.pwtok: the file was made with another `chat_template` (",
    );
    refused(
        |config| config.chat_template_kwargs = [("a".to_owned(), true.into())].into(),
        "the file was made with another `chat_template_kwargs` (none) than [data] has ({\"a\":true})",
    );
    refused(
        |config| config.train_on = Some(TrainOn::All),
        "the file was made with another `train_on` (assistant) than [data] has (all)",
    );
    refused(
        |config| config.documents = Some(Documents { bos_id: 7, packed: false, restart_positions: false }),
        "the file was made with another `bos_id` (none) than [data] has (7); write the same one, or tokenize",
    );
    refused(
        |config| (config.seq_len, config.long_records) = (30, LongRecords::Refuse),
        "data.pwtok: record 1: the record has 46 tokens, and a row of seq_len 30 takes 31; raise seq_len, or write `long_records",
    );
    refused(
        |config| (config.seq_len, config.long_records) = (4, LongRecords::Cut),
        "after the cut to the 5 tokens of a row of seq_len 4, nothing of the record counts",
    );
}

#[test]
fn records_that_cannot_be_used_are_left_out_of_a_file() {
    let bad = format!("{}{{\"messages\": []}}\n", CHATS[0].1);
    let (folder, mut config) =
        folder(&[("a.jsonl", &bad)], |config| (config.seq_len, config.bad_records) = (60, 9));
    let (tokenized, file) = tokenize(&config, folder.path()).expect("it is tokenized");
    let left_out = tokenized.bad_records.expect("a bad record");
    assert!(left_out.count == 1 && left_out.first.ends_with("the chat has no messages; remove the record"));
    let all = reading(&config, &file).open(256, 0).expect("the file").rows();
    // After the cut, nothing is left of two records.
    config.seq_len = 32;
    let rows = reading(&config, &file).open(256, 0).expect("the file");
    assert_eq!((all, rows.rows(), rows.bad_records().map(|bad| bad.count)), (3, 1, Some(2)));
    config.bad_records = 0;
    has_error(tokenize(&config, folder.path()), "the chat has no messages; remove the record");
}

/// Tokenizes chats and opens the file, with other settings before both and between them.
fn open_after(
    before: impl FnOnce(&mut DataConfig),
    between: impl FnOnce(&mut DataConfig),
) -> Result<usize, String> {
    let (folder, mut config) = folder(CHATS, |config| {
        config.seq_len = 60;
        before(config);
    });
    let (_, file) = tokenize(&config, folder.path()).expect("it is tokenized");
    between(&mut config);
    let rows = reading(&config, &file).open(256, 0);
    rows.map(|rows| rows.rows()).map_err(|error| error.to_string())
}

#[test]
fn the_default_of_train_on_may_be_written() {
    let train_on = |own: Option<TrainOn>, given: Option<TrainOn>| {
        open_after(|config| config.train_on = own, |config| config.train_on = given)
    };
    assert_eq!(train_on(None, Some(TrainOn::Assistant)), Ok(3));
    assert_eq!(train_on(Some(TrainOn::Assistant), None), Ok(3));
    has_error(
        train_on(Some(TrainOn::All), Some(TrainOn::Assistant)),
        "another `train_on` (all) than [data] has (assistant)",
    );
}

#[test]
fn another_date_counts_if_the_template_asks_for_it() {
    let date = |text: &str| Some(text.parse().expect("a date"));
    let change = |template: &str, own: &str, given: &str| {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let file = folder.path().join("template.jinja");
        std::fs::write(&file, template).expect("a file");
        let before = |config: &mut DataConfig| {
            config.chat_template = Some(ChatTemplate::File(file.clone()));
            (config.train_on, config.date) = (Some(TrainOn::All), date(own));
        };
        open_after(before, |config| config.date = date(given))
    };
    const CHAT: &str = "{% for message in messages %}{{ message.content }}{% endfor %}";
    assert_eq!(change(CHAT, "2024-07-26", "2025-01-01"), Ok(3));
    let dated = format!("{{{{ strftime_now('%d %B') }}}}{CHAT}");
    assert_eq!(change(&dated, "2024-07-26", "2024-07-26"), Ok(3));
    has_error(
        change(&dated, "2024-07-26", "2025-01-01"),
        "made with another `date` (2024-07-26) than [data] has (2025-01-01)",
    );
}

#[test]
fn ids_beyond_the_vocabulary_are_found() {
    let check = |files: &[(&str, &str)], vocab_size: usize, part: &str| {
        let (folder, config) = folder(files, |config| config.seq_len = 60);
        let (_, file) = tokenize(&config, folder.path()).expect("it is tokenized");
        let error = reading(&config, &file).open(vocab_size, 0).map(|rows| rows.rows());
        has_error(error, part);
    };
    check(TEXTS, 117, "data.pwtok: token 33: token id 117 lies beyond the vocabulary of 117");
    check(CHATS, 124, "data.pwtok: record 1: token id 124 lies beyond the vocabulary of 124");
}

#[test]
fn files_that_cannot_be_tokenized() {
    let refused = |files: &[(&str, &str)], part: &str| {
        let (folder, config) = folder(files, |_| {});
        has_error(tokenize(&config, folder.path()), part);
        assert!(!folder.path().join("data.pwtok").exists());
    };
    refused(&[("a.jsonl", "[1, 2, 3]")], "a.jsonl: its lines are token ids, which need no tokenizer");
    refused(&[("a.txt", "")], "a.txt: the data is empty");
    refused(&[("a.jsonl", "{\"text\": \"a\"}\n{\"text\": 1}")], "a.jsonl:2: `text` is not a text");
    let (folder, mut config) = folder(TEXTS, |_| {});
    let (_, file) = tokenize(&config, folder.path()).expect("it is tokenized");
    config.path.push(file.to_str().expect("UTF-8").to_owned());
    has_error(
        config.open(256, 1),
        "data.pwtok: a file of `pipewright tokenize` is the only file of its data",
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
fn work_that_is_stopped_leaves_no_file() {
    let line = format!("{{\"text\": \"{}\"}}\n", "to be or not to be ".repeat(50));
    let (folder, config) = folder(&[("a.jsonl", &line.repeat(3000))], |_| {});
    let output = folder.path().join("data.pwtok");
    let mut calls = 0;
    let stopped = config.tokenize(&output, &mut |progress| {
        calls += 1;
        assert!(progress.tokens > 0);
        ControlFlow::Break(())
    });
    has_error(stopped, "data.pwtok: not written, because the work was stopped");
    assert_eq!(calls, 1);
    require_nothing_unfinished(folder.path());
    assert!(!output.exists());
}

#[test]
#[cfg(feature = "tokenizers")]
fn a_tokenizer_may_leave_ids_out() {
    const WORDS: &str = r#"{"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {"?": 0, "to": 70000, "be": 4294967295}, "unk_token": "?"}}"#;
    let (folder, mut config) = folder(&[("a.txt", "to or to or to or to or to")], |_| {});
    let tokenizer = folder.path().join("tokenizer.json");
    std::fs::write(&tokenizer, WORDS).expect("a file");
    config.tokenizer = crate::Tokenizer::File(tokenizer);
    let (tokenized, file) = tokenize(&config, folder.path()).expect("it is tokenized");
    assert_eq!((tokenized.tokens, tokenized.vocab_size, tokenized.width), (9, 1 << 32, 4));
    let open = |config: &DataConfig| config.open(70_001, 1).expect("good data");
    compare(open(&config), open(&reading(&config, &file)));
    let beyond = reading(&config, &file).open(70_000, 1).map(|rows| rows.rows()).expect_err("it is refused");
    assert!(
        beyond.to_string().contains("token 0: token id 70000 lies beyond the vocabulary of 70000"),
        "{beyond}"
    );
}

#[test]
fn the_progress_reaches_the_end() {
    let (folder, config) = folder(TEXTS, |_| {});
    let mut last = None;
    let tokenized = config
        .tokenize(&folder.path().join("a.pwtok"), &mut |progress| {
            last = Some(progress);
            ControlFlow::Continue(())
        })
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
    let tokenized = config.tokenize(&output, &mut |_| {
        write(&other);
        ControlFlow::Continue(())
    });
    tokenized.expect("it is tokenized");
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
