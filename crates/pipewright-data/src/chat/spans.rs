//! Finds the parts of a chat that count in the loss.
//!
//! If the template has `generation` blocks, they are what the assistant writes; those of a completion begin
//! behind the text of the messages before it. Otherwise an answer begins where the messages before it and the
//! beginning of an answer end, and it ends where the messages up to it end. These places are found in the text
//! of the whole chat (see [`AnchoredChat`]), because a template may write the same message in another way if
//! other messages follow it.

use std::ops::Range;

use minijinja::Value;

use crate::chat::anchors::AnchoredChat;
use crate::chat::error::ChatProblem;
use crate::chat::template::{ChatRenderer, RenderedChat};
use crate::settings::train_on::TrainOn;

/// A text with the bytes of it that count in the loss.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MarkedText {
    pub(crate) text: String,
    /// The parts that count, in order.
    pub(crate) counted: Vec<Range<usize>>,
}

/// A chat, whose last messages may be the completion of a prompt.
pub(crate) struct Chat<'a> {
    pub(crate) messages: &'a [Value],
    pub(crate) tools: &'a Value,
    /// The number of messages before the completion.
    pub(crate) prompt: usize,
}

impl Chat<'_> {
    /// Renders the chat, and finds the parts that count.
    pub(crate) fn marked(
        &self,
        renderer: &ChatRenderer,
        train_on: TrainOn,
    ) -> Result<MarkedText, ChatProblem> {
        let Self { messages, tools, prompt } = *self;
        let RenderedChat { text, generated } = renderer.render(messages, tools, false)?;
        let counted = match train_on {
            TrainOn::All => std::iter::once(0..text.len()).collect(),
            TrainOn::Assistant if renderer.has_generation() => generated,
            TrainOn::Assistant => self.answers(renderer, &text, 0)?,
            TrainOn::Completion if renderer.has_generation() => {
                let start = self.end_of_prompt(renderer, &text)?;
                generated.into_iter().filter(|block| block.start >= start).collect()
            }
            // A chat that ends with a question has no completion.
            TrainOn::Completion if !messages.last().is_some_and(is_answer) => Vec::new(),
            TrainOn::Completion => self.answers(renderer, &text, prompt)?,
        };
        Ok(MarkedText { text, counted })
    }

    /// Returns the parts of the whole text that are the answers from message `first` on, without the beginning
    /// of an answer, which the prompt has already.
    fn answers(
        &self,
        renderer: &ChatRenderer,
        whole: &str,
        first: usize,
    ) -> Result<Vec<Range<usize>>, ChatProblem> {
        let chat = AnchoredChat::new(renderer, self.messages, self.tools, whole)?;
        let (mut parts, mut last): (Vec<Range<usize>>, Option<usize>) = (Vec::new(), None);
        for index in (first..self.messages.len()).filter(|&index| is_answer(&self.messages[index])) {
            let end_before =
                parts.last().map(|part| part.end).filter(|_| last.map(|last| last + 1) == Some(index));
            let start = if index == 0 { Some(chat.start_of_first()) } else { chat.start(index) };
            let start = start.or_else(|| chat.start_behind(index, end_before?));
            let start = start.ok_or(ChatProblem::PrefixesDisagree { messages: index })?;
            let is_last = index + 1 == self.messages.len();
            let end = if is_last { Some(whole.len()) } else { chat.end(index, start) };
            let end = end.ok_or(ChatProblem::PrefixesDisagree { messages: index + 1 })?;
            parts.push(start..end);
            last = Some(index);
        }
        Ok(parts)
    }

    /// Returns the place behind the prompt of a completion. Blocks may include the beginning of an answer.
    fn end_of_prompt(&self, renderer: &ChatRenderer, whole: &str) -> Result<usize, ChatProblem> {
        let count = self.prompt;
        if count == 0 {
            return Ok(0);
        }
        let chat = AnchoredChat::new(renderer, self.messages, self.tools, whole)?;
        let end = [false, true].into_iter().find_map(|prompt| chat.boundary(count, prompt));
        end.map(|end| end.at).ok_or(ChatProblem::PrefixesDisagree { messages: count })
    }
}

/// Returns whether the assistant writes a message.
fn is_answer(message: &Value) -> bool {
    message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"))
}
