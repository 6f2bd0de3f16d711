//! `pipewright generate`: samples text from a trained model.

mod chat;

use std::path::PathBuf;
use std::time::Instant;

use burn::tensor::Device;
use clap::Args;
use pipewright::train::data::ChatTemplate;
use pipewright_models::generation::{Generated, Request, Sampling, generate};
use serde_json::json;

use crate::commands::generate::chat::{Answer, Chat};
use crate::display::say;
use crate::failure::Failure;
use crate::output;
use crate::training::model::{check_weights, unknown_note};
use crate::training::trained_model::{self, Origin, TrainedModel};

/// The arguments of `pipewright generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArguments {
    /// The folder of a run, for its newest checkpoint, a checkpoint, or a Hugging Face directory
    #[arg(value_name = "RUN_DIR|MODEL_DIR")]
    model: PathBuf,
    /// The text that the generated text follows; with --chat a message, and without one each line of standard
    /// input is a message
    #[arg(long, value_name = "TEXT", required_unless_present = "chat")]
    prompt: Option<String>,
    /// Answer messages: the chat template of the model renders them
    #[arg(long)]
    chat: bool,
    /// The instructions for a chat
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// A chat template by name or file, in place of the model's own
    #[arg(long, value_name = "NAME|FILE", requires = "chat")]
    chat_template: Option<String>,
    /// The number of tokens to generate, at most: 100, or 1000 for an answer
    #[arg(long, value_name = "N")]
    tokens: Option<usize>,
    /// The divisor of the logits: below 1 for more probable tokens; 0 always takes the most probable one
    #[arg(long, value_name = "T", default_value_t = 1.0, allow_negative_numbers = true)]
    temperature: f64,
    /// Choose among this number of the most probable tokens; 0: all
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Choose among the most probable tokens that together have at least this probability
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true)]
    top_p: f64,
    /// Above 1: take tokens of the prompt and the text so far less often
    #[arg(long, value_name = "R", default_value_t = 1.0, allow_negative_numbers = true)]
    repetition_penalty: f64,
    /// The seed of the choice: the same seed gives the same text
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// `bytes` or a tokenizer.json, in place of the model's own
    #[arg(long, value_name = "bytes|FILE")]
    tokenizer: Option<String>,
    /// The model that the adapters of the run change, if its folder has moved
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// Compute all earlier tokens again for each token, without a key-value cache
    #[arg(long)]
    no_cache: bool,
    /// Print an object with the text, the tokens and the times
    #[arg(long)]
    json: bool,
}

/// The limits of tokens without `--tokens`.
const LONGEST_TEXT: usize = 100;
const LONGEST_ANSWER: usize = 1000;

/// The times of a generation in seconds.
struct Times {
    /// Until the first token was made.
    first: f64,
    whole: f64,
}

/// A text that was generated.
struct Outcome {
    prompt: Vec<u32>,
    generated: Generated,
    text: String,
    times: Times,
}

/// Runs the command.
pub(crate) fn run(arguments: &GenerateArguments) -> Result<(), Failure> {
    if arguments.prompt.as_deref() == Some("") {
        return Err(Failure::input("`--prompt` is empty: give at least one character"));
    }
    if arguments.json && arguments.prompt.is_none() {
        return Err(Failure::input("`--json` is for one answer: give the message as `--prompt`"));
    }
    let mut found =
        trained_model::open(&arguments.model, arguments.tokenizer.as_deref(), arguments.base.as_deref())?;
    if let Origin::Directory(directory) = &found.origin {
        let notes = [unknown_note(directory)?, check_weights(directory, &found.model)?];
        notes.iter().flatten().for_each(|note| say(note));
    }
    if let Some(template) = &arguments.chat_template {
        found.chat.chat_template = Some(ChatTemplate::of(template));
    }
    let model = found.model.whole(found.origin.source(), &Device::flex()).map_err(Failure::input)?;
    let request = arguments.request(&found);
    let start = Instant::now();
    let mut first = None;
    let mut each = |_| {
        first.get_or_insert_with(|| start.elapsed().as_secs_f64());
    };
    let (prompt, generated, text) = match (&arguments.prompt, arguments.chat) {
        (Some(text), false) => {
            let prompt = prompt(&found, text)?;
            let request = Request { prompt: &prompt, ..request };
            let generated = generate(&*model, &request, &mut each).map_err(Failure::input)?;
            let text = found.codec.decode(&generated.tokens).map_err(Failure::input)?;
            (prompt, generated, text)
        }
        (message, _) => {
            let mut chat = Chat::new(&found, &*model, request, arguments.system.as_deref())?;
            let Some(message) = message else { return chat.converse() };
            let Answer { prompt, generated, text } = chat.answer(message, &mut each)?;
            (prompt, generated, text)
        }
    };
    let whole = start.elapsed().as_secs_f64();
    let times = Times { first: first.unwrap_or(whole), whole };
    report(arguments, &found, &Outcome { prompt, generated, text, times })
}

