//! Values of arguments: values that a shell completes, times, and errors that do not repeat long values.

use std::ffi::OsStr;
use std::time::Duration;

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue};
use clap::{Arg, Command, Error};
use pipewright_document::shortened;
use pipewright_schedule::bytes::parse_with_unit;
use pipewright_schedule::generate::catalogue;

/// A parser of any text that knows some values. The arguments that use it hide these values in their help.
#[derive(Clone)]
pub struct Hinted(Vec<&'static str>);

impl Hinted {
    /// Returns the parser of a schedule's name.
    pub fn schedules() -> Self {
        Self(catalogue().iter().map(|generator| generator.name).collect())
    }

    /// Returns a parser that knows these values.
    pub fn of(values: Vec<&'static str>) -> Self {
        Self(values)
    }
}

impl TypedValueParser for Hinted {
    type Value = String;

    fn parse_ref(&self, command: &Command, argument: Option<&Arg>, value: &OsStr) -> Result<String, Error> {
        StringValueParser::new().parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.0.iter().copied().map(PossibleValue::new)))
    }
}

/// Reads a time such as `20s`, `500ms` or `2m`.
///
/// # Errors
/// A sentence that says how times are written.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    let seconds = parse_with_unit(text, &[("ms", 1e-3), ("s", 1.0), ("m", 60.0)], 0.0..=1e6);
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "write a time such as 20s, 500ms or 2m".to_owned())
}

/// The most possible values that an error lists. The keys of a configuration are more.
const MOST_VALUES: usize = 12;

/// Returns an error of wrong arguments that does not repeat a very long value, or a long list of values.
pub fn shortened_error(mut error: Error) -> Error {
    if let Some(ContextValue::String(value)) = error.get(ContextKind::InvalidValue) {
        let value = ContextValue::String(shortened(value).into_owned());
        error.insert(ContextKind::InvalidValue, value);
    }
    if let Some(ContextValue::Strings(values)) = error.get(ContextKind::ValidValue)
        && values.len() > MOST_VALUES
    {
        error.remove(ContextKind::ValidValue);
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        assert_eq!(parse_time("20s"), Ok(Duration::from_secs(20)));
        assert_eq!(parse_time("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_time("2m"), Ok(Duration::from_secs(120)));
        for wrong in ["", "-1s", "nan", "16 gigs", "inf"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }
}
