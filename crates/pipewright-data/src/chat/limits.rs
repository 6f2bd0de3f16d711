//! The work and the size of values that a template may ask for.
//!
//! The engine charges for instructions and for what they write, but not for what an operation reads: a comparison, a
//! filter or a key may visit a list that contains another one a thousand times, and a text of any length. So every
//! filter, test, method and function pays here for its arguments before it runs, and every list and table of a
//! template pays when it comes into being.

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value, filters, functions};

use crate::chat::python_text::{Written, error};

/// The deepest nesting of a value.
const DEPTH: usize = 300;
/// The number of visited values that cost as much as an instruction.
const VISITS: u64 = 2;
/// The bytes that an instruction copies or compares.
const BYTES: u64 = 64;
/// The bytes whose characters cost as much to read as an instruction.
const READ_BYTES: u64 = 16;

/// A filter of a value with its arguments.
pub(crate) type Filter = fn(&State<'_, '_>, &Value, &[Value]) -> Result<Value, Error>;

/// Charges for a text of some bytes before it is written.
pub(crate) fn charge(state: &State<'_, '_>, bytes: usize) -> Result<(), Error> {
    state.consume_fuel(bytes as u64 / BYTES)
}

/// Charges for reading the characters of values and of all that they contain.
pub(crate) fn charge_reading(state: &State<'_, '_>, values: &[Value]) -> Result<(), Error> {
    values.iter().try_for_each(|value| walk(state, value, READ_BYTES, &|_| Ok(())).map(drop))
}

/// Charges for a comparison of a value and of all that it contains. Returns the bytes of its texts.
pub(crate) fn charge_values(state: &State<'_, '_>, value: &Value) -> Result<usize, Error> {
    walk(state, value, BYTES, &|_| Ok(()))
}

/// Charges for a pattern: each of its specifications may write all arguments. Refuses a width of more than four digits,
/// or one that an argument has.
pub(crate) fn charge_pattern<'p>(
    state: &State<'_, '_>,
    specifications: impl Iterator<Item = &'p str>,
    argument: char,
    arguments: &[Value],
) -> Result<(), Error> {
    let mut bytes = 0_usize;
    for value in arguments {
        bytes = bytes.saturating_add(charge_values(state, value)?);
    }
    for specification in specifications {
        let numbers = || specification.split(|letter: char| !letter.is_ascii_digit());
        if specification.contains(argument) || numbers().any(|number| number.len() > 4) {
            return Err(error(
                "a width or a precision of a pattern has more than four digits, or is an argument",
            ));
        }
        let widths: usize = numbers().filter_map(|width| width.parse::<usize>().ok()).sum();
        charge(state, bytes.saturating_add(widths).saturating_add(64))?;
    }
    Ok(())
}

/// Visits a value and all that it contains. A value may contain another one often, so the visits are charged while
/// they happen. Returns the bytes of the texts.
pub(crate) fn walk(
    state: &State<'_, '_>,
    value: &Value,
    bytes_per_step: u64,
    check: &dyn Fn(&Value) -> Result<(), Error>,
) -> Result<usize, Error> {
    let mut walk = Walk { state, bytes_per_step, check, visits: 0, bytes: 0 };
    walk.visit(value, 0)?;
    state.consume_fuel(walk.visits / VISITS)?;
    Ok(walk.bytes)
}

struct Walk<'w> {
    state: &'w State<'w, 'w>,
    bytes_per_step: u64,
    check: &'w dyn Fn(&Value) -> Result<(), Error>,
    /// The visits that are not charged.
    visits: u64,
    bytes: usize,
}

impl Walk<'_> {
    fn visit(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let bytes = value.as_str().or_else(|| Written::text_of(value)).map_or(0, str::len);
        self.bytes = self.bytes.saturating_add(bytes);
        self.visits += 1 + bytes as u64 * VISITS / self.bytes_per_step;
        if self.visits >= 4096 {
            self.state.consume_fuel(self.visits / VISITS)?;
            self.visits = 0;
        }
        if depth > DEPTH {
            return Err(error(format!("a value has more than {DEPTH} lists inside each other")));
        }
        (self.check)(value)?;
        let is_map = value.kind() == ValueKind::Map;
        if is_map || matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
            for item in value.try_iter()? {
                if is_map {
                    self.visit(&item, depth + 1)?;
                    self.visit(&value.get_item(&item)?, depth + 1)?;
                } else {
                    self.visit(&item, depth + 1)?;
                }
            }
        }
        Ok(())
    }
}

