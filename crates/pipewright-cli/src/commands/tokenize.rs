//! `pipewright tokenize`: turns data files into one file of token ids, which a run reads as it needs them.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use pipewright::train::data::{
    ChatTemplate, DataConfig, DataError, DataErrorKind, Date, Documents, RecordKeys, Tokenized, Tokenizer,
    TrainOn,
};
use pipewright_planning::failure::{Exit, Failure};
use pipewright_planning::screen::say;
use pipewright_run::interrupt::Interrupt;
use pipewright_run::settings::data::{BYTES, tokenizer_file};
use pipewright_schedule::words::counted;

use crate::commands::template_kwargs::kwargs;
use crate::display::TokenizeBar;
use crate::signal;

/// The arguments of `pipewright tokenize`.
#[derive(Debug, Args)]
pub(crate) struct TokenizeArguments {
    /// Files of data, or patterns of them, as in `data.path`
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<String>,
    /// A folder with a tokenizer.json, the file itself, or `bytes`
    #[arg(long, value_name = "DIR")]
    tokenizer: String,
    /// The file to write; its name ends in `.pwtok`
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// The chat template: a name or a file; by default, the one next to the tokenizer
    #[arg(long, value_name = "NAME|FILE")]
    chat_template: Option<String>,
    /// The tokens of chats and completions that count in the loss, if it is not the default
    #[arg(long, value_parser = train_on_parser())]
    train_on: Option<TrainOn>,
    /// The token id that begins each document, as `data.bos_id`
    #[arg(long, value_name = "ID")]
    bos_id: Option<u32>,
    /// The date that chat templates ask for, such as 2024-07-26
    #[arg(long, value_name = "DATE")]
    date: Option<Date>,
    /// A further variable of the chat template, such as enable_thinking=false
    #[arg(long, value_name = "KEY=VALUE")]
    chat_template_kwargs: Vec<String>,
    /// The most records that are left out because they cannot be used; 0: refuse the first
    #[arg(long, value_name = "N", default_value_t = 100)]
    bad_records: u64,
    /// Another name of a key of records, as in `data.keys`
    #[arg(long, value_name = "KEY=NAME")]
    key: Vec<String>,
}

/// Returns the parser of the values of `data.train_on`.
fn train_on_parser() -> impl TypedValueParser<Value = TrainOn> {
    let value = |train_on: TrainOn| PossibleValue::new(train_on.key()).help(help(train_on));
    PossibleValuesParser::new(TrainOn::ALL.map(value)).map(|key| {
        let chosen = TrainOn::ALL.into_iter().find(|train_on| train_on.key() == key);
        chosen.expect("the key is one of the possible values")
    })
}

fn help(train_on: TrainOn) -> &'static str {
    match train_on {
        TrainOn::All => "All tokens",
        TrainOn::Assistant => "The answers of the assistant",
        TrainOn::Completion => "The completion; of a chat, its last message",
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &TokenizeArguments) -> Result<(), Failure> {
    let output = &arguments.output;
    if output.extension().is_none_or(|ending| ending != "pwtok") {
        return Err(Failure::input(format!(
            "{}: the name of the file must end in `.pwtok`, by which `data.path` knows it",
            output.display()
        )));
    }
    if output.is_dir() {
        return Err(Failure::input(format!("{}: this is a folder; name a file to write", output.display())));
    }
    let config = config(arguments)?;
    let interrupt = Interrupt::default();
    signal::watch(&interrupt)
        .map_err(|error| Failure::input(format!("cannot watch for signals: {error}")))?;
    let is_interrupted = interrupt.flag();
    let mut bar = TokenizeBar::new();
    let tokenized = config.tokenize(output, &mut |progress| {
        bar.show(progress);
        if is_interrupted.load(Ordering::Relaxed) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    bar.finish();
    let tokenized = tokenized.map_err(failure)?;
    say(&summary(&tokenized, output));
    if let Some(missing) = &tokenized.missing_end {
        say(&format!("data: {missing}"));
    }
    if let Some(bad) = &tokenized.bad_records {
        say(&format!("data: {bad}"));
    }
    Ok(())
}

fn failure(error: DataError) -> Failure {
    let is_stopped = error.kind == DataErrorKind::Stopped;
    Failure::new(if is_stopped { Exit::Interrupted } else { Exit::WrongInput }, error)
}

/// Returns the settings of the data.
fn config(arguments: &TokenizeArguments) -> Result<DataConfig, Failure> {
    // The name of a file that exists is not a pattern.
    let pattern = |path: &String| {
        if Path::new(path).is_file() { globset::escape(path) } else { path.clone() }
    };
    let documents = |bos_id| Documents { bos_id, packed: false, restart_positions: false };
    Ok(DataConfig {
        path: arguments.paths.iter().map(pattern).collect(),
        tokenizer: tokenizer(&arguments.tokenizer),
        documents: arguments.bos_id.map(documents),
        keys: keys(&arguments.key)?,
        chat_template: arguments.chat_template.as_deref().map(ChatTemplate::of),
        chat_template_kwargs: kwargs(&arguments.chat_template_kwargs)?,
        train_on: arguments.train_on,
        bad_records: arguments.bad_records,
        date: arguments.date,
        ..DataConfig::default()
    })
}

fn tokenizer(name: &str) -> Tokenizer {
    if name == BYTES { Tokenizer::Bytes } else { Tokenizer::File(tokenizer_file(Path::new(name))) }
}

fn keys(written: &[String]) -> Result<RecordKeys, Failure> {
    let mut keys = RecordKeys::default();
    for written in written {
        let is_known = written.split_once('=').is_some_and(|(key, name)| keys.rename(key, name));
        if !is_known {
            return Err(Failure::input(format!(
                "--key {written}: not the new name of a key; write for example --key text=content, with one of {}",
                RecordKeys::KEYS.join(", ")
            )));
        }
    }
    Ok(keys)
}

/// Returns what the file contains.
fn summary(tokenized: &Tokenized, output: &Path) -> String {
    let Tokenized { sources, tokens, examples, targets, width, .. } = tokenized;
    let sources = sources.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    let records = examples.map_or_else(String::new, |examples| {
        format!(" in {}, {targets} of them targets in the loss", counted(examples as usize, "record"))
    });
    format!(
        "{}: {}{records}, {} each, from {sources}",
        output.display(),
        counted(*tokens as usize, "token"),
        counted(*width, "byte")
    )
}
