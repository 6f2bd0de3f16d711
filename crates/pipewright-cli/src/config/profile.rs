//! Reads a profile: strict TOML, and every mistake with its place.
//!
//! The keys are checked here, the values by the profile itself. A key with another unit, such as `forward_ms`, is
//! reported with the right one.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use pipewright_schedule::profile::{DeviceProfile, LayerProfile, LinkProfile, Profile, ProfilePart};
use serde::Deserialize;
use toml::de::{DeTable, DeValue, ValueDeserializer};
use toml::{Spanned, Value};

use crate::config::keys::nearest;
use crate::config::place::{Place, Source};
use crate::config::problem::{ConfigError, Problem, ProblemKind};
use crate::config::settings::read_source;

/// The sections of a profile with their keys. The first has the keys outside of any section.
const SECTIONS: [(&str, &[&str]); 4] = [
    ("the profile", &["rows", "device", "link", "layers"]),
    ("[device]", &["name", "memory_bytes"]),
    ("[link]", &["latency_s", "bytes_per_s"]),
    (
        "[[layers]]",
        &[
            "kind",
            "count",
            "forward_s",
            "input_backward_s",
            "weight_backward_s",
            "recompute_s",
            "optimizer_s",
            "output_bytes",
            "parameter_bytes",
            "activation_bytes",
            "weight_activation_bytes",
        ],
    ),
];

/// Units that people write instead of seconds and bytes.
const OTHER_UNITS: [&str; 20] = [
    "ns", "us", "ms", "sec", "secs", "seconds", "min", "kb", "mb", "gb", "kib", "mib", "gib", "k", "m", "g",
    "bits", "gbps", "gbit", "b",
];

/// The keys of a section that were read, with their places.
struct Keys<'a> {
    section: usize,
    place: Place,
    entries: Vec<(&'static str, Place, Value)>,
    problems: &'a mut Vec<Problem>,
}

/// Reads the profile in `file`.
///
/// # Errors
/// Fails if the file cannot be read, or with every mistake in it.
pub(crate) fn read(file: &Path) -> Result<Profile, ConfigError> {
    let mut problems = Vec::new();
    let profile = parse(read_source(file)?, &mut problems);
    match profile {
        Some(profile) if problems.is_empty() => Ok(profile),
        _ => Err(ConfigError::Problems(problems)),
    }
}

