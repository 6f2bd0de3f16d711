//! Tests of the page of `report`: a trained run, and several runs with all metrics that a run may write.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::browser::{Browser, CTRL};
use crate::chromium::PATIENCE;
use crate::view_run::trained;

pub(crate) fn report(folder: &Path, runs: &[&str]) {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("pipewright"));
    let output = command.current_dir(folder).arg("report").args(runs).args(["-o", "report.html"]).output();
    let output = output.expect("the binary starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Writes the metrics of a run with this many steps.
pub(crate) fn write_run(folder: &Path, name: &str, steps: u64, ranks: &str) {
    let mut lines = String::new();
    for step in 1..=steps {
        let loss = 2.0 + 3.0 / step as f64;
        let validation = if step.is_multiple_of(10) {
            format!(",\"validation_loss\":{}", loss + 0.1)
        } else {
            String::new()
        };
        writeln!(
            lines,
            "{{\"step\":{step},\"loss\":{loss},\"grad_norm\":0.5,\"learning_rate\":0.001,\"tokens_per_second\":1000,\
             \"model_tflops\":0.0646,\"mfu\":0.273,\
             \"step_ms\":{},\"elapsed_s\":{},\"unix_s\":{},\"tokens\":{},\"bubble_fraction\":0.25,\"exposed_comm_fraction\":0.01,\
             \"peak_bytes\":{ranks},\"bubble_per_rank\":[0.2,0.3],\"predicted_step_ms\":98.5,\"host_ms\":1,\
             \"auxiliary\":{{\"moe_aux\":{loss}}}{validation}}}",
            if step == 1 { 2000 } else { 100 },
            step as f64 / 10.0,
            1000 + step,
            step * 100
        )
        .expect("a string takes all text");
    }
    fs::create_dir(folder.join(name)).expect("a folder");
    fs::write(folder.join(name).join("metrics.jsonl"), lines).expect("a file");
    fs::write(folder.join(name).join("config.toml"), format!("[run]\nsteps = {steps}\nseed = 42\n"))
        .expect("a file");
}

/// Returns the number of records of a run's event file. Each has a length, two checksums of four bytes, and
/// its data.
fn tensorboard_records(run: &Path) -> usize {
    let mut files = fs::read_dir(run).expect("a folder").map(|entry| entry.expect("an entry").path());
    let is_events = |path: &std::path::PathBuf| path.to_string_lossy().contains("events.out.tfevents.");
    let bytes = fs::read(files.find(is_events).expect("an event file")).expect("a file");
    let (mut at, mut records) = (0, 0);
    while at < bytes.len() {
        let length = u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        at += 8 + 4 + length as usize + 4;
        records += 1;
    }
    assert_eq!(at, bytes.len(), "the last record is complete");
    records
}

#[test]
fn a_trained_run_has_its_charts_tables_and_links() {
    let folder = trained(&["run.tensorboard=true"]);
    assert_eq!(
        tensorboard_records(&folder.path().join("out")),
        1 + 12,
        "the version, and one record per step"
    );
    report(folder.path(), &["out"]);
    let Some(mut browser) = Browser::open(&folder.path().join("report.html"), 1400, 900) else { return };
    assert!(browser.requests().is_empty());
    let titles = browser
        .value("[...document.querySelectorAll('figcaption')].map((title) => title.firstChild.textContent)");
    assert_eq!(
        titles,
        serde_json::json!([
            "Loss",
            "Gradient norm",
            "Throughput",
            "Step time",
            "Bubble",
            "Gap between steps",
            "Learning rate"
        ])
    );
    let drawn = "[...document.querySelectorAll('figure svg')].every((picture) => picture.querySelector('path')?.getAttribute('d').length > 20)";
    assert!(browser.holds(drawn));
    let figures = browser.text("#figures");
    for words in [
        "steps\n12",
        "last loss",
        "goodput (share of the time on steps that count)",
        "tokens per second",
        "step, predicted",
        "utilisation",
        "memory, largest rank",
    ] {
        assert!(figures.contains(words), "{words}: {figures}");
    }
    assert!(browser.text("#ranks").contains("rank 1"), "{}", browser.text("#ranks"));
    assert!(browser.text("#config").contains("num_hidden_layers = 2"));
    let timelines = browser.text("#timelines");
    assert!(
        timelines.contains("pipewright view out -o out/view.html") && timelines.contains("step 12"),
        "{timelines}"
    );
    assert!(browser.holds("[...document.querySelectorAll('#timelines a')].some((link) => link.getAttribute('href') === 'out/timeline.json')"));
}

#[test]
fn runs_are_compared_side_by_side() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    write_run(folder.path(), "a", 4000, "[1048576,2097152]");
    write_run(folder.path(), "b", 50, "[0,0]");
    report(folder.path(), &["a", "b"]);
    let Some(mut browser) = Browser::open(&folder.path().join("report.html"), 1400, 900) else { return };
    let figures = browser.text("#figures");
    assert!(
        figures.contains("steps\t4,000\t50") && figures.contains("memory, largest rank\t2.0 MiB\t–"),
        "{figures}"
    );
    assert!(figures.contains("rate of computation, median\t64.6 GFLOP/s"), "{figures}");
    assert!(figures.contains("MFU, median\t27.3\u{a0}%"), "{figures}");
    assert!(figures.contains("98.5 ms (measured +1.5\u{a0}%)"), "{figures}");
    // Both are of the same steps and ranks, so together they are the whole.
    assert!(
        figures.contains("bubble, median\t25.0\u{a0}%")
            && figures.contains("utilisation (without the bubble)\t75.0\u{a0}%"),
        "{figures}"
    );
    assert!(figures.contains("run.steps\t4000\t50") && !figures.contains("run.seed\t"), "{figures}");
    // Long runs are joined to groups with their ranges, and an auxiliary loss has its own chart.
    assert!(
        browser.holds("runs[0].steps.length === 1500 && runs[1].steps.length === 50 && charts.length === 7")
    );
    assert!(browser.holds("document.querySelectorAll('path.range').length > 3"));
    // The slow first step does not flatten the others.
    assert!(
        browser.number("charts.find(({ figure }) => figure.textContent.startsWith('Step time')).top") < 200.0
    );
    // The pointer shows the values of both runs in every chart.
    let [x, y] = ["x + 200", "y + 100"].map(|side| {
        browser.number(&format!("document.querySelector('figure svg').getBoundingClientRect().{side}"))
    });
    browser.mouse("mouseMoved", [x, y], false, 0);
    browser.frame();
    let tip = browser.text("#tip");
    assert!(
        tip.contains(", a, training: ") && tip.contains(", b, training: ") && tip.contains("validation"),
        "{tip}"
    );
    assert!(browser.holds("[...document.querySelectorAll('.cursor')].every((line) => line.getAttribute('visibility') === 'visible')"));
    // The controls change the axis, the scale and the smoothing.
    browser.enter("#axis", "seconds");
    assert_eq!(browser.number("charts[0].last"), 400.0);
    browser.click_on("#log");
    assert!(browser.holds("charts[0].isLog && charts[0].top < 1"));
    let rough = browser.value("document.querySelector('path:not(.range)').getAttribute('d')");
    browser.enter("#smooth", "50");
    assert_ne!(browser.value("document.querySelector('path:not(.range)').getAttribute('d')"), rough);
}

