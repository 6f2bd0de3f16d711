//! Tests of mistakes, large sizes and the keyboard.

use serde_json::{Value, json};

use crate::browser::Browser;
use crate::opened::{enter, follow, open, predicted, settle};

#[test]
fn mistakes_are_sentences() {
    let Some(mut browser) = open("", 1280) else { return };
    let mut check = |fragment: &str, sentence: &str| {
        follow(&mut browser, fragment);
        let shown = browser.text("#sentence");
        assert!(shown.contains(sentence), "{fragment}: {shown}");
        assert!(browser.holds("document.getElementById('result').hidden"), "{fragment}");
    };
    check("schedule=gpip", "unknown schedule gpip; did you mean gpipe?");
    check("schedule=interleaved1f1b&microbatches=9", "does not divide 9; use 8 microbatches");
    check("ranks=%3Cb%3E", "ranks: <b> is not a whole number");
    check("F=1,2,3", "3 entries for the costs of 4 stages");
    check("microbatches=100000", "too large for this page");
}

#[test]
fn a_mistake_is_mended_in_place() {
    let Some(mut browser) = open("", 1280) else { return };
    let is_hidden =
        |browser: &mut Browser, id: &str| browser.holds(&format!("document.getElementById('{id}').hidden"));
    enter(&mut browser, "#field-ranks", "0");
    assert!(!is_hidden(&mut browser, "sentence") && is_hidden(&mut browser, "result"));
    enter(&mut browser, "#field-ranks", "6");
    assert!(is_hidden(&mut browser, "sentence") && !is_hidden(&mut browser, "result"));
    assert_eq!(browser.value("document.querySelectorAll('#ranks tbody tr').length"), 6);
}

#[test]
fn the_page_stays_responsive_with_a_large_schedule() {
    let Some(mut browser) = open("", 1280) else { return };
    browser.value("window.longest = 0, new PerformanceObserver((list) => list.getEntries().forEach(({ duration }) => { longest = Math.max(longest, duration); })).observe({ type: 'longtask' }), 0");
    browser.enter("#field-ranks", "32");
    enter(&mut browser, "#field-microbatches", "250");
    let expected = predicted(json!({ "ranks": "32", "microbatches": "250" }));
    assert_eq!(Value::from(browser.text("#figures b")), expected["time"]);
    // A busy machine may take longer than the second that this is meant to take.
    assert!(browser.number("longest") < 5000.0);
}

#[test]
fn the_keyboard_reaches_the_controls() {
    let Some(mut browser) = open("", 1280) else { return };
    let mut reached = Vec::new();
    for _ in 0..9 {
        browser.key("Tab", "");
        reached.push(browser.value("document.activeElement.id"));
    }
    let ids = ["schedule", "ranks", "microbatches", "F", "B", "I", "W", "hop", "activation"];
    let expected = ids.map(|id| json!(if id == "schedule" { id.to_owned() } else { format!("field-{id}") }));
    assert_eq!(reached, expected);
    // A key in the select chooses the next schedule.
    browser.value("document.getElementById('schedule').focus()");
    browser.key("z", "z");
    settle(&mut browser);
    assert_eq!(browser.value("document.getElementById('schedule').value"), "zbvzerobubble");
}
