//! The methods of Python's texts.

use std::collections::HashSet;

use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use crate::chat::arguments::Arguments;
use crate::chat::limits::{charge, charge_pattern, charge_values};
use crate::chat::python_text::{error, is_space};

/// Calls a method of a text. Methods that are not listed here are methods of the engine.
pub(crate) fn call(
    state: &State<'_, '_>,
    text: &str,
    method: &str,
    given: &[Value],
) -> Result<Option<Value>, Error> {
    if let Some(value) = plain(text, method)? {
        Arguments::of([], given)?;
        return Ok(Some(value));
    }
    Ok(Some(match method {
        "strip" | "lstrip" | "rstrip" => {
            let arguments = Arguments::of(["chars"], given)?;
            let sides = [method != "rstrip", method != "lstrip"];
            stripped(text, arguments.text(0)?, sides).into()
        }
        "removeprefix" => {
            let arguments = Arguments::of(["prefix"], given)?;
            text.strip_prefix(arguments.needed(0)?).unwrap_or(text).into()
        }
        "removesuffix" => {
            let arguments = Arguments::of(["suffix"], given)?;
            text.strip_suffix(arguments.needed(0)?).unwrap_or(text).into()
        }
        "replace" => {
            let arguments = Arguments::of(["old", "new", "count"], given)?;
            let (old, new) = (arguments.needed(0)?, arguments.needed(1)?);
            replaced(state, text, old, new, arguments.integer(2, -1)?)?.into()
        }
        "split" | "rsplit" => {
            let arguments = Arguments::of(["sep", "maxsplit"], given)?;
            split(text, arguments.text(0)?, arguments.integer(1, -1)?, method == "rsplit")?.into()
        }
        "splitlines" => {
            let arguments = Arguments::of(["keepends"], given)?;
            lines(text, arguments.is_true(0)).into()
        }
        "partition" | "rpartition" => {
            let arguments = Arguments::of(["sep"], given)?;
            partition(text, arguments.needed(0)?, method == "rpartition")?
        }
        "find" | "rfind" | "index" | "rindex" | "count" => found(text, method, given)?,
        "startswith" | "endswith" => begins_or_ends(text, method, given)?.into(),
        "zfill" | "center" | "ljust" | "rjust" | "expandtabs" => padded(state, text, method, given)?.into(),
        "format" => {
            let specifications = text.split('{').skip(1).map(|field| {
                let specification = field.split('}').next().unwrap_or_default();
                specification.split_once(':').map_or("", |(_, width)| width)
            });
            charge_pattern(state, specifications, '{', given)?;
            return Ok(None);
        }
        "join" => {
            let [items] = given else { return Err(Error::from(ErrorKind::MissingArgument)) };
            let item_of = |(index, item): (usize, Value)| {
                let text = item.as_str().map(str::to_owned);
                text.ok_or_else(|| {
                    error(format!("item {index} of `join` is not a string but {}", item.kind()))
                })
            };
            joined(state, text, items.try_iter()?.enumerate().map(item_of))?
        }
        _ => return Ok(None),
    }))
}

/// Returns the result of a method without arguments.
fn plain(text: &str, method: &str) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "lower" | "casefold" if method == "lower" || text.is_ascii() => text.to_lowercase().into(),
        "upper" => text.to_uppercase().into(),
        "swapcase" => {
            let swap = |letter: char| -> String {
                if letter.is_uppercase() {
                    letter.to_lowercase().collect()
                } else {
                    letter.to_uppercase().collect()
                }
            };
            text.chars().map(swap).collect::<String>().into()
        }
        "title" => titled(text).into(),
        "capitalize" => capitalized(text).into(),
        "isdigit" | "isdecimal" | "isnumeric" => is_digits(text)?.into(),
        "isspace" => (!text.is_empty() && text.chars().all(is_space)).into(),
        "isalnum" => {
            let is_alphanumeric = |letter: char| letter.is_alphanumeric();
            (!text.is_empty() && text.chars().all(is_alphanumeric)).into()
        }
        "istitle" => {
            let is_cased = text.chars().any(|letter| letter.is_lowercase() || letter.is_uppercase());
            (is_cased && titled(text) == text).into()
        }
        _ => return Ok(None),
    }))
}

/// Writes items with a separator between them.
pub(crate) fn joined(
    state: &State<'_, '_>,
    separator: &str,
    items: impl Iterator<Item = Result<String, Error>>,
) -> Result<Value, Error> {
    let mut all = String::new();
    for (index, item) in items.enumerate() {
        let (item, separator) = (item?, if index > 0 { separator } else { "" });
        charge(state, separator.len() + item.len())?;
        all.push_str(separator);
        all.push_str(&item);
    }
    Ok(all.into())
}

/// Replaces a text at most `count` times, or everywhere.
pub(crate) fn replaced(
    state: &State<'_, '_>,
    text: &str,
    old: &str,
    new: &str,
    count: i64,
) -> Result<String, Error> {
    let limit = usize::try_from(count).unwrap_or(usize::MAX);
    let count = text.matches(old).count().min(limit);
    charge(state, text.len().saturating_add(count.saturating_mul(new.len())))?;
    Ok(text.replacen(old, new, limit))
}

