//! Compares the rate of `pipewright tokenize` with the tokenizers library's own `encode_batch` on the same
//! documents.
//!
//! The bench trains a byte-level BPE on the text, with as many ids as a real vocabulary. Both sides use all
//! cores. `tokenize` reads the documents from a file and writes the ids to a file; the library has the
//! documents in memory and keeps the ids there. The sides run in turn, so that changes in the speed of the
//! machine affect both.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use pipewright::train::data::{DataConfig, Tokenizer};
use serde_json::json;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, DecoderWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerBuilder};

use crate::harness::{Figures, Outcome};

/// Size of the measurement.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// A folder whose files are the text.
    #[arg(long, default_value = ".")]
    text: PathBuf,
    /// Endings of the names of its files.
    #[arg(long, value_delimiter = ',', default_value = "md,rs,py,txt")]
    endings: Vec<String>,
    /// The size of the vocabulary.
    #[arg(long, default_value_t = 32_768)]
    vocabulary: usize,
    /// The size of the text in MiB, at least. A smaller text is repeated.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..))]
    mib: u64,
    /// The size of a document in bytes, at most.
    #[arg(long, default_value_t = 8192, value_parser = clap::value_parser!(u64).range(1..))]
    document: u64,
    /// Turns that count; the first one does not.
    #[arg(long, default_value_t = 5)]
    turns: usize,
}

/// The text that the vocabulary is trained on, at most.
const TRAINED_ON: usize = 16 << 20;

pub(crate) fn run(options: &Options) -> Outcome {
    let scratch = tempfile::tempdir()?;
    measure(options, scratch.path())
}

fn measure(options: &Options, folder: &Path) -> Outcome {
    let documents = documents(&options.text, options)?;
    let bytes: usize = documents.iter().map(String::len).sum();
    let file = folder.join("tokenizer.json");
    train(&documents, options.vocabulary, &file)?;
    let tokenizer = tokenizers::Tokenizer::from_file(&file).map_err(|error| error.to_string())?;
    let lines = folder.join("text.jsonl");
    let text: Vec<String> = documents.iter().map(|text| json!({ "text": text }).to_string() + "\n").collect();
    fs::write(&lines, text.concat())?;
    println!(
        "{:.1} MiB in {} documents, {} ids, {} threads",
        bytes as f64 / f64::from(1 << 20),
        documents.len(),
        tokenizer.get_vocab_size(true),
        rayon::current_num_threads(),
    );
    let config = DataConfig {
        path: vec![lines.display().to_string()],
        tokenizer: Tokenizer::File(file),
        ..DataConfig::default()
    };
    let mut figures = Figures::default();
    for turn in 0..=options.turns {
        let start = Instant::now();
        let tokens = config.tokenize(&folder.join("ids.pwtok"), &mut |_| ControlFlow::Continue(()))?.tokens;
        let own_seconds = start.elapsed().as_secs_f64();
        let inputs = documents.clone();
        let start = Instant::now();
        let encoded = tokenizer.encode_batch(inputs, true).map_err(|error| error.to_string())?;
        let library_seconds = start.elapsed().as_secs_f64();
        let expected = encoded.iter().map(|encoding| encoding.len() as u64).sum::<u64>();
        if tokens != expected {
            return Err(format!("the sides differ: {tokens} and {expected} tokens").into());
        }
        let rates = [own_seconds, library_seconds].map(|seconds| bytes as f64 / 1e6 / seconds);
        println!("turn {turn}: tokenize {:.1} MB/s, encode_batch {:.1} MB/s", rates[0], rates[1]);
        if turn > 0 {
            figures.add_with(1, "tokenize, MB of text per second", rates[0]);
            figures.add_with(1, "encode_batch, MB of text per second", rates[1]);
            figures.add_with(2, "tokenize over encode_batch", rates[0] / rates[1]);
        }
    }
    print!("{figures}");
    Ok(())
}

