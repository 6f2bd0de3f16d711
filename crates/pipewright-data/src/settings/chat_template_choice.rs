//! Which chat template is used.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::settings::named_templates::TEMPLATES;

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
