//! Tests of the figures, the picture and the table of the page.

use serde_json::{Value, json};

use crate::browser::Browser;
use crate::opened::{enter, follow, open, predicted, settle};

fn percent(share: &Value) -> String {
    format!("{:.1} %", share.as_f64().expect("a share") * 100.0)
}

/// Checks what the page shows against the native library.
fn check(browser: &mut Browser, setup: Value) {
    let expected = predicted(setup);
    let figures = browser.text("#figures");
    let figures: Vec<&str> = figures.lines().filter(|line| !line.is_empty()).collect();
    assert_eq!(figures[0], expected["time"], "{expected}");
    assert_eq!(figures[2], percent(&expected["summary"]["bubble_fraction"]));
    assert_eq!(figures[4], expected["busiest"]);
    let peaks = expected["summary"]["peak_activations"].as_array().expect("a list");
    let ranks = browser
        .value("[...document.querySelectorAll('#ranks tbody tr')].map((row) => row.children[2].innerText)");
    let shown: Vec<&str> =
        ranks.as_array().expect("rows").iter().map(|text| text.as_str().expect("a text").trim()).collect();
    assert_eq!(shown, peaks.iter().map(ToString::to_string).collect::<Vec<_>>());
    assert_eq!(browser.value("document.getElementById('command').value"), expected["command"]);
    assert_eq!(browser.value("document.getElementById('python').value"), expected["python"]);
    let title =
        browser.value("document.getElementById('picture').contentDocument.querySelector('h1').textContent");
    assert_eq!(title, expected["title"]);
}

#[test]
fn the_figures_are_those_of_the_native_library() {
    let Some(mut browser) = open("", 1280) else { return };
    check(&mut browser, json!({}));
    for schedule in ["gpipe", "interleaved1f1b", "zbvzerobubble", "seq1f1b", "zb-greedy"] {
        enter(&mut browser, "#schedule", schedule);
        check(&mut browser, json!({ "schedule": schedule }));
    }
    enter(&mut browser, "#field-microbatches", "12");
    enter(&mut browser, "#field-F", "1, 2, 2, 1");
    enter(&mut browser, "#field-hop", "0.25");
    check(
        &mut browser,
        json!({ "schedule": "zb-greedy", "microbatches": "12", "F": "1,2,2,1", "hop": "0.25" }),
    );
    assert_eq!(browser.requests(), [""; 0]);
}

#[test]
fn a_link_has_the_whole_state() {
    let fragment = "schedule=zbv&ranks=2&microbatches=6&B=3&activation=64MiB&compare=gpipe%2C1f1b";
    let Some(mut browser) = open(fragment, 1280) else { return };
    let setup = json!({ "schedule": "zbvzerobubble", "ranks": "2", "microbatches": "6", "B": "3", "activation": "64MiB" });
    check(&mut browser, setup);
    assert_eq!(browser.value("document.querySelectorAll('#compared tbody tr').length"), 2);
    enter(&mut browser, "#field-ranks", "3");
    let link = browser.value("document.getElementById('link').value");
    let link = link.as_str().expect("a link").split_once('#').expect("a fragment").1.to_owned();
    assert_eq!(
        link,
        "schedule=zbvzerobubble&ranks=3&microbatches=6&B=3&activation=64MiB&compare=gpipe%2C1f1b"
    );
    // The reader goes to another link.
    follow(&mut browser, "schedule=zb-h1&compare=zb-h1");
    check(&mut browser, json!({ "schedule": "zb-h1" }));
    assert_eq!(browser.value("document.querySelectorAll('#compared tbody tr').length"), 1);
}

#[test]
fn the_picture_names_causes() {
    let Some(mut browser) = open("", 1280) else { return };
    let frame = "document.getElementById('picture').contentDocument";
    let why = browser.value(&format!("{frame}.getElementById('why').innerText"));
    assert!(why.as_str().expect("a text").starts_with("Why it takes 30"), "{why}");
    let why = browser.value(&format!(
        "{frame}.querySelector('#why ol .go').click(), {frame}.getElementById('why').innerText"
    ));
    assert!(why.as_str().expect("a text").contains("It needs its output gradient: the message of"), "{why}");
}

#[test]
fn schedules_are_compared() {
    let Some(mut browser) = open("compare=gpipe&microbatches=9", 1280) else { return };
    let cells = "[...document.querySelectorAll('#compared tbody tr')].map((row) => row.innerText.split('\\t').join('|'))";
    enter(&mut browser, "#added", "zbvzerobubble");
    browser.click_on("#add");
    settle(&mut browser);
    enter(&mut browser, "#added", "interleaved1f1b");
    browser.click_on("#add");
    settle(&mut browser);
    let rows = browser.value(cells);
    let rows: Vec<&str> = rows.as_array().expect("rows").iter().filter_map(Value::as_str).collect();
    assert!(rows[0].starts_with("gpipe|1|33|18.2 %|9|"), "{rows:?}");
    assert!(rows[2].contains("does not divide 9; use 8 microbatches"), "{rows:?}");
    assert_eq!(
        browser.value("document.getElementById('scale').contentDocument.querySelectorAll('svg').length"),
        2
    );
    browser.click_on("#compared .remove");
    settle(&mut browser);
    assert_eq!(browser.value(cells).as_array().expect("rows").len(), 2);
    // A name in the table shows its schedule.
    browser.click_on("#compared .name");
    settle(&mut browser);
    check(&mut browser, json!({ "schedule": "zbvzerobubble", "microbatches": "9" }));
}
