//! The facts that the text of a chat depends on, apart from its messages, so that a file of rendered chats can be
//! compared with the settings of a run.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::settings::date::Date;

/// The function with which a template asks for the date.
pub(crate) const DATE_FUNCTION: &str = "strftime_now";

/// The identity of a chat template with what it may write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TemplateIdentity {
    /// The fingerprint of the template.
    template: String,
    /// The fingerprint of the special tokens of the tokenizer.
    tokens: String,
    /// The date, if the template asks for it.
    date: Option<Date>,
    /// The further variables of the template as JSON, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kwargs: Option<String>,
}

impl TemplateIdentity {
    /// Returns the identity of the template `source`.
    pub(crate) fn new(source: &str, tokens: &BTreeMap<String, String>, date: Option<Date>) -> Self {
        let tokens: String = tokens.iter().map(|(name, token)| format!("{name}\0{token}\0")).collect();
        Self {
            template: fingerprint(source),
            tokens: fingerprint(&tokens),
            date: date.filter(|_| source.contains(DATE_FUNCTION)),
            kwargs: None,
        }
    }

    /// Adds the further variables of the template.
    pub(crate) fn with_kwargs(self, kwargs: &BTreeMap<String, Json>) -> Self {
        let text = || Json::from_iter(kwargs.clone()).to_string();
        Self { kwargs: (!kwargs.is_empty()).then(text), ..self }
    }

    /// Returns the first setting in which another identity differs, with the values of both.
    pub(crate) fn difference(&self, other: &Self) -> Option<(&'static str, [String; 2])> {
        let date = |identity: &Self| identity.date.map_or("none".to_owned(), String::from);
        let kwargs = |identity: &Self| identity.kwargs.clone().unwrap_or("none".to_owned());
        let settings = [
            ("chat_template", [self.template.clone(), other.template.clone()]),
            ("tokenizer_config.json", [self.tokens.clone(), other.tokens.clone()]),
            ("date", [date(self), date(other)]),
            ("chat_template_kwargs", [kwargs(self), kwargs(other)]),
        ];
        settings.into_iter().find(|(_, [own, given])| own != given)
    }
}

/// Returns the beginning of the hash of a text.
fn fingerprint(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex()[..16].to_owned()
}
