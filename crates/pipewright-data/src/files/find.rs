//! Finds the files that patterns name. The meaning of patterns is documented at
//! [`crate::DataConfig::path`].

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use globset::{Glob, GlobSet, GlobSetBuilder};
use ignore::WalkBuilder;

use crate::error::DataError;
use crate::files::pattern::{Pattern, compile, malformed};

/// Returns all files that the patterns name, each once, in the order of their paths.
pub(crate) fn find(patterns: &[String]) -> Result<Vec<PathBuf>, DataError> {
    let excluded = exclusions(patterns)?;
    let mut found = BTreeSet::new();
    for text in patterns.iter().filter(|text| !text.starts_with('!')) {
        let pattern = Pattern::parse(text)?;
        let before = found.len();
        match &pattern.glob {
            None => {
                let path = file(&pattern.start)?;
                if excluded.is_match(&path) {
                    let problem =
                        "this file is named, and a pattern with `!` excludes it; remove one of the two";
                    return Err(DataError::of(&path, problem));
                }
                found.insert(path);
            }
            Some(glob) => search(&pattern.start, glob, &excluded, &mut found)?,
        }
        if found.len() == before && !found.iter().any(|path| matches(&pattern, path)) {
            let start = std::path::absolute(&pattern.start).unwrap_or(pattern.start);
            return Err(DataError::of(
                text.as_ref(),
                format!(
                    "no file matches; hidden files and files that a .gitignore lists are skipped, and relative patterns start \
                     at {}",
                    start.display()
                ),
            ));
        }
    }
    if found.is_empty() {
        return Err(DataError::new("no data path is given; name text files, such as \"notes/**/*.txt\""));
    }
    Ok(found.into_iter().collect())
}

/// Returns the patterns with `!` in front, which match whole paths.
fn exclusions(patterns: &[String]) -> Result<GlobSet, DataError> {
    let mut excluded = GlobSetBuilder::new();
    for pattern in patterns.iter().filter_map(|text| text.strip_prefix('!')) {
        excluded.add(compile(pattern, pattern)?);
    }
    excluded.build().map_err(|error| malformed(error.glob().unwrap_or_default(), &error))
}

/// Returns the path, if it leads to a regular file.
fn file(path: &Path) -> Result<PathBuf, DataError> {
    let problem = match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => return Ok(path.to_owned()),
        Ok(metadata) if metadata.is_dir() => {
            format!("this is a folder; name the files in it, such as \"{}/**/*.txt\"", path.display())
        }
        // A run reads its data again when it resumes.
        Ok(_) => "this is a device or a pipe; copy its content to a regular file and name that".to_owned(),
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => {
            "there is no such data file; check the path".to_owned()
        }
        Err(source) => return Err(DataError::unreadable(path, source)),
    };
    Err(DataError::of(path, problem))
}

/// Adds the files below `start` whose path from there matches.
fn search(
    start: &Path,
    glob: &Glob,
    excluded: &GlobSet,
    found: &mut BTreeSet<PathBuf>,
) -> Result<(), DataError> {
    if !non_empty(start).exists() {
        return Ok(());
    }
    let matcher = glob.compile_matcher();
    let walk = WalkBuilder::new(non_empty(start))
        // The files that a run reads depend on the folder only, not on settings of the user or of folders
        // above it.
        .parents(false)
        .git_global(false)
        .git_exclude(false)
        .ignore(false)
        .require_git(false)
        .build();
    for entry in walk {
        let entry = entry.map_err(|error| unreadable(start, error))?;
        if !entry.file_type().is_some_and(|kind| kind.is_file()) {
            continue;
        }
        let path = entry.path();
        let path = if start.as_os_str().is_empty() { path.strip_prefix(".").unwrap_or(path) } else { path };
        let below = path.strip_prefix(start).unwrap_or(path);
        if matcher.is_match(below) && !excluded.is_match(path) {
            found.insert(path.to_owned());
        }
    }
    Ok(())
}

/// Returns whether a file that an earlier pattern found matches this pattern too.
fn matches(pattern: &Pattern, path: &Path) -> bool {
    match (&pattern.glob, path.strip_prefix(&pattern.start)) {
        (Some(glob), Ok(below)) => glob.compile_matcher().is_match(below),
        (None, _) => path == pattern.start,
        (Some(_), Err(_)) => false,
    }
}