#[test]
fn entries_of_a_list_are_compared_one_by_one() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    for (name, rate) in [("a", 0.1), ("b", 0.2)] {
        write_run(folder.path(), name, 3, "[5,6]");
        let groups = format!(
            "[[optimizer.groups]]\nparameters = [\"head\"]\nlearning_rate = {rate}\n\n\
             [[optimizer.groups]]\nparameters = [\"norm\"]\nlearning_rate = 0.3\n\n[run]\nseed = 42\n"
        );
        fs::write(folder.path().join(name).join("config.toml"), groups).expect("a file");
    }
    report(folder.path(), &["a", "b"]);
    let Some(mut browser) = Browser::open(&folder.path().join("report.html"), 1400, 900) else { return };
    let differences = browser.text("#figures");
    assert!(differences.contains("optimizer.groups.0.learning_rate\t0.1\t0.2"), "{differences}");
    assert!(!differences.contains("groups.1") && !differences.contains("seed"), "{differences}");
}

/// Appends an event to the metrics of a run.
pub(crate) fn write_event(folder: &Path, name: &str, event: &str) {
    let path = folder.join(name).join("metrics.jsonl");
    let mut lines = fs::read_to_string(&path).expect("the metrics");
    writeln!(lines, "{event}").expect("a string takes all text");
    fs::write(path, lines).expect("a file");
}

