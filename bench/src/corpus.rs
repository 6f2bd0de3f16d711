//! Trains on a corpus of several GiB of ids in a file, in turn with ids in memory: the time of a step, and
//! the memory that the data takes.
//!
//! `tokenize` makes the file of bytes, so that an id takes a byte: the most rows, and so the longest list of
//! their order, that a file of this size can have. Memory is what the process holds itself (`RssAnon`). Pages
//! of the file that the system caches do not count, because it takes them back when a process needs memory.
//!
//! The file was just written, so the system usually has it in its cache: the ratio is the cost of the mapping
//! and of its order, not of the disk.

use std::fs;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use pipewright::train::data::{DataConfig, TokenRows};

use crate::harness::{Figures, Outcome, seconds};
use crate::model::{Bench, SEQUENCE, VOCABULARY, random_numbers};

/// Size of the measurement.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The size of the corpus in MiB.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u64).range(1..))]
    mib: u64,
    /// The size of the text in memory in MiB, which the corpus repeats.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..))]
    text_mib: u64,
    /// The folder in which a folder for the corpus is made, and removed afterwards; by default, the system's
    /// for temporary files.
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Ranks, which run under 1F1B.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    ranks: u32,
    /// Microbatches of a step, of one row each.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    microbatches: u32,
    /// Steps of each side that count; the first two do not.
    #[arg(long, default_value_t = 20)]
    steps: usize,
    /// Batches that are read without training, to compare the sides alone.
    #[arg(long, default_value_t = 2000)]
    batches: usize,
}

const WARM_UP: usize = 2;

pub(crate) fn run(options: &Options) -> Outcome {
    let base = options.folder.clone().unwrap_or_else(std::env::temp_dir);
    fs::create_dir_all(&base).map_err(|error| format!("{}: {error}", base.display()))?;
    let scratch = tempfile::tempdir_in(base)?;
    measure(options, scratch.path())
}

fn measure(options: &Options, folder: &Path) -> Outcome {
    let rows = options.microbatches as usize;
    let corpus = make_corpus(options, folder)?;
    println!("{} MiB of ids in a file, {} MiB in memory", options.mib, options.text_mib);
    let before = anonymous_bytes()?;
    let mut file = open(&corpus, rows)?;
    let opened = anonymous_bytes()?;
    let seconds_of_file = read(&mut file, options.batches, rows)?;
    let held = anonymous_bytes()?;
    let mut memory = open(&folder.join("text/0.txt"), rows)?;
    let seconds_of_memory = read(&mut memory, options.batches, rows)?;
    let rate = |seconds: f64| (options.batches * rows) as f64 / seconds;
    let mut bench = Bench::new("1f1b", options.ranks, options.microbatches)?;
    let mut figures = Figures::default();
    figures.add_with(0, "rows per second from the file, alone", rate(seconds_of_file));
    figures.add_with(0, "rows per second from memory, alone", rate(seconds_of_memory));
    for step in 0..WARM_UP + options.steps {
        let seconds_of_file = train(&mut bench, &mut file, rows)?;
        let seconds_of_memory = train(&mut bench, &mut memory, rows)?;
        if step >= WARM_UP {
            figures.add_with(1, "rows trained per second from the file", rows as f64 / seconds_of_file);
            figures.add_with(1, "rows trained per second from memory", rows as f64 / seconds_of_memory);
            figures.add("file over memory", seconds_of_memory / seconds_of_file);
        }
    }
    figures.add_with(1, "MB of memory for an open file", megabytes(before, opened));
    figures.add_with(1, "MB of memory after reading from the file", megabytes(before, held));
    print!("{figures}");
    Ok(())
}

/// Writes the corpus: a text that is linked under several names. `tokenize` reads it under all of them.
fn make_corpus(options: &Options, folder: &Path) -> Outcome<PathBuf> {
    let text = folder.join("text");
    fs::create_dir_all(&text)?;
    write_text(&text.join("0.txt"), options.text_mib << 20)?;
    for number in 1..options.mib.div_ceil(options.text_mib) {
        fs::hard_link(text.join("0.txt"), text.join(format!("{number}.txt")))?;
    }
    let corpus = folder.join("corpus.pwtok");
    let config = DataConfig { path: vec![text.join("*.txt").display().to_string()], ..DataConfig::default() };
    let tokenized = config.tokenize(&corpus, &mut |_| ControlFlow::Continue(()))?;
    if tokenized.tokens < options.mib << 20 {
        return Err(format!("the corpus has only {} ids", tokenized.tokens).into());
    }
    Ok(corpus)
}

/// Writes lines of letters without a pattern.
fn write_text(path: &Path, bytes: u64) -> std::io::Result<()> {
    let mut file = std::io::BufWriter::new(fs::File::create_new(path)?);
    for (index, number) in (0..bytes).zip(random_numbers()) {
        let letter = b'a' + (number % 26) as u8;
        file.write_all(&[if index % 80 == 79 { b'\n' } else { letter }])?;
    }
    file.flush()
}

/// Opens a file for rows of the bench model.
fn open(path: &Path, rows: usize) -> Outcome<TokenRows> {
    let path = vec![path.display().to_string()];
    Ok(DataConfig { path, seq_len: SEQUENCE, ..DataConfig::default() }.open(VOCABULARY, rows)?)
}

/// Returns the seconds in which these batches are read.
fn read(source: &mut TokenRows, batches: usize, rows: usize) -> Outcome<f64> {
    seconds(|| (0..batches).try_for_each(|_| Ok(source.next_batch(rows).map(drop)?)))
}

/// Returns the seconds of a step with the reading of its batch.
fn train(bench: &mut Bench, source: &mut TokenRows, rows: usize) -> Outcome<f64> {
    seconds(|| {
        let batch = source.next_batch(rows)?;
        bench.set_batch([batch.inputs, batch.targets], [batch.rows, batch.seq_len]);
        bench.step()
    })
}

/// Returns the bytes of memory that this process holds itself.
fn anonymous_bytes() -> Outcome<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    Ok(anonymous_in(&status).ok_or("the system does not report anonymous memory")?)
}

/// Returns the bytes of anonymous memory in the text of `/proc/self/status`.
fn anonymous_in(status: &str) -> Option<u64> {
    let kib = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    kib.trim().trim_end_matches(" kB").parse::<u64>().ok().map(|kib| kib << 10)
}

fn megabytes(before: u64, after: u64) -> f64 {
    after.saturating_sub(before) as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::parsed;

    #[test]
    fn options_have_defaults_and_limits() {
        let options: Options = parsed(&[]).expect("all have defaults");
        assert_eq!((options.mib, options.ranks, options.folder), (4096, 2, None));
        assert!(parsed::<Options>(&["--mib", "0"]).is_err());
    }

    #[test]
    fn anonymous_memory_is_found() {
        assert_eq!(anonymous_in("VmRSS:\t  9 kB\nRssAnon:\t    2048 kB\nRssFile:\t 1 kB\n"), Some(2 << 20));
        assert_eq!(anonymous_in("VmRSS:\t  9 kB\n"), None);
    }

    #[test]
    fn a_corpus_repeats_its_text() {
        let scratch = tempfile::tempdir().expect("a folder");
        let options: Options = parsed(&["--mib=3", "--text-mib=1"]).expect("they are valid");
        let corpus = make_corpus(&options, scratch.path()).expect("a corpus");
        let rows = open(&corpus, 1).expect("rows").rows();
        assert_eq!(rows, (3 << 20) / SEQUENCE - 1);
    }
}
