//! Prepares messages as transformers does before a template renders them, and reads the keys of a message that say
//! whether its tokens count.

use minijinja::Value;
use minijinja::value::ValueKind;

use crate::chat::json_text;
use crate::error::DataError;

/// The names of a message's reasoning. Templates read the first, or `thinking`.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
/// The keys that say whether the tokens of a message count, as OpenAI's `weight` and Axolotl's `train` do.
const COUNTS: [&str; 3] = ["weight", "train", "training"];
/// The calls of a message.
const CALLS: &str = "tool_calls";

/// The names of `from` in the chats of ShareGPT, and the roles that they mean.
const SHARE_GPT: [(&str, &str); 7] = [
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("model", "assistant"),
    ("assistant", "assistant"),
    ("system", "system"),
    ("tool", "tool"),
];

/// Returns a message with `from` and `value` as one with `role` and `content`, and any other message as it is.
pub(crate) fn of_share_gpt(message: Value, number: usize) -> Result<Value, DataError> {
    let Some(mut pairs) = pairs_of(&message) else { return Ok(message) };
    if value_of(&mut pairs, "role").is_some() {
        return Ok(message);
    }
    let Some(from) = value_of(&mut pairs, "from").map(|from| from.clone()) else { return Ok(message) };
    let role = SHARE_GPT.iter().find(|(name, _)| from.as_str() == Some(name)).ok_or_else(|| {
        let names = SHARE_GPT.map(|(name, _)| name).join(", ");
        DataError::new(format!(
            "message {number} is from `{from}`, which is none of {names}; correct the record"
        ))
    })?;
    for (key, value) in &mut pairs {
        match key.as_str() {
            Some("from") => (*key, *value) = (Value::from("role"), Value::from(role.1)),
            Some("value") => *key = Value::from("content"),
            _ => {}
        }
    }
    Ok(Value::from_pairs(pairs))
}

/// Returns a message as templates read it: keys whose value is null are missing, its reasoning has the names that
/// templates ask for, and tool calls are tables.
pub(crate) fn normalized(message: &Value, number: usize) -> Result<Value, DataError> {
    let mut pairs = pairs_of(message).ok_or_else(|| no_message(number))?;
    pairs.retain(|(_, value)| !value.is_none());
    if let Some(calls) = value_of(&mut pairs, CALLS) {
        *calls = tables(calls, &format!("`{CALLS}` of message {number}"))?;
    }
    let reasoning = REASONING.iter().find_map(|name| value_of(&mut pairs, name).map(|value| value.clone()));
    if let Some(reasoning) = reasoning {
        if value_of(&mut pairs, "thinking").is_none() {
            pairs.insert(0, (Value::from("thinking"), reasoning.clone()));
        } else if let Some(at) = pairs.iter().position(|(key, _)| key.as_str() == Some("thinking")) {
            let thinking = pairs.remove(at);
            pairs.insert(0, thinking);
        }
        match value_of(&mut pairs, REASONING[0]) {
            Some(value) => *value = reasoning,
            None => pairs.push((Value::from(REASONING[0]), reasoning)),
        }
    }
    Ok(Value::from_pairs(pairs))
}

/// Returns the tools of a chat as templates read them: a list of tables, or null.
pub(crate) fn tools_of(tools: &Value) -> Result<Value, DataError> {
    let tools = decoded(tools).ok_or_else(|| not_tables("`tools`"))?;
    if tools.is_none() || tools.is_undefined() {
        return Ok(Value::from(()));
    }
    tables(&tools, "`tools`")
}

/// Returns the messages with the arguments of their tool calls as tables; `None` if no arguments are JSON in a
/// text.
pub(crate) fn with_decoded_arguments(messages: &[Value]) -> Result<Option<Vec<Value>>, DataError> {
    let mut is_changed = false;
    let mut all = messages.to_vec();
    for (index, message) in all.iter_mut().enumerate() {
        let Some(mut pairs) = pairs_of(message) else { continue };
        let Some(calls) = value_of(&mut pairs, CALLS) else { continue };
        let mut changed = Vec::new();
        for call in calls.try_iter().into_iter().flatten() {
            changed.push(match decoded_call(&call, index + 1)? {
                Some(decoded) => {
                    is_changed = true;
                    decoded
                }
                None => call,
            });
        }
        *calls = Value::from(changed);
        *message = Value::from_pairs(pairs);
    }
    Ok(is_changed.then_some(all))
}

