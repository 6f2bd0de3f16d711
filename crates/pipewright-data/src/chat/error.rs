//! The errors of chats and their templates.

use std::path::PathBuf;

use thiserror::Error;

use crate::settings::named_templates::names;

/// Why a chat template cannot be used.
#[derive(Error)]
pub enum TemplateError {
    /// There is no template.
    #[error(
        "there is no chat template next to the tokenizer: name a file or one of {}, as `chat_template` in [data], or with \
         `generate --chat-template`",
        names()
    )]
    Missing,
    /// No template has this name.
    #[error("there is no chat template named {name:?}; name one of {}, or a file", names())]
    Unknown {
        /// The name.
        name: String,
    },
    /// A file cannot be read.
    #[error("{}: cannot be read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The settings of a tokenizer are not JSON.
    #[error("{}: not JSON", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's reason.
        source: serde_json::Error,
    },
    /// The template is malformed.
    #[error("the chat template {template} is malformed{}: {reason}; correct it, or name another as `chat_template` in [data], or with `generate --chat-template`", in_line(*line))]
    Malformed {
        /// The template: its name or file.
        template: String,
        /// The line, counted from 1.
        line: Option<usize>,
        /// The parser's reason.
        reason: String,
    },
}

/// Why a chat cannot be rendered.
#[derive(Error)]
pub enum ChatProblem {
    /// The template fails.
    #[error("the chat template fails{}: {reason}", in_line(*line))]
    Template {
        /// The line, counted from 1.
        line: Option<usize>,
        /// The message of the template.
        reason: String,
    },
    /// The text has noncharacters of Unicode, which mark parts of it.
    #[error(
        "the chat contains a noncharacter from U+FDD0 to U+FDD4, or `generation` blocks of the template are nested; remove them"
    )]
    Marks,
    /// The place behind the first messages is not known.
    #[error(
        "where the text of the first {messages} messages ends cannot be found in the text of the chat, so the assistant's part \
         is not known: write `train_on = \"completion\"` or \"all\" in [data], or name a template with `generation` blocks"
    )]
    PrefixesDisagree {
        /// The number of messages.
        messages: usize,
    },
    /// The messages are not a list of tables with roles.
    #[error("message {message} is not a table with `role` and `content`; correct the record")]
    NoMessage {
        /// The message, counted from 1.
        message: usize,
    },
    /// The messages are not a list.
    #[error("the chat is a {found} and not a list of messages with `role` and `content`; correct the record")]
    NotAList {
        /// The type of the value.
        found: String,
    },
    /// There are no messages.
    #[error("the chat has no messages; remove the record")]
    Empty,
    /// Tools or tool calls are not a list of tables.
    #[error("{place} is neither a list of tables nor a JSON text of one; correct the record")]
    NotTables {
        /// The key with its place.
        place: String,
    },
    /// The arguments of a tool call are not a table.
    #[error(
        "the arguments of a tool call of message {message} are neither a table nor a JSON text of one; correct the record"
    )]
    NoArguments {
        /// The message, counted from 1.
        message: usize,
    },
    /// The value that says whether a message counts is neither yes nor no.
    #[error("`{key}` of message {message} is neither 0 or false nor 1 or true; correct the record")]
    Weight {
        /// The message, counted from 1.
        message: usize,
        /// The key.
        key: String,
    },
    /// A message that the assistant does not write is to count.
    #[error(
        "message {message} says with `{key}` that its tokens count, and only the assistant's answers can; remove the key, or \
         write `train_on = \"all\"` in [data]"
    )]
    CountsNoAnswer {
        /// The message, counted from 1.
        message: usize,
        /// The key.
        key: String,
    },
    /// A message has a key that may say which tokens count.
    #[error(
        "message {message} has the key `{key}`, which may say which of its tokens count and is not read; say it with \
         `weight`, 0 or 1, for the whole message, or remove the key"
    )]
    UnknownMask {
        /// The message, counted from 1.
        message: usize,
        /// The key.
        key: String,
    },
    /// A message does not count, and all tokens are to count.
    #[error(
        "message {message} says that its tokens do not count, and `train_on = \"all\"` counts all tokens; remove its key, or \
         write `train_on = \"assistant\"` in [data]"
    )]
    AllCount {
        /// The message, counted from 1.
        message: usize,
    },
    /// A template does more than a limit allows.
    #[error(
        "the chat template takes more than {steps} steps for a chat of {bytes} bytes, or writes too much text: it does not \
         end, or its loops are inside each other; correct it, or name another as `chat_template` in [data]"
    )]
    Exhausted {
        /// The limit.
        steps: u64,
        /// The size of the chat.
        bytes: u64,
    },
    /// No token of the record counts in the loss.
    #[error(
        "no token of the record counts in the loss ({counts}); remove the record, or write `train_on = \"all\"` in [data]"
    )]
    NoTarget {
        /// The tokens that count.
        counts: &'static str,
    },
}

pipewright_schedule::message_as_debug!(TemplateError, ChatProblem);

fn in_line(line: Option<usize>) -> String {
    line.map_or_else(String::new, |line| format!(" in line {line}"))
}
