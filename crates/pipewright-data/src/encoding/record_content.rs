//! Looks up the keys of records, which are JSON objects and rows of Parquet.

use minijinja::Value;
use minijinja::value::ValueKind;

use crate::chat::message::{no_message, normalized, of_share_gpt};
use crate::config::DataConfig;
use crate::error::DataError;
use crate::settings::preference::PreferenceData;
use crate::settings::record::{RecordKeys, RecordKind, SYSTEM, TOOLS};

/// Returns what a record contains. If it has the keys of several kinds, the first of them wins: chats,
/// completions, instructions, questions, texts. A key whose value is null is missing, because a row of Parquet has all
/// columns.
pub(crate) fn kind_of(record: &Value, config: &DataConfig) -> Result<RecordKind, DataError> {
    let keys = &config.keys;
    if record.kind() != ValueKind::Map {
        return Err(DataError::new(format!(
            "the line is a {}; write a record such as {{\"text\": \"to be\"}}, or an array of token ids",
            record.kind()
        )));
    }
    let has = |key: &str| is_given(record, key);
    if let Some(preference) = config.preference {
        let (kind, completions, others) = match preference {
            PreferenceData::Pairs { .. } | PreferenceData::Scored => {
                (RecordKind::Pair, &[&keys.chosen, &keys.rejected][..], &[][..])
            }
            PreferenceData::Unpaired { .. } => {
                (RecordKind::Labelled, &[&keys.completion][..], &[&keys.prompt, &keys.label][..])
            }
        };
        if let Some(missing) = completions.iter().chain(others).find(|key| !has(key)) {
            return Err(DataError::new(format!(
                "the record has no `{missing}`, and the loss takes {kind}; correct the record, or name another key with \
                 `data.keys`"
            )));
        }
        completions.iter().try_for_each(|key| require_completion(key, &get(record, key)))?;
        return Ok(kind);
    }
    if !config.labels.is_empty() {
        let is_content = has_chat(record, keys) || has(&keys.text);
        return if is_content && has(&keys.label) {
            Ok(RecordKind::Classified)
        } else {
            Err(DataError::new(format!(
                "the record has no `{}`, and training on labels takes a text (`{}`) or a chat (`{}`) with a `{}`; correct the \
                 record, or name other keys with `data.keys`",
                if is_content { &keys.label } else { &keys.text },
                keys.text,
                keys.messages,
                keys.label
            )))
        };
    }
    if has_chat(record, keys) {
        Ok(RecordKind::Chat)
    } else if has(&keys.prompt) && has(&keys.completion) {
        Ok(RecordKind::Completion)
    } else if has(&keys.instruction) && has(&keys.output) {
        Ok(RecordKind::Instruction)
    } else if has(&keys.question) && has(&keys.answer) {
        Ok(RecordKind::Question)
    } else if has(&keys.text) {
        Ok(RecordKind::Text)
    } else if has(&keys.chosen) && has(&keys.rejected) {
        Err(DataError::new(
            "the record has `chosen` and `rejected`, which only preference training takes: write a `loss` in [preference]",
        ))
    } else if !get(record, &keys.text).is_undefined() {
        text_of(record, &keys.text).map(|_| RecordKind::Text)
    } else {
        let keys: Vec<String> =
            record.try_iter().into_iter().flatten().map(|key| format!("`{key}`")).collect();
        let found =
            if keys.is_empty() { "no keys".to_owned() } else { format!("the keys {}", keys.join(", ")) };
        Err(DataError::new(format!(
            "the record has {found}, and none of the keys that say what it contains has a value: `messages`, `conversations`, \
             `prompt` and `completion`, `instruction` and `output`, `question` and `answer`, or `text`; name other keys with \
             `data.keys`, such as `keys = {{ text = \"content\" }}`"
        )))
    }
}

/// Returns the value of a key; undefined if the record does not have it.
pub(crate) fn get(record: &Value, key: &str) -> Value {
    record.get_attr(key).unwrap_or_default()
}

/// Returns whether a record has a value for a key.
pub(crate) fn is_given(record: &Value, key: &str) -> bool {
    let value = get(record, key);
    !value.is_undefined() && !value.is_none()
}

