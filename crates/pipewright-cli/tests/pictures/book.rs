//! Tests of the book's own style and script, on a page that is built as mdBook builds its pages.

use std::fs;

use crate::browser::Browser;

const STYLE: &str = include_str!("../../../../book.css");
const SCRIPT: &str = include_str!("../../../../book-tables.js");

/// Returns a page with the arrows of mdBook, a table of long names, and a table that fits everywhere.
fn page() -> String {
    let long = "builder.check_metadata(CheckMetadata::Always)";
    format!(
        "<!DOCTYPE html><meta charset=utf-8><style>body {{ margin: 15px }} .nav-wrapper {{ display: none }}\n{STYLE}</style>
        <input type=checkbox id=mdbook-sidebar-toggle-anchor checked><div class=page-wrapper><div class=content>
        <div class=table-wrapper><table id=wide><thead><tr><th>PyTorch<th>Pipewright<th>different</thead><tbody>
        <tr><td><code>{long}</code><td><code>{long}</code><td>Some words about it.</tbody></table></div>
        <div class=table-wrapper><table id=narrow><thead><tr><th>a<th>b</thead><tbody><tr><td>1<td>2</tbody></table></div></div>
        <nav class=nav-wide-wrapper>&lt; &gt;</nav><nav class=nav-wrapper>&lt; &gt;</nav></div><script>{SCRIPT}</script>"
    )
}

#[test]
fn the_book_can_be_read_at_every_width() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = folder.path().join("page.html");
    fs::write(&file, page()).expect("a file");
    let Some(mut browser) = Browser::open(&file, 400, 800) else { return };
    let is_shown = |browser: &mut Browser, selector: &str| {
        browser.holds(&format!("getComputedStyle(document.querySelector('{selector}')).display !== 'none'"))
    };
    for (width, is_list, has_arrows) in [(400, true, false), (1400, false, false), (1700, false, true)] {
        browser.resize(width, 800);
        browser.frame();
        assert!(browser.holds("document.documentElement.scrollWidth <= innerWidth"), "at {width}");
        assert_eq!(
            browser.holds("document.getElementById('wide').classList.contains('is-list')"),
            is_list,
            "{width}"
        );
        assert!(!browser.holds("document.getElementById('narrow').classList.contains('is-list')"), "{width}");
        assert_eq!(is_shown(&mut browser, ".nav-wide-wrapper"), has_arrows, "at {width}");
        assert_eq!(is_shown(&mut browser, ".nav-wrapper"), !has_arrows, "at {width}");
    }
    browser.resize(400, 800);
    browser.frame();
    // Each cell is below the name of its column.
    let label = "getComputedStyle(document.querySelector('#wide td:nth-child(2)'), '::before').content";
    assert_eq!(browser.value(label), "\"Pipewright\"");
    assert!(browser.holds("new Set([...document.querySelectorAll('#wide td')].map((cell) => cell.getBoundingClientRect().left)).size === 1"));
}
