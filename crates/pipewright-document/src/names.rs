//! Advice for a name that does not exist.

use pipewright_schedule::words;

/// Returns the candidate that `name` probably misspells: at most a third of the letters differ.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    words::nearest(name, candidates, |letters| (letters / 3).max(1))
}

/// Returns the advice for an unknown key of a table that has the keys `known`: the nearest of them, or the only one
/// that begins with the key, such as `memory_gb` for `memory`.
pub fn advice_for_unknown(key: &str, known: &[&str]) -> String {
    let of_start = || {
        let start = format!("{key}_");
        let mut longer = known.iter().copied().filter(|known| known.starts_with(&start));
        longer.next().filter(|_| longer.next().is_none())
    };
    match nearest(key, known.iter().copied()).or_else(of_start) {
        Some(meant) => format!("did you mean `{meant}`?"),
        None => {
            let names: Vec<String> = known.iter().map(|name| format!("`{name}`")).collect();
            format!("the keys are {}", names.join(", "))
        }
    }
}

/// Units that people write instead of seconds and bytes.
const OTHER_UNITS: [&str; 20] = [
    "ns", "us", "ms", "sec", "secs", "seconds", "min", "kb", "mb", "gb", "kib", "mib", "gib", "k", "m", "g",
    "bits", "gbps", "gbit", "b",
];

/// Returns the known key in seconds or bytes that an unknown key names with another unit.
pub(crate) fn with_other_unit<'a>(key: &str, known: &[&'a str]) -> Option<&'a str> {
    let lower = key.to_lowercase();
    let (stem, unit) = lower.rsplit_once('_')?;
    let has_stem =
        |known: &&str| known.strip_prefix(stem).is_some_and(|end| matches!(end, "_s" | "_bytes" | "_per_s"));
    known.iter().copied().find(has_stem).filter(|_| OTHER_UNITS.contains(&unit))
}
