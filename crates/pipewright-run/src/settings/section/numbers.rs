//! Getters of numbers and lists of numbers.

use toml::Value;

use crate::settings::problem::ProblemKind;
use crate::settings::section::bound::Bound;
use crate::settings::section::reader::{LARGEST_COUNT, Section, as_number, shown};

impl Section<'_> {
    /// Reads a whole number of at least 1.
    pub(crate) fn count(&mut self, key: &'static str, default: u32) -> u32 {
        self.count_to(key, default, LARGEST_COUNT)
    }

    /// Reads a whole number of at least 0; 0 if it is not written.
    pub(crate) fn count_from_0(&mut self, key: &'static str) -> u32 {
        let count = self.whole(key, 0, 0, u64::from(LARGEST_COUNT));
        u32::try_from(count).expect("whole() keeps to its range, which u32 holds")
    }

    /// Reads a whole number from 1 to `most`.
    pub(crate) fn count_to(&mut self, key: &'static str, default: u32, most: u32) -> u32 {
        let count = self.whole(key, u64::from(default), 1, u64::from(most));
        u32::try_from(count).expect("whole() keeps to its range, which u32 holds")
    }

    /// Reads a whole number within `least..=most`.
    pub(crate) fn whole(&mut self, key: &'static str, default: u64, least: u64, most: u64) -> u64 {
        let Some(value) = self.value(key) else { return default };
        let Value::Integer(number) = value else {
            self.report(key, ProblemKind::wrong_type(key, "a whole number", &value));
            return default;
        };
        match u64::try_from(number) {
            Ok(number) if (least..=most).contains(&number) => number,
            _ => {
                let range = format!("a whole number from {least} to {most}");
                self.report(key, ProblemKind::OutOfRange { key, value: number.to_string(), range });
                default
            }
        }
    }

    /// Reads a list of whole numbers of at least 1.
    pub(crate) fn counts(&mut self, key: &'static str) -> Option<Vec<u32>> {
        const EXPECTED: &str = "a list of whole numbers, such as [4, 8]";
        let value = self.value(key)?;
        let Value::Array(items) = &value else {
            self.report(key, ProblemKind::wrong_type(key, EXPECTED, &value));
            return None;
        };
        let mut counts = Vec::with_capacity(items.len());
        for item in items {
            let Value::Integer(number) = item else {
                self.report(key, ProblemKind::wrong_type(key, EXPECTED, &value));
                return None;
            };
            match u32::try_from(*number) {
                Ok(count) if (1..=LARGEST_COUNT).contains(&count) => counts.push(count),
                _ => {
                    let range = format!("whole numbers from 1 to {LARGEST_COUNT}");
                    self.report(key, ProblemKind::OutOfRange { key, value: value.to_string(), range });
                    return None;
                }
            }
        }
        Some(counts)
    }

    /// Reads a whole number of at least 1, or a list of them; empty if it is not written.
    pub(crate) fn count_or_counts(&mut self, key: &'static str) -> Vec<u32> {
        match self.value(key) {
            None => Vec::new(),
            Some(Value::Array(items)) if items.is_empty() => {
                self.report(key, ProblemKind::Empty { key });
                Vec::new()
            }
            Some(Value::Array(_)) => self.counts(key).unwrap_or_default(),
            Some(_) => vec![self.count(key, 1)],
        }
    }

    /// Reads a number with or without a fraction.
    pub(crate) fn number(&mut self, key: &'static str, default: f64, bound: &Bound) -> f64 {
        let Some(value) = self.value(key) else { return default };
        match as_number(&value) {
            Some(number) if bound.holds(number) => number,
            Some(_) => {
                let range = bound.words().to_owned();
                self.report(key, ProblemKind::OutOfRange { key, value: shown(&value), range });
                default
            }
            None => {
                self.report(key, ProblemKind::wrong_type(key, "a number", &value));
                default
            }
        }
    }

    /// Like [`Section::number`], for a number that the optimizer rounds to single precision.
    pub(crate) fn single(&mut self, key: &'static str, default: f64, bound: &Bound) -> f64 {
        let number = self.number(key, default, bound);
        if let Some(range) = bound.refuses_single(number) {
            self.report(key, ProblemKind::OutOfRange { key, value: format!("{number:?}"), range });
        }
        number
    }

    /// Reads two numbers that the optimizer rounds to single precision.
    pub(crate) fn single_pair(&mut self, key: &'static str, default: [f64; 2], bound: &Bound) -> [f64; 2] {
        let Some(value) = self.value(key) else { return default };
        let numbers = match &value {
            Value::Array(items) => items.iter().map(as_number).collect::<Option<Vec<f64>>>(),
            _ => None,
        };
        match numbers.and_then(|numbers| <[f64; 2]>::try_from(numbers).ok()) {
            Some(pair) => match pair.iter().find_map(|number| bound.refuses_single(*number)) {
                None => pair,
                Some(range) => {
                    let range = format!("for each of the two {range}");
                    self.report(key, ProblemKind::OutOfRange { key, value: shown(&value), range });
                    default
                }
            },
            None => {
                self.report(key, ProblemKind::wrong_type(key, "a list of two numbers", &value));
                default
            }
        }
    }
}
