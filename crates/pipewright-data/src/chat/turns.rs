//! Chats that a model continues: the text before its answer, and the text that ends an answer.

use minijinja::Value;

use crate::chat::template::ChatRenderer;
use crate::error::DataError;

/// A message of a chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatMessage {
    /// The writer of the message.
    pub role: ChatRole,
    /// The text.
    pub content: String,
}

/// The writer of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChatRole {
    /// The instructions for the whole chat.
    System,
    /// The person who asks.
    User,
    /// The model.
    Assistant,
}

impl ChatRole {
    /// Returns the name that templates have for it.
    fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

impl ChatRenderer {
    /// Returns the text of the messages with the beginning of an answer, which a model continues.
    ///
    /// # Errors
    /// When the template fails, for example because it does not allow these roles.
    pub fn prompt(&self, messages: &[ChatMessage]) -> Result<String, DataError> {
        Ok(self.render(&values(messages), &Value::from(()), true)?.text)
    }

    /// Returns the text behind an answer, such as `<|im_end|>`, without white space around it; `None` if there
    /// is none or the template fails.
    pub fn end_of_answer(&self) -> Option<String> {
        const ANSWER: &str = "Answer";
        let message = |role, content: &str| ChatMessage { role, content: content.to_owned() };
        let messages = [message(ChatRole::User, "Question"), message(ChatRole::Assistant, ANSWER)];
        let text = self.render(&values(&messages), &Value::from(()), false).ok()?.text;
        let (_, end) = text.rsplit_once(ANSWER)?;
        Some(end.trim().to_owned()).filter(|end| !end.is_empty())
    }
}

fn values(messages: &[ChatMessage]) -> Vec<Value> {
    let value = |message: &ChatMessage| {
        Value::from_pairs([
            ("role", Value::from(message.role.name())),
            ("content", Value::from(message.content.as_str())),
        ])
    };
    messages.iter().map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DataConfig;
    use crate::settings::chat_template::ChatTemplate;

    fn renderer(name: &str) -> ChatRenderer {
        let chat_template = Some(ChatTemplate::Named(name.to_owned()));
        ChatRenderer::of(&DataConfig { chat_template, ..DataConfig::default() }).expect("a template")
    }

    #[test]
    fn a_prompt_ends_where_the_answer_begins() {
        let message = |role, content: &str| ChatMessage { role, content: content.to_owned() };
        let chat = [message(ChatRole::System, "Be brief."), message(ChatRole::User, "Two plus two?")];
        assert_eq!(
            renderer("chatml").prompt(&chat).expect("a chat"),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nTwo plus two?<|im_end|>\n<|im_start|>assistant\n"
        );
    }

    #[test]
    fn an_answer_ends_with_a_text() {
        let end = |name| renderer(name).end_of_answer();
        assert_eq!(end("chatml").as_deref(), Some("<|im_end|>"));
        assert_eq!(end("phi3").as_deref(), Some("<|end|>"));
        assert_eq!(end("gemma").as_deref(), Some("<end_of_turn>"));
    }

    #[test]
    fn a_template_refuses_roles() {
        let system = ChatMessage { role: ChatRole::System, content: "Be brief.".to_owned() };
        let error = renderer("gemma").prompt(&[system]).expect_err("gemma has no system role").to_string();
        assert!(error.starts_with("the chat template fails"), "{error}");
    }
}
