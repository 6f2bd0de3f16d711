//! Tests that the wheel, the mouse, keys, buttons and touch change the view of the page.

use crate::browser::{Browser, CTRL, SHIFT};
use crate::made::Made;

const LARGE: &str = "simulate 1f1b --ranks 64 --microbatches 256";
/// A point of the plot.
const POINT: [f64; 2] = [500.0, 400.0];

/// The visible part of the timeline.
#[derive(Clone, Copy, Debug, PartialEq)]
struct View {
    zoom: f64,
    left: f64,
    top: f64,
}

impl Browser {
    fn view(&mut self) -> View {
        let [zoom, left, top] = ["zoom", "left", "top"].map(|name| self.number(&format!("view.{name}")));
        View { zoom, left, top }
    }

    /// Returns the time and the rank at a point of the window.
    fn under(&mut self, [x, y]: [f64; 2]) -> [f64; 2] {
        let [plot_x, plot_y] =
            ["x", "y"].map(|side| self.number(&format!("plot.getBoundingClientRect().{side}")));
        let time = self.number(&format!("timeAt({x} - {plot_x} - gutter)"));
        [time, self.number(&format!("rankAt({y} - {plot_y} - axisHeight)"))]
    }

    fn check_under(&mut self, point: [f64; 2], expected: [f64; 2]) {
        let [time, rank] = self.under(point);
        assert!(
            (time - expected[0]).abs() < 1e-6 * expected[0].abs() + 1e-6,
            "time {time}, not {}",
            expected[0]
        );
        assert!((rank - expected[1]).abs() < 1e-6, "rank {rank}, not {}", expected[1]);
    }
}

/// Opens the page of the large schedule and zooms in, so that the page can be moved in every direction.
fn zoomed() -> Option<(Made, Browser)> {
    let made = Made::page(LARGE);
    let mut browser = Browser::open(&made.path(), 1000, 800)?;
    for _ in 0..4 {
        browser.wheel(POINT, [0.0, -300.0], CTRL);
    }
    Some((made, browser))
}

#[test]
fn the_wheel_zooms_with_ctrl_and_scrolls_without() {
    let Some((_made, mut browser)) = zoomed() else { return };
    let zoomed = browser.view();
    assert!(zoomed.zoom > 4.0 && zoomed.left > 0.0 && zoomed.top > 0.0, "{zoomed:?}");
    let place = browser.under(POINT);
    browser.wheel(POINT, [0.0, -100.0], CTRL);
    browser.check_under(POINT, place);
    let before = browser.view();
    browser.wheel(POINT, [0.0, 120.0], 0);
    let down = browser.view();
    assert!(
        down.top > before.top && down.left == before.left && down.zoom == before.zoom,
        "{before:?} {down:?}"
    );
    browser.wheel(POINT, [0.0, 120.0], SHIFT);
    let right = browser.view();
    assert!(right.left > down.left && right.top == down.top, "{down:?} {right:?}");
    browser.wheel(POINT, [-60.0, 0.0], 0);
    assert!(browser.view().left < right.left);
    browser.wheel(POINT, [0.0, 400.0], CTRL);
    assert!(browser.view().zoom < right.zoom);
}

#[test]
fn the_wheel_moves_through_time_if_all_ranks_are_in_sight() {
    let made = Made::page("simulate 1f1b --ranks 4 --microbatches 8");
    let Some(mut browser) = Browser::open(&made.path(), 1000, 800) else { return };
    browser.wheel([500.0, 250.0], [0.0, -300.0], CTRL);
    let before = browser.view();
    browser.wheel([500.0, 250.0], [0.0, 50.0], 0);
    assert!(browser.view().left > before.left);
}

#[test]
fn the_wheel_scrolls_a_page_that_the_window_cannot_hold() {
    let made = Made::page("simulate 1f1b --ranks 4 --microbatches 8");
    let Some(mut browser) = Browser::open(&made.path(), 800, 150) else { return };
    // The pointer is over the plot, which does not scroll itself.
    browser.wheel([400.0, 140.0], [0.0, 60.0], 0);
    browser.value("new Promise((done) => setTimeout(done, 500))");
    assert!(browser.number("scrollY") > 0.0);
}

#[test]
fn dragging_moves_in_both_directions() {
    let Some((_made, mut browser)) = zoomed() else { return };
    let (from, to) = ([600.0, 500.0], [450.0, 420.0]);
    let place = browser.under(from);
    browser.drag(from, to);
    browser.check_under(to, place);
    let place = browser.under(to);
    browser.drag(to, from);
    browser.check_under(from, place);
}

