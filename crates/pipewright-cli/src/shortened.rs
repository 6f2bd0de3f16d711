//! Shortens what a user has written, for messages that repeat it.

use std::borrow::Cow;

/// The most characters of a value that a message repeats.
const LONGEST: usize = 120;

/// Returns a value, or its beginning and its length if it is long.
pub(crate) fn shortened(value: &str) -> Cow<'_, str> {
    if value.chars().count() <= LONGEST {
        return Cow::Borrowed(value);
    }
    let beginning: String = value.chars().take(LONGEST / 2).collect();
    Cow::Owned(format!("{beginning}... ({} characters)", value.chars().count()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_values_are_cut() {
        assert_eq!(shortened("F=1"), "F=1");
        assert_eq!(shortened(&"1".repeat(300)), format!("{}... (300 characters)", "1".repeat(60)));
        assert_eq!(shortened(&"\u{e4}".repeat(121)), format!("{}... (121 characters)", "\u{e4}".repeat(60)));
    }
}
