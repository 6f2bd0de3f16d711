//! The filters of Jinja that write text or numbers, as Jinja computes them.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, State, Value, filters};

use crate::chat::arguments::Arguments;
use crate::chat::limits::{Filter, add_filter, bound, charge, charge_values};
use crate::chat::operators::{formatted, holds};
use crate::chat::python_json::tojson;
use crate::chat::python_text::{Written, error, text_of};
use crate::chat::text_methods::{capitalized, centred, joined, lines, replaced, stripped};

const FILTERS: [(&str, Filter); 25] = [
    ("capitalize", |_, value, given| without(given, || Ok(capitalized(&text_of(value)?).into()))),
    ("center", |state, value, given| {
        let width = Arguments::of(["width"], given)?.size(0, 80)?;
        Ok(centred(state, &text_of(value)?, width)?.into())
    }),
    ("e", |_, value, given| without(given, || escape(value, false))),
    ("escape", |_, value, given| without(given, || escape(value, false))),
    ("filesizeformat", |_, value, given| {
        let is_binary = Arguments::of(["binary"], given)?.is_true(0);
        Ok(file_size(number(value)?, is_binary).into())
    }),
    ("float", float),
    ("forceescape", |_, value, given| without(given, || escape(value, true))),
    ("format", |state, value, given| {
        if given.last().is_some_and(Value::is_kwargs) {
            return Err(error("`format` with names is not available; use `%`"));
        }
        formatted(state, &text_of(value)?, given)
    }),
    ("indent", indent),
    ("int", int),
    ("join", join),
    ("lower", |_, value, given| without(given, || Ok(text_of(value)?.to_lowercase().into()))),
    ("replace", |state, value, given| {
        let arguments = Arguments::of(["old", "new", "count"], given)?;
        let text =
            |index| arguments.written(index).and_then(|text| text.ok_or_else(|| arguments.missing(index)));
        Ok(replaced(state, &text_of(value)?, &text(0)?, &text(1)?, arguments.integer(2, -1)?)?.into())
    }),
    ("round", round),
    ("safe", |_, value, given| without(given, || Ok(Value::from_object(Written::Markup(text_of(value)?))))),
    ("string", |_, value, given| without(given, || Ok(text_of(value)?.into()))),
    ("striptags", |_, value, given| {
        without(given, || Ok(unescaped(&without_tags(&text_of(value)?))?.into()))
    }),
    ("title", |_, value, given| without(given, || Ok(titled(&text_of(value)?).into()))),
    ("tojson", tojson),
    ("trim", |_, value, given| {
        let arguments = Arguments::of(["chars"], given)?;
        Ok(stripped(&text_of(value)?, arguments.text(0)?, [true, true]).into())
    }),
    ("truncate", truncate),
    ("upper", |_, value, given| without(given, || Ok(text_of(value)?.to_uppercase().into()))),
    ("urlencode", |state, value, given| without(given, || urlencode(state, value))),
    ("wordcount", |_, value, given| {
        without(given, || {
            let text = text_of(value)?;
            let words = text.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
            Ok(words.filter(|word| !word.is_empty()).count().into())
        })
    }),
    ("abs", |_, value, given| without(given, || absolute(value))),
];

/// A filter of the engine that compares items.
type OrderedFilter = fn(&State<'_, '_>, Value, Kwargs) -> Result<Value, Error>;

/// Filters of the engine that Jinja does not have, or that write another text.
const REMOVED: [&str; 7] = ["bool", "chain", "groupby", "lines", "pprint", "split", "zip"];

