//! Finds the parts of a chat that count in the loss.
//!
//! If the template has `generation` blocks, they are what the assistant writes. Otherwise the text of the
//! messages before an answer, with the beginning of the answer, is compared with the text of the messages up
//! to the answer: the rest is the answer. This needs texts of first messages that are the beginning of the
//! whole text, which is checked.

use std::ops::Range;

use minijinja::Value;

use crate::chat_error::ChatProblem;
use crate::chat_template::{ChatRenderer, RenderedChat};
use crate::train_on::TrainOn;

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
            TrainOn::Assistant => {
                let answers = (0..messages.len()).filter(|&index| is_answer(&messages[index]));
                answers
                    .map(|index| self.answer(renderer, &text, index..index + 1))
                    .collect::<Result<_, _>>()?
            }
            TrainOn::Completion if renderer.has_generation() => {
                let before = messages[..prompt].iter().filter(|message| is_answer(message)).count();
                generated.into_iter().skip(before).collect()
            }
            // A chat that ends with a question has no completion.
            TrainOn::Completion if !messages.last().is_some_and(is_answer) => Vec::new(),
            TrainOn::Completion => vec![self.answer(renderer, &text, prompt..messages.len())?],
        };
        Ok(MarkedText { text, counted })
    }

    /// Returns the part of the whole text that some messages are, without the beginning of an answer, which
    /// the prompt has already.
    fn answer(
        &self,
        renderer: &ChatRenderer,
        whole: &str,
        range: Range<usize>,
    ) -> Result<Range<usize>, ChatProblem> {
        let Self { messages, tools, .. } = *self;
        let render = |count: usize, prompt: bool| renderer.render(&messages[..count], tools, prompt);
        let end = if range.end == messages.len() {
            whole.len()
        } else {
            let text = render(range.end, false)?.text;
            if !whole.starts_with(&text) {
                return Err(ChatProblem::PrefixesDisagree { messages: range.end });
            }
            text.len()
        };
        let is_beginning = |text: &str| text.len() <= end && whole.starts_with(text);
        if range.start == 0 {
            return Ok(0..end);
        }
        // A template may have no beginning of an answer, or one that differs from an answer's.
        for prompt in [true, false] {
            let before = render(range.start, prompt)?.text;
            if is_beginning(&before) {
                return Ok(before.len()..end);
            }
        }
        Err(ChatProblem::PrefixesDisagree { messages: range.start })
    }
}

/// Returns whether the assistant writes a message.
fn is_answer(message: &Value) -> bool {
    message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"))
}
