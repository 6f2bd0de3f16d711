//! The chat templates that are known by name, for models without one of their own, and the choice among them.
//!
//! They write the formats that the models of these names document. `gpt_oss` and `qwen3` write tools and thoughts
//! too.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The known templates, by name.
pub(crate) const TEMPLATES: [(&str, &str); 9] = [
    ("chatml", include_str!("templates/chatml.jinja")),
    ("gemma", include_str!("templates/gemma.jinja")),
    ("gpt_oss", include_str!("templates/gpt_oss.jinja")),
    ("llama2", include_str!("templates/llama2.jinja")),
    ("llama3", include_str!("templates/llama3.jinja")),
    ("mistral", include_str!("templates/mistral.jinja")),
    ("phi3", include_str!("templates/phi3.jinja")),
    ("qwen3", include_str!("templates/qwen3.jinja")),
    ("zephyr", include_str!("templates/zephyr.jinja")),
];

/// A chat template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ChatTemplate {
    /// A template that is known by its name ([`ChatTemplate::NAMES`]).
    Named(String),
    /// A file with a template.
    File(PathBuf),
}

impl ChatTemplate {
    /// The names of the known templates.
    pub const NAMES: [&str; TEMPLATES.len()] = {
        let mut names = [""; TEMPLATES.len()];
        let mut index = 0;
        while index < names.len() {
            names[index] = TEMPLATES[index].0;
            index += 1;
        }
        names
    };

    /// Returns the template that a text means: a file if the text has a folder, an ending or a variable, and a name
    /// otherwise, also an unknown one.
    pub fn of(text: &str) -> Self {
        if text.contains(['/', '.', '~', '$']) {
            Self::File(text.into())
        } else {
            Self::Named(text.to_owned())
        }
    }
}
