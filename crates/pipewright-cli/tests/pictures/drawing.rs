//! Tests of the drawing, opened as a file in a browser.

use std::fs;

use crate::browser::Browser;
use crate::made::Made;

/// Checks that a browser shows the drawing without an error, and that the file is not larger than `largest`.
fn check(arguments: &str, largest: usize, expression: &str) {
    let made = Made::new(arguments, "svg");
    let size = fs::metadata(made.path()).expect("the drawing").len() as usize;
    assert!(size <= largest, "{arguments}: {size} bytes");
    let Some(mut browser) = Browser::open(&made.path(), 1200, 800) else { return };
    assert!(browser.holds("document.documentElement.nodeName === 'svg'"));
    assert!(browser.holds("document.querySelector('parsererror') === null"), "{arguments}");
    assert!(browser.holds(expression), "{arguments}: {expression}");
}

#[test]
fn a_small_drawing_names_its_actions() {
    let expression =
        "document.title.startsWith('1f1b: 4 ranks') && document.querySelectorAll('g > title').length >= 64";
    check("simulate 1f1b --ranks 4 --microbatches 8", 60_000, expression);
}

#[test]
fn large_drawings_stay_below_a_megabyte() {
    for name in ["1f1b", "interleaved1f1b", "zbvzerobubble", "dualpipev"] {
        let arguments = format!("simulate {name} --ranks 64 --microbatches 256 --cost hop=0.1 --memory-lane");
        check(&arguments, 1_000_000, "document.querySelectorAll('path[stroke-width]').length >= 128");
    }
}

#[test]
fn the_memory_lane_is_for_drawings() {
    for arguments in ["schedule 1f1b --ranks 2 --microbatches 2", "simulate 1f1b --ranks 2 --microbatches 2"]
    {
        let output = std::process::Command::new(assert_cmd::cargo::cargo_bin!("pipewright"))
            .args(arguments.split(' '))
            .arg("--memory-lane")
            .output()
            .expect("the binary starts");
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{words}");
        assert!(words.contains("--format svg"), "{words}");
    }
}
