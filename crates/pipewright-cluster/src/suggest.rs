//! Names that are near to an unknown one, for error messages.

/// Returns a hint such as "; the nearest name is `h100`", or nothing if no name is near.
pub(crate) fn nearest<'a>(unknown: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let distance = |name: &&str| strsim::levenshtein(&name.to_lowercase(), &unknown.to_lowercase());
    let nearest = known.into_iter().min_by_key(distance);
    let near_enough = |name: &&str| distance(name) <= name.len().max(3) / 2;
    nearest.filter(near_enough).map_or_else(String::new, |name| format!("; the nearest name is `{name}`"))
}
