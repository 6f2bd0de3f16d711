//! Arguments that give a chat template further variables, as `data.chat_template_kwargs` does in a configuration.

use std::collections::BTreeMap;

use pipewright_planning::failure::Failure;
use pipewright_run::settings::data::json_of;
use serde_json::Value;

/// Returns the variables in arguments such as `enable_thinking=false`. A value is TOML, or a text without quotes.
pub(super) fn kwargs(written: &[String]) -> Result<BTreeMap<String, Value>, Failure> {
    written.iter().map(|written| variable(written)).collect()
}

fn variable(written: &str) -> Result<(String, Value), Failure> {
    let pair = written.split_once('=').filter(|(key, _)| !key.trim().is_empty()).and_then(|(key, text)| {
        let document = format!("value = {text}").parse::<toml::Table>();
        let parsed = document
            .ok()
            .filter(|document| document.len() == 1)
            .and_then(|mut document| document.remove("value"));
        Some((key.trim().to_owned(), json_of(parsed.unwrap_or_else(|| text.into()))?))
    });
    pair.ok_or_else(|| {
        Failure::input(format!(
            "--chat-template-kwargs {written}: not a variable and its value; write for example --chat-template-kwargs \
             enable_thinking=false"
        ))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_toml_or_texts() {
        let check = |written: &str, key: &str, value: Value| {
            let expected = BTreeMap::from([(key.to_owned(), value)]);
            assert_eq!(kwargs(&[written.to_owned()]).ok(), Some(expected), "{written}");
        };
        check("enable_thinking=false", "enable_thinking", json!(false));
        check(" budget = 12", "budget", json!(12));
        check("effort=low", "effort", json!("low"));
        check("effort=a = b", "effort", json!("a = b"));
        check("tags=[1, \"a\"]", "tags", json!([1, "a"]));
        check("deep={ a = 1.5 }", "deep", json!({"a": 1.5}));
        check("text=", "text", json!(""));
        for written in ["enable_thinking", "=3", "day=2024-07-26"] {
            assert!(kwargs(&[written.to_owned()]).is_err(), "{written}");
        }
    }
}