impl GenerateArguments {
    /// Returns the request without its prompt.
    fn request<'a>(&self, found: &'a TrainedModel) -> Request<'a> {
        Request {
            prompt: &[],
            tokens: self.tokens.unwrap_or(if self.chat { LONGEST_ANSWER } else { LONGEST_TEXT }),
            ends: &found.ends,
            sampling: Sampling {
                repetition_penalty: self.repetition_penalty,
                temperature: self.temperature,
                top_k: self.top_k,
                top_p: self.top_p,
                seed: self.seed,
            },
            longest: longest(found),
            uses_cache: !self.no_cache,
        }
    }
}

/// Prints the text and how fast it was generated. The text of an answer stands alone, others follow their prompt.
fn report(arguments: &GenerateArguments, found: &TrainedModel, outcome: &Outcome) -> Result<(), Failure> {
    let Outcome { prompt, generated, text, times } = outcome;
    let length = prompt.len() + generated.tokens.len();
    if let Some(trained) = found.trained_length.filter(|trained| length > *trained) {
        say(&format!("the text has {length} tokens, and the model was trained on rows of {trained}"));
    }
    if arguments.json {
        return print_json(arguments, found, outcome);
    }
    let before = if arguments.chat { "" } else { arguments.prompt.as_deref().unwrap_or_default() };
    output::write(None, &format!("{before}{text}\n"))?;
    say(&summary(found, prompt, generated, times));
    Ok(())
}

/// Returns the tokens of the prompt, begun as the model's documents begin.
fn prompt(found: &TrainedModel, text: &str) -> Result<Vec<u32>, Failure> {
    // Models are trained with the special tokens of their tokenizers, such as the token that begins a
    // document.
    let encoded = found.codec.encode(text, found.model.vocab_size(), true).map_err(Failure::input)?;
    let bos = found.bos_id.filter(|bos| encoded.first() != Some(bos));
    Ok(bos.into_iter().chain(encoded).collect())
}

/// Returns the number of positions that the model knows, if it says so.
fn longest(found: &TrainedModel) -> Option<usize> {
    let json = found.model.to_json();
    json["max_position_embeddings"].as_u64().and_then(|longest| usize::try_from(longest).ok())
}

fn family(found: &TrainedModel) -> String {
    found.model.to_json()["model_type"].as_str().unwrap_or("the model").to_owned()
}

fn tokens_per_second(generated: &Generated, times: &Times) -> f64 {
    generated.tokens.len() as f64 / times.whole.max(f64::MIN_POSITIVE)
}

fn print_json(arguments: &GenerateArguments, found: &TrainedModel, outcome: &Outcome) -> Result<(), Failure> {
    let Outcome { prompt, generated, text, times } = outcome;
    let json = json!({
        "model": family(found),
        "prompt": arguments.prompt,
        "text": text,
        "prompt_tokens": prompt,
        "tokens": generated.tokens,
        "stop": if generated.is_ended { "eos" } else { "length" },
        "cache": generated.is_cached,
        "first_token_s": times.first,
        "seconds": times.whole,
        "tokens_per_second": tokens_per_second(generated, times),
    });
    output::write(None, &format!("{json:#}\n"))
}

/// Returns a sentence with the speed, and whether a cache was used.
fn summary(found: &TrainedModel, prompt: &[u32], generated: &Generated, times: &Times) -> String {
    let cache = if generated.is_cached {
        "with a key-value cache".to_owned()
    } else {
        "without a key-value cache: each token computes all earlier ones again".to_owned()
    };
    let end = if generated.is_ended { ", ended by the model" } else { "" };
    format!(
        "{}: {} tokens{end} in {:.2} s ({:.1} tokens/s), the first after {:.2} s for a prompt of {} tokens, {cache}",
        family(found),
        generated.tokens.len(),
        times.whole,
        tokens_per_second(generated, times),
        times.first,
        prompt.len(),
    )
}
