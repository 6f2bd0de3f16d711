//! Mixtures of sources: the order of their rows, judged by a checker that does not know how rows are drawn,
//! and invalid sources.

use std::collections::BTreeSet;
use std::path::Path;

use tempfile::TempDir;

use super::has_error;
use super::tokenized::{CHATS, tokenize};
use crate::memory_budget::MemoryBudget;
use crate::{
    ChatTemplate, Cursor, DOCUMENTS, DataConfig, Documents, MixSource, MixWeight, POSITIONS, SideTensor,
    TokenBatch, TokenRows, VALID_TOKENS,
};

fn source(path: &Path, weight: f64) -> MixSource {
    let path = vec![path.to_str().expect("UTF-8").to_owned()];
    MixSource { path, weight: MixWeight::try_from(weight).expect("a weight") }
}

/// Returns a folder with these files, and settings that mix them by their weights.
fn folder(files: &[(&str, &str, f64)], change: impl FnOnce(&mut DataConfig)) -> (TempDir, DataConfig) {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let mut mix = Vec::new();
    for (name, content, weight) in files {
        let path = folder.path().join(name);
        std::fs::write(&path, content).expect("a file");
        mix.push(source(&path, *weight));
    }
    let mut config = DataConfig { mix, seq_len: 4, seed: 3, ..DataConfig::default() };
    change(&mut config);
    (folder, config)
}

/// Returns settings with a source of lines for each number of rows. The ids of a row are its source and its
/// number.
fn numbered(sources: &[(u32, f64)], shuffle: bool) -> (TempDir, DataConfig) {
    let lines = |(index, (rows, weight)): (usize, &(u32, f64))| {
        let lines: String = (0..*rows).map(|row| format!("[{index}, {row}]\n")).collect();
        (format!("{index}.jsonl"), lines, *weight)
    };
    let files: Vec<(String, String, f64)> = sources.iter().enumerate().map(lines).collect();
    let files: Vec<(&str, &str, f64)> =
        files.iter().map(|(name, lines, weight)| (name.as_str(), lines.as_str(), *weight)).collect();
    folder(&files, |config| (config.seq_len, config.shuffle) = (1, shuffle))
}

/// Returns the source and the number of each of the next rows.
fn taken(rows: &mut TokenRows, count: usize) -> Vec<(usize, i32)> {
    let batch = rows.next_batch(count).expect("it is in memory");
    batch.inputs.iter().map(|source| *source as usize).zip(batch.targets).collect()
}

/// Judges the order of rows: after each row, every source has given its share within one row, and has given
/// every row once before it gives one again. With `shuffle`, the passes over a source have different orders.
fn judge(order: &[(usize, i32)], sources: &[(u32, f64)], shuffle: bool) {
    let sum: f64 = sources.iter().map(|(_, weight)| weight).sum();
    let mut given: Vec<Vec<i32>> = vec![Vec::new(); sources.len()];
    for (count, (source, row)) in (1..).zip(order) {
        given[*source].push(*row);
        for ((_, weight), given) in sources.iter().zip(&given) {
            let difference = weight / sum * f64::from(count) - given.len() as f64;
            assert!(difference.abs() < 1.0, "{sources:?}: {difference} rows after {count}");
        }
    }
    for ((rows, _), given) in sources.iter().zip(&given) {
        let passes: Vec<&[i32]> = given.chunks(*rows as usize).collect();
        for pass in &passes {
            let distinct: BTreeSet<i32> = pass.iter().copied().collect();
            assert_eq!(distinct.len(), pass.len(), "a row comes again before all have come");
            assert!(distinct.iter().all(|row| (0..*rows as i32).contains(row)));
        }
        let is_same = |pair: &[&[i32]]| pair[1].len() == pair[0].len() && pair[0] == pair[1];
        if shuffle && *rows > 8 {
            assert!(!passes.windows(2).any(is_same), "two passes have the same order");
        }
    }
}

#[test]
fn every_source_gives_its_share_and_every_row_once_in_a_pass() {
    let mixtures: [&[(u32, f64)]; 5] = [
        &[(20, 0.7), (50, 0.3)],
        &[(9, 1.0), (9, 1.0), (9, 1.0)],
        &[(100, 1.0), (3, 5.0), (40, 0.01), (11, 2.5)],
        &[(1, 1.0), (200, 1.0)],
        &[(30, 4.0)],
    ];
    for sources in mixtures {
        for shuffle in [true, false] {
            let (_folder, config) = numbered(sources, shuffle);
            let mut rows = config.open(256, 4).expect("good data");
            let order = taken(&mut rows.clone(), 2000);
            judge(&order, sources, shuffle);
            // Batches of any size have the same order, and it continues from any place in it.
            let mut in_parts = Vec::new();
            for size in (1..50).cycle().take(200) {
                let cursor = rows.cursor();
                assert_eq!(rows.tokens_seen(), in_parts.len() as u64);
                let given = rows.given_rows();
                rows.seek(cursor).expect("it was there");
                assert_eq!(rows.given_rows(), given);
                in_parts.extend(taken(&mut rows, size));
            }
            assert_eq!(in_parts[..2000], order);
        }
    }
}

