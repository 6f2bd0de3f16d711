//! Names that are near to an unknown one, for error messages.

/// Returns a hint such as "; the nearest name is `h100`", or nothing if no name is near: at most one letter
/// in four differs, and one more. Case, spaces and punctuation do not matter.
pub(crate) fn nearest<'a>(unknown: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let sought = letters(unknown);
    let distances = known.into_iter().map(|name| {
        let own = letters(name);
        (strsim::damerau_levenshtein(&own, &sought), own.chars().count(), name)
    });
    let near = distances.filter(|&(distance, length, _)| distance <= 1 + length / 4 && distance < length);
    near.min().map_or_else(String::new, |(_, _, name)| nearest_hint(name))
}

/// Returns the hint that a name is the nearest one.
pub(crate) fn nearest_hint(name: &str) -> String {
    format!("; the nearest name is `{name}`")
}

fn letters(name: &str) -> String {
    name.chars().filter(|letter| letter.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn a_name_is_near_if_few_letters_differ() {
        let check = |unknown: &str, expected: &str| {
            let hint = nearest(unknown, ["h100", "H100 80 GB SXM", "mi300x", "gb200"]);
            assert_eq!(hint.trim_start_matches("; the nearest name is "), expected, "{unknown}");
        };
        check("h10", "`h100`");
        check("H-100", "`h100`");
        check("hl00", "`h100`");
        check("m300ix", "`mi300x`");
        check("H100 80GB SXM", "`H100 80 GB SXM`");
        check("x99y", "");
        check("", "");
        check("tpu", "");
    }
}