/// Returns the line of a restart.
pub(crate) fn restart(step: u64, failed_step: u64) -> String {
    format!(
        "{{\"event\":\"restart\",\"step\":{step},\"failed_step\":{failed_step},\"rank\":1,\
         \"cause\":\"step {failed_step}: lost <b>\",\"restart\":1,\"of\":3}}"
    )
}

#[test]
fn events_are_listed_and_marked() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    write_run(folder.path(), "a", 20, "[5,6]");
    write_event(folder.path(), "a", &restart(0, 3));
    write_event(folder.path(), "a", &restart(10, 12));
    write_event(
        folder.path(),
        "a",
        r#"{"event":"rank_no_longer_slow","step":15,"ranks":[1],"slowdown":1.0}"#,
    );
    write_run(folder.path(), "b", 20, "[5,6]");
    report(folder.path(), &["a", "b"]);
    let Some(mut browser) = Browser::open(&folder.path().join("report.html"), 1400, 900) else { return };
    let sentence = "step 12: lost <b>; the run continues from step 10 (restart 1 of 3)";
    let list = "[...document.querySelectorAll('#events h3, #events tr')].map((row) => row.innerText)";
    let first = "step 3\tstep 3: lost <b>; the run continues again from step 1 (restart 1 of 3)";
    let fast = "step 15: rank 1 is no longer slow";
    let rows = ["a".to_owned(), first.to_owned(), format!("step 12\t{sentence}"), format!("step 15\t{fast}")];
    assert_eq!(browser.value(list), serde_json::json!(rows));
    let figures = browser.text("#figures");
    // One of them began again at step 1.
    assert!(figures.contains("not known after 2 restarts"), "{figures:?}");
    // Nothing is at step 0, so the first restart has no mark.
    let marks = "charts.map(({ picture }) => [...picture.querySelectorAll('.event')].map((mark) => [Number(mark.getAttribute('x1')), mark.textContent]))";
    let places = [10, 15].map(|step| browser.number(&format!("charts[0].x({step})")));
    let charts = browser.number("charts.length") as usize;
    assert_eq!(
        browser.value(marks),
        serde_json::json!(vec![[(places[0], sentence), (places[1], fast)]; charts])
    );
    report(folder.path(), &["b"]);
    let mut browser =
        Browser::open(&folder.path().join("report.html"), 1400, 900).expect("it was opened before");
    assert!(browser.holds("document.getElementById('events').hidden && !document.querySelector('.event')"));
    write_event(folder.path(), "b", &restart(10, 12));
    report(folder.path(), &["b"]);
    let mut browser =
        Browser::open(&folder.path().join("report.html"), 1400, 900).expect("it was opened before");
    let figures = browser.text("#figures");
    assert!(figures.contains("100.0\u{a0}%, 1 restart took 0.9"), "{figures:?}");
}

#[test]
fn samples_are_listed_the_latest_first() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    write_run(folder.path(), "a", 20, "[5,6]");
    let path = folder.path().join("a/metrics.jsonl");
    let mut lines = fs::read_to_string(&path).expect("a file");
    for (step, text) in [(21, "<b>one"), (22, "two")] {
        let sample = format!("{{\"prompt\":\"once\",\"text\":\"{text}\"}}");
        writeln!(lines, "{{\"step\":{step},\"samples\":[{sample}]}}").expect("a string takes all text");
    }
    fs::write(path, lines).expect("a file");
    report(folder.path(), &["a"]);
    let Some(mut browser) = Browser::open(&folder.path().join("report.html"), 1400, 900) else { return };
    let list = "[...document.querySelectorAll('#samples:not([hidden]) tr')].map((row) => row.innerText)";
    let expected = ["step 22\tonce\ttwo", "step 21\tonce\t<b>one"];
    assert_eq!(browser.value(list), serde_json::json!(expected));
}

/// Returns a point of the first chart, at a share of the length of its axis.
fn point_of_chart(browser: &mut Browser, share: f64) -> [f64; 2] {
    let x = format!("box.x + charts[0].x(charts[0].first + {share} * (charts[0].last - charts[0].first))");
    [x, "box.y + 100".to_owned()].map(|side| {
        browser.number(&format!(
            "(() => {{ const box = charts[0].picture.getBoundingClientRect(); return {side}; }})()"
        ))
    })
}

