//! Conditions of a shell that compare texts and numbers. `None` is a condition that is not decided.

use crate::emit::shell::arithmetic::number;

/// Commands whose arguments are assignments.
pub(super) const DECLARES: [&str; 5] = ["export", "local", "declare", "readonly", "typeset"];

/// Returns whether both hold.
pub(super) fn and(one: Option<bool>, other: Option<bool>) -> Option<bool> {
    match (one, other) {
        (Some(false), _) | (_, Some(false)) => Some(false),
        (Some(true), Some(true)) => Some(true),
        _ => None,
    }
}

/// Returns whether one of them holds.
pub(super) fn or(one: Option<bool>, other: Option<bool>) -> Option<bool> {
    not(and(not(one), not(other)))
}

/// Returns whether it does not hold.
pub(super) fn not(value: Option<bool>) -> Option<bool> {
    value.map(|value| !value)
}

/// Returns the result of a command: `[ .. ]`, `test`, or a command whose result is always the same.
pub(super) fn result_of(command: &[&str]) -> Option<bool> {
    match command {
        ["[", words @ .., "]"] | ["test", words @ ..] => holds(words, |text| text.trim().parse().ok()),
        ["true" | ":" | "echo" | "printf" | "set", ..] => Some(true),
        [name, ..] if DECLARES.contains(name) => Some(true),
        ["false", ..] => Some(false),
        _ => None,
    }
}

/// Returns whether the words of `[[ .. ]]` hold, whose numbers are sums.
pub(super) fn holds_in_double_brackets(words: &[&str]) -> Option<bool> {
    holds(words, number)
}

/// Returns whether the words in the brackets of a test hold.
fn holds(words: &[&str], number: fn(&str) -> Option<i64>) -> Option<bool> {
    match *words {
        [] => Some(false),
        [text] => Some(!text.is_empty()),
        ["!", text] => Some(text.is_empty()),
        ["-z", text] => Some(text.is_empty()),
        ["-n", text] => Some(!text.is_empty()),
        // A test of a file, or a mistake of a test whose operand is left out.
        [operator, _] => (operator.len() != 2 || !operator.starts_with('-')).then_some(false),
        // `[[` takes these as patterns.
        [_, _, other] if other.contains(['*', '?', '[']) => None,
        [one, "=" | "==", other] => Some(one == other),
        [one, "!=", other] => Some(one != other),
        ["!", ref rest @ ..] => not(holds(rest, number)),
        [one, operator, other] => {
            let order = number(one)?.cmp(&number(other)?);
            match operator {
                "-eq" => Some(order.is_eq()),
                "-ne" => Some(order.is_ne()),
                "-lt" => Some(order.is_lt()),
                "-le" => Some(order.is_le()),
                "-gt" => Some(order.is_gt()),
                "-ge" => Some(order.is_ge()),
                _ => None,
            }
        }
        _ => None,
    }
}

/// Returns whether a word of `case` matches a pattern.
pub(super) fn matches(word: &str, pattern: &str) -> Option<bool> {
    match pattern {
        "*" => Some(true),
        _ if pattern.contains(['*', '?', '[']) => None,
        _ => Some(word == pattern),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_of_texts_and_numbers_are_decided() {
        let check = |words: &str, expected: Option<bool>| {
            let words: Vec<&str> = words.split(' ').collect();
            assert_eq!(result_of(&words), expected, "{words:?}");
        };
        check("[ a = a ]", Some(true));
        check("[ test = test ]", Some(true));
        check("[ [ != ] ]", Some(true));
        check("[ test ]", Some(true));
        check("test ! -n test", Some(false));
        check("test 3 -gt 4", Some(false));
        check("[ -f x ]", None);
        check("[ a = a", None);
        check("grep a", None);
    }
}
