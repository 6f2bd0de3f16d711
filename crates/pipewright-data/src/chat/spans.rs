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
use crate::chat::message::is_left_out;
use crate::chat::template::{ChatRenderer, RenderedChat};
use crate::error::DataError;
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
    pub(crate) fn marked(&self, renderer: &ChatRenderer, train_on: TrainOn) -> Result<MarkedText, DataError> {
        let Self { messages, tools, prompt } = *self;
        let left_out = self.left_out(train_on)?;
        let RenderedChat { text, generated } = renderer.render(messages, tools, false)?;
        let counted = match train_on {
            TrainOn::All => std::iter::once(0..text.len()).collect(),
            TrainOn::Assistant if renderer.has_generation() => {
                self.without(generated, &left_out, renderer, &text)?
            }
            TrainOn::Assistant => self.answers(renderer, &text, 0, &left_out)?,
            TrainOn::Completion if renderer.has_generation() => {
                let start = self.end_of_prompt(renderer, &text)?;
                let blocks = generated.into_iter().filter(|block| block.start >= start).collect();
                self.without(blocks, &left_out, renderer, &text)?
            }
            // A chat that ends with a question has no completion.
            TrainOn::Completion if !messages.last().is_some_and(is_answer) => Vec::new(),
            TrainOn::Completion => self.answers(renderer, &text, prompt, &left_out)?,
        };
        Ok(MarkedText { text, counted })
    }

    /// Returns the answers that say that their tokens do not count, in order.
    fn left_out(&self, train_on: TrainOn) -> Result<Vec<usize>, DataError> {
        let mut left_out = Vec::new();
        for (index, message) in self.messages.iter().enumerate() {
            let all_count = train_on == TrainOn::All;
            if !is_left_out(message, index + 1, all_count)? {
                continue;
            }
            if all_count {
                return Err(DataError::new(format!(
                    "message {} says that its tokens do not count, and `train_on = \"all\"` counts all tokens; remove its \
                     key, or write `train_on = \"assistant\"` in [data]",
                    index + 1
                )));
            }
            if is_answer(message) {
                left_out.push(index);
            }
        }
        Ok(left_out)
    }

    /// Returns the parts of the whole text that are the answers from message `first` on, without the beginning
    /// of an answer, which the prompt has already, and without the answers in `left_out`.
    fn answers(
        &self,
        renderer: &ChatRenderer,
        whole: &str,
        first: usize,
        left_out: &[usize],
    ) -> Result<Vec<Range<usize>>, DataError> {
        let chat = AnchoredChat::new(renderer, self.messages, self.tools, whole)?;
        let (mut parts, mut before): (Vec<Range<usize>>, Option<(usize, usize)>) = (Vec::new(), None);
        for index in (first..self.messages.len()).filter(|&index| is_answer(&self.messages[index])) {
            let end_before = before.filter(|(last, _)| last + 1 == index).map(|(_, end)| end);
            let part = chat.answer(index, end_before);
            before = part.as_ref().ok().map(|part| (index, part.end));
            if !left_out.contains(&index) {
                parts.push(part?);
            }
        }
        Ok(parts)
    }

    /// Returns what remains of `generation` blocks without the answers in `left_out`, with their beginnings, which may
    /// be in the blocks.
    fn without(
        &self,
        mut blocks: Vec<Range<usize>>,
        left_out: &[usize],
        renderer: &ChatRenderer,
        whole: &str,
    ) -> Result<Vec<Range<usize>>, DataError> {
        if left_out.is_empty() {
            return Ok(blocks);
        }
        let chat = AnchoredChat::new(renderer, self.messages, self.tools, whole)?;
        for &index in left_out {
            let message = chat.message(index)?;
            let remaining = |block: Range<usize>| {
                let before = block.start..block.end.min(message.start);
                let behind = block.start.max(message.end)..block.end;
                [before, behind].into_iter().filter(|part| !part.is_empty())
            };
            blocks = blocks.into_iter().flat_map(remaining).collect();
        }
        Ok(blocks)
    }

    /// Returns the place behind the prompt of a completion. Blocks may include the beginning of an answer.
    fn end_of_prompt(&self, renderer: &ChatRenderer, whole: &str) -> Result<usize, DataError> {
        if self.prompt == 0 {
            return Ok(0);
        }
        AnchoredChat::new(renderer, self.messages, self.tools, whole)?.end_of_prompt(self.prompt)
    }
}

/// Returns whether the assistant writes a message.
fn is_answer(message: &Value) -> bool {
    message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"))
}
