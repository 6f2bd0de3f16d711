//! The keys of one section of a profile: which there are, and the values that are written.

use std::collections::HashMap;
use std::ops::Range;

use pipewright_schedule::profile::ProfilePart;
use serde::Deserialize;
use toml::Value;
use toml::de::{DeTable, ValueDeserializer};

use crate::settings::keys::nearest;
use crate::settings::place::Place;
use crate::settings::problem::{Problem, ProblemKind, ProfileMismatch};

/// The sections of a profile with their keys. The first has the keys outside of any section.
pub(super) const SECTIONS: [(&str, &[&str]); 5] = [
    (
        "the profile",
        &["rows", "tokens", "stage_bytes", "rank_bytes", "assumed", "device", "link", "node", "layers"],
    ),
    ("[device]", &["name", "memory_bytes", "device", "precision", "ranks", "threads_per_rank"]),
    ("[link]", &["latency_s", "bytes_per_s", "reduce_bytes_per_s", "offload_bytes_per_s"]),
    (
        "[[layers]]",
        &[
            "kind",
            "count",
            "forward_s",
            "input_backward_s",
            "weight_backward_s",
            "backward_s",
            "recompute_s",
            "exchange_s",
            "optimizer_s",
            "output_bytes",
            "parameter_bytes",
            "trained_bytes",
            "activation_bytes",
            "weight_activation_bytes",
            "norms_bytes",
            "norms_s",
            "feed_forward_bytes",
            "feed_forward_s",
            "temporary_bytes",
            "tensor_sums",
        ],
    ),
    ("[node]", &["ranks", "latency_s", "bytes_per_s"]),
];

/// Units that people write instead of seconds and bytes.
const OTHER_UNITS: [&str; 20] = [
    "ns", "us", "ms", "sec", "secs", "seconds", "min", "kb", "mb", "gb", "kib", "mib", "gib", "k", "m", "g",
    "bits", "gbps", "gbit", "b",
];

/// The keys of a section that were read, with their places.
pub(super) struct Keys<'a> {
    section: usize,
    place: Place,
    entries: Vec<(&'static str, Place, Value)>,
    /// Keys that must be written, and are not.
    missing: Vec<&'static str>,
    problems: &'a mut Vec<Problem>,
    /// The number of problems before this section.
    before: usize,
}

/// Where each value of a profile is written, and under [`SECTION`] each section itself.
pub(super) type Places = HashMap<(ProfilePart, &'static str), Place>;

/// The name under which the places have a section.
pub(super) const SECTION: &str = "";

impl<'a> Keys<'a> {
    pub(super) fn of(
        section: usize,
        section_place: Place,
        keys: DeTable<'_>,
        place: &impl Fn(Range<usize>) -> Place,
        problems: &'a mut Vec<Problem>,
    ) -> Self {
        let (name, known) = SECTIONS[section];
        let before = problems.len();
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
        Self { section, place: section_place, entries, missing: Vec::new(), problems, before }
    }

    fn entry(&self, key: &str) -> Option<(Place, Value)> {
        let found = self.entries.iter().find(|(known, _, _)| *known == key);
        found.map(|(_, place, value)| (place.clone(), value.clone()))
    }

    /// Records that a key is missing, unless it was written wrongly, which is reported already.
    pub(super) fn miss(&mut self, key: &'static str) {
        let is_reported = |problem: &Problem| match &problem.kind {
            ProblemKind::Profile(ProfileMismatch::Unit { meant, .. }) => *meant == key,
            _ => false,
        };
        if !self.problems[self.before..].iter().any(is_reported) {
            self.missing.push(key);
        }
    }

    /// Takes the missing keys out, or reports them.
    pub(super) fn take_missing(&mut self) -> Vec<&'static str> {
        std::mem::take(&mut self.missing)
    }

    fn wrong(&mut self, key: &'static str, place: Place, expected: &'static str, value: &Value) {
        self.problems.push(Problem { place, kind: ProblemKind::wrong_type(key, expected, value) });
    }

    pub(super) fn text(&mut self, key: &'static str) -> String {
        match self.entry(key) {
            Some((_, Value::String(text))) => text,
            Some((place, value)) => {
                self.wrong(key, place, "a text in quotes", &value);
                "?".to_owned()
            }
            None => String::new(),
        }
    }

    pub(super) fn optional_number(&mut self, key: &'static str) -> Option<f64> {
        match self.entry(key)? {
            (_, Value::Float(number)) => Some(number),
            (_, Value::Integer(number)) => Some(number as f64),
            (place, value) => {
                self.wrong(key, place, "a number", &value);
                None
            }
        }
    }

    pub(super) fn number(&mut self, key: &'static str) -> f64 {
        if self.entry(key).is_none() {
            self.miss(key);
        }
        self.optional_number(key).unwrap_or(1.0)
    }

    pub(super) fn optional<Number: TryFrom<i64>>(&mut self, key: &'static str) -> Option<Number> {
        match self.entry(key)? {
            (place, Value::Integer(number)) => {
                let fits = Number::try_from(number).ok();
                if fits.is_none() {
                    // Only 32 bits are too few for a number that is not negative.
                    let range = match number {
                        0.. => format!("a whole number from 0 to {}", u32::MAX),
                        _ => "a whole number, 0 or above".to_owned(),
                    };
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

    pub(super) fn whole<Number: TryFrom<i64> + Default>(&mut self, key: &'static str) -> Number {
        if self.entry(key).is_none() {
            self.miss(key);
        }
        self.optional(key).unwrap_or_default()
    }

    /// Reads a list of texts.
    pub(super) fn texts(&mut self, key: &'static str) -> Vec<String> {
        let Some((place, value)) = self.entry(key) else { return Vec::new() };
        let texts = value
            .as_array()
            .and_then(|items| items.iter().map(|item| item.as_str().map(str::to_owned)).collect());
        texts.unwrap_or_else(|| {
            self.wrong(key, place, "a list of texts", &value);
            Vec::new()
        })
    }

    /// Reports the keys that are missing, and keeps the places of the others for problems with their values.
    pub(super) fn keep(self, part: ProfilePart, places: &mut Places) {
        let Self { section, place, entries, missing, problems, .. } = self;
        problems.extend(missing.into_iter().map(|key| missing_problem(section, key, place.clone())));
        places.insert((part, SECTION), place);
        places.extend(entries.into_iter().map(|(key, place, _)| ((part, key), place)));
    }
}

/// Returns the problem of a missing key.
pub(super) fn missing_problem(section: usize, key: &'static str, place: Place) -> Problem {
    Problem { place, kind: ProblemKind::Missing { key, section: SECTIONS[section].0 } }
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
        return ProfileMismatch::Unit { key, meant }.into();
    }
    let suggestion = nearest(&key, known.iter().copied());
    ProblemKind::UnknownKeyOf { key, section, known: known.to_vec(), suggestion }
}