#[test]
fn keys_move_and_zoom() {
    let Some((_made, mut browser)) = zoomed() else { return };
    let mut before = browser.view();
    let mut press = |key, text, has_effect: fn(View, View) -> bool| {
        browser.key(key, text);
        let after = browser.view();
        assert!(has_effect(before, after), "{key}: {before:?} {after:?}");
        before = after;
    };
    press("ArrowRight", "", |before, after| after.left > before.left && after.top == before.top);
    press("ArrowLeft", "", |before, after| after.left < before.left && after.top == before.top);
    press("ArrowDown", "", |before, after| after.top > before.top && after.left == before.left);
    press("ArrowUp", "", |before, after| after.top < before.top && after.left == before.left);
    press("+", "+", |before, after| after.zoom > before.zoom);
    press("-", "-", |before, after| after.zoom < before.zoom);
    press("0", "0", |_, after| after == View { zoom: 1.0, left: 0.0, top: 0.0 });
}

#[test]
fn buttons_and_double_clicks_zoom() {
    let Some((_made, mut browser)) = zoomed() else { return };
    browser.click(POINT, 2);
    assert_eq!(browser.view().zoom, 1.0);
    let mut press = |id: &str| {
        let [x, y] = ["x + 10", "y + 10"].map(|side| {
            browser.number(&format!("document.getElementById('{id}').getBoundingClientRect().{side}"))
        });
        browser.click([x, y], 1);
        (browser.view(), browser.holds("view.showsMemory"))
    };
    assert!(press("zoom-in").0.zoom > 1.0);
    assert!(press("zoom-in").0.zoom > 2.0);
    assert!(press("zoom-out").0.zoom < 2.0);
    assert_eq!(press("fit").0.zoom, 1.0);
    let memory = "memory";
    assert!(press(memory).1 && !press(memory).1);
}

#[test]
fn fingers_move_and_pinch() {
    let Some((_made, mut browser)) = zoomed() else { return };
    let before = browser.view();
    let place = browser.under([600.0, 500.0]);
    browser.touch(&[[600.0, 500.0]], &[[500.0, 450.0]]);
    assert_eq!(browser.view().zoom, before.zoom);
    browser.check_under([500.0, 450.0], place);
    let before = browser.view();
    browser.touch(&[[450.0, 400.0], [550.0, 400.0]], &[[400.0, 400.0], [600.0, 400.0]]);
    let spread = browser.view();
    assert!((spread.zoom / before.zoom - 2.0).abs() < 0.05, "{before:?} {spread:?}");
    browser.touch(&[[400.0, 400.0], [600.0, 400.0]], &[[450.0, 400.0], [550.0, 400.0]]);
    assert!(browser.view().zoom < spread.zoom);
}

#[test]
fn the_overview_moves_the_view() {
    let Some((_made, mut browser)) = zoomed() else { return };
    let y = browser.number("overview.getBoundingClientRect().y");
    browser.click([900.0, y + 40.0], 1);
    let late = browser.view();
    browser.click([200.0, y + 8.0], 1);
    let early = browser.view();
    assert!(early.left < late.left && early.top < late.top && early.zoom == late.zoom, "{early:?} {late:?}");
}

#[test]
fn hovering_names_the_action_and_lights_up_its_microbatch() {
    let made = Made::page("simulate 1f1b --ranks 4 --microbatches 8");
    let Some(mut browser) = Browser::open(&made.path(), 1000, 800) else { return };
    let y = browser.number("plot.getBoundingClientRect().y + axisHeight + rowOf(0).top + 10");
    let x = browser.number("gutter + xOf(1.5 / data.quantum)");
    browser.mouse("mouseMoved", [x, y], false, 0);
    browser.frame();
    let tip = browser.value("tip.style.display + tip.textContent");
    let tip = tip.as_str().expect("a text");
    assert!(
        tip.starts_with("block0F1 on rank 0\nF forward: stage 0, microbatch 1\n1 to 2, takes 1"),
        "{tip}"
    );
    let lit = browser.texts();
    assert!(lit.contains(&"0F1".to_owned()) && !lit.contains(&"0F0".to_owned()), "{lit:?}");
    browser.mouse("mouseMoved", [500.0, 5.0], false, 0);
    browser.frame();
    assert!(browser.texts().contains(&"0F0".to_owned()));
}