/// Returns documents of whole lines from the text in a folder. Together, they have at least the size that the
/// options ask for.
fn documents(folder: &Path, options: &Options) -> Outcome<Vec<String>> {
    let mut files = Vec::new();
    files_below(folder, &options.endings, &mut files)?;
    files.sort();
    let mut documents: Vec<String> = Vec::new();
    for file in &files {
        // Files in other encodings are left out.
        let Ok(text) = fs::read_to_string(file) else { continue };
        documents.extend(cut(&text, options.document as usize).into_iter().map(str::to_owned));
    }
    if documents.is_empty() {
        return Err(format!("{}: there is no text in it; choose another --text", folder.display()).into());
    }
    let wanted = (options.mib << 20) as usize;
    let mut bytes = 0;
    let repeated = documents.iter().cycle().take_while(|document| {
        let is_needed = bytes < wanted;
        bytes += document.len();
        is_needed
    });
    Ok(repeated.cloned().collect())
}

/// Adds the files below a folder with these endings to `files`, without hidden folders and build outputs.
fn files_below(folder: &Path, endings: &[String], files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let (path, kind) = entry.and_then(|entry| Ok((entry.path(), entry.file_type()?)))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if kind.is_dir() && !name.starts_with('.') && name != "target" {
            files_below(&path, endings, files)?;
        } else if kind.is_file()
            && path.extension().is_some_and(|found| endings.iter().any(|ending| found == ending.as_str()))
        {
            files.push(path);
        }
    }
    Ok(())
}

/// Cuts a text into parts of whole lines with `most` bytes at most. A longer line is a part by itself.
fn cut(text: &str, most: usize) -> Vec<&str> {
    let (mut parts, mut start, mut end) = (Vec::new(), 0, 0);
    for line in text.split_inclusive('\n') {
        if end + line.len() - start > most && end > start {
            parts.push(&text[start..end]);
            start = end;
        }
        end += line.len();
    }
    if end > start {
        parts.push(&text[start..end]);
    }
    parts
}

/// Writes a byte-level BPE of GPT-2's form that is trained on the documents.
fn train(documents: &[String], vocabulary: usize, file: &Path) -> Outcome {
    let model = BPE::builder().build().map_err(|error| error.to_string())?;
    let mut tokenizer = TokenizerBuilder::new()
        .with_model(model)
        .with_normalizer(Some(NFC))
        .with_pre_tokenizer(Some(PreTokenizerWrapper::from(ByteLevel::default().add_prefix_space(false))))
        .with_post_processor(Some(PostProcessorWrapper::from(ByteLevel::default())))
        .with_decoder(Some(DecoderWrapper::from(ByteLevel::default())))
        .build()
        .map_err(|error| error.to_string())?;
    let mut trainer = BpeTrainerBuilder::new()
        .show_progress(false)
        .vocab_size(vocabulary)
        .special_tokens(vec![AddedToken::from("<|endoftext|>", true)])
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    let mut bytes = 0;
    let part: Vec<&str> = documents
        .iter()
        .take_while(|text| {
            bytes += text.len();
            bytes <= TRAINED_ON
        })
        .map(String::as_str)
        .collect();
    tokenizer.train(&mut trainer, part.into_iter()).map_err(|error| error.to_string())?;
    tokenizer.save(file, false).map_err(|error| error.to_string())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::parsed;

    #[test]
    fn options_have_defaults_and_limits() {
        let options: Options = parsed(&[]).expect("all have defaults");
        assert_eq!((options.vocabulary, options.mib, options.turns), (32_768, 64, 5));
        assert!(parsed::<Options>(&["--mib", "0"]).is_err());
    }

    #[test]
    fn documents_are_whole_lines() {
        assert_eq!(cut("ab\ncd\nefghij\nk", 6), ["ab\ncd\n", "efghij\n", "k"]);
        assert!(cut("", 6).is_empty());
    }

    /// Runs the whole measurement on a small text: both sides must find the same number of tokens.
    #[test]
    fn both_sides_find_the_same_tokens() {
        let [texts, made] =
            [tempfile::tempdir(), tempfile::tempdir()].map(|folder| folder.expect("a folder"));
        let text = texts.path().to_owned();
        fs::write(text.join("a.md"), "to be or not to be\nthat is the question\n".repeat(50))
            .expect("a file");
        let endings = vec!["md".to_owned()];
        let options = Options { text, endings, vocabulary: 300, mib: 1, document: 100, turns: 1 };
        let measured = measure(&options, made.path()).map_err(|error| error.to_string());
        assert_eq!(measured, Ok(()));
    }
}
