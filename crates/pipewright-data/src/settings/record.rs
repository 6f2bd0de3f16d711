//! The kinds of records in data files, and the names of their keys.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The names of the keys of records.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RecordKeys {
    /// The key of a text, which is a document.
    pub text: String,
    /// The key of a chat: a list of messages with `role` and `content`.
    pub messages: String,
    /// The other key of a chat, whose messages may have `from` and `value`, as ShareGPT's have.
    pub conversations: String,
    /// The key of the prompt of a completion.
    pub prompt: String,
    /// The key of a completion.
    pub completion: String,
    /// The key of an instruction, which becomes the user's message of a chat.
    pub instruction: String,
    /// The key of the input of an instruction, which may be missing.
    pub input: String,
    /// The key of the answer to an instruction.
    pub output: String,
    /// The key of a question, which becomes the user's message of a chat.
    pub question: String,
    /// The key of the answer to a question.
    pub answer: String,
    /// The key of the preferred completion of a prompt.
    pub chosen: String,
    /// The key of the other completion.
    pub rejected: String,
    /// The key of the label of a completion, which says whether it is desirable, or of a text or chat.
    pub label: String,
    /// The key of the margin between the rewards of a pair, which may be missing.
    pub margin: String,
}

impl Default for RecordKeys {
    fn default() -> Self {
        let [
            text,
            messages,
            conversations,
            prompt,
            completion,
            instruction,
            input,
            output,
            question,
            answer,
            chosen,
            rejected,
            label,
            margin,
        ] = Self::KEYS.map(str::to_owned);
        Self {
            text,
            messages,
            conversations,
            prompt,
            completion,
            instruction,
            input,
            output,
            question,
            answer,
            chosen,
            rejected,
            label,
            margin,
        }
    }
}

impl RecordKeys {
    /// The keys that can have other names.
    pub const KEYS: [&str; 14] = [
        "text",
        "messages",
        "conversations",
        "prompt",
        "completion",
        "instruction",
        "input",
        "output",
        "question",
        "answer",
        "chosen",
        "rejected",
        "label",
        "margin",
    ];

    /// Gives a key another name. Returns false if there is no such key.
    pub fn rename(&mut self, key: &str, name: &str) -> bool {
        let own = match key {
            "text" => &mut self.text,
            "messages" => &mut self.messages,
            "conversations" => &mut self.conversations,
            "prompt" => &mut self.prompt,
            "completion" => &mut self.completion,
            "instruction" => &mut self.instruction,
            "input" => &mut self.input,
            "output" => &mut self.output,
            "question" => &mut self.question,
            "answer" => &mut self.answer,
            "chosen" => &mut self.chosen,
            "rejected" => &mut self.rejected,
            "label" => &mut self.label,
            "margin" => &mut self.margin,
            _ => return false,
        };
        name.clone_into(own);
        true
    }

    /// Returns the names of all keys that are read.
    pub(crate) fn names(&self) -> [&str; 16] {
        [
            &self.text,
            &self.messages,
            &self.conversations,
            &self.prompt,
            &self.completion,
            &self.instruction,
            &self.input,
            &self.output,
            &self.question,
            &self.answer,
            &self.chosen,
            &self.rejected,
            &self.label,
            &self.margin,
            TOOLS,
            SYSTEM,
        ]
    }
}

/// The key of the tools of a chat, which templates may describe.
pub(crate) const TOOLS: &str = "tools";
/// The key of the instructions of a chat of ShareGPT, if they are not a message.
pub(crate) const SYSTEM: &str = "system";

/// The content of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// A text.
    Text,
    /// A chat.
    Chat,
    /// A prompt and its completion.
    Completion,
    /// An instruction and its output.
    Instruction,
    /// A question and its answer.
    Question,
    /// A prompt with a chosen and a rejected completion.
    Pair,
    /// A prompt and its completion, with a label.
    Labelled,
    /// A text or a chat, with the label of a class.
    Classified,
}

impl fmt::Display for RecordKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "texts",
            Self::Chat => "chats",
            Self::Completion => "prompts and completions",
            Self::Instruction => "instructions and outputs",
            Self::Question => "questions and answers",
            Self::Pair => "pairs of completions",
            Self::Labelled => "completions with labels",
            Self::Classified => "texts or chats with labels",
        })
    }
}
