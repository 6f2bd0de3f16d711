//! `pipewright generate --chat`: a model answers messages, which its chat template renders.

use std::io::{BufRead, IsTerminal, Read, Write};
use std::sync::mpsc::SyncSender;
use std::time::{SystemTime, UNIX_EPOCH};

use pipewright::train::data::{ChatMessage, ChatRenderer, ChatRole, DataConfig, Date};
use pipewright_models::generation::{Generated, Request};
use pipewright_planning::failure::Failure;
use pipewright_planning::output;
use pipewright_planning::screen::say;
use pipewright_run::training::trained_model::TrainedModel;
use pipewright_schedule::words::counted;

use crate::commands::generate::input::read_aside;
use crate::commands::generate::ranks::{Ranks, failure};

/// The largest size of a message on standard input, in bytes.
const LONGEST_MESSAGE: u64 = 1 << 20;
const SECONDS_OF_A_DAY: u64 = 86_400;

/// A chat with a model.
pub(super) struct Chat<'a> {
    found: &'a TrainedModel,
    renderer: ChatRenderer,
    /// The request without its prompt and the tokens that end an answer.
    request: Request<'a>,
    ends: Vec<u32>,
    messages: Vec<ChatMessage>,
}

/// The answer to a message.
struct Answer {
    generated: Generated,
    text: String,
}

impl<'a> Chat<'a> {
    /// Begins a chat with instructions for it.
    pub(super) fn new(
        found: &'a TrainedModel,
        request: Request<'a>,
        system: Option<&str>,
    ) -> Result<Self, Failure> {
        // A template may ask for the date. The date of the training data is the one that the model knows.
        let date = found.chat.date.or_else(today);
        let renderer =
            ChatRenderer::of(&DataConfig { date, ..found.chat.clone() }).map_err(Failure::input)?;
        let mut ends = request.ends.to_vec();
        ends.extend(end_token(found, &renderer));
        let system = system.map(|text| ChatMessage { role: ChatRole::System, content: text.to_owned() });
        Ok(Self { found, renderer, request, ends, messages: system.into_iter().collect() })
    }

    /// Returns the tokens before the answer to a message that begins the chat.
    pub(super) fn prompt(&self, message: &str) -> Result<Vec<u32>, Failure> {
        let message = ChatMessage { role: ChatRole::User, content: message.to_owned() };
        self.encode(&[&self.messages[..], &[message]].concat())
    }

    /// Returns the request for the answer after these tokens, which is shorter than asked for if the model
    /// has no positions for more.
    pub(super) fn request<'b>(&'b self, prompt: &'b [u32]) -> Request<'b> {
        let room = self.request.longest.map_or(usize::MAX, |longest| longest.saturating_sub(prompt.len()));
        Request { prompt, tokens: self.request.tokens.min(room), ends: &self.ends, ..self.request }
    }

    fn encode(&self, messages: &[ChatMessage]) -> Result<Vec<u32>, Failure> {
        let text = self.renderer.prompt(messages).map_err(Failure::input)?;
        let codec = &self.found.codec;
        let prompt = codec.encode(&text, self.found.model.vocab_size(), false).map_err(Failure::input)?;
        match self.request.longest {
            Some(longest) if longest <= prompt.len() => Err(Failure::input(format!(
                "the chat has {} tokens, and the model has positions for {longest} (`max_position_embeddings`): begin a new \
                 chat",
                prompt.len()
            ))),
            _ => Ok(prompt),
        }
    }

    /// Answers the next message of the chat. Passes each token of the answer to `each`.
    fn answer(
        &mut self,
        ranks: &mut Ranks,
        message: &str,
        each: &mut dyn FnMut(u32),
    ) -> Result<Answer, Failure> {
        self.messages.push(ChatMessage { role: ChatRole::User, content: message.to_owned() });
        let prompt = self.encode(&self.messages)?;
        let request = self.request(&prompt);
        let generated = ranks.group.answer(&request, each).map_err(failure)?;
        let text = self.found.codec.decode(&generated.tokens).map_err(Failure::input)?;
        self.messages.push(ChatMessage { role: ChatRole::Assistant, content: text.clone() });
        Ok(Answer { generated, text })
    }

