//! Numbers with their nouns in messages.

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

#[cfg(test)]
mod tests {
    use super::*;

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
