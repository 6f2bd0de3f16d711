//! Finds the parts of a chat that count in the loss.
//!
//! If the template has `generation` blocks, they are what the assistant writes; those of a completion begin
//! behind the text of the messages before it. Otherwise the text of the messages before an answer, with the
//! beginning of the answer, is compared with the text of the messages up to the answer: the rest is the
//! answer. This needs texts of first messages that are the beginning of the whole text, which is checked.

use std::ops::Range;

use minijinja::Value;

use crate::chat::error::ChatProblem;
use crate::chat::message::is_left_out;
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
            TrainOn::Assistant => {
                let answers = (0..messages.len()).filter(|&index| is_answer(&messages[index]));
                answers
                    .map(|index| self.answer(renderer, &text, index..index + 1))
                    .collect::<Result<_, _>>()?
            }
            TrainOn::Completion if renderer.has_generation() => {
                // Blocks may include the beginning of an answer.
                let start = self.end_of(renderer, &text, prompt, &[false, true])?;
                generated.into_iter().filter(|block| block.start >= start).collect()
            }
            // A chat that ends with a question has no completion.
            TrainOn::Completion if !messages.last().is_some_and(is_answer) => Vec::new(),
            TrainOn::Completion => vec![self.answer(renderer, &text, prompt..messages.len())?],
        };
        let counted = self.without_left_out(renderer, &text, counted, train_on)?;
        Ok(MarkedText { text, counted })
    }

    /// Removes the messages that say that their tokens do not count.
    fn without_left_out(
        &self,
        renderer: &ChatRenderer,
        text: &str,
        mut counted: Vec<Range<usize>>,
        train_on: TrainOn,
    ) -> Result<Vec<Range<usize>>, ChatProblem> {
        let is_block = renderer.has_generation();
        for (index, message) in self.messages.iter().enumerate() {
            if !is_left_out(message, index + 1)? {
                continue;
            }
            if train_on == TrainOn::All {
                return Err(ChatProblem::AllCount { message: index + 1 });
            }
            if !is_answer(message) {
                continue;
            }
            let left_out = self.answer(renderer, text, index..index + 1)?;
            counted = counted.into_iter().flat_map(|part| without(part, &left_out, is_block)).collect();
        }
        Ok(counted)
    }

    /// Returns the part of the whole text that some messages are, without the beginning of an answer, which
    /// the prompt has already.
    fn answer(
        &self,
        renderer: &ChatRenderer,
        whole: &str,
        range: Range<usize>,
    ) -> Result<Range<usize>, ChatProblem> {
        let end = if range.end == self.messages.len() {
            whole.len()
        } else {
            self.end_of(renderer, whole, range.end, &[false])?
        };
        // A template may have no beginning of an answer, or one that differs from an answer's.
        let start = self.end_of(renderer, &whole[..end], range.start, &[true, false])?;
        Ok(start..end)
    }

    /// Returns the first byte of `whole` behind the text of the first `count` messages. `prompts` says in
    /// which order their texts with and without the beginning of an answer are tried.
    fn end_of(
        &self,
        renderer: &ChatRenderer,
        whole: &str,
        count: usize,
        prompts: &[bool],
    ) -> Result<usize, ChatProblem> {
        if count == 0 {
            return Ok(0);
        }
        for &prompt in prompts {
            let before = renderer.render(&self.messages[..count], self.tools, prompt)?.text;
            if whole.starts_with(&before) {
                return Ok(before.len());
            }
        }
        Err(ChatProblem::PrefixesDisagree { messages: count })
    }
}

/// Returns what is left of a part of the text before and behind another one. Of a `generation` block that begins
/// before an answer, such as with the name of its writer, nothing is left before it.
fn without(part: Range<usize>, left_out: &Range<usize>, is_block: bool) -> Vec<Range<usize>> {
    if part.end <= left_out.start || part.start >= left_out.end {
        return vec![part];
    }
    let before = part.start..if is_block { part.start } else { left_out.start };
    [before, left_out.end..part.end].into_iter().filter(|part| !part.is_empty()).collect()
}

/// Returns whether the assistant writes a message.
fn is_answer(message: &Value) -> bool {
    message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"))
}
