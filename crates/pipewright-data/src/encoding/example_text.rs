//! Turns chats, completions and instructions into texts whose counted parts are known.

use minijinja::Value;

use crate::chat::error::{ChatProblem, TemplateError};
use crate::chat::spans::{Chat, MarkedText};
use crate::chat::template::ChatRenderer;
use crate::config::DataConfig;
use crate::encoding::record_content::{chat_of_instruction, get, messages_of, text_of};
use crate::record_error::RecordProblem;
use crate::settings::record::{RecordKind, TOOLS};
use crate::settings::train_on::TrainOn;

/// Makes the texts of records.
pub(crate) struct ExampleText<'a> {
    config: &'a DataConfig,
    /// The chat template, which is read for the first chat.
    renderer: Option<ChatRenderer>,
    /// The token that ends a text, which is read for the first completion; empty if there is none.
    end: Option<String>,
}

/// Why a record has no text.
pub(crate) enum NoText {
    Template(TemplateError),
    Record(RecordProblem),
}

impl From<TemplateError> for NoText {
    fn from(error: TemplateError) -> Self {
        Self::Template(error)
    }
}

impl<P: Into<RecordProblem>> From<P> for NoText {
    fn from(problem: P) -> Self {
        Self::Record(problem.into())
    }
}

impl<'a> ExampleText<'a> {
    pub(crate) fn new(config: &'a DataConfig) -> Self {
        Self { config, renderer: None, end: None }
    }

    /// Returns which tokens count in the loss of records of this kind.
    pub(crate) fn train_on(&self, kind: RecordKind) -> TrainOn {
        let default = match kind {
            RecordKind::Chat | RecordKind::Text => TrainOn::Assistant,
            RecordKind::Completion | RecordKind::Instruction => TrainOn::Completion,
        };
        self.config.train_on.unwrap_or(default)
    }

    /// Returns the text of a record, and whether it is a document, to which the tokenizer adds its special
    /// tokens. The template of a chat writes its own.
    pub(crate) fn of_record(
        &mut self,
        record: &Value,
        kind: RecordKind,
    ) -> Result<(MarkedText, bool), NoText> {
        let (config, keys) = (self.config, &self.config.keys);
        let (messages, prompt) = match kind {
            RecordKind::Text | RecordKind::Chat => {
                let messages = messages_of(&get(record, &keys.messages))?;
                let prompt = messages.len() - 1;
                (messages, prompt)
            }
            RecordKind::Instruction => (chat_of_instruction(record, keys)?, 1),
            RecordKind::Completion => {
                let (prompt, completion) = (get(record, &keys.prompt), get(record, &keys.completion));
                if prompt.as_str().is_some() {
                    return Ok((self.of_completion(record)?, true));
                }
                let mut messages = messages_of(&prompt)?;
                let count = messages.len();
                messages.extend(messages_of(&completion)?);
                (messages, count)
            }
        };
        let train_on = self.train_on(kind);
        let renderer = match &mut self.renderer {
            Some(renderer) => renderer,
            empty => empty.insert(ChatRenderer::of(config)?),
        };
        let tools = Some(get(record, TOOLS)).filter(|tools| !tools.is_undefined()).unwrap_or(Value::from(()));
        let chat = Chat { messages: &messages, tools: &tools, prompt };
        Ok((chat.marked(renderer, train_on)?, false))
    }

    /// Returns the text of a prompt and its completion, with the token of the tokenizer that ends a text.
    fn of_completion(&mut self, record: &Value) -> Result<MarkedText, NoText> {
        let keys = &self.config.keys;
        let (prompt, completion) = (text_of(record, &keys.prompt)?, text_of(record, &keys.completion)?);
        let start = match self.train_on(RecordKind::Completion) {
            TrainOn::All => 0,
            TrainOn::Assistant | TrainOn::Completion => prompt.len(),
        };
        let end = match &mut self.end {
            Some(end) => end,
            empty => empty.insert(ChatRenderer::end_token(self.config)?.unwrap_or_default()),
        };
        let end = if completion.ends_with(end.as_str()) { "" } else { end.as_str() };
        let text = format!("{prompt}{completion}{end}");
        let counted = std::iter::once(start..text.len()).collect();
        Ok(MarkedText { text, counted })
    }
}

/// Returns the problem of a record without a target that counts.
pub(crate) fn no_target(train_on: TrainOn) -> RecordProblem {
    ChatProblem::NoTarget { counts: train_on.in_words() }.into()
}