/// Replaces the filters of the engine.
pub(crate) fn add_to(environment: &mut Environment<'_>) {
    for name in REMOVED {
        environment.remove_filter(name);
    }
    // The engine compares values without a limit.
    environment.add_filter("unique", |state: &State<'_, '_>, value: Value, kwargs: Kwargs| {
        charge_values(state, &value)?;
        filters::unique(state, value, kwargs)
    });
    let ordered: [(_, OrderedFilter); 3] =
        [("sort", filters::sort), ("min", filters::min), ("max", filters::max)];
    for (name, filter) in ordered {
        environment.add_filter(name, move |state: &State<'_, '_>, value: Value, kwargs: Kwargs| {
            check_order(state, &value, &kwargs)?;
            filter(state, value, kwargs)
        });
    }
    for (name, filter) in FILTERS {
        add_filter(environment, name, false, filter);
    }
    for name in ["length", "count"] {
        add_filter(environment, name, true, |state, value, given| without(given, || length(state, value)));
    }
}

/// Refuses a list whose items have no order, such as a number and a text.
fn check_order(state: &State<'_, '_>, value: &Value, kwargs: &Kwargs) -> Result<(), Error> {
    charge_values(state, value)?;
    if kwargs.has("attribute") || value.kind() != ValueKind::Seq {
        return Ok(());
    }
    let mut items = value.try_iter()?;
    let first = items.next();
    first.map_or(Ok(()), |first| items.try_for_each(|item| holds(state, &first, "<", &item).map(drop)))
}

/// Runs a filter without arguments.
fn without(given: &[Value], run: impl FnOnce() -> Result<Value, Error>) -> Result<Value, Error> {
    Arguments::of([], given)?;
    run()
}

fn length(state: &State<'_, '_>, value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(Value::from(0)),
        ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
            let counted = || bound(state, value.clone())?.try_iter().map(Iterator::count);
            value.len().map_or_else(counted, Ok).map(Value::from)
        }
        other => Err(error(format!("a value of the type {other} has no length"))),
    }
}

/// Returns a value as a floating-point number. A text is read as Python's `float` reads it.
fn number(value: &Value) -> Result<f64, Error> {
    match value.kind() {
        ValueKind::Bool => Ok(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value.clone())
            .or_else(|_| i128::try_from(value.clone()).map(|integer| integer as f64)),
        ValueKind::String => float_of(value.as_str().unwrap_or_default())
            .ok_or_else(|| error(format!("{value:?} is not a number"))),
        other => Err(error(format!("a value of the type {other} is not a number"))),
    }
}

fn absolute(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Bool => Ok(Value::from(i32::from(value.is_true()))),
        ValueKind::Number if value.is_integer() => {
            let integer = i128::try_from(value.clone())?.checked_abs();
            integer.map(Value::from).ok_or_else(|| error("an integer is too large"))
        }
        ValueKind::Number => Ok(Value::from(number(value)?.abs())),
        other => Err(error(format!("a value of the type {other} is not a number"))),
    }
}

/// Returns the number that Python's `float` reads in a text.
fn float_of(text: &str) -> Option<f64> {
    let text = stripped(text, None, [true, true]);
    let is_placed = text
        .split('_')
        .skip(1)
        .all(|part| part.starts_with(|letter: char| letter.is_ascii_digit()))
        && text.split('_').rev().skip(1).all(|part| part.ends_with(|letter: char| letter.is_ascii_digit()));
    is_placed.then(|| text.replace('_', "").parse().ok()).flatten()
}

fn float(_: &State<'_, '_>, value: &Value, given: &[Value]) -> Result<Value, Error> {
    let arguments = Arguments::of(["default"], given)?;
    if value.is_undefined() {
        return Err(error("an undefined value is not a number"));
    }
    let default = || arguments.get(0).cloned().unwrap_or_else(|| Value::from(0.0));
    Ok(number(value).map_or_else(|_| default(), Value::from))
}

