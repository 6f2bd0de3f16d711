//! The arguments of filters and methods, which Python takes by place or by name.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use crate::chat::python_text::text_of;

/// Arguments in the order of their names.
pub(crate) struct Arguments<const N: usize> {
    names: [&'static str; N],
    values: [Option<Value>; N],
}

impl<const N: usize> Arguments<N> {
    /// Assigns arguments to names.
    pub(crate) fn of(names: [&'static str; N], given: &[Value]) -> Result<Self, Error> {
        let mut values = [const { None }; N];
        let named = given.last().and_then(|last| Kwargs::try_from(last.clone()).ok());
        // An undefined value converts too.
        let named = named.filter(|_| given.last().is_some_and(|last| !last.is_undefined()));
        let placed = &given[..given.len() - usize::from(named.is_some())];
        if placed.len() > N {
            return Err(Error::from(ErrorKind::TooManyArguments));
        }
        for (value, given) in values.iter_mut().zip(placed) {
            *value = Some(given.clone());
        }
        if let Some(named) = named {
            for (index, name) in names.iter().enumerate().skip(placed.len()) {
                values[index] = named.get::<Option<Value>>(name)?;
            }
            named.assert_all_used()?;
        }
        Ok(Self { names, values })
    }

    /// Returns an argument, if it is given and not null.
    pub(crate) fn get(&self, index: usize) -> Option<&Value> {
        self.values[index].as_ref().filter(|value| !value.is_none())
    }

    pub(crate) fn integer(&self, index: usize, default: i64) -> Result<i64, Error> {
        let Some(value) = self.get(index) else { return Ok(default) };
        if value.kind() == ValueKind::Bool {
            return Ok(i64::from(value.is_true()));
        }
        let integer = value.is_integer().then(|| value.as_i64()).flatten();
        integer.ok_or_else(|| self.wrong(index, "an integer", value))
    }

    /// Returns an integer that is not negative.
    pub(crate) fn size(&self, index: usize, default: usize) -> Result<usize, Error> {
        let size = self.integer(index, i64::try_from(default).unwrap_or(i64::MAX))?;
        Ok(usize::try_from(size.max(0)).unwrap_or(usize::MAX))
    }

    /// Returns a text, if it is given and not null.
    pub(crate) fn text(&self, index: usize) -> Result<Option<&str>, Error> {
        let Some(value) = self.get(index) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(index, "a text", value))
    }

    /// Returns a text that must be given.
    pub(crate) fn needed(&self, index: usize) -> Result<&str, Error> {
        self.text(index)?.ok_or_else(|| self.missing(index))
    }

    /// Returns the text that `str` makes of an argument.
    pub(crate) fn written(&self, index: usize) -> Result<Option<String>, Error> {
        self.values[index].as_ref().map(text_of).transpose()
    }

    pub(crate) fn is_true(&self, index: usize) -> bool {
        self.get(index).is_some_and(Value::is_true)
    }

    pub(crate) fn missing(&self, index: usize) -> Error {
        Error::new(ErrorKind::MissingArgument, format!("`{}` is missing", self.names[index]))
    }

    fn wrong(&self, index: usize, expected: &str, value: &Value) -> Error {
        let reason = format!("`{}` is not {expected} but {}", self.names[index], value.kind());
        Error::new(ErrorKind::InvalidOperation, reason)
    }
}