/// Returns a text without white space or some characters at its beginning and its end.
pub(crate) fn stripped<'t>(text: &'t str, letters: Option<&str>, [start, end]: [bool; 2]) -> &'t str {
    let letters: Option<HashSet<char>> = letters.map(|letters| letters.chars().collect());
    let is_cut =
        |letter: char| letters.as_ref().map_or_else(|| is_space(letter), |letters| letters.contains(&letter));
    let text = if start { text.trim_start_matches(is_cut) } else { text };
    if end { text.trim_end_matches(&is_cut) } else { text }
}

/// Returns a text whose words begin with capitals; a word is a sequence of letters that have capitals.
fn titled(text: &str) -> String {
    let mut is_inside = false;
    let letters = text.chars().flat_map(|letter| {
        let is_cased = letter.is_lowercase() || letter.is_uppercase();
        let was_inside = std::mem::replace(&mut is_inside, is_cased);
        let cased: Vec<char> =
            if was_inside { letter.to_lowercase().collect() } else { letter.to_uppercase().collect() };
        cased
    });
    letters.collect()
}

/// Returns a text whose first letter is a capital, and whose other letters are not.
pub(crate) fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    let first: String = letters.next().into_iter().flat_map(char::to_uppercase).collect();
    first + &letters.as_str().to_lowercase()
}

