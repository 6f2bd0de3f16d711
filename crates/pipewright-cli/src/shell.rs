//! Words of commands that the user may paste into a shell.

/// Returns the word, quoted for a shell if necessary. A word that looks like a flag is changed to a path.
pub(crate) fn quoted(word: &str) -> String {
    let word = if word.starts_with('-') { format!("./{word}") } else { word.to_owned() };
    let is_plain = |character: char| character.is_alphanumeric() || "/._-+:@%".contains(character);
    let needs_quotes = word.is_empty() || !word.chars().all(is_plain);
    if needs_quotes { format!("'{}'", word.replace('\'', "'\\''")) } else { word }
}

#[cfg(test)]
mod tests {
    use super::*;

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
