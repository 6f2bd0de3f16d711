//! Turns chats, completions and instructions into texts whose counted parts are known.

use minijinja::Value;

use crate::chat::identity::TemplateIdentity;
use crate::chat::spans::{Chat, MarkedText};
use crate::chat::special_tokens::{END, SpecialTokens};
use crate::chat::template::ChatRenderer;
use crate::config::DataConfig;
use crate::encoding::record_content::{
    chat_of, chat_of_instruction, chat_of_question, completions_of_pair, get, has_chat, messages_of, text_of,
};
use crate::error::DataError;
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

impl<'a> ExampleText<'a> {
    pub(crate) fn new(config: &'a DataConfig) -> Self {
        Self { config, renderer: None, end: None }
    }

    /// Returns which tokens count in the loss of records of this kind.
    pub(crate) fn train_on(&self, kind: RecordKind) -> TrainOn {
        let default = match kind {
            RecordKind::Chat | RecordKind::Text => TrainOn::Assistant,
            RecordKind::Completion | RecordKind::Instruction | RecordKind::Question => TrainOn::Completion,
            RecordKind::Pair | RecordKind::Labelled => return TrainOn::Completion,
            RecordKind::Classified => return TrainOn::All,
        };
        self.config.train_on.unwrap_or(default)
    }

    /// Reads the chat template or the end of a text, if a record of this kind needs it and it is not read yet.
    pub(crate) fn prepare(&mut self, record: &Value, kind: RecordKind) -> Result<(), DataError> {
        if self.is_classified_text(record, kind) {
            return Ok(());
        }
        if self.is_plain_completion(record, kind) {
            if self.end.is_none() {
                self.end = Some(SpecialTokens::of(self.config)?.text(END).unwrap_or_default().to_owned());
            }
        } else if self.renderer.is_none() {
            self.renderer = Some(ChatRenderer::of(self.config)?);
        }
        Ok(())
    }

    /// Returns the identity of the chat template, if a record so far needed it.
    pub(crate) fn template_identity(&self) -> Option<&TemplateIdentity> {
        self.renderer.as_ref().map(ChatRenderer::identity)
    }

    /// Returns the text that ends completions, which is empty if there is none; `None` if there are no completions.
    pub(crate) fn end(&self) -> Option<&str> {
        self.end.as_deref()
    }

    /// Returns whether a record is a completion of texts, or two of them, and not of messages.
    fn is_plain_completion(&self, record: &Value, kind: RecordKind) -> bool {
        let keys = &self.config.keys;
        let text = match kind {
            RecordKind::Completion => get(record, &keys.prompt),
            RecordKind::Labelled => get(record, &keys.completion),
            RecordKind::Pair => get(record, &keys.chosen),
            _ => return false,
        };
        text.as_str().is_some()
    }

    /// Returns whether a record has a text with a label, and no chat.
    fn is_classified_text(&self, record: &Value, kind: RecordKind) -> bool {
        kind == RecordKind::Classified && !has_chat(record, &self.config.keys)
    }

    /// Returns the texts of a record for which it is prepared, like [`ExampleText::of_record`]: two of a pair, and one
    /// of other records.
    pub(crate) fn texts_of(
        &self,
        record: &Value,
        kind: RecordKind,
    ) -> Result<Vec<(MarkedText, bool)>, DataError> {
        let keys = &self.config.keys;
        match kind {
            RecordKind::Pair => {
                let completions = completions_of_pair(record, keys)?;
                completions.iter().map(|record| self.of_record(record, RecordKind::Labelled)).collect()
            }
            _ => Ok(vec![self.of_record(record, kind)?]),
        }
    }

    /// Returns the text of a record for which it is prepared, and whether it is a document, to which the
    /// tokenizer adds its special tokens. The template of a chat writes its own.
    fn of_record(&self, record: &Value, kind: RecordKind) -> Result<(MarkedText, bool), DataError> {
        let keys = &self.config.keys;
        if self.is_classified_text(record, kind) {
            return Ok((MarkedText { text: text_of(record, &keys.text)?, counted: Vec::new() }, true));
        }
        let Some(renderer) = self.renderer.as_ref().filter(|_| !self.is_plain_completion(record, kind))
        else {
            return Ok((self.of_completion(record, kind)?, true));
        };
        let (messages, prompt) = match kind {
            RecordKind::Text | RecordKind::Chat | RecordKind::Classified => {
                let messages = chat_of(record, keys)?;
                let prompt = messages.len() - 1;
                (messages, prompt)
            }
            RecordKind::Instruction => (chat_of_instruction(record, keys)?, 1),
            RecordKind::Question => (chat_of_question(record, keys)?, 1),
            RecordKind::Completion | RecordKind::Labelled | RecordKind::Pair => {
                let mut messages = messages_of(&get(record, &keys.prompt))?;
                let count = messages.len();
                messages.extend(messages_of(&get(record, &keys.completion))?);
                (messages, count)
            }
        };
        let tools = Some(get(record, TOOLS)).filter(|tools| !tools.is_undefined()).unwrap_or(Value::from(()));
        let chat = Chat { messages: &messages, tools: &tools, prompt };
        Ok((chat.marked(renderer, self.train_on(kind))?, false))
    }

    /// Returns the text of a prompt and its completion, with the token of the tokenizer that ends a text.
    fn of_completion(&self, record: &Value, kind: RecordKind) -> Result<MarkedText, DataError> {
        let keys = &self.config.keys;
        let (prompt, completion) = (text_of(record, &keys.prompt)?, text_of(record, &keys.completion)?);
        let start = match self.train_on(kind) {
            TrainOn::All => 0,
            TrainOn::Assistant | TrainOn::Completion => prompt.len(),
        };
        let end = self.end.as_deref().unwrap_or_default();
        let end = if completion.ends_with(end) { "" } else { end };
        let text = format!("{prompt}{completion}{end}");
        let counted = std::iter::once(start..text.len()).collect();
        Ok(MarkedText { text, counted })
    }
}