#[test]
fn all_charts_zoom_together() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    write_run(folder.path(), "a", 101, "[5,6]");
    report(folder.path(), &["a"]);
    let Some(mut browser) = Browser::open(&folder.path().join("report.html"), 1400, 900) else { return };
    let top = browser.number("charts[0].top");
    let (from, to) = (point_of_chart(&mut browser, 0.2), point_of_chart(&mut browser, 0.6));
    browser.drag(from, to);
    let range = "charts.every(({ first, last }) => Math.abs(first - 21) < 0.5 && Math.abs(last - 61) < 0.5)";
    assert!(browser.holds(range), "{}", browser.value("charts.map(({ first, last }) => [first, last])"));
    assert!(browser.number("charts[0].top") < top, "the other axis suits what is in sight");
    let length = "charts[1].last - charts[1].first";
    let middle = point_of_chart(&mut browser, 0.5);
    browser.wheel(middle, [0.0, -200.0], CTRL);
    assert!(browser.number(length) < 39.0);
    browser.click(middle, 2);
    assert!(browser.holds("chosen.range === null && charts[0].first === 1 && charts[0].last === 101"));
    assert!(browser.holds("document.getElementById('zoom-all').disabled"));
    // Keys of a chart that has the focus.
    browser.value("charts[0].picture.focus(), 0");
    browser.key("+", "+");
    assert!(browser.number(length) < 70.0);
    let first = browser.number("charts[0].first");
    browser.value("charts[0].picture.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight', shiftKey: true })), 0");
    assert!(browser.number("charts[0].first") > first);
    browser.key("0", "0");
    assert_eq!(browser.number(length), 100.0);
    // A part of the axis of steps is not a part of another axis.
    browser.key("+", "+");
    browser.enter("#axis", "tokens");
    assert!(browser.holds("chosen.range === null && charts[0].last === 10100"));
    browser.value("zoomTo([200, 300]), 0");
    browser.click_on("#zoom-all");
    assert!(browser.holds("chosen.range === null"));
}

#[test]
fn the_legend_switches_runs_off_and_on() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    write_run(folder.path(), "a", 40, "[5,6]");
    write_run(folder.path(), "b", 30, "[5,6]");
    report(folder.path(), &["a", "b"]);
    let Some(mut browser) = Browser::open(&folder.path().join("report.html"), 1400, 900) else { return };
    let runs = "JSON.stringify(charts.map(({ lines }) => [...new Set(lines.map(({ run }) => run.name))].join()).filter((names, at, all) => all.indexOf(names) === at))";
    assert_eq!(browser.value(runs), "[\"a,b\"]");
    browser.click_on("#runs button");
    assert_eq!((browser.value(runs), browser.number("charts[0].last")), ("[\"b\"]".into(), 30.0));
    assert_eq!(browser.value("document.querySelector('#runs button').getAttribute('aria-pressed')"), "false");
    browser.click_on("#runs li:last-child button");
    assert!(browser.holds("charts.every(({ lines }) => lines.length === 0)"));
    browser.click_on("#runs button");
    browser.click_on("#runs li:last-child button");
    assert_eq!((browser.value(runs), browser.number("charts[0].last")), ("[\"a,b\"]".into(), 40.0));
}

#[test]
fn a_page_that_follows_its_run_keeps_what_was_chosen() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    write_run(folder.path(), "a", 40, "[5,6]");
    write_run(folder.path(), "b", 30, "[5,6]");
    fs::write(folder.path().join("a/config.toml"), "[run]\nsteps = 50\n").expect("a file");
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("pipewright"));
    command.current_dir(folder.path()).args(["report", "a", "b", "-o", "report.html", "--follow=500ms"]);
    let mut following = command.spawn().expect("the binary starts");
    let file = folder.path().join("report.html");
    let start = Instant::now();
    while !fs::read_to_string(&file).is_ok_and(|page| page.ends_with("</html>\n")) {
        assert!(start.elapsed() < PATIENCE, "there is no page");
        std::thread::sleep(Duration::from_millis(20));
    }
    let browser = Browser::open(&file, 1400, 900);
    following.kill().and_then(|()| following.wait()).expect("it is ours to end");
    let Some(mut browser) = browser else { return };
    browser.wait_until("document.getElementById('following')?.textContent.includes('every 0.5 s') ?? false");
    // The page may load itself again at any moment, so this may run twice.
    let choose =
        "window.isOld = true, isHidden(1) || switchRun(1, document.querySelectorAll('#runs button')[1]),
        zoomTo([10, 20]), chosen.log || document.getElementById('log').click(), true";
    browser.wait_until(choose);
    browser.wait_until("window.isOld === undefined && typeof charts === 'object' && charts.length > 3");
    let kept = "chosen.log && document.getElementById('log').checked && charts[0].first === 10 && charts[0].last === 20
        && charts[0].lines.every(({ index }) => index === 0)";
    browser.wait_until(kept);
    assert!(browser.requests().is_empty(), "the page loads nothing else");
}

