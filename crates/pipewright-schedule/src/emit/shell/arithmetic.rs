//! The value of a shell's sum, such as `$((NODES * 8))`.

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
    let end =
        rest.find(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_')).unwrap_or(rest.len());
    let (name, after) = rest.split_at(end);
    *rest = after;
    if has_brace {
        take(rest, &['}'])?;
    }
    name.parse().ok().or_else(|| value(name))
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
    let is_of_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let (mut names, mut rest) = (Vec::new(), text);
    while let Some(start) = rest.find(is_of_name) {
        let before = rest[..start].trim_end();
        let name = &rest[start..];
        let (name, after) = name.split_at(name.find(|letter| !is_of_name(letter)).unwrap_or(name.len()));
        if before.ends_with("++") || before.ends_with("--") || is_assignment(after.trim_start()) {
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
