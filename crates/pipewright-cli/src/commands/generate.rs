//! `pipewright generate`: samples text from a trained model.

mod ranks;
mod prompts;
mod input;
mod chat;
mod report;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use pipewright::train::data::ChatTemplate;
use pipewright_models::generation::{Generated, Request, Sampling};
use pipewright_models::generation_ranks::RanksError;
use pipewright_planning::failure::{Exit, Failure};
use pipewright_run::training::model::{check_weights, unknown_note};
use pipewright_run::training::process_group::ProcessGroup;
use pipewright_run::training::samples::encode_prompt;
use pipewright_run::training::trained_model::{self, Origin, TrainedModel};

use crate::commands::generate::chat::Chat;
use crate::commands::generate::input::read_once;
use crate::commands::generate::prompts::{PromptArguments, read_file, read_standard_input};
use crate::commands::generate::ranks::{RankArguments, RankPlan, Ranks, failure};
use crate::commands::generate::report::{Outcome, Report, Times};
use crate::commands::template_kwargs::kwargs;
use crate::terminal::Terminal;

/// The arguments of `pipewright generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArguments {
    /// The folder of a run, for its newest checkpoint, a checkpoint, or a Hugging Face directory
    #[arg(value_name = "RUN_DIR|MODEL_DIR")]
    model: PathBuf,
    #[command(flatten)]
    prompts: PromptArguments,
    /// Answer messages: the chat template of the model renders them
    #[arg(long)]
    chat: bool,
    /// The instructions for a chat
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// A chat template by name or file, in place of the model's own
    #[arg(long, value_name = "NAME|FILE", requires = "chat")]
    chat_template: Option<String>,
    /// A further variable of the chat template, such as enable_thinking=false
    #[arg(long, value_name = "KEY=VALUE", requires = "chat")]
    chat_template_kwargs: Vec<String>,
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
    #[command(flatten)]
    ranks: RankArguments,
    /// Compute all earlier tokens again for each token, without a key-value cache
    #[arg(long)]
    no_cache: bool,
    /// Print an object with the texts, the tokens and the times
    #[arg(long)]
    json: bool,
}

/// The limits of tokens without `--tokens`.
const LONGEST_TEXT: usize = 100;
const LONGEST_ANSWER: usize = 1000;

/// Runs the command. With several processes, the first one reads the prompts and prints; the others compute.
pub(crate) fn run(arguments: &GenerateArguments) -> Result<(), Failure> {
    let mut processes = ProcessGroup::gather(Terminal::shared())?;
    let outcome = generate_in(arguments, &mut processes);
    processes.settle(outcome)
}

fn generate_in(arguments: &GenerateArguments, processes: &mut ProcessGroup) -> Result<(), Failure> {
    let opened = arguments.open(processes);
    if let Ok((_, plan)) = &opened {
        processes.set_deadline(plan.deadline());
    }
    let (found, plan) = processes.agree(opened, |(found, plan)| plan.fields(found))?;
    // Until the ranks have started, the other processes wait for the first one only up to a deadline. A user may
    // take longer to write, so standard input is read afterwards.
    let reads_later = processes.is_several() && arguments.prompts.are_on_standard_input();
    let session = || Session::new(arguments, &found, reads_later);
    let session = if processes.is_leader() { session().map(Some) } else { Ok(None) };
    let session = processes.all_succeed(session, Exit::WrongInput)?;
    let ranks = plan.start(&found, processes)?;
    match (session, ranks) {
        (Some(session), Some(ranks)) => session.run(arguments, ranks),
        // This process has computed for the first one.
        _ => Ok(()),
    }
}

/// The texts that the first process generates.
struct Session<'a> {
    found: &'a TrainedModel,
    /// The request without its prompt.
    request: Request<'a>,
    chat: Option<Chat<'a>>,
    /// `None` if they are read after the ranks have started.
    prompts: Option<Prompts>,
}

struct Prompts {
    texts: Vec<String>,
    /// The tokens of each prompt.
    encoded: Vec<Vec<u32>>,
}

impl Prompts {
    fn new(found: &TrainedModel, chat: Option<&Chat<'_>>, texts: Vec<String>) -> Result<Self, Failure> {
        Ok(Self { encoded: encode(found, chat, &texts)?, texts })
    }
}

