//! Looks up the keys of records, which are JSON objects and rows of Parquet.

use minijinja::Value;
use minijinja::value::ValueKind;

use crate::chat::error::ChatProblem;
use crate::chat::message::normalized;
use crate::record_error::RecordProblem;
use crate::settings::record::{RecordKeys, RecordKind};

/// Returns what a record contains. If it has the keys of several kinds, the first of them wins: chats,
/// completions, instructions, texts.
pub(crate) fn kind_of(record: &Value, keys: &RecordKeys) -> Result<RecordKind, RecordProblem> {
    if record.kind() != ValueKind::Map {
        return Err(RecordProblem::NoRecord { found: record.kind().to_string() });
    }
    let has = |key: &str| !get(record, key).is_undefined();
    if has(&keys.messages) {
        Ok(RecordKind::Chat)
    } else if has(&keys.prompt) && has(&keys.completion) {
        Ok(RecordKind::Completion)
    } else if has(&keys.instruction) && has(&keys.output) {
        Ok(RecordKind::Instruction)
    } else if has(&keys.text) {
        Ok(RecordKind::Text)
    } else {
        let found = record.try_iter().into_iter().flatten().map(|key| key.to_string()).collect();
        Err(RecordProblem::NoKnownKey { found })
    }
}

/// Returns the value of a key; undefined if the record does not have it.
pub(crate) fn get(record: &Value, key: &str) -> Value {
    record.get_attr(key).unwrap_or_default()
}

/// Returns the text of a key.
pub(crate) fn text_of(record: &Value, key: &str) -> Result<String, RecordProblem> {
    let value = get(record, key);
    value
        .as_str()
        .map(str::to_owned)
        .ok_or_else(|| RecordProblem::NotText { key: key.to_owned(), found: type_of(&value) })
}

/// Returns the type of a value in words.
fn type_of(value: &Value) -> String {
    match value.kind() {
        // Only Parquet has them.
        ValueKind::Plain => "date, time or decimal".to_owned(),
        ValueKind::Bytes => "bytes that are not UTF-8".to_owned(),
        kind => kind.to_string(),
    }
}

/// Returns the messages in a list.
pub(crate) fn messages_of(list: &Value) -> Result<Vec<Value>, ChatProblem> {
    if list.kind() != ValueKind::Seq {
        return Err(ChatProblem::NotAList { found: type_of(list) });
    }
    let messages: Vec<Value> = list.try_iter().into_iter().flatten().collect();
    let is_message =
        |message: &Value| message.kind() == ValueKind::Map && get(message, "role").as_str().is_some();
    match messages.iter().position(|message| !is_message(message)) {
        Some(index) => Err(ChatProblem::NoMessage { message: index + 1 }),
        None if messages.is_empty() => Err(ChatProblem::Empty),
        None => messages.iter().enumerate().map(|(index, message)| normalized(message, index + 1)).collect(),
    }
}

/// Returns the chat of an instruction: the user's message, and the assistant's.
pub(crate) fn chat_of_instruction(record: &Value, keys: &RecordKeys) -> Result<Vec<Value>, RecordProblem> {
    let mut question = text_of(record, &keys.instruction)?;
    let input = get(record, &keys.input);
    if !input.is_undefined() && !input.is_none() {
        let input = text_of(record, &keys.input)?;
        if !input.is_empty() {
            question = format!("{question}\n\n{input}");
        }
    }
    let answer = text_of(record, &keys.output)?;
    let message = |role: &str, content: String| {
        Value::from_pairs([("role", Value::from(role)), ("content", Value::from(content))])
    };
    Ok(vec![message("user", question), message("assistant", answer)])
}