fn int(_: &State<'_, '_>, value: &Value, given: &[Value]) -> Result<Value, Error> {
    let arguments = Arguments::of(["default", "base"], given)?;
    let base = u32::try_from(arguments.integer(1, 10)?).ok().filter(|base| (2..=36).contains(base));
    let base = base.ok_or_else(|| error("the base of `int` is from 2 to 36"))?;
    let default = || arguments.get(0).cloned().unwrap_or_else(|| Value::from(0));
    match value.kind() {
        ValueKind::Undefined => return Err(error("an undefined value is not a number")),
        ValueKind::Number if value.is_integer() => return Ok(value.clone()),
        _ if Written::text_of(value).is_some() => return Err(error("this value has no integer")),
        _ => {}
    }
    if let Some(text) = value.as_str() {
        let text = stripped(text, None, [true, true]);
        let (sign, digits) = text
            .strip_prefix('-')
            .map_or_else(|| ("", text.strip_prefix('+').unwrap_or(text)), |digits| ("-", digits));
        let prefixes = match base {
            2 => ["0b", "0B"],
            8 => ["0o", "0O"],
            16 => ["0x", "0X"],
            _ => ["\0", "\0"],
        };
        let plain = prefixes.iter().find_map(|prefix| digits.strip_prefix(prefix));
        let digits = plain.map_or(digits, |plain| plain.strip_prefix('_').unwrap_or(plain));
        let is_number =
            digits.split('_').all(|part| !part.is_empty() && part.chars().all(|digit| digit.is_digit(base)));
        if is_number {
            let integer = i128::from_str_radix(&format!("{sign}{}", digits.replace('_', "")), base);
            return integer.map(Value::from).map_err(|_| error("an integer is too large"));
        }
    }
    let whole = number(value).ok().filter(|number| number.is_finite());
    match whole {
        None => Ok(default()),
        Some(number) if number.abs() >= 170_141_183_460_469_231_731_687_303_715_884_105_728.0 => {
            Err(error("an integer is too large"))
        }
        #[expect(clippy::cast_possible_truncation, reason = "it is in the range")]
        Some(number) => Ok(Value::from(number.trunc() as i128)),
    }
}

fn round(_: &State<'_, '_>, value: &Value, given: &[Value]) -> Result<Value, Error> {
    let arguments = Arguments::of(["precision", "method"], given)?;
    let method = arguments.text(1)?.unwrap_or("common");
    let precision = usize::try_from(arguments.integer(0, 0)?).ok().filter(|precision| *precision <= 300);
    let precision = precision.ok_or_else(|| error("the precision of `round` is from 0 to 300"))?;
    let is_integer = value.is_integer() || value.kind() == ValueKind::Bool;
    if value.kind() == ValueKind::String {
        return Err(error("a text has no rounded value"));
    }
    let number = number(value)?;
    let round = match method {
        "common" if is_integer => return Ok(Value::from(i128::try_from(value.clone())?)),
        "common" => {
            return Ok(format!("{number:.precision$}")
                .parse::<f64>()
                .map_or_else(|_| value.clone(), Value::from));
        }
        "ceil" => f64::ceil,
        "floor" => f64::floor,
        _ => return Err(error("the method of `round` is common, ceil or floor")),
    };
    let scale: f64 = format!("1e{precision}").parse().expect("a power of ten is a number");
    if !(number * scale).is_finite() {
        return Err(error("the number is too large for `round`"));
    }
    Ok(Value::from(round(number * scale) / scale + 0.0))
}

fn join(state: &State<'_, '_>, value: &Value, given: &[Value]) -> Result<Value, Error> {
    let arguments = Arguments::of(["d", "attribute"], given)?;
    let separator = arguments.written(0)?.unwrap_or_default();
    if matches!(value.kind(), ValueKind::None | ValueKind::Number | ValueKind::Bool) {
        return Err(error(format!("a value of the type {} cannot be joined", value.kind())));
    }
    let item_of =
        |item: Value| text_of(&arguments.get(1).map_or(Ok(item.clone()), |path| attribute(item, path))?);
    joined(state, &separator, value.try_iter()?.map(item_of))
}