impl<'a> Session<'a> {
    /// Prepares the requests. If `reads_later`, the prompts are read after the ranks have started.
    fn new(
        arguments: &GenerateArguments,
        found: &'a TrainedModel,
        reads_later: bool,
    ) -> Result<Self, Failure> {
        let texts = if reads_later { None } else { Some(arguments.prompts.read(read_file)?) };
        if arguments.json && texts.as_ref().is_some_and(Vec::is_empty) {
            return Err(Failure::input("`--json` is for answers to known messages: give them as `--prompt`"));
        }
        let request = arguments.request(found);
        let chat = arguments.chat.then(|| Chat::new(found, request, arguments.system.as_deref()));
        let chat = chat.transpose()?;
        let prompts = texts.map(|texts| Prompts::new(found, chat.as_ref(), texts)).transpose()?;
        Ok(Self { found, request, chat, prompts })
    }

    fn run(self, arguments: &GenerateArguments, mut ranks: Ranks) -> Result<(), Failure> {
        let Self { found, request, mut chat, prompts } = self;
        let prompts = match prompts {
            Some(prompts) => prompts,
            None => {
                let texts = arguments.prompts.read(|_| read_once(&mut ranks, read_standard_input))?;
                Prompts::new(found, chat.as_ref(), texts)?
            }
        };
        let Prompts { texts: prompts, encoded } = prompts;
        if prompts.is_empty() {
            return chat.as_mut().map_or(Ok(()), |chat| chat.converse(&mut ranks));
        }
        let request_of = |prompt| match &chat {
            Some(chat) => chat.request(prompt),
            None => Request { prompt, ..request },
        };
        let requests: Vec<Request<'_>> = encoded.iter().map(|prompt| request_of(prompt)).collect();
        let (texts, times) = generate(&mut ranks, &requests)?;
        let outcomes = prompts.into_iter().zip(&encoded).zip(texts).map(|((prompt, tokens), generated)| {
            let text = found.codec.decode(&generated.tokens).map_err(Failure::input)?;
            Ok(Outcome { prompt, prompt_tokens: tokens.clone(), generated, text })
        });
        let report = Report {
            outcomes: outcomes.collect::<Result<_, Failure>>()?,
            found,
            ranks: &ranks,
            times,
            is_single: arguments.prompts.is_single(),
            is_chat: arguments.chat,
        };
        if arguments.json { report.print_json() } else { report.print() }
    }
}

/// Returns the tokens of each prompt, which is a message in a chat.
fn encode(
    found: &TrainedModel,
    chat: Option<&Chat<'_>>,
    prompts: &[String],
) -> Result<Vec<Vec<u32>>, Failure> {
    let encode = |(index, text): (usize, &String)| {
        let tokens = match chat {
            Some(chat) => chat.prompt(text),
            None => encode_prompt(&found.codec, found.model.vocab_size(), found.bos_id, text)
                .map_err(Failure::input),
        };
        tokens.map_err(|failure| of_prompt(index, prompts.len(), failure))
    };
    prompts.iter().enumerate().map(encode).collect()
}

/// Generates all texts, and measures how long it takes.
fn generate(ranks: &mut Ranks, requests: &[Request<'_>]) -> Result<(Vec<Generated>, Times), Failure> {
    let start = Instant::now();
    let mut first = None;
    let mut each = |_, _| {
        first.get_or_insert_with(|| start.elapsed().as_secs_f64());
    };
    let texts = ranks.group.generate(requests, &mut each).map_err(|error| match error {
        RanksError::Request { index, source } => of_prompt(index, requests.len(), Failure::input(source)),
        error => failure(error),
    })?;
    let whole = start.elapsed().as_secs_f64();
    Ok((texts, Times { first: first.unwrap_or(whole), whole }))
}

/// Returns the failure of a prompt, with its number if there are several.
fn of_prompt(index: usize, prompts: usize, failure: Failure) -> Failure {
    if prompts == 1 {
        return failure;
    }
    Failure::input(format!("prompt {}: {}", index + 1, failure.text()))
}

impl GenerateArguments {
    /// Opens the model, and distributes it over ranks.
    fn open(&self, processes: &ProcessGroup) -> Result<(Arc<TrainedModel>, RankPlan), Failure> {
        let mut found = trained_model::open(&self.model, self.tokenizer.as_deref(), self.base.as_deref())?;
        if let Origin::Directory(directory) = &found.origin
            && processes.is_leader()
        {
            let unknown = unknown_note(directory)?;
            let weights = check_weights(directory, &found.model.parameters().map_err(Failure::input)?)?;
            unknown.iter().chain(&weights).for_each(|note| processes.note(note));
        }
        if let Some(template) = &self.chat_template {
            found.chat.chat_template = Some(ChatTemplate::of(template));
        }
        found.chat.chat_template_kwargs.extend(kwargs(&self.chat_template_kwargs)?);
        let plan = self.ranks.plan(&found, processes)?;
        Ok((Arc::new(found), plan))
    }

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
            longest: found.model.longest(),
            uses_cache: !self.no_cache,
        }
    }
}
