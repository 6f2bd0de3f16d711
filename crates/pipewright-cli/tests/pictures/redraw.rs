//! Measures how long the page takes to redraw itself, with software rendering.
//!
//! Other programs may use the processors at the same time, so the processor time of the page's thread counts. Other tests of
//! this program wait, because two threads of one core slow each other down.

use std::io::Write;

use crate::browser::Browser;
use crate::made::Made;
use crate::turns::OnlyTurn;

/// The time of a frame at 60 Hz, in milliseconds.
const FRAME: f64 = 16.0;

/// The number of redraws at each zoom.
const REDRAWS: usize = 15;

/// A script that draws the page in a callback. Reading a pixel waits until the canvas is complete.
const REDRAW: &str = "new Promise((done) => setTimeout(() => {
    draw();
    for (const context of [paint, paintOverview]) context.getImageData(0, 0, 1, 1);
    done(0);
}))";

/// Draws the page at several zooms. Returns the zooms, each with the fastest and the median time in
/// milliseconds.
fn sweep(browser: &mut Browser) -> Vec<[f64; 3]> {
    let timed = |browser: &mut Browser| {
        let before = browser.script_ms();
        browser.value(REDRAW);
        browser.script_ms() - before
    };
    let zooms = (0..=8).map(|power| f64::from(1 << power));
    let row = |zoom| {
        browser.value(&format!("fit(), zoomBy({zoom}, plotWidth() * 0.4, plotHeight() * 0.4), 0"));
        // The frame of the new zoom is drawn before the times.
        browser.frame();
        let mut times = [0.0; REDRAWS].map(|_| timed(browser));
        times.sort_by(f64::total_cmp);
        [zoom, times[0], times[REDRAWS / 2]]
    };
    zooms.map(row).collect()
}

/// Checks the times of a page that shows at least this number of actions.
fn check(name: &str, made: &Made, actions: f64) {
    let _turn = OnlyTurn::begin();
    let Some(mut browser) = Browser::open(&made.path(), 1400, 800) else { return };
    let shown = browser.number("ranks.reduce((sum, { cells }) => sum + cells.start.length, 0)");
    assert!(shown >= actions, "{name} shows {shown} actions");
    // During the first sweep the browser compiles the page's script, so its times do not count.
    sweep(&mut browser);
    let rows = sweep(&mut browser);
    report(name, shown, &rows);
    for [zoom, _, median] in rows {
        assert!(median > 0.0 && median <= FRAME, "{name} at zoom {zoom}: median {median:.1} ms");
    }
}

fn report(name: &str, actions: f64, rows: &[[f64; 3]]) {
    let mut medians: Vec<f64> = rows.iter().map(|row| row[2]).collect();
    medians.sort_by(f64::total_cmp);
    let each: Vec<String> =
        rows.iter().map(|[zoom, fastest, median]| format!("{zoom}x {median:.1} ({fastest:.1})")).collect();
    let line = format!(
        "redraw of {name}, {actions} actions: median {:.1} ms; median (and fastest) by zoom: {}",
        medians[medians.len() / 2],
        each.join(", ")
    );
    // The test harness hides what `eprintln!` prints of a test that passes.
    let _said = writeln!(std::io::stderr(), "{line}");
}

#[test]
fn a_redraw_takes_less_than_a_frame() {
    for name in ["1f1b", "interleaved1f1b", "zbvzerobubble", "dualpipev"] {
        check(name, &Made::page(&format!("simulate {name} --ranks 64 --microbatches 256")), 30_000.0);
    }
}

#[test]
fn a_redraw_of_a_hundred_thousand_actions_with_their_critical_path_takes_less_than_a_frame() {
    check("view 1f1b", &Made::view("1f1b --ranks 64 --microbatches 800"), 100_000.0);
}
