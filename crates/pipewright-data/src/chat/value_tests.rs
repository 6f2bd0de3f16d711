//! The tests of Jinja for the types of values.

use minijinja::value::ValueKind;
use minijinja::{Environment, Error, State, Value, tests};

use crate::chat::limits::{charge, charge_reading};
use crate::chat::operators::holds;
use crate::chat::python_text::{Written, error, text_of};

/// Tests of the engine that Jinja does not have.
const REMOVED: [&str; 4] = ["endingwith", "int", "safe", "startingwith"];

/// Tests that compare, with their operators.
const COMPARISONS: [(&[&str], &str); 7] = [
    (&["eq", "equalto", "=="], "=="),
    (&["ne", "!="], "!="),
    (&["lt", "lessthan", "<"], "<"),
    (&["le", "<="], "<="),
    (&["gt", "greaterthan", ">"], ">"),
    (&["ge", ">="], ">="),
    (&["in"], "in"),
];

/// Replaces the tests of the engine.
pub(crate) fn add_to(environment: &mut Environment<'_>) {
    for name in REMOVED {
        environment.remove_test(name);
    }
    for (names, operator) in COMPARISONS {
        for name in names {
            environment.add_test(*name, move |state: &State<'_, '_>, value: Value, other: Value| {
                holds(state, &value, operator, &other)
            });
        }
    }
    let is_container = |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable)
    };
    for name in ["iterable", "sequence"] {
        environment.add_test(name, move |value: &Value| {
            is_container(value) || value.is_undefined() || is_markup(value)
        });
    }
    environment.add_test("string", |value: &Value| value.kind() == ValueKind::String || is_markup(value));
    environment.add_test("number", |value: &Value| {
        matches!(value.kind(), ValueKind::Number | ValueKind::Bool) || is_long_integer(value)
    });
    environment.add_test("integer", |value: &Value| value.is_integer() || is_long_integer(value));
    environment.add_test("callable", |value: &Value| {
        value.is_undefined()
            || (value.kind() == ValueKind::Plain && value.downcast_object_ref::<Written>().is_none())
    });
    environment.add_test("lower", |state: &State<'_, '_>, value: &Value| {
        is_cased(state, value, char::is_lowercase, char::is_uppercase)
    });
    environment.add_test("upper", |state: &State<'_, '_>, value: &Value| {
        is_cased(state, value, char::is_uppercase, char::is_lowercase)
    });
    environment.add_test("sameas", |state: &State<'_, '_>, value: &Value, other: &Value| {
        charge(state, value.as_str().map_or(0, str::len))?;
        Ok::<_, Error>(tests::is_sameas(value, other))
    });
    environment.add_test("odd", |value: &Value| Ok::<_, Error>(rest_of(value, 2)? == 1));
    environment.add_test("even", |value: &Value| Ok::<_, Error>(rest_of(value, 2)? == 0));
    environment.add_test("divisibleby", |value: &Value, by: i128| Ok::<_, Error>(rest_of(value, by)? == 0));
}

fn is_markup(value: &Value) -> bool {
    matches!(value.downcast_object_ref::<Written>(), Some(Written::Markup(_)))
}

fn is_long_integer(value: &Value) -> bool {
    matches!(value.downcast_object_ref::<Written>(), Some(Written::Integer(_)))
}

fn is_cased(
    state: &State<'_, '_>,
    value: &Value,
    is: fn(char) -> bool,
    is_other: fn(char) -> bool,
) -> Result<bool, Error> {
    charge_reading(state, std::slice::from_ref(value))?;
    let text = text_of(value)?;
    Ok(text.chars().any(is) && !text.chars().any(is_other))
}

/// Returns the remainder of a division of integers.
fn rest_of(value: &Value, by: i128) -> Result<i128, Error> {
    let integer = match value.kind() {
        ValueKind::Bool => i128::from(value.is_true()),
        ValueKind::Number if value.is_integer() => i128::try_from(value.clone())?,
        other => return Err(error(format!("a value of the type {other} is not an integer"))),
    };
    integer.checked_rem_euclid(by).ok_or_else(|| error("division by zero"))
}