/// Splits a text at most `limit` times, or everywhere.
fn split(text: &str, separator: Option<&str>, limit: i64, is_from_end: bool) -> Result<Vec<Value>, Error> {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    if separator == Some("") {
        return Err(error("empty separator"));
    }
    let mut parts: Vec<&str> = Vec::new();
    let mut rest = if separator.is_none() { stripped(text, None, [!is_from_end, is_from_end]) } else { text };
    while parts.len() < limit {
        let pair = match separator {
            Some(separator) if is_from_end => rest.rsplit_once(separator).map(|(start, end)| (end, start)),
            Some(separator) => rest.split_once(separator),
            None if is_from_end => rest.rfind(is_space).map(|at| {
                let length = rest[at..].chars().next().map_or(0, char::len_utf8);
                (&rest[at + length..], stripped(&rest[..at], None, [false, true]))
            }),
            None => rest.find(is_space).map(|at| (&rest[..at], stripped(&rest[at..], None, [true, false]))),
        };
        let Some((part, next)) = pair else { break };
        parts.push(part);
        rest = next;
        if separator.is_none() && rest.is_empty() {
            break;
        }
    }
    if separator.is_some() || !rest.is_empty() {
        // Without a separator, white space at the other end does not count either.
        let sides = [is_from_end, !is_from_end];
        let is_last = separator.is_none() && parts.len() < limit;
        parts.push(if is_last { stripped(rest, None, sides) } else { rest });
    }
    if is_from_end {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Returns the lines of a text as Python divides them.
pub(crate) fn lines(text: &str, keeps_ends: bool) -> Vec<Value> {
    let is_end = |letter: char| {
        matches!(
            letter,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(is_end) {
        let length = if rest[at..].starts_with("\r\n") {
            2
        } else {
            rest[at..].chars().next().map_or(1, char::len_utf8)
        };
        lines.push(Value::from(&rest[..if keeps_ends { at + length } else { at }]));
        rest = &rest[at + length..];
    }
    if !rest.is_empty() {
        lines.push(Value::from(rest));
    }
    lines
}

fn partition(text: &str, separator: &str, is_from_end: bool) -> Result<Value, Error> {
    if separator.is_empty() {
        return Err(error("empty separator"));
    }
    let pair = if is_from_end { text.rsplit_once(separator) } else { text.split_once(separator) };
    let parts = match pair {
        Some((before, after)) => [before, separator, after],
        None if is_from_end => ["", "", text],
        None => [text, "", ""],
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from).to_vec())))
}

/// Returns the part of a text between two of its characters, as Python's slices do, and the number of characters
/// before it; `None` if the start is behind the text.
fn between(text: &str, start: i64, end: Option<i64>) -> Option<(&str, usize)> {
    let count = text.chars().count();
    let place = |at: i64| {
        let from_end = count.saturating_sub(usize::try_from(at.unsigned_abs()).unwrap_or(usize::MAX));
        usize::try_from(at).unwrap_or(from_end)
    };
    let (start, end) = (place(start), end.map_or(count, place).min(count));
    let offset = |at| text.char_indices().nth(at).map_or(text.len(), |(offset, _)| offset);
    (start <= count && start <= end).then(|| (&text[offset(start)..offset(end)], start))
}

fn found(text: &str, method: &str, given: &[Value]) -> Result<Value, Error> {
    let arguments = Arguments::of(["sub", "start", "end"], given)?;
    let sought = arguments.needed(0)?;
    let end = arguments.get(2).map(|_| arguments.integer(2, 0)).transpose()?;
    let part = between(text, arguments.integer(1, 0)?, end);
    if method == "count" {
        return Ok(Value::from(part.map_or(0, |(part, _)| part.matches(sought).count())));
    }
    let at = part.and_then(|(part, before)| {
        let at = if method.starts_with('r') { part.rfind(sought) } else { part.find(sought) };
        at.map(|at| before + part[..at].chars().count())
    });
    match at {
        Some(at) => Ok(Value::from(at)),
        None if method.ends_with("index") => Err(error("substring not found")),
        None => Ok(Value::from(-1)),
    }
}

fn begins_or_ends(text: &str, method: &str, given: &[Value]) -> Result<bool, Error> {
    let arguments = Arguments::of(["affix", "start", "end"], given)?;
    let affix = arguments.get(0).ok_or_else(|| arguments.missing(0))?;
    let end = arguments.get(2).map(|_| arguments.integer(2, 0)).transpose()?;
    let part = between(text, arguments.integer(1, 0)?, end).map(|(part, _)| part);
    let is_affix =
        |affix: &str| {
            part.is_some_and(|part| {
                if method == "startswith" { part.starts_with(affix) } else { part.ends_with(affix) }
            })
        };
    if let Some(affix) = affix.as_str() {
        return Ok(is_affix(affix));
    }
    if !affix.is_tuple() {
        return Err(error(format!(
            "`{method}` needs a string or a tuple of strings, and not {}",
            affix.kind()
        )));
    }
    for affix in affix.try_iter()? {
        let affix = affix.as_str().ok_or_else(|| error(format!("`{method}` needs strings")))?;
        if is_affix(affix) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Pads a text to a width, or replaces its tabs by spaces.
fn padded(state: &State<'_, '_>, text: &str, method: &str, given: &[Value]) -> Result<String, Error> {
    if method == "expandtabs" {
        let size = Arguments::of(["tabsize"], given)?.size(0, 8)?;
        charge(state, text.len().saturating_add(size.saturating_mul(text.matches('\t').count())))?;
        return Ok(expanded(text, size));
    }
    let arguments = Arguments::of(["width", "fillchar"], given)?;
    let width =
        arguments.get(0).map(|_| arguments.size(0, 0)).transpose()?.ok_or_else(|| arguments.missing(0))?;
    let missing = width.saturating_sub(text.chars().count());
    charge(state, text.len().saturating_add(missing.saturating_mul(4)))?;
    if method == "zfill" {
        let sign = usize::from(text.starts_with(['+', '-']));
        return Ok(format!("{}{}{}", &text[..sign], "0".repeat(missing), &text[sign..]));
    }
    let filling = arguments.text(1)?.unwrap_or(" ");
    if filling.chars().count() != 1 {
        return Err(error("the fill character must be exactly one character long"));
    }
    let left = match method {
        "ljust" => 0,
        "rjust" => missing,
        _ => missing / 2 + (missing & width & 1),
    };
    Ok(format!("{}{text}{}", filling.repeat(left), filling.repeat(missing - left)))
}

/// Returns a text centred in a line, as the method `center` does.
pub(crate) fn centred(state: &State<'_, '_>, text: &str, width: usize) -> Result<String, Error> {
    padded(state, text, "center", &[Value::from(width)])
}

fn expanded(text: &str, size: usize) -> String {
    let (mut all, mut column) = (String::new(), 0);
    for letter in text.chars() {
        if letter == '\t' {
            let count = if size == 0 { 0 } else { size - column % size };
            all.extend(std::iter::repeat_n(' ', count));
            column += count;
        } else {
            all.push(letter);
            column = if matches!(letter, '\n' | '\r') { 0 } else { column + 1 };
        }
    }
    all
}

/// Returns whether all characters are digits.
fn is_digits(text: &str) -> Result<bool, Error> {
    if text.chars().any(|letter| letter.is_ascii() && !letter.is_ascii_digit()) {
        return Ok(false);
    }
    if !text.is_ascii() {
        return Err(error("whether characters other than ASCII are digits is not known"));
    }
    Ok(!text.is_empty())
}

/// Calls a method of a list.
pub(crate) fn call_of_list(
    state: &State<'_, '_>,
    list: &Value,
    method: &str,
    given: &[Value],
) -> Result<Option<Value>, Error> {
    if list.kind() != ValueKind::Seq && list.kind() != ValueKind::Iterable {
        return Ok(None);
    }
    charge_values(state, list)?;
    let items = || -> Result<Vec<Value>, Error> { Ok(list.try_iter()?.collect()) };
    match (method, given) {
        ("copy", []) => Ok(Some(Value::from(items()?))),
        ("count", [value]) => Ok(Some(Value::from(items()?.iter().filter(|item| *item == value).count()))),
        ("index", [value]) => {
            let at = items()?.iter().position(|item| item == value);
            at.map(|at| Some(Value::from(at)))
                .ok_or_else(|| error("the list does not have the value of `index`"))
        }
        _ => Ok(None),
    }
}
