//! Words of messages: numbers with their nouns, and the known name that is nearest to an unknown one.

use std::fmt::Display;

/// Returns a number with its noun, in the plural unless the number is 1.
///
/// ```
/// use pipewright_schedule::words::counted;
/// assert_eq!(counted(1u32, "microbatch"), "1 microbatch");
/// assert_eq!(counted(3u64, "microbatch"), "3 microbatches");
/// assert_eq!(counted(0usize, "rank"), "0 ranks");
/// ```
pub fn counted<N: Display + PartialEq + From<u8>>(number: N, noun: &str) -> String {
    if number == N::from(1) { format!("{number} {noun}") } else { format!("{number} {}", plural(noun)) }
}

/// Returns the plural of a noun that is formed by rule.
fn plural(noun: &str) -> String {
    match noun.strip_suffix('y') {
        Some(stem) if stem.ends_with(|letter| !matches!(letter, 'a' | 'e' | 'o' | 'u')) => {
            format!("{stem}ies")
        }
        _ if ["ch", "s", "sh", "x"].iter().any(|ending| noun.ends_with(ending)) => format!("{noun}es"),
        _ => format!("{noun}s"),
    }
}

/// Returns the known name that is nearest to an unknown one. `most` returns how many letters may differ from
/// a known name with a number of letters. A name is not near if all letters differ. Two neighbours in the
/// wrong order count as one letter. Case, spaces and punctuation do not matter. If several names are equally
/// near, the shortest one wins, and then the first one in the order of letters.
///
/// ```
/// use pipewright_schedule::words::nearest;
/// let names = ["h100", "mi300x", "gb200"];
/// assert_eq!(nearest("m300ix", names, |letters| 1 + letters / 4), Some("mi300x"));
/// assert_eq!(nearest("tpu", names, |letters| 1 + letters / 4), None);
/// ```
pub fn nearest<'a>(
    unknown: &str,
    known: impl IntoIterator<Item = &'a str>,
    most: impl Fn(usize) -> usize,
) -> Option<&'a str> {
    let sought = letters(unknown);
    let length_sought = sought.chars().count();
    let distances = known.into_iter().filter_map(|name| {
        let own = letters(name);
        let length = own.chars().count();
        // The distance is at least the difference of the lengths, and takes long for a long text.
        let may_be_near = length.abs_diff(length_sought) <= most(length);
        may_be_near.then(|| (strsim::damerau_levenshtein(&own, &sought), length, name))
    });
    let near = distances.filter(|&(distance, length, _)| distance <= most(length) && distance < length);
    near.min().map(|(_, _, name)| name)
}

fn letters(name: &str) -> String {
    name.chars().filter(|letter| letter.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_near_if_few_letters_differ() {
        let check = |unknown: &str, expected: Option<&str>| {
            let known = ["h100", "H100 80 GB SXM", "mi300x", "gb200"];
            assert_eq!(nearest(unknown, known, |letters| 1 + letters / 4), expected, "{unknown}");
        };
        check("h10", Some("h100"));
        check("H-100", Some("h100"));
        check("hl00", Some("h100"));
        check("m300ix", Some("mi300x"));
        check("H100 80GB SXM", Some("H100 80 GB SXM"));
        check("x99y", None);
        check("", None);
        check("tpu", None);
    }

    #[test]
    fn nouns_follow_their_number() {
        let check = |noun: &str, one: &str, several: &str| {
            assert_eq!((counted(1u32, noun), counted(2u32, noun)), (one.to_owned(), several.to_owned()));
        };
        check("stage", "1 stage", "2 stages");
        check("entry", "1 entry", "2 entries");
        check("process", "1 process", "2 processes");
        check("boundary", "1 boundary", "2 boundaries");
        check("batch", "1 batch", "2 batches");
        check("day", "1 day", "2 days");
    }
}