/// Returns whether a record has a chat.
pub(crate) fn has_chat(record: &Value, keys: &RecordKeys) -> bool {
    is_given(record, &keys.messages) || is_given(record, &keys.conversations)
}

/// Returns the text of a key.
pub(crate) fn text_of(record: &Value, key: &str) -> Result<String, DataError> {
    let value = get(record, key);
    value.as_str().map(str::to_owned).ok_or_else(|| {
        let found = type_of(&value);
        DataError::new(format!(
            "`{key}` is not a text but a value of the type {found}; correct the record, or name another key with `data.keys`"
        ))
    })
}

/// Returns the label of a completion: whether it is desirable.
pub(crate) fn label_of(record: &Value, keys: &RecordKeys) -> Result<bool, DataError> {
    let label = get(record, &keys.label);
    if label.kind() == ValueKind::Bool {
        return Ok(label.is_true());
    }
    let (key, found) = (&keys.label, type_of(&label));
    Err(DataError::new(format!(
        "`{key}` is neither true nor false but a value of the type {found}; correct the record, or name another key with \
         `data.keys`"
    )))
}

/// Returns the number of the label of a text or a chat, which a record gives as such or by its name.
pub(crate) fn class_of(record: &Value, config: &DataConfig) -> Result<u32, DataError> {
    let (key, labels) = (&config.keys.label, &config.labels);
    let label = get(record, key);
    let number = match label.as_str() {
        Some(name) => labels.iter().position(|label| label == name),
        None => label.as_usize().filter(|number| *number < labels.len() && label.kind() == ValueKind::Number),
    };
    number.map(|number| number as u32).ok_or_else(|| {
        let named = labels.iter().take(8).map(|label| format!("`{label}`")).collect::<Vec<_>>().join(", ");
        let more = if labels.len() > 8 { ", ..." } else { "" };
        DataError::new(format!(
            "`{key}` is {label}, which is neither one of the labels {named}{more} nor a number below {}; correct the record, or \
             write the labels as `labels` in [data]",
            labels.len()
        ))
    })
}

/// Returns the margin between the rewards of a pair; 0 if the record does not say it.
pub(crate) fn margin_of(record: &Value, keys: &RecordKeys) -> Result<f32, DataError> {
    let margin = get(record, &keys.margin);
    if !is_given(record, &keys.margin) {
        return Ok(0.0);
    }
    let number = (margin.kind() == ValueKind::Number).then(|| f64::try_from(margin.clone()).ok()).flatten();
    number.map(|number| number as f32).filter(|number| number.is_finite()).ok_or_else(|| {
        let (key, found) = (&keys.margin, type_of(&margin));
        DataError::new(format!(
            "`{key}` is not a finite number but a value of the type {found}; correct the record"
        ))
    })
}

/// Returns a pair of completions as two records with a prompt and a completion. Without a prompt, the prompt is what
/// both completions begin with.
pub(crate) fn completions_of_pair(record: &Value, keys: &RecordKeys) -> Result<[Value; 2], DataError> {
    let [chosen, rejected] = [&keys.chosen, &keys.rejected].map(|key| get(record, key));
    let (mut prompt, mut completions) = (get(record, &keys.prompt), [chosen.clone(), rejected.clone()]);
    if !is_given(record, &keys.prompt) {
        let (common, rest) = match (chosen.as_str(), rejected.as_str()) {
            (Some(chosen), Some(rejected)) => {
                let shared = shared_text(chosen, rejected);
                let rest = [chosen, rejected].map(|text| Value::from(&text[shared..]));
                (Value::from(&chosen[..shared]), rest)
            }
            _ => {
                let [chosen, rejected] = [messages_of(&chosen)?, messages_of(&rejected)?];
                let shared = chosen.iter().zip(&rejected).take_while(|(one, other)| one == other).count();
                let shared = shared.min(chosen.len().min(rejected.len()) - 1);
                let rest = [&chosen, &rejected].map(|list| Value::from(list[shared..].to_vec()));
                (Value::from(chosen[..shared].to_vec()), rest)
            }
        };
        (prompt, completions) = (common, rest);
    }
    let tools = get(record, TOOLS);
    let record = |completion| {
        let pairs = [(keys.prompt.as_str(), prompt.clone()), (keys.completion.as_str(), completion)];
        let tools = Some((TOOLS, tools.clone())).filter(|(_, tools)| !tools.is_undefined());
        Value::from_pairs(pairs.into_iter().chain(tools))
    };
    Ok(completions.map(record))
}