#[test]
fn a_seed_changes_the_rows_of_sources_and_not_their_turns() {
    let sources = [(20, 0.7), (20, 0.3)];
    let (_folder, config) = numbered(&sources, true);
    let order = |seed: u64| {
        let config = DataConfig { seed, ..config.clone() };
        taken(&mut config.open(256, 1).expect("good data"), 60)
    };
    let turns = |order: &[(usize, i32)]| order.iter().map(|(source, _)| *source).collect::<Vec<_>>();
    let (first, second) = (order(1), order(2));
    assert_ne!(first, second);
    assert_eq!(turns(&first), turns(&second));
    // Sources of the same length have orders of their own.
    let rows = |index: usize| {
        let rows = first.iter().filter(move |(source, _)| *source == index);
        rows.map(|(_, row)| *row).take(18).collect::<Vec<_>>()
    };
    assert_ne!(rows(0), rows(1));
}

#[test]
fn the_first_source_has_the_order_that_it_has_alone() {
    let (_folder, mut config) = numbered(&[(20, 0.5), (20, 0.5)], true);
    let mixed = taken(&mut config.open(256, 1).expect("good data"), 80);
    config.path = config.mix[0].path.clone();
    config.mix.clear();
    let alone = taken(&mut config.open(256, 1).expect("good data"), 40);
    assert!(mixed.into_iter().filter(|(source, _)| *source == 0).eq(alone));
}

#[test]
fn each_source_holds_its_share_out() {
    let sources = [(20, 0.9), (60, 0.1), (1, 1.0)];
    let (_folder, config) = numbered(&sources, true);
    let rows = config.open(256, 1).expect("good data");
    let (mut training, mut held) = rows.hold_out(0.2).expect("it divides");
    assert_eq!((training.rows(), held.rows()), (16 + 48 + 1, 4 + 12));
    judge(&taken(&mut training, 500), &[(16, 0.9), (48, 0.1), (1, 1.0)], true);
    // In an epoch, each held-out row comes once, and the sources take turns.
    let expected: BTreeSet<(usize, i32)> =
        (16..20).map(|row| (0, row)).chain((48..60).map(|row| (1, row))).collect();
    for _ in 0..2 {
        let order = taken(&mut held, 16);
        assert_eq!(order.iter().copied().collect::<BTreeSet<_>>(), expected);
        assert_eq!(order.chunks(4).map(|four| four.iter().filter(|row| row.0 == 0).count()).max(), Some(1));
    }
    has_error(
        config.open(256, 1).expect("good data").hold_out(0.6),
        "2.jsonl: this source of `mix` has 0 tokens and no row of seq_len 1",
    );
}

#[test]
fn the_identity_has_the_sources_and_their_weights() {
    let identity = |sources: &[(u32, f64)]| {
        let (_folder, config) = numbered(sources, true);
        config.open(256, 1).expect("good data").identity().expect("it is in memory")
    };
    let first = identity(&[(20, 0.7), (50, 0.3)]);
    assert_eq!(first, identity(&[(20, 0.7), (50, 0.3)]));
    assert_eq!((first.rows, first.mix.len()), (70, 2));
    assert_ne!(first, identity(&[(20, 0.6), (50, 0.4)]));
    assert_ne!(first.hash, identity(&[(21, 0.7), (50, 0.3)]).hash);
    let (_folder, mut config) = numbered(&[(20, 0.7), (50, 0.3)], true);
    config.mix.reverse();
    assert_ne!(first, config.open(256, 1).expect("good data").identity().expect("it is in memory"));
}

/// Returns the row with this number of a batch, without the shapes of its side inputs.
fn row_of(batch: &TokenBatch, row: usize) -> TokenBatch {
    let part = |values: &[i32]| values.chunks(values.len() / batch.rows).nth(row).expect("a row").to_vec();
    let side = batch.side.iter().map(|side| SideTensor { values: part(&side.values), ..side.clone() });
    TokenBatch {
        inputs: part(&batch.inputs),
        targets: part(&batch.targets),
        rows: 1,
        seq_len: batch.seq_len,
        side: side.collect(),
    }
}

