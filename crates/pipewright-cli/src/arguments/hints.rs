//! Values that a shell completes for an argument that takes any text.

use std::ffi::OsStr;

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::{Arg, Command, Error};
use pipewright_run::settings::set_arguments;
use pipewright_schedule::generate::catalogue;

/// A parser of any text that knows some values. The arguments that use it hide these values in their help.
#[derive(Clone)]
pub(crate) struct Hinted(Vec<&'static str>);

impl Hinted {
    /// Returns the parser of a schedule's name.
    pub(crate) fn schedules() -> Self {
        Self(catalogue().iter().map(|generator| generator.name).collect())
    }

    /// Returns the parser of a key and its value, as after `--set`.
    pub(crate) fn keys() -> Self {
        Self(set_arguments().iter().map(String::as_str).collect())
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
