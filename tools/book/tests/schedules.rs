//! The generated pages of the book are up to date.

use std::collections::BTreeSet;
use std::fs;

use pipewright_book::markdown::files_below;
use pipewright_book::{root, schedules};

const COMMAND: &str = "run `cargo run -p pipewright-book`";

#[test]
fn the_generated_pages_are_up_to_date() {
    for file in schedules::files().expect("every schedule has a section") {
        let path = root().join("docs").join(&file.path);
        let found = fs::read_to_string(&path).unwrap_or_default();
        assert!(found == file.content, "docs/{} differs from the code; {COMMAND}", file.path);
    }
}

#[test]
fn no_picture_is_left_over() {
    let made = schedules::files().expect("every schedule has a section");
    let made: BTreeSet<&str> = made.iter().map(|file| file.path.as_str()).collect();
    let docs = root().join("docs");
    for path in files_below(&docs.join("images/schedules"), "svg").expect("the folder of the pictures") {
        let path = path.strip_prefix(&docs).expect("a file below docs").to_string_lossy().into_owned();
        assert!(made.contains(path.as_str()), "no schedule has the picture docs/{path}; delete it");
    }
}
