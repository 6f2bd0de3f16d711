//! Tests of reading data, from files to batches.

mod chats;
mod chat_messages;
mod chat_spans;
mod formats;
mod records;
#[cfg(feature = "parquet")]
mod parquet_files;
mod preference;
mod rows;
#[cfg(feature = "tokenizers")]
mod tokenizer_files;
#[cfg(feature = "tokenizers")]
mod gguf;
mod tokenized;
mod damaged;
mod mix;
mod remote;

use std::fmt::Display;

use crate::{DataConfig, TokenRows};

/// Opens files with these names and contents. Returns an error as its message, without the folder.
fn open_files(
    files: &[(&str, &[u8])],
    vocab_size: usize,
    batch_rows: usize,
    change: impl FnOnce(&mut DataConfig),
) -> Result<TokenRows, String> {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let root = folder.path().to_str().expect("UTF-8");
    for (name, content) in files {
        std::fs::write(folder.path().join(name), content).expect("a file");
    }
    let path = files.iter().map(|(name, _)| format!("{root}/{name}")).collect();
    let mut config = DataConfig { path, seq_len: 4, shuffle: false, seed: 1, ..DataConfig::default() };
    change(&mut config);
    // The debug form has the causes.
    config.open(vocab_size, batch_rows).map_err(|error| format!("{error:?}").replace(&format!("{root}/"), ""))
}

/// Checks that a result is an error whose message has this part.
fn has_error<T>(result: Result<T, impl Display>, part: &str) {
    let error = result.err().map(|error| error.to_string()).expect(part);
    assert!(error.contains(part), "{error}\nhas not: {part}");
}
