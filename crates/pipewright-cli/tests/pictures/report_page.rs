//! Tests of the page of `report`: a trained run, and several runs with all metrics that a run may write.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::browser::Browser;
use crate::view_run::trained;

fn report(folder: &Path, runs: &[&str]) {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("pipewright"));
    let output = command.current_dir(folder).arg("report").args(runs).args(["-o", "report.html"]).output();
    let output = output.expect("the binary starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Writes the metrics of a run with this many steps.
fn write_run(folder: &Path, name: &str, steps: u64, ranks: &str) {
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
             \"step_ms\":{},\"elapsed_s\":{},\"tokens\":{},\"bubble_fraction\":0.25,\"exposed_comm_fraction\":0.01,\
             \"peak_bytes\":{ranks},\"bubble_per_rank\":[0.2,0.3],\"predicted_step_ms\":98.5,\"host_ms\":1,\
             \"auxiliary\":{{\"moe_aux\":{loss}}}{validation}}}",
            if step == 1 { 2000 } else { 100 },
            step as f64 / 10.0,
            step * 100
        )
        .expect("a string takes all text");
    }
    fs::create_dir(folder.join(name)).expect("a folder");
    fs::write(folder.join(name).join("metrics.jsonl"), lines).expect("a file");
    fs::write(folder.join(name).join("config.toml"), format!("[run]\nsteps = {steps}\nseed = 42\n"))
        .expect("a file");
}

/// Returns the number of records of a run's event file. Each has a length, two checksums of four bytes, and its data.
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
        serde_json::json!(["Loss", "Gradient norm", "Throughput", "Step time", "Bubble", "Learning rate"])
    );
    let drawn = "[...document.querySelectorAll('figure svg')].every((picture) => picture.querySelector('path')?.getAttribute('d').length > 20)";
    assert!(browser.holds(drawn));
    let figures = browser.text("#figures");
    for words in [
        "steps\n12",
        "last loss",
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
    assert!(figures.contains("98.5 ms (measured +1.5 %)"), "{figures}");
    let differences = browser.text("#config");
    assert!(
        differences.contains("run.steps\t4000\t50") && !differences.contains("run.seed\t"),
        "{differences}"
    );
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
fn the_page_fits_and_has_both_themes() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    write_run(folder.path(), "a", 20, "[5,6]");
    report(folder.path(), &["a"]);
    let Some(mut browser) = Browser::open(&folder.path().join("report.html"), 800, 600) else { return };
    for width in [800, 1400] {
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