/// Returns an attribute of an attribute, such as `function.name`.
fn attribute(item: Value, path: &Value) -> Result<Value, Error> {
    if path.is_integer() {
        return item.get_item(path);
    }
    let path = path.as_str().ok_or_else(|| error("`attribute` is a text"))?;
    path.split('.').try_fold(item, |item, name| match name.parse::<usize>() {
        Ok(index) => item.get_item_by_index(index),
        Err(_) => item.get_attr(name),
    })
}

fn indent(state: &State<'_, '_>, value: &Value, given: &[Value]) -> Result<Value, Error> {
    let arguments = Arguments::of(["width", "first", "blank"], given)?;
    let text = value.as_str().or_else(|| Written::text_of(value));
    let text = text.ok_or_else(|| error(format!("`indent` needs a string, and not {}", value.kind())))?;
    let width = match arguments.get(0).filter(|width| width.kind() == ValueKind::String) {
        Some(width) => text_of(width)?,
        None => {
            let width = arguments.size(0, 4)?;
            charge(state, width)?;
            " ".repeat(width)
        }
    };
    let is_blank = arguments.is_true(2);
    let mut all = if arguments.is_true(1) { width.clone() } else { String::new() };
    for (index, line) in lines(&format!("{text}\n"), false).iter().enumerate() {
        let line = line.as_str().unwrap_or_default();
        charge(state, width.len() + line.len())?;
        if index > 0 {
            all.push('\n');
            all.push_str(if is_blank || !line.is_empty() { &width } else { "" });
        }
        all.push_str(line);
    }
    Ok(all.into())
}

fn truncate(state: &State<'_, '_>, value: &Value, given: &[Value]) -> Result<Value, Error> {
    let arguments = Arguments::of(["length", "killwords", "end", "leeway"], given)?;
    let text = value
        .as_str()
        .ok_or_else(|| error(format!("`truncate` needs a string, and not {}", value.kind())))?;
    let (length, end) = (arguments.size(0, 255)?, arguments.text(2)?.unwrap_or("..."));
    let leeway = arguments.integer(3, 5)?;
    let room = length.checked_sub(end.chars().count());
    let (Some(room), Ok(leeway)) = (room, usize::try_from(leeway)) else {
        return Err(error(format!(
            "`truncate` needs a length of at least {}, and a leeway of at least 0",
            end.chars().count()
        )));
    };
    charge(state, text.len() + end.len())?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text.into());
    }
    let cut: String = text.chars().take(room).collect();
    let kept = if arguments.is_true(1) { &cut } else { cut.rsplit_once(' ').map_or(&*cut, |(kept, _)| kept) };
    Ok(format!("{kept}{end}").into())
}

/// Replaces the signs of HTML. A text whose signs are replaced already stays as it is, unless it `is_forced`.
fn escape(value: &Value, is_forced: bool) -> Result<Value, Error> {
    if !is_forced && matches!(value.downcast_object_ref::<Written>(), Some(Written::Markup(_))) {
        return Ok(value.clone());
    }
    let mut text = String::new();
    for letter in text_of(value)?.chars() {
        match letter {
            '&' => text.push_str("&amp;"),
            '<' => text.push_str("&lt;"),
            '>' => text.push_str("&gt;"),
            '\'' => text.push_str("&#39;"),
            '"' => text.push_str("&#34;"),
            letter => text.push(letter),
        }
    }
    Ok(Value::from_object(Written::Markup(text)))
}

/// Returns a text without comments and tags of HTML, with single spaces.
fn without_tags(text: &str) -> String {
    let mut text = text.to_owned();
    for (open, close) in [("<!--", "-->"), ("<", ">")] {
        let (mut kept, mut rest) = (String::with_capacity(text.len()), text.as_str());
        while let Some(start) = rest.find(open)
            && let Some(end) = rest[start..].find(close)
        {
            kept.push_str(&rest[..start]);
            rest = &rest[start + end + close.len()..];
        }
        kept.push_str(rest);
        text = kept;
    }
    let words: Vec<&str> =
        text.split(crate::chat::python_text::is_space).filter(|word| !word.is_empty()).collect();
    words.join(" ")
}