fn parse(source: Source, problems: &mut Vec<Problem>) -> Option<Profile> {
    let source = Arc::new(source);
    let place = |span: Range<usize>| Place::File { source: Arc::clone(&source), span };
    let (table, errors) = DeTable::parse_recoverable(&source.text);
    if !errors.is_empty() {
        problems.extend(errors.iter().map(|error| Problem {
            place: place(error.span().unwrap_or(0..0)),
            kind: ProblemKind::Syntax { message: error.message().to_owned() },
        }));
        return None;
    }
    let mut places: Vec<(ProfilePart, &'static str, Place)> = Vec::new();
    let (mut device, mut link) = (None, None);
    let mut layers = Vec::new();
    let mut top = DeTable::new();
    for (key, value) in table.into_inner() {
        let (key_place, value_place) = (place(key.span()), place(value.span()));
        match (key.get_ref().as_ref(), value.into_inner()) {
            ("device", DeValue::Table(keys)) => {
                let mut keys = Keys::of(1, key_place, keys, &place, problems);
                device = Some(DeviceProfile {
                    name: keys.text("name"),
                    memory_bytes: keys.optional("memory_bytes"),
                });
                keys.keep(ProfilePart::Device, &mut places);
            }
            ("link", DeValue::Table(keys)) => {
                let mut keys = Keys::of(2, key_place, keys, &place, problems);
                let [latency_s, bytes_per_s] = ["latency_s", "bytes_per_s"].map(|key| keys.number(key));
                link = Some(LinkProfile { latency_s, bytes_per_s });
                keys.keep(ProfilePart::Link, &mut places);
            }
            ("layers", DeValue::Array(items)) => {
                for (index, item) in items.into_iter().enumerate() {
                    let item_place = place(item.span());
                    if let DeValue::Table(keys) = item.into_inner() {
                        let mut keys = Keys::of(3, item_place, keys, &place, problems);
                        layers.push(layer(&mut keys));
                        keys.keep(ProfilePart::Layer(index), &mut places);
                    } else {
                        let kind = ProblemKind::WrongType {
                            key: "layers",
                            expected: "[[layers]] sections",
                            found: "a list",
                        };
                        problems.push(Problem { place: item_place, kind });
                    }
                }
            }
            ("device" | "link" | "layers", _) => {
                let kind = ProblemKind::WrongType { key: "layers", expected: "a section", found: "a value" };
                problems.push(Problem { place: value_place, kind });
            }
            (_, value) => {
                let span = value_span(&value_place);
                top.insert(key, Spanned::new(span, value));
            }
        }
    }
    let whole = place(0..0);
    let mut keys = Keys::of(0, whole.clone(), top, &place, problems);
    let rows = keys.optional("rows").unwrap_or(1);
    keys.keep(ProfilePart::Top, &mut places);
    let missing =
        |key| Problem { place: whole.clone(), kind: ProblemKind::Missing { key, section: SECTIONS[0].0 } };
    if link.is_none() {
        problems.push(missing("link"));
    }
    if layers.is_empty() {
        problems.push(missing("layers"));
    }
    if !problems.is_empty() {
        return None;
    }
    let profile = Profile { rows, device, link: link?, layers };
    for problem in profile.problems() {
        let known = places.iter().find(|(part, key, _)| (*part, *key) == (problem.part, problem.key));
        let place = known.map_or(whole.clone(), |(_, _, place)| place.clone());
        let kind =
            ProblemKind::OutOfRange { key: problem.key, value: problem.value, range: problem.expected };
        problems.push(Problem { place, kind });
    }
    Some(profile)
}

fn value_span(place: &Place) -> Range<usize> {
    match place {
        Place::File { span, .. } => span.clone(),
        Place::Set { .. } | Place::Default => 0..0,
    }
}

fn layer(keys: &mut Keys<'_>) -> LayerProfile {
    let kind = keys.text("kind");
    if kind.is_empty() {
        keys.miss("kind");
    }
    LayerProfile {
        kind,
        count: keys.optional("count").unwrap_or(1),
        forward_s: keys.number("forward_s"),
        input_backward_s: keys.number("input_backward_s"),
        weight_backward_s: keys.number("weight_backward_s"),
        recompute_s: keys.optional_number("recompute_s"),
        optimizer_s: keys.optional_number("optimizer_s").unwrap_or(0.0),
        output_bytes: keys.whole("output_bytes"),
        parameter_bytes: keys.whole("parameter_bytes"),
        activation_bytes: keys.whole("activation_bytes"),
        weight_activation_bytes: keys.optional("weight_activation_bytes"),
    }
}

impl<'a> Keys<'a> {
    fn of(
        section: usize,
        section_place: Place,
        keys: DeTable<'_>,
        place: &impl Fn(Range<usize>) -> Place,
        problems: &'a mut Vec<Problem>,
    ) -> Self {
        let (name, known) = SECTIONS[section];
        let mut entries = Vec::new();
        for (key, value) in keys {
            let (key_place, value_place) = (place(key.span()), place(value.span()));
            let written = key.get_ref().to_string();
            let Some(&known_key) = known.iter().find(|known| **known == written) else {
                problems.push(Problem { place: key_place, kind: unknown(written, name, known) });
                continue;
            };
            match Value::deserialize(ValueDeserializer::from(value)) {
                Ok(value) => entries.push((known_key, value_place, value)),
                Err(error) => {
                    let message = error.message().to_owned();
                    let kind = ProblemKind::Unrepresentable { key: written, message };
                    problems.push(Problem { place: value_place, kind });
                }
            }
        }
        Self { section, place: section_place, entries, problems }
    }

    fn entry(&self, key: &str) -> Option<(Place, Value)> {
        let found = self.entries.iter().find(|(known, _, _)| *known == key);
        found.map(|(_, place, value)| (place.clone(), value.clone()))
    }

    fn miss(&mut self, key: &'static str) {
        let kind = ProblemKind::Missing { key, section: SECTIONS[self.section].0 };
        // A key that was written wrongly is reported as such.
        if !self
            .problems
            .iter()
            .any(|problem| matches!(&problem.kind, ProblemKind::Unit { meant, .. } if *meant == key))
        {
            self.problems.push(Problem { place: self.place.clone(), kind });
        }
    }

    fn wrong(&mut self, key: &'static str, place: Place, expected: &'static str, value: &Value) {
        let found = match value {
            Value::String(_) => "a text",
            Value::Integer(_) => "a whole number",
            Value::Float(_) => "a number with a fraction",
            Value::Boolean(_) => "true or false",
            Value::Datetime(_) => "a date",
            Value::Array(_) => "a list",
            Value::Table(_) => "a table",
        };
        self.problems.push(Problem { place, kind: ProblemKind::WrongType { key, expected, found } });
    }

    fn text(&mut self, key: &'static str) -> String {
        match self.entry(key) {
            Some((_, Value::String(text))) => text,
            Some((place, value)) => {
                self.wrong(key, place, "a text in quotes", &value);
                "?".to_owned()
            }
            None => String::new(),
        }
    }

    fn optional_number(&mut self, key: &'static str) -> Option<f64> {
        match self.entry(key)? {
            (_, Value::Float(number)) => Some(number),
            (_, Value::Integer(number)) => Some(number as f64),
            (place, value) => {
                self.wrong(key, place, "a number", &value);
                None
            }
        }
    }

    fn number(&mut self, key: &'static str) -> f64 {
        if self.entry(key).is_none() {
            self.miss(key);
        }
        self.optional_number(key).unwrap_or(1.0)
    }

    fn optional<Number: TryFrom<i64>>(&mut self, key: &'static str) -> Option<Number> {
        match self.entry(key)? {
            (place, Value::Integer(number)) => {
                let fits = Number::try_from(number).ok();
                if fits.is_none() {
                    let range = "a whole number, 0 or above".to_owned();
                    let kind = ProblemKind::OutOfRange { key, value: number.to_string(), range };
                    self.problems.push(Problem { place, kind });
                }
                fits
            }
            (place, value) => {
                self.wrong(key, place, "a whole number", &value);
                None
            }
        }
    }

    fn whole(&mut self, key: &'static str) -> u64 {
        if self.entry(key).is_none() {
            self.miss(key);
        }
        self.optional(key).unwrap_or(0)
    }

    /// Keeps the places of the keys, for problems with their values.
    fn keep(self, part: ProfilePart, places: &mut Vec<(ProfilePart, &'static str, Place)>) {
        places.extend(self.entries.into_iter().map(|(key, place, _)| (part, key, place)));
    }
}

/// Returns the problem of an unknown key.
fn unknown(key: String, section: &'static str, known: &'static [&'static str]) -> ProblemKind {
    let lower = key.to_lowercase();
    let (stem, unit) = lower.rsplit_once('_').unwrap_or((&lower, ""));
    let same_stem = known.iter().find(|known| {
        let end = known.strip_prefix(stem).unwrap_or("?");
        matches!(end, "_s" | "_bytes" | "_per_s")
    });
    if let Some(meant) = same_stem.filter(|_| OTHER_UNITS.contains(&unit)) {
        return ProblemKind::Unit { key, meant };
    }
    let suggestion = nearest(&key, known.iter().copied());
    ProblemKind::UnknownProfileKey { key, section, known: known.to_vec(), suggestion }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "[link]\nlatency_s = 5e-6\nbytes_per_s = 1e10\n[[layers]]\nkind = \"attention\"\ncount = 12\n\
                        forward_s = 1e-3\ninput_backward_s = 1e-3\nweight_backward_s = 1e-3\noutput_bytes = 524288\n\
                        parameter_bytes = 4194304\nactivation_bytes = 6291456\n";

    fn problems(text: &str) -> Vec<String> {
        let mut problems = Vec::new();
        let _ = parse(Source { name: "p.toml".into(), text: text.to_owned() }, &mut problems);
        problems.iter().map(ToString::to_string).collect()
    }

    fn check(from: &str, to: &str, expected: &[&str]) {
        assert!(GOOD.contains(from), "{from}");
        assert_eq!(problems(&GOOD.replacen(from, to, 1)), expected);
    }

    #[test]
    fn a_profile_by_hand() {
        assert_eq!(problems(GOOD), [""; 0]);
        check("[link]", "rows = 2\n[device]\nname = \"x\"\nmemory_bytes = 5\n[link]", &[]);
    }

    #[test]
    fn every_mistake_has_its_line() {
        let unit = "has a unit that profiles do not use; times are in seconds and sizes in bytes";
        check("forward_s", "forward_ms", &[&format!("p.toml:7:1: `forward_ms` {unit}")]);
        check("output_bytes", "output_mib", &[&format!("p.toml:10:1: `output_mib` {unit}")]);
        check(
            "forward_s = 1e-3",
            "forward_s = -1",
            &["p.toml:7:13: `forward_s` is -1, where a number of seconds from 0 to 1e6 is expected"],
        );
        check(
            "forward_s = 1e-3",
            "forward_s = nan",
            &["p.toml:7:13: `forward_s` is NaN, where a number of seconds from 0 to 1e6 is expected"],
        );
        check("count = 12", "cuont = 12", &["p.toml:6:1: unknown key `cuont` in [[layers]]"]);
        check(
            "output_bytes = 524288",
            "output_bytes = -1",
            &["p.toml:10:16: `output_bytes` is -1, where a whole number, 0 or above is expected"],
        );
        check(
            "kind = \"attention\"",
            "kind = 3",
            &["p.toml:5:8: `kind` is a whole number, where a text in quotes is expected"],
        );
        check("forward_s = 1e-3\n", "", &["p.toml:4:1: `forward_s` is missing in [[layers]]"]);
        check(
            "bytes_per_s = 1e10",
            "bytes_per_s = 0",
            &["p.toml:3:15: `bytes_per_s` is 0, where a number from 1 to 1e18 is expected"],
        );
        assert_eq!(
            problems("[link]\nlatency_s = 0\nbytes_per_s = 1e9\n"),
            ["p.toml:1:1: `layers` is missing in the profile"]
        );
    }
}
