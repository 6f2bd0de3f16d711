//! The links of the built book: every page, picture and heading that a page names exists.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};
use std::{fs, io};

use crate::markdown::files_below;

/// Returns the links of all pages below `folder` that lead nowhere, each with its page. Addresses with a
/// scheme, such as `https://`, are not followed.
///
/// # Errors
/// When a file cannot be read, or the folder has no page.
pub fn broken_links(folder: &Path) -> io::Result<Vec<String>> {
    let mut pages = BTreeMap::new();
    for path in files_below(folder, "html")? {
        let text = fs::read_to_string(&path)?;
        pages.insert(path, text);
    }
    if pages.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the folder has no page; run `mdbook build`"));
    }
    let ids: BTreeMap<&PathBuf, BTreeSet<&str>> =
        pages.iter().map(|(path, text)| (path, attributes(text, "id").collect())).collect();
    let mut broken = Vec::new();
    for (path, text) in &pages {
        for link in attributes(text, "href").chain(attributes(text, "src")) {
            if is_broken(path, link, &ids) {
                broken.push(format!("{}: the link `{link}` leads nowhere", path.display()));
            }
        }
    }
    broken.dedup();
    Ok(broken)
}

fn is_broken(page: &Path, link: &str, ids: &BTreeMap<&PathBuf, BTreeSet<&str>>) -> bool {
    if link.contains(':') {
        return false;
    }
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = match file {
        "" => page.to_owned(),
        file => without_dots(&page.parent().unwrap_or(page).join(file)),
    };
    match ids.get(&target) {
        Some(ids) => !anchor.is_empty() && !ids.contains(anchor),
        None => !target.exists(),
    }
}

/// Returns the path without `..` and `.`, as a browser resolves it.
fn without_dots(path: &Path) -> PathBuf {
    let mut whole = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                whole.pop();
            }
            Component::CurDir => {}
            part => whole.push(part),
        }
    }
    whole
}

/// Returns the values of an attribute, in the order of the text.
fn attributes<'a>(text: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    let opening = format!(" {name}=\"");
    let mut rest = text;
    std::iter::from_fn(move || {
        let (_, after) = rest.split_once(&opening)?;
        let (value, after) = after.split_once('"')?;
        rest = after;
        Some(value)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the broken links of a page `a/b.html` if there is also a page `c.html` with the id `known`.
    fn check(links: &str, expected: &[&str]) {
        let folder = std::env::temp_dir().join(format!("pipewright-book-{}", std::process::id()));
        fs::create_dir_all(folder.join("a")).expect("a folder");
        fs::write(folder.join("c.html"), "<h1 id=\"known\">").expect("a page");
        fs::write(folder.join("a/b.html"), links).expect("a page");
        let found = broken_links(&folder).expect("pages");
        fs::remove_dir_all(&folder).expect("the folder goes");
        let prefix = format!("{}/a/b.html: the link `", folder.display());
        let found: Vec<&str> = found
            .iter()
            .map(|line| line.trim_start_matches(&prefix).trim_end_matches("` leads nowhere"))
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn links_that_lead_nowhere_are_found() {
        let good = "<a href=\"../c.html\"><a href=\"../c.html#known\"><a href=\"https://burn.dev\"><a href=\"#here\" id=\"here\">";
        let bad = "<a href=\"c.html\"><a href=\"../c.html#other\"><img src=\"d.svg\"><a href=\"#there\">";
        check(&format!("{good}{bad}"), &["c.html", "../c.html#other", "#there", "d.svg"]);
    }
}
