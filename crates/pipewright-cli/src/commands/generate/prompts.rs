//! The prompts of `pipewright generate`: arguments, and the lines of a file or of standard input.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::Args;
use pipewright_planning::failure::{Failure, sentence};
use pipewright_system::bounded_file::{SMALL_TEXT, read_regular_text};

/// The arguments that name prompts.
#[derive(Debug, Args)]
pub(crate) struct PromptArguments {
    /// The text that the generated text follows; with --chat a message, and without one each line of standard
    /// input is a message. Several prompts are computed side by side
    #[arg(long, value_name = "TEXT", required_unless_present_any = ["chat", "prompts"])]
    prompt: Vec<String>,
    /// A file with a prompt in each line, or - for standard input
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
}

impl PromptArguments {
    /// Returns whether there is one prompt at most, from an argument.
    pub(super) fn is_single(&self) -> bool {
        self.prompts.is_none() && self.prompt.len() < 2
    }

    /// Returns whether prompts are on standard input, where they may come at any time.
    pub(super) fn are_on_standard_input(&self) -> bool {
        self.prompts.as_deref().is_some_and(is_standard_input)
    }

    /// Returns the prompts in their order: the arguments, and then the lines of the file, which `read` reads.
    /// Lines without text do not count. There are none in a chat on standard input.
    pub(super) fn read(
        &self,
        read: impl FnOnce(&Path) -> Result<String, Failure>,
    ) -> Result<Vec<String>, Failure> {
        if self.prompt.iter().any(String::is_empty) {
            return Err(Failure::input("`--prompt` is empty: give at least one character"));
        }
        let mut prompts = self.prompt.clone();
        if let Some(path) = &self.prompts {
            let text = read(path)?;
            prompts.extend(text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned));
            if prompts.is_empty() {
                return Err(Failure::input(format!(
                    "{}: no line has a prompt: write one in each line",
                    path.display()
                )));
            }
        }
        Ok(prompts)
    }
}

fn is_standard_input(path: &Path) -> bool {
    path == Path::new("-")
}

/// Returns the text of a file or of standard input.
pub(super) fn read_file(path: &Path) -> Result<String, Failure> {
    if is_standard_input(path) {
        return read_standard_input();
    }
    read_regular_text(path, SMALL_TEXT)
        .map_err(|error| Failure::input(format!("{}: {}", path.display(), sentence(&error))))
}

/// Returns the text of standard input.
pub(super) fn read_standard_input() -> Result<String, Failure> {
    let mut bytes = Vec::new();
    let read = std::io::stdin().lock().take(SMALL_TEXT + 1).read_to_end(&mut bytes);
    let refused = |reason: &str| Failure::input(format!("standard input: {reason}"));
    match read {
        Err(error) => Err(refused(&format!("cannot be read: {error}"))),
        Ok(_) if bytes.len() as u64 > SMALL_TEXT => {
            Err(refused("the prompts have more than 16 MiB; give fewer at a time"))
        }
        Ok(_) => String::from_utf8(bytes).map_err(|_| refused("the prompts are not UTF-8; give text")),
    }
}
