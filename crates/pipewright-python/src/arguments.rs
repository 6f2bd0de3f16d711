//! Reads arguments: whole numbers, names and sizes, with messages that name the argument.

use std::fmt::Display;
use std::str::FromStr;

use pipewright_schedule::bytes::parse_bytes;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyString};

use crate::errors::{Raised, type_error, value_error};

/// Reads a whole number that has `T`'s range.
pub(crate) fn whole<T: TryFrom<i128>>(name: &str, value: &Bound<'_, PyAny>) -> PyResult<T> {
    let is_number = !value.is_instance_of::<PyBool>() && value.hasattr("__index__")?;
    if !is_number {
        return Err(type_error(format!("{name} is {}, not a whole number", described(value))));
    }
    let number = value.call_method0("__index__")?.extract::<i128>().ok();
    number
        .and_then(|number| T::try_from(number).ok())
        .ok_or_else(|| value_error(format!("{name} is {}, which is negative or too large", described(value))))
}

/// Reads an optional whole number.
pub(crate) fn optional<T: TryFrom<i128>>(
    name: &str,
    value: Option<&Bound<'_, PyAny>>,
) -> PyResult<Option<T>> {
    value.map(|value| whole(name, value)).transpose()
}

/// Reads a list of whole numbers.
pub(crate) fn whole_list<T: TryFrom<i128>>(name: &str, values: &Bound<'_, PyAny>) -> PyResult<Vec<T>> {
    if values.is_instance_of::<PyString>() {
        return Err(type_error(format!("{name} is a text, not a list of whole numbers")));
    }
    let items = values
        .try_iter()
        .map_err(|_no_list| type_error(format!("{name} is {}, not a list", described(values))))?;
    items.map(|item| whole(name, &item?)).collect()
}

/// Reads a size: a number of bytes, or a text such as `80GiB`.
pub(crate) fn bytes(name: &str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    match value.extract::<String>() {
        Ok(text) => parse_bytes(&text).map_err(|error| value_error(format!("{name}: {error}"))),
        Err(_) => whole(name, value),
    }
}

/// Reads a text that names something, such as a level.
pub(crate) fn named<T: FromStr<Err: Raised>>(py: Python<'_>, text: &str) -> PyResult<T> {
    text.parse().map_err(|error: T::Err| error.raised(py))
}

/// Returns a value for a message, shortened if it is long.
fn described(value: &Bound<'_, PyAny>) -> impl Display + use<> {
    const LONGEST: usize = 40;
    let text = value.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string());
    let is_long = text.chars().count() > LONGEST;
    if is_long { text.chars().take(LONGEST).collect::<String>() + "..." } else { text }
}