#[test]
fn chats_texts_and_tokenized_files_are_mixed() {
    let chats = CHATS[0].1;
    let text =
        "to be or not to be, that is the question: whether 'tis nobler in the mind to suffer".repeat(4);
    let files = [("a.jsonl", chats, 1.0), ("b.txt", text.as_str(), 1.0), ("c.jsonl", chats, 2.0)];
    let (folder, mut config) = folder(&files, |config| {
        (config.seq_len, config.shuffle) = (80, false);
        config.chat_template = Some(ChatTemplate::Named("chatml".to_owned()));
        config.documents = Some(Documents { bos_id: 7, packed: true, restart_positions: false });
        config.packs_examples = true;
    });
    let alone = |path: &[String]| {
        let config = DataConfig { path: path.to_vec(), mix: Vec::new(), ..config.clone() };
        (config.clone(), config.open(256, 1).expect("good data"))
    };
    let (third, _) = alone(&config.mix[2].path);
    let (_, file) = tokenize(&third, folder.path()).expect("it is tokenized");
    let mut single: Vec<TokenRows> = config.mix.iter().map(|source| alone(&source.path).1).collect();
    config.mix[2] = source(&file, 2.0);
    let mut mixed = config.open(256, 1).expect("good data");
    assert!(mixed.ignores_targets());
    let count = |rows: &TokenRows| rows.counted_targets().expect("it is in memory").unwrap_or(rows.tokens());
    assert_eq!(count(&mixed), single.iter().map(count).sum::<usize>());
    for _ in 0..10 {
        let turns: Vec<usize> = (0..3)
            .map(|ahead| {
                let mut later = mixed.clone();
                later.next_batch(ahead).expect("it can be read");
                later.next_source().expect("a mixture")
            })
            .collect();
        let batch = mixed.next_batch(3).expect("it can be read");
        for (row, source) in turns.into_iter().enumerate() {
            let TokenBatch { inputs, targets, side, .. } = row_of(&batch, row);
            let expected = single[source].next_batch(1).expect("it is in memory");
            assert_eq!((inputs, targets), (expected.inputs.clone(), expected.targets.clone()));
            let names: Vec<&str> = side.iter().map(|side| side.name.as_str()).collect();
            assert_eq!(names, [VALID_TOKENS, DOCUMENTS, POSITIONS]);
            for SideTensor { name, values, .. } in side {
                match expected.side.iter().find(|side| side.name == name) {
                    Some(side) => assert_eq!(side.values, values, "{name} of source {source}"),
                    None if name == VALID_TOKENS => assert_eq!(values, [80]),
                    None => assert!(values.iter().copied().eq(0..80), "{name} of source {source}"),
                }
            }
        }
    }
}

#[test]
fn a_row_that_cannot_be_read_leaves_the_position() {
    let files = [("a.txt", "to be or not to be", 1.0), ("b.txt", "that is the question", 1.0)];
    let (folder, mut config) = folder(&files, |_| {});
    let single = DataConfig { path: config.mix[1].path.clone(), mix: Vec::new(), ..config.clone() };
    let (_, file) = tokenize(&single, folder.path()).expect("it is tokenized");
    config.mix[1] = source(&file, 1.0);
    let mut rows = config.open(256, 1).expect("good data");
    rows.next_batch(1).expect("it is in memory");
    let (cursor, given) = (rows.cursor(), rows.given_rows());
    assert_eq!((cursor, given.as_slice()), (Cursor { epoch: 0, index: 1 }, &[1, 0][..]));
    std::fs::OpenOptions::new().write(true).open(&file).and_then(|file| file.set_len(4100)).expect("a file");
    rows.next_batch(1).expect_err("the row is gone");
    rows.next_row_parts().expect_err("the row is gone");
    assert_eq!((rows.cursor(), rows.given_rows()), (cursor, given));
    has_error(rows.seek(Cursor { epoch: 1, index: 0 }), "resume with the data of the first run");
}

/// Checks the error of opening a mixture of these files.
fn refused(files: &[(&str, &str, f64)], change: impl FnOnce(&mut DataConfig), part: &str) {
    let (folder, config) = folder(files, change);
    let root = format!("{}/", folder.path().display());
    has_error(config.open(256, 1).map_err(|error| error.to_string().replace(&root, "")), part);
}

#[test]
fn sources_that_cannot_be_mixed() {
    let text = "to be or not to be";
    let two = [("a.txt", text, 1.0), ("b.txt", text, 1.0)];
    refused(
        &two,
        |config| config.path = vec!["a.txt".to_owned()],
        "the data has both `path` and `mix`: remove `path`",
    );
    let short =
        "b.txt: this source of `mix` has 4 tokens and no row of seq_len 4 to train on; give it more data";
    refused(&[("a.txt", text, 1.0), ("b.txt", "to b", 1.0)], |_| {}, short);
    refused(&[("a.txt", text, 1.0), ("b.txt", "", 1.0)], |_| {}, "b.txt: the data is empty");
    let twice =
        |config: &mut DataConfig| config.mix[1].path = vec![config.mix[0].path[0].replace("a.txt", "*.txt")];
    refused(&two, twice, "a.txt: the file is in two sources of `mix`, a.txt and *.txt, so its records");
    let nothing = r#"{"prompt": "to", "completion": ""}"#;
    let record = "b.jsonl:1: no token of the record counts in the loss";
    refused(&[("a.txt", text, 1.0), ("b.jsonl", nothing, 1.0)], |_| {}, record);
    refused(&two, |config| config.mix[1].path[0].push('x'), "b.txtx");
}

#[test]
fn the_sources_of_a_mixture_share_the_memory_for_data() {
    let text = "to be or not to be ".repeat(30);
    let (_folder, config) = folder(&[("a.txt", &text, 1.0), ("b.txt", &text, 1.0)], |_| {});
    let open = |bytes: usize| config.open_within(MemoryBudget::of(bytes as u64), 256, 1).map(drop);
    open(2 * text.len()).expect("there is as much memory as both files need");
    has_error(open(2 * text.len() - 1), "b.txt: reading this file takes");
}