fn non_empty(start: &Path) -> &Path {
    if start.as_os_str().is_empty() { Path::new(".") } else { start }
}

fn unreadable(start: &Path, error: ignore::Error) -> DataError {
    let path = match &error {
        ignore::Error::WithPath { path, .. } => path.clone(),
        _ => start.to_owned(),
    };
    let message = error.to_string();
    let source = error.into_io_error().unwrap_or_else(|| std::io::Error::other(message));
    DataError::unreadable(&path, source)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a scratch folder with these files.
    fn folder(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a scratch folder");
        for name in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().expect("it is below the folder")).expect("a folder");
            std::fs::write(&path, name).expect("a file");
        }
        folder
    }

    /// Compares the files that the patterns find.
    fn check(files: &[&str], patterns: &[&str], expected: &[&str]) {
        let folder = folder(files);
        let root = folder.path().to_str().expect("UTF-8").to_owned();
        let rooted = |text: &&str| match text.strip_prefix('!') {
            Some(text) if text.starts_with("**") => format!("!{text}"),
            Some(text) => format!("!{root}/{text}"),
            None => format!("{root}/{text}"),
        };
        let found = find(&patterns.iter().map(rooted).collect::<Vec<_>>()).map(|paths| {
            let below = |path: &PathBuf| path.strip_prefix(&root).expect("it is below").display().to_string();
            paths.iter().map(below).collect::<Vec<_>>()
        });
        let found = found.unwrap_or_else(|error| vec![error.to_string().replace(&root, "")]);
        assert_eq!(found, expected, "{patterns:?}");
    }

    #[test]
    fn in_the_order_of_their_paths_each_once() {
        let files = ["b.md", "a/z.md", "a/c/d.md", "a.txt"];
        check(&files, &["**/*.md"], &["a/c/d.md", "a/z.md", "b.md"]);
        check(&files, &["b.md", "**/*.md", "b.md"], &["a/c/d.md", "a/z.md", "b.md"]);
        check(&files, &["*/*.md"], &["a/z.md"]);
        check(&files, &["*.{md,txt}"], &["a.txt", "b.md"]);
    }

    #[test]
    fn exclusions_take_out() {
        let files = ["b.md", "a/z.md", "a/old/d.md"];
        check(&files, &["**/*.md", "!**/old/**"], &["a/z.md", "b.md"]);
        check(&files, &["**/*.md", "!a/**"], &["b.md"]);
        let excluded = "/b.md: this file is named, and a pattern with `!` excludes it; remove one of the two";
        check(&files, &["b.md", "!**/*.md"], &[excluded]);
    }

    #[test]
    fn what_version_control_leaves_out_is_passed_over() {
        let folder = folder(&["b.md", ".hidden/a.md", "target/c.md"]);
        std::fs::write(folder.path().join(".gitignore"), "/target\n").expect("a file");
        let count = |pattern: &str| {
            find(&[folder.path().join(pattern).display().to_string()]).map_or(0, |paths| paths.len())
        };
        assert_eq!(count("**/*.md"), 1);
        assert_eq!(count("target/*.md"), 1, "the fixed part names the folder");
        assert_eq!(count(".hidden/*.md"), 1, "the fixed part names the folder");
        assert_eq!(count("target/c.md"), 1);
    }

    #[test]
    fn nothing_found() {
        check(&["a.md"], &["a.txt"], &["/a.txt: there is no such data file; check the path"]);
        check(&["b/a.md"], &["b"], &["/b: this is a folder; name the files in it, such as \"/b/**/*.txt\""]);
        let passed_over = "no file matches; hidden files and files that a .gitignore lists are skipped, and \
                           relative patterns start at";
        check(&["a.md"], &["*.md", "*.txt"], &[&format!("/*.txt: {passed_over} ")]);
        check(&["a.md"], &["c/*.txt"], &[&format!("/c/*.txt: {passed_over} /c")]);
        check(&[], &["!*.md"], &["no data path is given; name text files, such as \"notes/**/*.txt\""]);
    }
}
