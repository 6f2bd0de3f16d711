//! The functions that replace the operators of a template ([`source`](crate::chat::source)), with Python's meaning.

use std::cmp::Ordering;
use std::sync::Arc;

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Object, ObjectRepr, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value};

use crate::chat::limits::{
    bound, charge, charge_pattern, charge_values, indexed, key, key_of_table, made, paid, sliced, walk,
};
use crate::chat::python_text::{Written, error, text_of};
use crate::chat::source::{
    ATTRIBUTE, BOUND, COMPARE, CONCAT, HELD, INDEXED, ITEM, ITERATED, KEY, MADE, PAID, REMAINDER, SLICED,
    TABLE_KEY,
};
use crate::chat::text_methods::joined;

/// Adds the functions.
pub(crate) fn add_to(environment: &mut Environment<'_>) {
    environment.add_function(CONCAT, |state: &State<'_, '_>, parts: Rest<Value>| {
        joined(state, "", parts.iter().map(text_of))
    });
    environment.add_function(REMAINDER, |state: &State<'_, '_>, left: &Value, right: &Value| {
        remainder(state, left, right)
    });
    environment.add_function(COMPARE, |state: &State<'_, '_>, all: Rest<Value>| compare(state, &all));
    environment.add_function(ATTRIBUTE, |value: &Value, name: &str| attribute(value, name));
    environment.add_function(ITEM, |value: &Value, name: &str| item(value, name));
    environment.add_function(HELD, |state: &State<'_, '_>, value: Value| held(state, value));
    environment.add_function(ITERATED, |value: Value| iterated(value));
    environment.add_function(BOUND, |state: &State<'_, '_>, value: Value| bound(state, value));
    environment.add_function(MADE, |state: &State<'_, '_>, value: Value| made(state, value));
    environment.add_function(INDEXED, |state: &State<'_, '_>, value: Value| indexed(state, value));
    environment.add_function(SLICED, |state: &State<'_, '_>, value: Value| sliced(state, value));
    environment.add_function(KEY, |state: &State<'_, '_>, value: Value| key(state, value));
    environment.add_function(TABLE_KEY, |state: &State<'_, '_>, value: Value| key_of_table(state, value));
    environment.add_function(PAID, |state: &State<'_, '_>, values: Rest<Value>| paid(state, &values));
    environment.add_function("namespace", namespace);
}

/// Returns the remainder of a division, or a formatted text.
fn remainder(state: &State<'_, '_>, left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(pattern) = left.as_str() {
        if Written::text_of(right).is_some() {
            return Err(error("this value cannot be formatted with `%`"));
        }
        let arguments: Vec<Value> =
            if right.is_tuple() { right.try_iter()?.collect() } else { vec![right.clone()] };
        return formatted(state, pattern, &arguments);
    }
    let is_number = |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    if !is_number(left) || !is_number(right) {
        return Err(error(format!(
            "unsupported operand types for `%`: {} and {}",
            left.kind(),
            right.kind()
        )));
    }
    let is_integer = |value: &Value| value.is_integer() || value.kind() == ValueKind::Bool;
    if is_integer(left) && is_integer(right) {
        let (left, right) = (i128::try_from(left.clone())?, i128::try_from(right.clone())?);
        let rest = left.checked_rem(right).ok_or_else(|| error("division by zero"))?;
        return Ok(Value::from(if rest != 0 && (rest < 0) != (right < 0) { rest + right } else { rest }));
    }
    let (left, right) = (f64::try_from(left.clone())?, f64::try_from(right.clone())?);
    if right == 0.0 {
        return Err(error("division by zero"));
    }
    let rest = left % right;
    Ok(Value::from(if rest == 0.0 {
        0.0_f64.copysign(right)
    } else if (rest < 0.0) != (right < 0.0) {
        rest + right
    } else {
        rest
    }))
}

/// Formats arguments by the pattern of Python's `%`.
pub(crate) fn formatted(state: &State<'_, '_>, pattern: &str, arguments: &[Value]) -> Result<Value, Error> {
    let specifications = pattern.split('%').skip(1).map(|specification| {
        let end = specification.find(|letter: char| letter.is_ascii_alphabetic());
        &specification[..end.unwrap_or(specification.len())]
    });
    charge_pattern(state, specifications, '*', arguments)?;
    let is_plain = |value: &Value| {
        value.is_integer() || matches!(value.kind(), ValueKind::String | ValueKind::None | ValueKind::Bool)
    };
    // The engine writes other values with its own rules.
    let arguments: Result<Vec<Value>, Error> = arguments
        .iter()
        .map(|value| match value.kind() {
            _ if is_plain(value) => Ok(value.clone()),
            ValueKind::Number => Ok(value.clone()),
            _ => text_of(value).map(Value::from),
        })
        .collect();
    format(FormatStyle::Printf, pattern, &arguments?).map(Value::from)
}

