//! The value of a shell's sum, such as `$((NODES * 8))`.

use crate::emit::shell::letters::is_of_name;

/// The longest text between the brackets of an element that a sum sets.
const LONGEST_SUBSCRIPT: usize = 200;

/// Returns the value of a sum of whole numbers and names, with `+ - * / %` and parentheses. `None` if it has anything
/// else, an unknown name, a division by 0, or is too large.
pub(super) fn evaluate(text: &str, value: &dyn Fn(&str) -> Option<i64>) -> Option<i64> {
    let mut rest = text;
    let result = sum(&mut rest, value, 0)?;
    rest.trim().is_empty().then_some(result)
}

/// The most parentheses inside each other.
const DEPTH: usize = 32;

fn sum(rest: &mut &str, value: &dyn Fn(&str) -> Option<i64>, depth: usize) -> Option<i64> {
    let mut total = product(rest, value, depth)?;
    while let Some(operator) = take(rest, &['+', '-']) {
        let next = product(rest, value, depth)?;
        total = if operator == '+' { total.checked_add(next)? } else { total.checked_sub(next)? };
    }
    Some(total)
}

fn product(rest: &mut &str, value: &dyn Fn(&str) -> Option<i64>, depth: usize) -> Option<i64> {
    let mut total = factor(rest, value, depth)?;
    while let Some(operator) = take(rest, &['*', '/', '%']) {
        let next = factor(rest, value, depth)?;
        total = match operator {
            '*' => total.checked_mul(next)?,
            '/' => total.checked_div(next)?,
            _ => total.checked_rem(next)?,
        };
    }
    Some(total)
}

fn factor(rest: &mut &str, value: &dyn Fn(&str) -> Option<i64>, depth: usize) -> Option<i64> {
    if depth > DEPTH {
        return None;
    }
    if take(rest, &['-']).is_some() {
        return factor(rest, value, depth + 1)?.checked_neg();
    }
    if take(rest, &['(']).is_some() {
        let inside = sum(rest, value, depth + 1)?;
        return take(rest, &[')']).map(|_| inside);
    }
    take(rest, &['$']);
    let has_brace = take(rest, &['{']).is_some();
    let (name, after) = rest.split_at(rest.find(|letter| !is_of_name(letter)).unwrap_or(rest.len()));
    *rest = after;
    if has_brace {
        take(rest, &['}'])?;
    }
    if name.starts_with(|letter: char| letter.is_ascii_digit()) { number(name) } else { value(name) }
}

/// Returns a whole number as a sum reads it: a leading 0 is for the base 8, and `0x` for 16.
pub(super) fn number(text: &str) -> Option<i64> {
    let text = text.trim();
    let digits = text.trim_start_matches(['-', '+']);
    let (digits, base) = match digits.strip_prefix('0') {
        None | Some("") => (digits, 10),
        Some(octal) => octal.strip_prefix(['x', 'X']).map_or((octal, 8), |digits| (digits, 16)),
    };
    let size = i64::from_str_radix(digits, base).ok().filter(|_| digits.starts_with(is_of_name))?;
    match &text[..text.len() - text.trim_start_matches(['-', '+']).len()] {
        "" | "+" => Some(size),
        "-" => Some(-size),
        _ => None,
    }
}

/// Takes one of some letters from the start of the text, after blanks.
fn take(rest: &mut &str, letters: &[char]) -> Option<char> {
    *rest = rest.trim_start();
    let first = rest.chars().next().filter(|letter| letters.contains(letter))?;
    *rest = &rest[first.len_utf8()..];
    Some(first)
}

/// Returns the names to which a sum gives a value, as in `N += 1`, `N++` and `--N`.
pub(super) fn names_set(text: &str) -> Vec<&str> {
    let (mut names, mut rest) = (Vec::new(), text);
    while let Some(start) = rest.find(is_of_name) {
        let before = rest[..start].trim_end();
        let name = &rest[start..];
        let (name, after) = name.split_at(name.find(|letter| !is_of_name(letter)).unwrap_or(name.len()));
        let end = after.bytes().take(LONGEST_SUBSCRIPT).position(|byte| byte == b']');
        let behind = end.filter(|_| after.starts_with('[')).map_or(after, |end| &after[end + 1..]);
        if before.ends_with("++") || before.ends_with("--") || is_assignment(behind.trim_start()) {
            names.push(name);
        }
        rest = after;
    }
    names
}

/// Returns whether the text after a name gives the name a value.
fn is_assignment(after: &str) -> bool {
    let operator: String =
        after.chars().take_while(|letter| "+-*/%<>&|^=!".contains(*letter)).take(3).collect();
    let is_step = operator.starts_with("++") || operator.starts_with("--");
    let comparisons = ["==", "<=", ">=", "!="];
    let is_comparison = comparisons.iter().any(|comparison| operator.starts_with(comparison));
    is_step || (operator.contains('=') && !is_comparison)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_may_set_names() {
        let check = |text: &str, expected: &[&str]| assert_eq!(names_set(text), expected, "{text}");
        check("N += 1", &["N"]);
        check("N=A*2, M <<= 1", &["N", "M"]);
        check("N++ + --M", &["N", "M"]);
        check("N == 1 && A <= 2 || B != 3 && C < D", &[]);
    }

    #[test]
    fn sums_have_the_shell_order() {
        let value = |name: &str| (name == "A").then_some(8);
        let check =
            |text: &str, expected: Option<i64>| assert_eq!(evaluate(text, &value), expected, "{text}");
        check("(2 + A * 3)", Some(26));
        check("($A/${A} - -1)", Some(2));
        check("(A % 3) * (1 + 1)", Some(4));
        for wrong in ["(1 / 0)", "(B)", "1 +", "A ** 2", "9223372036854775807 + 1", "(1", ""] {
            check(wrong, None);
        }
        check(&"(".repeat(1000), None);
    }
}
