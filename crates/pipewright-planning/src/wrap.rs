//! Breaks lines between words, because a terminal breaks a long line inside a word.

/// Returns the text with each line that is wider than `columns` broken between words. The further lines of an
/// indented line are indented a little more. A word that is wider than a line is not broken.
pub(super) fn wrap(text: &str, columns: usize) -> String {
    text.split('\n').map(|line| wrap_line(line, columns)).collect::<Vec<_>>().join("\n")
}

fn wrap_line(line: &str, columns: usize) -> String {
    let indentation = line.len() - line.trim_start_matches(' ').len();
    let further = " ".repeat(if indentation == 0 { 0 } else { indentation + 2 });
    let (mut wrapped, mut rest) = (String::new(), line.to_owned());
    while let Some(end) = break_before(&rest, columns) {
        let (before, after) = rest.split_at(end);
        wrapped.push_str(before.trim_end());
        wrapped.push('\n');
        rest = format!("{further}{}", after.trim_start());
    }
    wrapped + &rest
}

/// Returns the place of the space at which a line is broken; `None` if it is narrow enough or has only one
/// word.
fn break_before(line: &str, columns: usize) -> Option<usize> {
    let (limit, _) = line.char_indices().nth(columns)?;
    let begin = line.len() - line.trim_start().len();
    let is_break = |&place: &usize| place > begin;
    // A space at the limit itself is left out of the line.
    let last = if line[limit..].starts_with(' ') { Some(limit) } else { line[..limit].rfind(' ') };
    let last = last.filter(is_break);
    last.or_else(|| line[begin..].find(' ').map(|index| begin + index))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrap("to be or not", 12), "to be or not");
        assert_eq!(wrap("to be or not", 11), "to be or\nnot");
        assert_eq!(wrap("to be or not to be", 6), "to be\nor not\nto be");
        assert_eq!(wrap("a\n\nto be or", 5), "a\n\nto be\nor");
        assert_eq!(wrap("é é é", 3), "é é\né");
        assert_eq!(wrap("an éééé é", 5), "an\néééé\né");
    }

    #[test]
    fn words_are_whole_and_further_lines_are_indented() {
        assert_eq!(wrap("in /a/long/path is", 6), "in\n/a/long/path\nis");
        assert_eq!(wrap("  resume out   trains on", 14), "  resume out\n    trains on");
        assert_eq!(wrap("        wide", 4), "        wide");
        assert_eq!(wrap("", 4), "");
    }
}