    /// Answers each line of standard input until it ends.
    pub(super) fn converse(&mut self, ranks: &mut Ranks) -> Result<(), Failure> {
        let is_terminal = std::io::stdin().is_terminal();
        let messages = read_aside(send_messages)?;
        loop {
            if is_terminal {
                ask();
            }
            let Some(message) = ranks.next_of(&messages)? else { return Ok(()) };
            let message = message?;
            if message.trim().is_empty() {
                continue;
            }
            let mut shown = ShownText::default();
            let codec = &self.found.codec;
            let answer = self.answer(ranks, message.trim(), &mut |token| {
                shown.tokens.push(token);
                if let Ok(text) = codec.decode(&shown.tokens) {
                    shown.show(&text);
                }
            })?;
            shown.finish(&answer.text)?;
            if !answer.generated.is_ended {
                let count = answer.generated.tokens.len();
                let limit = if count < self.request.tokens {
                    "the model has no more positions"
                } else {
                    "see --tokens"
                };
                say(&format!("the answer is cut after {}: {limit}", counted(count, "token")));
            }
        }
    }
}

/// The part of an answer that is on standard output.
#[derive(Default)]
struct ShownText {
    tokens: Vec<u32>,
    /// The number of bytes of the answer's text.
    len: usize,
}

impl ShownText {
    /// Shows what is new in the text of the tokens so far. An incomplete character is shown with its last
    /// byte.
    fn show(&mut self, text: &str) {
        let new = text.get(self.len..).filter(|new| !new.ends_with(char::REPLACEMENT_CHARACTER));
        // An output that fails is reported at the end of the answer.
        if let Some(new) = new.filter(|new| output::write(None, new).is_ok()) {
            self.len += new.len();
        }
    }

    /// Shows the rest of the answer and ends its line.
    fn finish(&self, text: &str) -> Result<(), Failure> {
        output::write(None, &format!("{}\n", text.get(self.len..).unwrap_or_default()))
    }
}

/// Returns the token that ends an answer by the template, if the tokenizer has one for it. Models whose
/// settings lack it would write the next question too.
fn end_token(found: &TrainedModel, renderer: &ChatRenderer) -> Option<u32> {
    let end = renderer.end_of_answer()?;
    let codec = &found.codec;
    let first = *codec.encode(&end, found.model.vocab_size(), false).ok()?.first()?;
    // Only special tokens are left out of a text.
    let is_special = codec.decode(&[first]).ok()?.is_empty();
    let text = codec.decode_all(&[first]).ok()?;
    (is_special && !text.is_empty() && end.starts_with(&text)).then_some(first)
}

/// Returns the date in UTC.
fn today() -> Option<Date> {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    Date::days_after_1970(since_1970.as_secs() / SECONDS_OF_A_DAY)
}

/// Asks for a message on a terminal.
fn ask() {
    let mut screen = std::io::stderr().lock();
    // If the mark cannot be written, the next line is still read.
    let _ = screen.write_all(b"> ").and_then(|()| screen.flush());
}

/// Sends each line of standard input, and ends after one that cannot be read.
fn send_messages(messages: &SyncSender<Result<String, Failure>>) {
    let mut input = std::io::stdin().lock();
    while let Some(message) = read_message(&mut input).transpose() {
        let is_last = message.is_err();
        if messages.send(message).is_err() || is_last {
            return;
        }
    }
}

/// Reads a line of standard input; `None` at its end.
fn read_message(input: &mut impl BufRead) -> Result<Option<String>, Failure> {
    let mut line = Vec::new();
    let read = input.take(LONGEST_MESSAGE + 1).read_until(b'\n', &mut line);
    let refused = |reason: &str| Failure::input(format!("standard input: {reason}"));
    match read {
        Ok(0) => return Ok(None),
        Ok(_) if line.len() as u64 > LONGEST_MESSAGE && !line.ends_with(b"\n") => {
            return Err(refused("a line has more than 1 MiB; send shorter messages"));
        }
        Ok(_) => {}
        Err(error) => return Err(refused(&format!("cannot be read: {error}"))),
    }
    String::from_utf8(line).map(Some).map_err(|_| refused("a line is not UTF-8; send text"))
}