/// Returns a tool call with decoded arguments, which are its own or its function's; `None` if they are not a text.
fn decoded_call(call: &Value, message: usize) -> Result<Option<Value>, DataError> {
    let Some(mut pairs) = pairs_of(call) else { return Ok(None) };
    let mut is_changed = false;
    if let Some(function) = value_of(&mut pairs, "function")
        && let Some(decoded) = decoded_call(function, message)?
    {
        *function = decoded;
        is_changed = true;
    }
    if let Some(arguments) = value_of(&mut pairs, "arguments")
        && !matches!(arguments.kind(), ValueKind::Map | ValueKind::None)
    {
        let table =
            decoded(arguments).filter(|table| arguments.as_str().is_some() && table.kind() == ValueKind::Map);
        *arguments = table.ok_or_else(|| {
            DataError::new(format!(
                "the arguments of a tool call of message {message} are neither a table nor a JSON text of one; correct the \
                 record"
            ))
        })?;
        is_changed = true;
    }
    Ok(is_changed.then(|| Value::from_pairs(pairs)))
}

/// Returns the value of a JSON text, or another value as it is; `None` if a text is not JSON.
fn decoded(value: &Value) -> Option<Value> {
    value.as_str().map_or_else(|| Some(value.clone()), |text| json_text::parse(text.as_bytes()).ok())
}

/// Returns a list of tables; it, and each of them, may be a JSON text.
fn tables(list: &Value, place: &str) -> Result<Value, DataError> {
    let refused = || not_tables(place);
    let list = decoded(list).filter(|list| list.kind() == ValueKind::Seq).ok_or_else(refused)?;
    let tables = list
        .try_iter()
        .into_iter()
        .flatten()
        .map(|table| decoded(&table).filter(|table| table.kind() == ValueKind::Map).ok_or_else(refused));
    tables.collect::<Result<Vec<Value>, _>>().map(Value::from)
}

fn not_tables(place: &str) -> DataError {
    DataError::new(format!("{place} is neither a list of tables nor a JSON text of one; correct the record"))
}

/// Returns the error of a message that is not a table with a role.
pub(crate) fn no_message(number: usize) -> DataError {
    DataError::new(format!(
        "message {number} is not a table with `role` and `content`, or `from` and `value`; correct the record"
    ))
}

/// Returns whether a message says that its tokens do not count. With `all_count`, a message that the assistant does not
/// write may say that they do.
///
/// # Errors
/// When the message has a key that may say so and that is not read, or a value that is neither yes nor no.
pub(crate) fn is_left_out(message: &Value, number: usize, all_count: bool) -> Result<bool, DataError> {
    let is_answer = message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"));
    let mut is_left_out = false;
    for (key, value) in pairs_of(message).unwrap_or_default() {
        let Some(key) = key.as_str().filter(|_| !value.is_none()) else { continue };
        if COUNTS.contains(&key) {
            let counts = flag(&value).ok_or_else(|| {
                DataError::new(format!(
                    "`{key}` of message {number} is neither 0 or false nor 1 or true; correct the record"
                ))
            })?;
            if counts && !is_answer && key != COUNTS[0] {
                if all_count {
                    return Ok(false);
                }
                return Err(DataError::new(format!(
                    "message {number} says with `{key}` that its tokens count, and only the assistant's answers can; remove \
                     the key, or write `train_on = \"all\"` in [data]"
                )));
            }
            is_left_out |= !counts;
        } else if looks_like_mask(key) {
            return Err(DataError::new(format!(
                "message {number} has the key `{key}`, which may say which of its tokens count and is not read; say it with \
                 `weight`, 0 or 1, for the whole message, or remove the key"
            )));
        }
    }
    Ok(is_left_out)
}

/// Returns whether a number or a boolean is 1 or 0.
fn flag(value: &Value) -> Option<bool> {
    if value.kind() == ValueKind::Bool {
        return Some(value.is_true());
    }
    let number = f64::try_from(value.clone()).ok().filter(|_| value.kind() == ValueKind::Number)?;
    if number == 0.0 { Some(false) } else { (number == 1.0).then_some(true) }
}

/// Returns whether a key may say which tokens count.
fn looks_like_mask(key: &str) -> bool {
    const WORDS: [&str; 9] =
        ["mask", "masked", "masking", "train", "training", "trainable", "weight", "weights", "loss"];
    let key = key.to_lowercase();
    key.split(|letter: char| !letter.is_alphanumeric()).any(|word| WORDS.contains(&word))
}

/// Returns the keys and values of a table.
fn pairs_of(table: &Value) -> Option<Vec<(Value, Value)>> {
    let object = table.as_object().filter(|_| table.kind() == ValueKind::Map)?;
    Some(object.try_iter_pairs()?.collect())
}

fn value_of<'p>(pairs: &'p mut [(Value, Value)], key: &str) -> Option<&'p mut Value> {
    pairs.iter_mut().find(|(name, _)| name.as_str() == Some(key)).map(|(_, value)| value)
}