/// Returns metrics in which the ranks change from four to two after the tenth step.
fn fewer_ranks() -> String {
    let line = |step: u64| {
        let values = if step <= 10 { "[0.1,0.2,0.3,0.4]" } else { "[0.1,0.2]" };
        format!("{{\"step\":{step},\"loss\":2.0,\"bubble_per_rank\":{values},\"peak_bytes\":{values}}}\n")
    };
    (1..=20).map(line).collect()
}

#[test]
fn ranks_that_were_not_there_are_named() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    write_run(folder.path(), "a", 20, "[5,6]");
    write_run(folder.path(), "b", 20, "[5,6,7,8,9,9]");
    fs::write(folder.path().join("a/metrics.jsonl"), fewer_ranks()).expect("a file");
    report(folder.path(), &["a", "b"]);
    let Some(mut browser) = Browser::open(&folder.path().join("report.html"), 1400, 900) else { return };
    let ranks_of = |browser: &mut Browser, run: u32| browser.text(&format!(".run-ranks:nth-child({run})"));
    let a = ranks_of(&mut browser, 1);
    for words in [
        "ranks 2 to 3\tonly until step 10",
        "ranks 4 to 5\tnot in this run",
        "Grey: the run had fewer ranks.",
    ] {
        assert!(a.contains(words), "{words}: {a}");
    }
    let b = ranks_of(&mut browser, 2);
    assert!(b.contains("ranks 2 to 5\tnot in this run") || b.contains("only"), "{b}");
    let grey = "(() => { const canvas = document.querySelector('.heat canvas'), paint = canvas.getContext('2d');
        return [[0, 0], [0, 3], [15, 1], [15, 3]].map(([x, y]) => [...paint.getImageData(x, y, 1, 1).data].join()); })()";
    let pixels = browser.value(grey);
    assert!(pixels[3] != pixels[2] && pixels[3] != pixels[1], "{pixels}");
    // A rank that came later says since when.
    let reversed: Vec<String> = fewer_ranks()
        .lines()
        .enumerate()
        .map(|(at, _)| fewer_ranks().lines().nth(19 - at).expect("a line").to_owned())
        .enumerate()
        .map(|(at, line)| line.replacen(&format!("\"step\":{}", 20 - at), &format!("\"step\":{}", at + 1), 1))
        .collect();
    fs::write(folder.path().join("a/metrics.jsonl"), reversed.join("\n") + "\n").expect("a file");
    report(folder.path(), &["a"]);
    let mut browser = {
        drop(browser);
        Browser::open(&folder.path().join("report.html"), 1400, 900).expect("it was opened before")
    };
    let text = browser.text("#ranks");
    assert!(text.contains("rank 3, from step 11") && !text.contains("rank 1, from"), "{text}");
}

#[test]
fn both_pages_have_one_prediction_of_the_step() {
    let folder = trained(&[]);
    report(folder.path(), &["out"]);
    let output = Command::new(assert_cmd::cargo::cargo_bin!("pipewright"))
        .current_dir(folder.path())
        .args(["view", "out", "-o", "view.html"])
        .output()
        .expect("the binary starts");
    assert!(output.status.success());
    let Some(mut browser) = Browser::open(&folder.path().join("report.html"), 1400, 900) else { return };
    let [predicted, measured] =
        ["predicted_step_ms", "step_ms"].map(|name| browser.number(&format!("runs[0].figures.{name}")));
    drop(browser);
    let mut browser = Browser::open(&folder.path().join("view.html"), 1400, 900).expect("as before");
    for (name, expected) in [("predicted", predicted), ("measured", measured)] {
        let shown = browser.number(&format!("data.view.wholeStep.{name}")) * 1e3;
        assert!((shown / expected - 1.0).abs() < 1e-9, "{name}: {shown}, not {expected}");
    }
    let figures = browser.text("#figures");
    let text = browser.value(&format!("time({predicted} / 1e3 / data.quantum)"));
    assert!(
        figures.starts_with("time per step ")
            && figures.contains(&format!("predicted {}", text.as_str().expect("a text"))),
        "{figures}"
    );
    assert!(figures.contains("program of a step, predicted "), "{figures}");
}
