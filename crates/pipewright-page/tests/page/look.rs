//! Tests of the file, of narrow windows, and of what a screen reader finds.

use std::fs;

use crate::opened::{enter, file, open};

#[test]
fn the_file_needs_no_other_file() {
    let Some(file) = file() else { return };
    let page = fs::read_to_string(file).expect("the page");
    for reference in ["http://", "https://", "src=", "@import", "url(", "fetch("] {
        assert!(!page.contains(reference), "{reference}");
    }
    assert!(!page.contains("{{"), "a place in the page is not filled");
    assert!(page.len() < 2_000_000, "{} bytes", page.len());
}

#[test]
fn the_page_can_be_read_at_every_width() {
    let Some(mut browser) = open("schedule=interleaved1f1b&compare=gpipe%2C1f1b%2Cinterleaved1f1b", 1280)
    else {
        return;
    };
    for (width, height) in [(1280, 800), (1280, 600), (900, 800), (375, 800)] {
        browser.resize(width, height);
        browser.frame();
        assert!(browser.holds("document.documentElement.scrollWidth <= innerWidth"), "at {width}");
        for name in ["picture", "scale"] {
            let frame = format!("document.getElementById('{name}')");
            let fits = format!(
                "{frame}.clientHeight > 100 && {frame}.contentDocument.documentElement.scrollHeight <= {frame}.clientHeight + 2"
            );
            assert!(browser.holds(&fits), "{name} at {width} x {height}");
        }
    }
}

#[test]
fn controls_and_frames_have_names() {
    let Some(mut browser) = open("", 1280) else { return };
    enter(&mut browser, "#schedule", "zbvzerobubble");
    let names = browser.accessible();
    let has = |role: &str, name: &str| names.iter().any(|(known, text)| known == role && text == name);
    assert!(
        has("combobox", "schedule") && has("spinbutton", "ranks") && has("textbox", "forward"),
        "{names:?}"
    );
    assert!(has("checkbox", "overlap") && has("button", "copy link"), "{names:?}");
    assert!(
        names.iter().any(|(role, name)| role == "Iframe" && name.starts_with("Timeline of each rank")),
        "{names:?}"
    );
}