/// Returns a value that a variable may have: lists are complete, so that no list waits for a list that waits for a
/// list.
pub(crate) fn bound(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    if value.kind() != ValueKind::Iterable {
        return Ok(value);
    }
    let mut items = Vec::new();
    for item in value.try_iter()? {
        if items.len() % 64 == 0 {
            state.consume_fuel(64 / VISITS)?;
        }
        items.push(item);
    }
    Ok(Value::from(items))
}

/// Returns a list or a table of a template. Others may contain it often and deep, so it pays for what it contains.
pub(crate) fn made(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    charge_values(state, &value)?;
    bound(state, value)
}

/// Returns a value whose item is read: the characters of a text are counted.
pub(crate) fn indexed(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    charge(state, value.as_str().map_or(0, str::len))?;
    Ok(value)
}

/// Returns a value from which a part is taken.
pub(crate) fn sliced(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => state.consume_fuel(value.as_str().map_or(0, str::len) as u64 / READ_BYTES)?,
        ValueKind::Seq => state.consume_fuel(value.len().unwrap_or_default() as u64 / VISITS)?,
        ValueKind::Iterable => {}
        other => return Err(error(format!("a value of the type {other} has no parts"))),
    }
    bound(state, value)
}

/// Returns a value that looks up an item. A list cannot be a key, so its item is not defined.
pub(crate) fn key(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    charge_reading(state, std::slice::from_ref(&value))?;
    let is_container = matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable);
    Ok(if is_container && !value.is_tuple() { Value::UNDEFINED } else { value })
}

/// Returns a key of a table. A list cannot be one.
pub(crate) fn key_of_table(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    let kind = value.kind();
    let key = key(state, value)?;
    if key.is_undefined() && kind != ValueKind::Undefined {
        return Err(error(format!("{kind} cannot be a key")));
    }
    Ok(key)
}

/// Returns all arguments as a list, after they are paid.
pub(crate) fn paid(state: &State<'_, '_>, arguments: &[Value]) -> Result<Value, Error> {
    charge_reading(state, arguments)?;
    Ok(Value::from(arguments.to_vec()))
}

/// Adds a filter that pays for its arguments. With `is_shallow`, it does not read what a list contains.
pub(crate) fn add_filter(
    environment: &mut Environment<'_>,
    name: &'static str,
    is_shallow: bool,
    filter: Filter,
) {
    environment.add_filter(name, move |state: &State<'_, '_>, value: Value, given: Rest<ValueOrKwargs>| {
        let given = given.into_values();
        if is_shallow {
            charge(state, value.as_str().map_or(0, str::len))?;
        } else {
            charge_reading(state, std::slice::from_ref(&value))?;
        }
        charge_reading(state, &given)?;
        filter(state, &value, &given)
    });
}

/// Makes the filters of the engine pay for their arguments, and check the depth of what they return.
pub(crate) fn add_to(environment: &mut Environment<'_>) {
    // Whether a filter reads a whole value. The others run a filter or a test for each item, which pays itself.
    let filters = [
        ("batch", true, Value::from_function(filters::batch)),
        ("dictsort", true, Value::from_function(filters::dictsort)),
        ("items", true, Value::from_function(filters::items)),
        ("reverse", true, Value::from_function(filters::reverse)),
        ("slice", true, Value::from_function(filters::slice)),
        ("sum", true, Value::from_function(filters::sum)),
        ("attr", false, Value::from_function(filters::attr)),
        ("map", false, Value::from_function(filters::map)),
        ("reject", false, Value::from_function(filters::reject)),
        ("rejectattr", false, Value::from_function(filters::rejectattr)),
        ("select", false, Value::from_function(filters::select)),
        ("selectattr", false, Value::from_function(filters::selectattr)),
    ];
    for (name, reads_whole, filter) in filters {
        environment.add_filter(
            name,
            move |state: &mut State<'_, '_>, value: Value, given: Rest<ValueOrKwargs>| {
                let given = given.into_values();
                if reads_whole {
                    let all = [&[bound(state, value)?], &given[..]].concat();
                    charge_reading(state, &all)?;
                    let result = filter.call(state, &all)?;
                    return made(state, result);
                }
                let items = value.len().unwrap_or_default().max(1) as u64;
                for argument in given.iter() {
                    let bytes = charge_values(state, argument)? as u64;
                    state.consume_fuel(items.saturating_mul(bytes) / BYTES)?;
                }
                filter.call(state, &[&[value], &given[..]].concat())
            },
        );
    }
    environment.add_function("dict", |state: &State<'_, '_>, value: Option<Value>, names| {
        made(state, functions::dict(value, names)?)
    });
}
