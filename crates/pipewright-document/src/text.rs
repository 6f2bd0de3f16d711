//! Texts that the user has written, in messages: control characters as escapes, and words quoted
//! for a shell.

use std::borrow::Cow;

/// Returns the text with control characters as escapes such as `\u{1b}`, except line ends and tabs.
/// Characters that change the direction of writing count as control characters, because they change the order
/// of what follows.
pub fn escape(text: &str) -> Cow<'_, str> {
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        if is_hidden(character) {
            escaped.extend(character.escape_default());
        } else {
            escaped.push(character);
        }
    }
    Cow::Owned(escaped)
}

/// Like [`escape`], for JSON: control characters, which JSON has in strings only, have JSON's own escapes
/// such as `\u202e`.
pub fn escape_in_json(json: &str) -> Cow<'_, str> {
    if !json.contains(is_hidden) {
        return Cow::Borrowed(json);
    }
    let escaped = json.chars().map(|character| match character {
        hidden if is_hidden(hidden) => format!("\\u{:04x}", u32::from(hidden)),
        shown => shown.to_string(),
    });
    Cow::Owned(escaped.collect())
}

/// Like [`escape`], for a text that this program has coloured: the sequences that set colours stay.
pub fn escape_all_but_colours(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find('\u{1b}') {
        let (before, sequence) = rest.split_at(start);
        escaped.push_str(&escape(before));
        let length = colour(sequence).unwrap_or(0);
        escaped.push_str(&sequence[..length]);
        rest = &sequence[length..];
        if length == 0 {
            escaped.push_str(&escape(&rest[..1]));
            rest = &rest[1..];
        }
    }
    escaped.push_str(&escape(rest));
    escaped
}

/// Returns the length of the sequence that sets a colour at the start of the text: `ESC [`, numbers, `m`.
fn colour(text: &str) -> Option<usize> {
    let numbers = text.strip_prefix("\u{1b}[")?;
    let end = numbers.find(|character: char| !character.is_ascii_digit() && character != ';')?;
    numbers[end..].starts_with('m').then_some("\u{1b}[".len() + end + 1)
}

fn is_hidden(character: char) -> bool {
    let turns = matches!(
        character,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    );
    turns || (character.is_control() && !matches!(character, '\n' | '\t'))
}

/// Returns the word, quoted for a shell if necessary. A word that looks like a flag is changed to a path.
pub fn quoted(word: &str) -> String {
    let word = if word.starts_with('-') { format!("./{word}") } else { word.to_owned() };
    let is_plain = |character: char| character.is_alphanumeric() || "/._-+:@%".contains(character);
    let needs_quotes = word.is_empty() || !word.chars().all(is_plain);
    if needs_quotes { format!("'{}'", word.replace('\'', "'\\''")) } else { word }
}

/// Returns a flag `--set` for each key, with a space before it, quoted for a shell if necessary.
pub fn set_flags(set: &[String]) -> String {
    let is_plain = |character: char| character.is_ascii_alphanumeric() || "._-+=".contains(character);
    let flag = |key: &String| {
        if key.chars().all(is_plain) { format!(" --set {key}") } else { format!(" --set {}", quoted(key)) }
    };
    set.iter().map(flag).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_stays_json() {
        let text = serde_json::json!({ "out": "a\u{202e}b\u{9b}c" }).to_string();
        let escaped = escape_in_json(&text);
        assert_eq!(escaped, r#"{"out":"a\u202eb\u009bc"}"#);
        let read: serde_json::Value = serde_json::from_str(&escaped).expect("JSON");
        assert_eq!(read["out"], "a\u{202e}b\u{9b}c");
    }

    #[test]
    fn control_characters_are_escaped_and_others_are_not() {
        let check = |text: &str, expected: &str| assert_eq!(escape(text), expected);
        check("a\n\tb é 漢 😀", "a\n\tb é 漢 😀");
        check("\u{1b}[2J\u{7}\r\u{7f}", r"\u{1b}[2J\u{7}\r\u{7f}");
        check("\u{9b}31m a\u{202e}b\0", r"\u{9b}31m a\u{202e}b\u{0}");
    }

    #[test]
    fn colours_stay() {
        let check = |text: &str, expected: &str| assert_eq!(escape_all_but_colours(text), expected);
        check("\u{1b}[1;31mred\u{1b}[0m", "\u{1b}[1;31mred\u{1b}[0m");
        check("\u{1b}[2J\u{1b}]0;title\u{7}\u{1b}", r"\u{1b}[2J\u{1b}]0;title\u{7}\u{1b}");
        check("\u{1b}[31", r"\u{1b}[31");
    }

    #[test]
    fn words_survive_a_shell() {
        let check = |word: &str, expected: &str| assert_eq!(quoted(word), expected);
        check("runs/sample-1", "runs/sample-1");
        check("a b", "'a b'");
        check("it's", "'it'\\''s'");
        check("-x", "./-x");
        check("$HOME", "'$HOME'");
        check("", "''");
    }
}
