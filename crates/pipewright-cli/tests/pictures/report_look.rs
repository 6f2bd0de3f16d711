//! Tests of the look of the page of `report`: its tables, charts, themes and prints.

use crate::browser::Browser;
use crate::report_page::{report, restart, write_event, write_run};

#[test]
fn marks_of_axes_are_round_and_at_least_two() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    write_run(folder.path(), "a", 20, "[5,6]");
    report(folder.path(), &["a"]);
    let Some(mut browser) = Browser::open(&folder.path().join("report.html"), 1400, 900) else { return };
    let mut check = |script: &str, expected: &[&str]| {
        assert_eq!(browser.value(script), serde_json::json!(expected), "{script}");
    };
    let times = |least: f64, most: f64, count: u32| {
        format!(
            "(({{ ticks, step }}) => ticks.map((tick) => clockMark(tick, step)))(ticksOf({least}, {most}, {count}, clockSteps))"
        )
    };
    check(&times(1.0, 7000.0, 4), &["30:00", "1:00:00", "1:30:00"]);
    check(&times(0.0, 6000.0, 3), &["0:00", "1:00:00"]);
    check(&times(5.0, 190.0, 4), &["1:00", "2:00", "3:00"]);
    check(&times(0.4, 2.1, 4), &["0.5 s", "1 s", "1.5 s", "2 s"]);
    check(&times(0.0, 150_000.0, 4), &["0:00", "15:00:00", "30:00:00"]);
    // A clock would show 0:00 for a run of less than a second.
    check("[0.618, 9.94, 12.7, 3700].map(elapsed)", &["0.62 s", "9.9 s", "0:12", "1:01:40"]);
    // The marks of an axis from 0 to 0.01 have one form.
    let rate = "specs.find(({ title }) => title === 'Learning rate').format";
    check(&format!("[0.01, 0.005, 3e-4, 0].map({rate})"), &["0.01", "0.005", "3.0e-4", "0"]);
    // A single mark would not show the scale: 5 is the only multiple of 5.
    check("ticksOf(1, 9.9, 2).ticks.map(String)", &["2", "4", "6", "8"]);
    let logs = |least: f64, most: f64| {
        format!(
            "logTicksOf(Math.log10({least}), Math.log10({most}), 5).map((tick) => significant(10 ** tick))"
        )
    };
    check(&logs(2.9, 5.6), &["3", "4", "5"]);
    check(&logs(0.8, 30.0), &["1", "2", "5", "10", "20"]);
    check(&logs(0.001, 2e4), &["0.01", "1", "100", "10000"]);
    // Every axis of this run has two marks at least, and whole numbers of steps.
    for axis in ["steps", "tokens", "seconds"] {
        browser.enter("#axis", axis);
        let fewest = "Math.min(...[...document.querySelectorAll('figure svg')].map((picture) =>
            [...picture.querySelectorAll('.grid')].filter((mark) => mark.getAttribute('x1') === mark.getAttribute('x2')).length))";
        assert!(browser.number(fewest) >= 2.0, "{axis}");
    }
    assert!(browser.text("#controls").contains("logarithmic loss and gradient norm"));
}

#[test]
fn points_at_the_edges_of_a_chart_are_whole() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    write_run(folder.path(), "a", 40, "[5,6]");
    report(folder.path(), &["a"]);
    let Some(mut browser) = Browser::open(&folder.path().join("report.html"), 1400, 900) else { return };
    let cut = "[...document.querySelectorAll('circle')].filter((point) => {
        const region = document.querySelector(point.parentNode.getAttribute('clip-path').slice(4, -1) + ' rect');
        const [x, y, width, height] = ['x', 'y', 'width', 'height'].map((name) => +region.getAttribute(name));
        const [cx, cy, r] = ['cx', 'cy', 'r'].map((name) => +point.getAttribute(name));
        return cx - r < x || cx + r > x + width || cy - r < y || cy + r > y + height;
    }).length";
    assert!(
        browser.holds("document.querySelectorAll('circle').length === 4"),
        "a validation every ten steps"
    );
    assert_eq!(browser.number(cut), 0.0);
    // The lowest value has room below it.
    assert!(browser.holds("charts[0].bottom < Math.min(...charts[0].lines.flatMap(({ values }) => values.filter((value) => value !== null)))"));
}

#[test]
fn values_above_a_chart_are_mentioned_in_it() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    write_run(folder.path(), "a", 40, "[5,6]");
    write_run(folder.path(), "b", 30, "[5,6]");
    report(folder.path(), &["a", "b"]);
    let Some(mut browser) = Browser::open(&folder.path().join("report.html"), 1400, 900) else { return };
    let notes = "JSON.stringify([...document.querySelectorAll('svg .above')].map((note) =>
        note.closest('figure').querySelector('figcaption').firstChild.textContent + ': ' + note.textContent))";
    assert_eq!(browser.value(notes), "[\"Step time: ↑ 2 above the chart, up to 2 s\"]");
}