/// Refuses a completion that is empty, or neither a text nor a list.
fn require_completion(key: &str, completion: &Value) -> Result<(), DataError> {
    let problem = match completion.kind() {
        ValueKind::String if !completion.as_str().is_some_and(str::is_empty) => return Ok(()),
        ValueKind::Seq => return Ok(()),
        ValueKind::String => "is empty".to_owned(),
        _ => format!(
            "is neither a text nor a list of messages but a value of the type {}",
            type_of(completion)
        ),
    };
    Err(DataError::new(format!("`{key}` {problem}; correct or remove the record")))
}

/// Returns the bytes of the text with which both texts begin, without a space at its end. Some of each text is left.
fn shared_text(one: &str, other: &str) -> usize {
    let places = one.char_indices().zip(other.chars());
    let mut end = 0;
    for ((place, letter), second) in places {
        end = place;
        if letter != second {
            return one[..place].strip_suffix(' ').map_or(place, str::len);
        }
    }
    end
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

/// Returns the messages of a chat.
pub(crate) fn chat_of(record: &Value, keys: &RecordKeys) -> Result<Vec<Value>, DataError> {
    let (list, conversations) = (get(record, &keys.messages), get(record, &keys.conversations));
    if !is_given(record, &keys.conversations) || list.kind() == ValueKind::Seq {
        return messages_of(&list);
    }
    let mut messages = messages_of(&conversations)?;
    let has_system = get(&messages[0], "role").as_str() == Some(SYSTEM);
    let system = get(record, SYSTEM);
    if let Some(text) = system.as_str().filter(|text| !text.is_empty() && !has_system) {
        messages.insert(0, message(SYSTEM, text));
    }
    Ok(messages)
}

/// Returns the messages in a list, which has at least one.
pub(crate) fn messages_of(list: &Value) -> Result<Vec<Value>, DataError> {
    if list.kind() != ValueKind::Seq {
        return Err(DataError::new(format!(
            "the chat is a {} and not a list of messages with `role` and `content`; correct the record",
            type_of(list)
        )));
    }
    let messages = (1..).zip(list.try_iter().into_iter().flatten());
    let messages: Vec<Value> =
        messages.map(|(number, message)| of_share_gpt(message, number)).collect::<Result<_, _>>()?;
    let is_message =
        |message: &Value| message.kind() == ValueKind::Map && get(message, "role").as_str().is_some();
    match messages.iter().position(|message| !is_message(message)) {
        Some(index) => Err(no_message(index + 1)),
        None if messages.is_empty() => Err(DataError::new("the chat has no messages; remove the record")),
        None => messages.iter().enumerate().map(|(index, message)| normalized(message, index + 1)).collect(),
    }
}

/// Returns the chat of an instruction: the user's message, and the assistant's.
pub(crate) fn chat_of_instruction(record: &Value, keys: &RecordKeys) -> Result<Vec<Value>, DataError> {
    let mut question = text_of(record, &keys.instruction)?;
    if is_given(record, &keys.input) {
        let input = text_of(record, &keys.input)?;
        if !input.is_empty() {
            question = format!("{question}\n\n{input}");
        }
    }
    Ok(vec![message("user", &question), message("assistant", &text_of(record, &keys.output)?)])
}

/// Returns the chat of a question: the user's message, and the assistant's.
pub(crate) fn chat_of_question(record: &Value, keys: &RecordKeys) -> Result<Vec<Value>, DataError> {
    let (question, answer) = (text_of(record, &keys.question)?, text_of(record, &keys.answer)?);
    Ok(vec![message("user", &question), message("assistant", &answer)])
}

fn message(role: &str, content: &str) -> Value {
    Value::from_pairs([("role", role), ("content", content)])
}
