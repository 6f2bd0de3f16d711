//! Conditions of a shell that compare texts and numbers. `None` is a condition that is not decided.

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
    and(one.map(|value| !value), other.map(|value| !value)).map(|value| !value)
}

/// Returns the result of the words of `[ .. ]`, `[[ .. ]]`, `test`, `true` or `false`.
pub(super) fn result_of(words: &[&str]) -> Option<bool> {
    const BRACKETS: [&str; 5] = ["[", "[[", "]", "]]", "test"];
    let words: Vec<&str> = words.iter().copied().filter(|word| !BRACKETS.contains(word)).collect();
    match words.as_slice() {
        ["!", rest @ ..] => holds(rest).map(|result| !result),
        words => holds(words),
    }
}

fn holds(words: &[&str]) -> Option<bool> {
    match *words {
        ["true"] => Some(true),
        ["false"] => Some(false),
        ["-z", text] => Some(text.is_empty()),
        ["-n", text] => Some(!text.is_empty()),
        // `[[` takes these as patterns.
        [_, _, other] if other.contains(['*', '?']) => None,
        [one, "=" | "==", other] => Some(one == other),
        [one, "!=", other] => Some(one != other),
        [one, operator, other] => {
            let order = one.trim().parse::<i64>().ok()?.cmp(&other.trim().parse::<i64>().ok()?);
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