#[test]
fn the_page_fits_and_has_both_themes() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    write_run(folder.path(), "a", 20, "[5,6]");
    report(folder.path(), &["a"]);
    let Some(mut browser) = Browser::open(&folder.path().join("report.html"), 800, 600) else { return };
    check_widths_and_themes(&mut browser, &[800, 1400]);
}

/// Checks that a page is not wider than the window, and that it follows the theme of the system.
fn check_widths_and_themes(browser: &mut Browser, widths: &[u32]) {
    for &width in widths {
        browser.resize(width, 700);
        browser.frame();
        assert!(browser.holds("document.documentElement.scrollWidth <= innerWidth"), "at {width}");
    }
    let background = "getComputedStyle(document.body).backgroundColor";
    browser.prefer("light");
    assert_eq!(browser.value(background), "rgb(255, 255, 255)");
    browser.prefer("dark");
    assert_eq!(browser.value(background), "rgb(22, 25, 29)");
}

#[test]
fn the_page_of_several_runs_fits_a_phone() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    write_run(folder.path(), "a", 20, "[5,6]");
    write_run(folder.path(), "b", 30, "[5,6]");
    report(folder.path(), &["a", "b"]);
    let Some(mut browser) = Browser::open(&folder.path().join("report.html"), 375, 700) else { return };
    check_widths_and_themes(&mut browser, &[375]);
    browser.resize(375, 700);
    browser.frame();
    let last = "document.querySelector('#figures tbody td:last-child').getBoundingClientRect()";
    assert!(browser.holds(&format!("{last}.right <= innerWidth")), "the last run is visible");
}

#[test]
fn the_page_of_several_schedules_fits_a_phone_and_has_both_themes() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin!("pipewright"));
    let arguments = "compare 1f1b zbv --ranks 4 --microbatches 8 --format html -o c.html";
    let made = command.current_dir(folder.path()).args(arguments.split(' ')).status();
    assert!(made.expect("the binary starts").success());
    let Some(mut browser) = Browser::open(&folder.path().join("c.html"), 375, 700) else { return };
    check_widths_and_themes(&mut browser, &[375, 1280]);
    browser.resize(375, 700);
    browser.frame();
    assert!(browser.number("document.querySelector('svg').getBoundingClientRect().width") >= 760.0);
    let rectangle = "getComputedStyle(document.querySelector('svg > rect')).fill";
    assert_eq!(browser.value(rectangle), "rgb(22, 25, 29)", "the pictures are dark too");
}

#[test]
fn printing_is_light_and_keeps_colours() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    write_run(folder.path(), "a", 20, "[5,6]");
    report(folder.path(), &["a"]);
    let Some(mut browser) = Browser::open(&folder.path().join("report.html"), 1000, 800) else { return };
    browser.prefer("dark");
    let pixel =
        "[...document.querySelector('.heat canvas').getContext('2d').getImageData(0, 1, 1, 1).data].join()";
    let dark = browser.value(pixel);
    browser.value(&format!("addEventListener('beforeprint', () => {{ window.printed = {pixel}; }}), 0"));
    browser.print();
    assert_ne!(browser.value("printed"), dark, "the picture of the ranks is light");
    assert_eq!(browser.value(pixel), dark, "the screen is dark again");
    browser.emulate_paper();
    assert_eq!(browser.value("getComputedStyle(document.body).backgroundColor"), "rgb(255, 255, 255)");
    assert_eq!(browser.value("getComputedStyle(document.querySelector('.bar i')).printColorAdjust"), "exact");
    // The charts keep their form at any width.
    assert!(browser.holds("charts.every(({ picture, width, height }) => picture.getAttribute('viewBox') === `0 0 ${width} ${height}`)"));
}

#[test]
fn a_long_name_of_a_figure_does_not_overlap_its_value() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    write_run(folder.path(), "a", 20, "[5,6]");
    write_event(folder.path(), "a", &restart(10, 12));
    report(folder.path(), &["a"]);
    let Some(mut browser) = Browser::open(&folder.path().join("report.html"), 1400, 900) else { return };
    let overlapping = "JSON.stringify([...document.querySelectorAll('#figures tbody tr')].filter((row) => {
        const textOf = (cell) => {
            const range = document.createRange();
            range.selectNodeContents(cell);
            return range.getBoundingClientRect();
        };
        const [name, value] = [...row.children].map(textOf), { left, right } = row.getBoundingClientRect();
        return name.left < left - 0.5 || name.right > value.left || value.right > right + 0.5;
    }).map((row) => row.textContent))";
    assert!(browser.text("#figures").contains("goodput (share of the time on steps that count)"));
    for width in [380, 800, 1000, 1400] {
        browser.resize(width, 900);
        browser.frame();
        assert_eq!(browser.value(overlapping), "[]", "at {width}");
    }
}
