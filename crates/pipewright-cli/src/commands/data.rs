//! `pipewright data show`: prints rows of the training data as a person reads them.

use std::fmt::Write as _;
use std::io::{ErrorKind, IsTerminal, Write as _};
use std::path::{Path, PathBuf};

use anstyle::Style;
use clap::{Args, Subcommand};
use pipewright::train::data::{DataConfig, RowPart, TokenCodec, TokenRows, Tokenizer};
use pipewright_document::text::escape;
use pipewright_planning::failure::Failure;
use pipewright_run::run_data::data_config;
use pipewright_run::run_model::open_training;
use pipewright_run::settings::Settings;
use pipewright_run::settings::data::{BYTES, tokenizer_file};
use pipewright_run::training::load::load_settings;
use pipewright_run::training::model::read_model;
use pipewright_schedule::words::counted;

use crate::keys::keys;

/// The size of a vocabulary without an end: a file of data is shown without a model.
const ANY_ID: usize = i32::MAX as usize;

/// The arguments of `pipewright data`.
#[derive(Debug, Args)]
pub(crate) struct DataArguments {
    #[command(subcommand)]
    command: DataCommand,
}

#[derive(Debug, Subcommand)]
enum DataCommand {
    /// Print rows of the training data, in the order in which a run takes them.
    #[command(after_help = "\
Tokens that do not count in the loss are dim, or stand between \u{2039} and \u{203a} if the output is not a terminal. Special tokens \
are visible. A row of several records has a line between them, and a row of a mixture says its source. A file of `pipewright tokenize` needs the tokenizer that made it.

Example:
  pipewright data show --rows 1")]
    Show(ShowArguments),
}

#[derive(Debug, Args)]
struct ShowArguments {
    /// A configuration, or a file of data; by default, the built-in sample
    #[arg(value_name = "CONFIG.toml|FILE")]
    file: Option<PathBuf>,
    /// The tokenizer: its folder, its file or `bytes`; by default, `data.tokenizer`
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<String>,
    /// How many rows to print
    #[arg(long, value_name = "N", default_value_t = 3)]
    rows: usize,
    /// Override a key with a TOML value; a value that is not TOML is taken as text
    #[arg(long, value_name = "section.key=value", value_parser = keys(), hide_possible_values = true)]
    set: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(arguments: &DataArguments) -> Result<(), Failure> {
    let DataCommand::Show(arguments) = &arguments.command;
    let settings = settings(arguments)?;
    let config = data_config(&settings);
    let mut rows = match (&config.tokenizer, arguments.file_of_data()) {
        (Tokenizer::File(_), Some(_)) => config.open(ANY_ID, 1).map_err(Failure::input)?,
        _ => open_training(&settings, &read_model(&settings)?, 1)?,
    };
    let codec = TokenCodec::open(&config.tokenizer).map_err(Failure::input)?;
    let out = std::io::stdout();
    let has_colour = out.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let text = shown(&mut rows, arguments.rows, (&config, &codec), &Marks::new(has_colour))?;
    // The text has colours, so it is not escaped.
    let mut out = out.lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::unwritten(Path::new("standard output"), &error, "choose another place"))
        }
        _ => Ok(()),
    }
}

impl ShowArguments {
    /// Returns the file of data, if the file is not a configuration.
    fn file_of_data(&self) -> Option<&Path> {
        let is_config = |path: &&Path| path.extension().is_some_and(|ending| ending == "toml");
        self.file.as_deref().filter(|path| !is_config(path))
    }
}

/// Returns the settings of a configuration. A file of data takes the place of the sample's data.
fn settings(arguments: &ShowArguments) -> Result<Settings, Failure> {
    let (file, data) = (arguments.file.as_deref(), arguments.file_of_data());
    let config = if data.is_some() { None } else { file };
    let mut set = Vec::new();
    if config.is_none() {
        set.extend(["pipeline.microbatches=1", "pipeline.ranks=1"].map(str::to_owned));
    }
    let text = |key: &str, value: String| format!("{key}={}", toml::Value::String(value));
    // The path is taken as it is, not as a pattern.
    set.extend(data.map(|path| text("data.path", globset::escape(&path.to_string_lossy()))));
    set.extend(arguments.tokenizer.as_deref().map(|name| {
        let file = tokenizer_file(Path::new(name)).to_string_lossy().into_owned();
        text("data.tokenizer", if name == BYTES { name.to_owned() } else { file })
    }));
    set.extend(arguments.set.iter().cloned());
    Ok(load_settings(config, &set)?.settings)
}

/// The signs around tokens that do not count.
struct Marks {
    open: String,
    close: String,
}

impl Marks {
    fn new(has_colour: bool) -> Self {
        let dim = Style::new().dimmed();
        if has_colour {
            Self { open: dim.render().to_string(), close: dim.render_reset().to_string() }
        } else {
            Self { open: "\u{2039}".to_owned(), close: "\u{203a}".to_owned() }
        }
    }
}

