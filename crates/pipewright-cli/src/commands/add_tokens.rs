//! `pipewright add-tokens`: writes a model with further tokens.

use std::path::PathBuf;

use clap::Args;
use pipewright_models::{ModelConfig, hf};
use pipewright_planning::failure::Failure;
use pipewright_planning::screen::say;
use pipewright_schedule::words::counted;
use pipewright_system::bounded_file::{SMALL_TEXT, read_text};

/// The arguments of `pipewright add-tokens`.
#[derive(Debug, Args)]
pub(crate) struct AddTokensArguments {
    /// The folder of the model
    #[arg(value_name = "DIR")]
    from: PathBuf,
    /// The folder to write; it must be empty or not exist
    #[arg(value_name = "OUT")]
    to: PathBuf,
    /// A new token; give the option once for each
    #[arg(long = "token", value_name = "TEXT", required_unless_present = "file")]
    tokens: Vec<String>,
    /// A text file with a new token in each line
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Leave the tokens out of generated texts, as the tokens that end them
    #[arg(long)]
    special: bool,
}

/// Runs the command.
pub(crate) fn run(arguments: &AddTokensArguments) -> Result<(), Failure> {
    let AddTokensArguments { from, to, tokens, file, special } = arguments;
    let mut tokens = tokens.clone();
    if let Some(file) = file {
        let text = read_text(file, SMALL_TEXT)
            .map_err(|error| Failure::input(format!("{}: {error}", file.display())))?;
        tokens.extend(text.lines().filter(|line| !line.is_empty()).map(str::to_owned));
    }
    if tokens.iter().any(String::is_empty) || tokens.is_empty() {
        return Err(Failure::input(
            "a token without a text: name the tokens with --token TEXT or --file FILE",
        ));
    }
    let model = ModelConfig::read(from).map_err(Failure::input)?;
    let added = hf::add_tokens(from, &*model, &tokens, *special, to).map_err(Failure::input)?;
    say(&format!(
        "wrote {} with {} from the id {} on to {}: {} in the vocabulary, {} of them new",
        from.display(),
        counted(tokens.len(), "token"),
        added.first,
        to.display(),
        counted(added.vocab_size, "id"),
        added.rows
    ));
    Ok(())
}
