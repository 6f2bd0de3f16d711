//! The requests of the page's script.

use pipewright_schedule::generate::{Formula, Generator, catalogue as generators};
use pipewright_schedule::picture::page_colours;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::comparison::compare;
use crate::fields::FIELDS;
use crate::prediction::simulate;
use crate::setup::{Setup, Texts};

#[derive(Deserialize)]
#[serde(tag = "do", rename_all = "lowercase")]
enum Request {
    /// All schedules and controls, and the colours of the page.
    Catalogue,
    /// The prediction of a setup.
    Simulate { setup: Texts },
    /// The figures of several schedules at the size and the costs of a setup.
    Compare { setup: Texts, names: Vec<String> },
}

/// Answers a request. Both are JSON. The answer has the key `error`, with a sentence for the reader, if the request cannot
/// be read or a schedule does not have the requested size.
pub fn answer(request: &str) -> String {
    let answer =
        serde_json::from_str(request).map_err(|error| format!("the request cannot be read: {error}"));
    let answer = answer.and_then(|request| match request {
        Request::Catalogue => Ok(catalogue()),
        Request::Simulate { setup } => simulate(&Setup::read(&setup)?),
        Request::Compare { setup, names } => compare(&setup, &names),
    });
    answer.unwrap_or_else(|error| json!({ "error": error })).to_string()
}

fn catalogue() -> Value {
    let schedules: Vec<Value> = generators().iter().map(described).collect();
    json!({ "schedules": schedules, "fields": FIELDS, "colours": page_colours() })
}

fn described(generator: &Generator) -> Value {
    let fields: Vec<&str> =
        FIELDS.iter().filter(|field| field.is_of(generator)).map(|field| field.key).collect();
    let formulas = |formulas: &[Formula]| -> Vec<String> {
        let text = |formula: &Formula| {
            let bound = if formula.is_bound { "at most " } else { "" };
            let sizes =
                if formula.sizes.is_empty() { String::new() } else { format!(" for {}", formula.sizes) };
            format!("{bound}{}{sizes}", formula.value)
        };
        formulas.iter().map(text).collect()
    };
    let guide = &generator.guide;
    json!({
        "name": generator.name,
        "aliases": generator.aliases,
        "summary": generator.summary,
        "order": guide.order,
        "choice": guide.choice,
        "source": guide.source,
        "bubble": formulas(guide.bubble),
        "peak": formulas(guide.peak),
        "fields": fields,
    })
}