/// Compares values in a chain, such as `a < b == c`.
fn compare(state: &State<'_, '_>, chain: &[Value]) -> Result<bool, Error> {
    for step in chain.windows(3).step_by(2) {
        let [left, operator, right] = step else { continue };
        if !holds(state, left, operator.as_str().unwrap_or_default(), right)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns whether a comparison holds.
pub(crate) fn holds(
    state: &State<'_, '_>,
    left: &Value,
    operator: &str,
    right: &Value,
) -> Result<bool, Error> {
    Ok(match operator {
        "==" => is_equal(state, left, right)?,
        "!=" => !is_equal(state, left, right)?,
        "in" => contains(state, right, left)?,
        "not in" => !contains(state, right, left)?,
        "<" => order(state, left, right)?.is_some_and(Ordering::is_lt),
        "<=" => order(state, left, right)?.is_some_and(Ordering::is_le),
        ">" => order(state, left, right)?.is_some_and(Ordering::is_gt),
        _ => order(state, left, right)?.is_some_and(Ordering::is_ge),
    })
}

fn is_equal(state: &State<'_, '_>, left: &Value, right: &Value) -> Result<bool, Error> {
    if left.as_object().is_some() && right.as_object().is_some() {
        charge_values(state, left)?;
        charge_values(state, right)?;
    } else if let (Some(left), Some(right)) = (left.as_str(), right.as_str()) {
        charge(state, left.len().min(right.len()))?;
    }
    Ok(left == right)
}

/// Returns the order of two values; `None` if one is not a number.
fn order(state: &State<'_, '_>, left: &Value, right: &Value) -> Result<Option<Ordering>, Error> {
    let is_number = |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    if is_number(left) && is_number(right) {
        let is_nan = |value: &Value| f64::try_from(value.clone()).is_ok_and(f64::is_nan);
        return Ok((!is_nan(left) && !is_nan(right)).then(|| left.cmp(right)));
    }
    match (left.as_str(), right.as_str()) {
        (Some(left), Some(right)) => {
            charge(state, left.len().min(right.len()))?;
            return Ok(Some(left.cmp(right)));
        }
        _ if left.kind() == ValueKind::Seq && right.kind() == ValueKind::Seq => {}
        _ => return Err(error(format!("{} and {} have no order", left.kind(), right.kind()))),
    }
    let (left, right): (Vec<Value>, Vec<Value>) = (left.try_iter()?.collect(), right.try_iter()?.collect());
    for (left, right) in left.iter().zip(&right) {
        if !is_equal(state, left, right)? {
            return order(state, left, right);
        }
    }
    Ok(Some(left.len().cmp(&right.len())))
}

fn contains(state: &State<'_, '_>, container: &Value, value: &Value) -> Result<bool, Error> {
    match container.kind() {
        ValueKind::String => {
            let (text, sought) = (container.as_str().unwrap_or_default(), value.as_str());
            let sought = sought.ok_or_else(|| {
                error(format!("`in` needs a string to look for in a string, and not {}", value.kind()))
            })?;
            charge(state, text.len())?;
            Ok(text.contains(sought))
        }
        ValueKind::Map => {
            if value.as_object().is_some() && !value.is_tuple() {
                return Err(error(format!("{} cannot be a key", value.kind())));
            }
            charge_values(state, value)?;
            Ok(container.as_object().is_some_and(|object| object.get_value(value).is_some()))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            for item in container.try_iter()? {
                state.consume_fuel(1)?;
                if is_equal(state, &item, value)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        ValueKind::Undefined => Ok(false),
        other => Err(error(format!("`in` cannot look into {other}"))),
    }
}

/// A method of a dictionary that is not called.
#[derive(Debug)]
struct Method {
    value: Value,
    name: String,
}

impl Object for Method {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, arguments: &[Value]) -> Result<Value, Error> {
        self.value.call_method(state, &self.name, arguments)
    }
}

fn is_dictionary(value: &Value) -> bool {
    value.kind() == ValueKind::Map && !is_namespace(value)
}

fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("Namespace"))
}

/// Returns an attribute that has the name of a method of dictionaries.
fn attribute(value: &Value, name: &str) -> Result<Value, Error> {
    if is_dictionary(value) {
        return method(value, name);
    }
    value.get_attr(name)
}

/// Returns an item that has the name of a method of dictionaries.
fn item(value: &Value, name: &str) -> Result<Value, Error> {
    let item = value.get_item(&Value::from(name))?;
    if item.is_undefined() && is_dictionary(value) { method(value, name) } else { Ok(item) }
}

fn method(value: &Value, name: &str) -> Result<Value, Error> {
    match name {
        "items" | "keys" | "values" | "get" | "copy" => {
            Ok(Value::from_object(Method { value: value.clone(), name: name.to_owned() }))
        }
        _ => Err(error(format!("`{name}` is a method that would change a dictionary"))),
    }
}

/// Returns a value that a namespace may keep: it does not contain a namespace, so no value contains itself.
fn held(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    let value = bound(state, value)?;
    walk(state, &value, 64, &|value| {
        if is_namespace(value) { Err(error("a namespace cannot keep a namespace")) } else { Ok(()) }
    })?;
    Ok(value)
}

fn namespace(state: &State<'_, '_>, arguments: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let arguments = arguments.into_values();
    for argument in arguments.iter() {
        for name in argument.try_iter()? {
            held(state, argument.get_item(&name)?)?;
            if name.as_str().is_some_and(|name| name.starts_with('_')) {
                return Err(error("the names in a namespace cannot begin with `_`"));
            }
        }
    }
    if arguments.len() > 1 {
        return Err(error("`namespace` takes a table or names"));
    }
    minijinja::functions::namespace(arguments.into_iter().next().map(ValueOrKwargs::from))
}

/// Returns a value that a loop iterates.
fn iterated(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
            Err(error(format!("a value of the type {} cannot be iterated", value.kind())))
        }
        _ => Ok(value),
    }
}
