//! A mistake in a document.

use std::error::Error;
use std::fmt;

use crate::place::Place;

/// One mistake: where it is, what is wrong, and what to do.
#[derive(Debug)]
pub struct Problem {
    /// The place where it was written.
    pub place: Place,
    /// The mistake.
    pub sentence: String,
    /// The advice, unless the sentence already says so.
    pub help: Option<String>,
    /// The error that the sentence is from, for callers that act on its type.
    pub cause: Option<Box<dyn Error + Send + Sync>>,
}

impl Problem {
    /// Returns the problem that a sentence describes.
    pub fn new(place: Place, sentence: impl Into<String>) -> Self {
        Self { place, sentence: sentence.into(), help: None, cause: None }
    }

    /// Returns the problem that an error describes.
    pub fn of(place: Place, cause: impl Error + Send + Sync + 'static) -> Self {
        let sentence = cause.to_string();
        Self { cause: Some(Box::new(cause)), ..Self::new(place, sentence) }
    }

    /// Returns the text with the advice.
    pub fn text(&self) -> String {
        let help = self.help.as_ref().map(|help| format!("; {help}"));
        format!("{self}{}", help.unwrap_or_default())
    }

    /// Returns the problem with advice.
    pub fn help(self, help: impl Into<String>) -> Self {
        Self { help: Some(help.into()), ..self }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.sentence)
    }
}

/// All mistakes of a document, at least one. Their text has a line for each, with its advice.
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<String> = self.0.iter().map(Problem::text).collect();
        f.write_str(&lines.join("\n"))
    }
}

impl Error for Problems {}

pipewright_schedule::message_as_debug!(Problems);