/// Replaces the entities of HTML.
fn unescaped(text: &str) -> Result<String, Error> {
    const ENTITIES: [(&str, char); 7] = [
        ("amp;", '&'),
        ("lt;", '<'),
        ("gt;", '>'),
        ("quot;", '"'),
        ("#34;", '"'),
        ("#39;", '\''),
        ("apos;", '\''),
    ];
    let (mut all, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once('&') {
        all.push_str(before);
        let entity = ENTITIES.iter().find(|(name, _)| after.starts_with(name));
        rest = match entity {
            Some((name, letter)) => {
                all.push(*letter);
                &after[name.len()..]
            }
            None if after.starts_with(|letter: char| letter == '#' || letter.is_ascii_alphabetic()) => {
                return Err(error("`striptags` knows only the entities amp, lt, gt, quot and apos"));
            }
            None => {
                all.push('&');
                after
            }
        };
    }
    all.push_str(rest);
    Ok(all)
}

/// Returns a text whose words begin with capitals; a word ends at white space, a hyphen and opening brackets.
fn titled(text: &str) -> String {
    let is_between = |letter: char| {
        crate::chat::python_text::is_space(letter) || matches!(letter, '-' | '(' | '{' | '[' | '<')
    };
    let mut all = String::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(is_between).unwrap_or(rest.len());
        all.push_str(&capitalized(&rest[..end]));
        rest = &rest[end..];
        let end = rest.find(|letter| !is_between(letter)).unwrap_or(rest.len());
        all.push_str(&rest[..end]);
        rest = &rest[end..];
    }
    all
}

fn urlencode(state: &State<'_, '_>, value: &Value) -> Result<Value, Error> {
    let quoted = |value: &Value, is_query: bool| -> Result<String, Error> {
        let text = text_of(value)?;
        charge(state, 3 * text.len())?;
        let mut all = String::new();
        for byte in text.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => {
                    all.push(char::from(byte));
                }
                b'/' if !is_query => all.push('/'),
                b' ' if is_query => all.push('+'),
                byte => all.push_str(&format!("%{byte:02X}")),
            }
        }
        Ok(all)
    };
    let mut pairs = Vec::new();
    match value.kind() {
        ValueKind::Map => {
            for key in value.try_iter()? {
                pairs.push(format!("{}={}", quoted(&key, true)?, quoted(&value.get_item(&key)?, true)?));
            }
        }
        ValueKind::Seq | ValueKind::Iterable => {
            for pair in value.try_iter()? {
                let pair: Vec<Value> = pair.try_iter()?.collect();
                let [key, value] = &*pair else { return Err(error("`urlencode` needs pairs")) };
                pairs.push(format!("{}={}", quoted(key, true)?, quoted(value, true)?));
            }
        }
        _ => return Ok(quoted(value, false)?.into()),
    }
    Ok(pairs.join("&").into())
}

fn file_size(bytes: f64, is_binary: bool) -> String {
    let base: f64 = if is_binary { 1024.0 } else { 1000.0 };
    let middle = if is_binary { "i" } else { "" };
    if bytes.to_bits() == 1_f64.to_bits() {
        return "1 Byte".to_owned();
    }
    if bytes < base {
        return format!("{} Bytes", bytes.trunc());
    }
    let mut unit = base * base;
    let names = if is_binary {
        ["K", "M", "G", "T", "P", "E", "Z", "Y"]
    } else {
        ["k", "M", "G", "T", "P", "E", "Z", "Y"]
    };
    for name in &names[..7] {
        if bytes < unit {
            return format!("{:.1} {name}{middle}B", base * bytes / unit);
        }
        unit *= base;
    }
    format!("{:.1} Y{middle}B", base * bytes / unit)
}