/// Returns the next `count` rows as text, with the label of each sequence that has one.
fn shown(
    rows: &mut TokenRows,
    count: usize,
    (config, codec): (&DataConfig, &TokenCodec),
    marks: &Marks,
) -> Result<String, Failure> {
    let (mut text, all) = (String::new(), rows.rows());
    let sources = rows.mixture();
    let write = |text: &mut String, words: std::fmt::Arguments<'_>| {
        text.write_fmt(words).expect("a string takes all text");
    };
    for number in 1..=count.min(all) {
        let source = rows.next_source().map_or_else(String::new, |index| {
            let name = escape(&sources[index].name);
            format!(", from source {} ({name})", index + 1)
        });
        let mut parts = rows.next_row_parts().map_err(Failure::input)?;
        let behind = |part: &mut RowPart| part.counts.pop().and_then(|_| part.ids.pop());
        // No token of a sequence that is scored is a target: its label or its reward counts.
        let (labels, counted_parts): (Vec<Option<&String>>, String) = if config.scores_sequences() {
            let word = if config.labels.is_empty() { "reward" } else { "label" };
            let labels = parts.iter_mut().map(|part| config.labels.get(behind(part)? as usize)).collect();
            (labels, counted(parts.len(), word))
        } else {
            let counts = parts.iter().flat_map(|part| &part.counts[1..]);
            (Vec::new(), counted(counts.filter(|counts| **counts).count(), "target"))
        };
        let tokens = parts.iter().map(|part| part.ids.len()).sum::<usize>();
        write(
            &mut text,
            format_args!(
                "row {number} of {all}{source}: {}, {counted_parts} in the loss\n",
                counted(tokens, "token")
            ),
        );
        for (index, part) in parts.iter().enumerate() {
            if index > 0 {
                text.push_str("---\n");
            }
            text.push_str(&marked(part, codec, marks)?);
            text.push('\n');
            if let Some(Some(label)) = labels.get(index) {
                write(&mut text, format_args!("label: {}\n", escape(label)));
            }
        }
        text.push('\n');
    }
    Ok(text)
}

/// Returns the text of a record, with the tokens that do not count marked.
fn marked(part: &RowPart, codec: &TokenCodec, marks: &Marks) -> Result<String, Failure> {
    let runs: Vec<&[bool]> = part.counts.chunk_by(|before, after| before == after).collect();
    let mut rest = part.ids.as_slice();
    let ids = runs.iter().map(|run| {
        let (ids, behind) = rest.split_at(run.len());
        rest = behind;
        ids
    });
    let texts = codec.decode_runs(ids).map_err(Failure::input)?;
    let mut text = String::new();
    for (run, words) in runs.iter().zip(&texts) {
        let words = escape(words);
        if run[0] || words.is_empty() {
            text.push_str(&words);
        } else {
            text.extend([&marks.open, words.as_ref(), &marks.close]);
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_do_not_count_are_dim_on_a_terminal_and_in_signs_elsewhere() {
        let codec = TokenCodec::open(&Tokenizer::Bytes).expect("bytes need no file");
        let part = RowPart {
            ids: b"to\x1bbe".map(u32::from).to_vec(),
            counts: vec![false, false, false, true, true],
        };
        let check = |has_colour, expected: &str| {
            assert_eq!(marked(&part, &codec, &Marks::new(has_colour)).ok().as_deref(), Some(expected));
        };
        check(false, "\u{2039}to\\u{1b}\u{203a}be");
        check(true, "\u{1b}[2mto\\u{1b}\u{1b}[0mbe");
    }

    #[test]
    fn a_file_of_data_has_the_tokenizer_that_is_named() {
        let tokenizer = |file: &str, name: Option<&str>, set: &[&str]| {
            let arguments = ShowArguments {
                file: Some(file.into()),
                tokenizer: name.map(str::to_owned),
                rows: 1,
                set: set.iter().map(|set| (*set).to_owned()).collect(),
            };
            data_config(&settings(&arguments).expect("good settings")).tokenizer
        };
        assert_eq!(tokenizer("a.pwtok", None, &[]), Tokenizer::Bytes);
        assert_eq!(tokenizer("a.pwtok", Some("bytes"), &[]), Tokenizer::Bytes);
        let folder = tempfile::tempdir().expect("a scratch folder");
        let file = folder.path().join("tokenizer.json");
        std::fs::write(&file, "{}").expect("a file");
        let of_folder = Tokenizer::File(file.clone());
        for name in [folder.path(), &file] {
            assert_eq!(tokenizer("a.pwtok", name.to_str(), &[]), of_folder);
        }
        let set = &["data.tokenizer=bytes"];
        assert_eq!(tokenizer("a.pwtok", folder.path().to_str(), set), Tokenizer::Bytes);
    }
}
